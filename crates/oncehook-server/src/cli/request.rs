//! A request as it was saved or typed: raw HTTP text, the text of `curl -v`, a HAR file, single headers, files.
//!
//! Promises: the body is exactly the bytes after the first blank line; a head that cannot be read is an error with its
//! line and never a guess; input is bounded.
//!
//! Does not: undo chunks or compression. What was signed are the bytes as they were sent, so a saved request that still
//! carries them is pointed out ([`SavedRequest::doubts`]).

use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, anyhow, bail};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use serde::Deserialize;

use super::text;

/// The largest input that is read: the largest body that a gateway can be configured to take, and room for its head.
const MAX_INPUT_BYTES: u64 = 65 << 20;

/// A request that somebody kept.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SavedRequest {
    pub(super) method: String,
    /// Nothing if there was no request line.
    pub(super) path: Option<String>,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

impl SavedRequest {
    /// Reads a request in whichever form it was saved.
    pub(super) fn read(raw: &[u8]) -> anyhow::Result<Self> {
        match raw.trim_ascii_start() {
            json @ [b'{', ..] if json.windows(9).any(|window| window == b"\"entries\"") => Self::parse_har(json),
            text if is_curl(text) => Self::parse_curl(text),
            _ => Self::parse(raw),
        }
    }

    /// Reads what `curl -v` printed: the lines that begin with `>`. It shows no body.
    fn parse_curl(raw: &[u8]) -> anyhow::Result<Self> {
        let text = String::from_utf8_lossy(raw);
        let sent: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix('>'))
            .map(|line| line.strip_prefix(' ').unwrap_or(line))
            .collect();
        // Only the last request, if there was a redirect.
        let first = sent.iter().rposition(|line| request_line(line).is_some()).context("there is no request line")?;
        let head: String = sent
            .iter()
            .skip(first)
            .take_while(|line| !line.trim().is_empty())
            .map(|line| format!("{line}\n"))
            .collect();
        Self::parse(head.as_bytes())
    }

    /// Reads the first POST of a HAR file.
    fn parse_har(json: &[u8]) -> anyhow::Result<Self> {
        let har: Har = serde_json::from_slice(json).context("this is not a HAR file")?;
        let mut requests = har.log.entries.into_iter().map(|entry| entry.request);
        let request = requests.find(|request| request.method == "POST").context("there is no POST in the HAR file")?;
        let mut headers = HeaderMap::new();
        for pair in request.headers.iter().filter(|pair| !pair.name.starts_with(':')) {
            let (name, value) = parse_header(&format!("{}: {}", pair.name, pair.value))
                .map_err(|problem| anyhow!("{}: {problem}", text::shown(&pair.name, 64)))?;
            headers.try_append(name, value).context("there are too many headers")?;
        }
        let line = format!("POST {}", request.url);
        let (_, path) = request_line(&line).context("the URL cannot be read")?;
        let body = request.post_data.map(|data| data.text.into_bytes()).unwrap_or_default();
        Ok(Self { method: request.method, path: Some(path.to_owned()), headers, body })
    }

    /// Reads raw HTTP text: a request line (which may be missing), headers, a blank line, the body.
    pub(super) fn parse(raw: &[u8]) -> anyhow::Result<Self> {
        let (head, body) = split_head(raw);
        let head = std::str::from_utf8(head).context("the head is not text")?;
        let first = head.lines().next().unwrap_or_default();
        let (line, skipped) = match request_line(first) {
            Some(line) => (Some(line), 1),
            None => (None, 0),
        };
        let headers = parse_headers(head, skipped)?;
        let (method, path) = line.map_or(("POST", None), |(method, path)| (method, Some(path.to_owned())));
        Ok(Self { method: method.to_owned(), path, headers, body: body.to_vec() })
    }

    /// Why the body may not be the bytes that were signed.
    pub(super) fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        let length =
            self.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
        if let Some(length) = length.filter(|length| *length > 0 && self.body.is_empty()) {
            doubts.push(format!(
                "{length} bytes of body were sent, but none were saved (curl -v shows none): give them with --body."
            ));
        } else if let Some(length) = length.filter(|length| *length != self.body.len()) {
            doubts.push(format!(
                "Content-Length says {length} bytes, but the saved body has {}: something was added or cut when it was saved.",
                self.body.len()
            ));
        }
        if self.headers.contains_key(header::TRANSFER_ENCODING) {
            doubts.push("The request was sent in chunks: save the body without the lengths between them.".to_owned());
        }
        if self.headers.contains_key(header::CONTENT_ENCODING) {
            doubts.push("The body was sent compressed; the gateway refuses such requests (415).".to_owned());
        }
        doubts
    }
}

/// Does a text look like what `curl -v` prints?
fn is_curl(text: &[u8]) -> bool {
    text.starts_with(b"> ")
        || text.starts_with(b"* ")
        || text.windows(3).any(|window| window == b"\n> ") && !text.starts_with(b"POST ")
}

/// The parts of a HAR file (HTTP Archive 1.2) that matter.
#[derive(Deserialize)]
struct Har {
    log: HarLog,
}

#[derive(Deserialize)]
struct HarLog {
    entries: Vec<HarEntry>,
}

#[derive(Deserialize)]
struct HarEntry {
    request: HarRequest,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct HarRequest {
    method: String,
    url: String,
    headers: Vec<HarPair>,
    post_data: Option<HarBody>,
}

#[derive(Deserialize)]
struct HarPair {
    name: String,
    value: String,
}

#[derive(Deserialize)]
struct HarBody {
    text: String,
}

/// The head without the blank line that ends it, and all that follows.
fn split_head(raw: &[u8]) -> (&[u8], &[u8]) {
    let mut at = 0;
    while let Some(rest) = raw.get(at..).filter(|rest| !rest.is_empty()) {
        let length = rest.iter().position(|byte| *byte == b'\n').map_or(rest.len(), |end| end + 1);
        let (line, after) = rest.split_at(length);
        if matches!(line, b"\n" | b"\r\n") {
            return (raw.get(..at).unwrap_or_default(), after);
        }
        at += length;
    }
    (raw, &[])
}

/// Method and path of `POST /path?query HTTP/1.1`; the protocol may be missing.
fn request_line(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split_ascii_whitespace();
    let (method, target) = (words.next()?, words.next()?);
    let is_method = method.bytes().all(|byte| byte.is_ascii_uppercase());
    let ends = words.next().is_none_or(|word| word.starts_with("HTTP/")) && words.next().is_none();
    let path = match target.split_once("://") {
        Some((_, rest)) => rest.find('/').and_then(|at| rest.get(at..)).unwrap_or("/"),
        None => target,
    };
    let path = path.split('#').next().unwrap_or_default();
    (is_method && ends && path.starts_with('/')).then_some((method, path))
}

/// Lines of `Name: value`, after the first few.
pub(super) fn parse_headers(text: &str, skipped: usize) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    for (index, line) in text.lines().enumerate().skip(skipped) {
        if line.is_empty() {
            continue;
        }
        let (name, value) = parse_header(line).map_err(|problem| anyhow!("line {}: {problem}", index + 1))?;
        headers.try_append(name, value).context("there are too many headers")?;
    }
    Ok(headers)
}

/// One `Name: value`. Also clap's parser for `--header`.
pub(super) fn parse_header(line: &str) -> Result<(HeaderName, HeaderValue), String> {
    let (name, value) = line.split_once(':').ok_or("a header is written as 'Name: value'")?;
    let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| "this is not the name of a header")?;
    let value = value.trim_matches([' ', '\t', '\r']);
    let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| "the value holds control characters")?;
    Ok((name, value))
}

/// The content of a file, or of standard input for `-`.
pub(super) fn read_input(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = if path.as_os_str() == "-" {
        std::io::stdin().lock().take(MAX_INPUT_BYTES + 1).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(path).and_then(|file| file.take(MAX_INPUT_BYTES + 1).read_to_end(&mut bytes))
    };
    read.with_context(|| format!("read {}", path.display()))?;
    if bytes.len() as u64 > MAX_INPUT_BYTES {
        bail!("{} is larger than any webhook", path.display());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(raw: &str) -> SavedRequest {
        SavedRequest::parse(raw.as_bytes()).unwrap()
    }

    #[test]
    fn a_whole_request_with_either_line_ending() {
        for end in ["\n", "\r\n"] {
            let raw = [
                "POST /webhooks/stripe?x=1 HTTP/1.1",
                "Host: a",
                "Stripe-Signature:  t=1,v1=ab ",
                "",
                "{\"a\":1}\r\n\r\nb\n",
            ];
            let request = parse(&raw.join(end));
            assert_eq!((request.method.as_str(), request.path.as_deref()), ("POST", Some("/webhooks/stripe?x=1")));
            assert_eq!(request.headers["stripe-signature"], "t=1,v1=ab");
            assert_eq!(request.headers.len(), 2);
            assert_eq!(request.body, b"{\"a\":1}\r\n\r\nb\n", "the body is untouched");
        }
    }

    #[test]
    fn the_request_line_may_be_missing() {
        let request = parse("X-Id: 7\n\nbody");
        assert_eq!((request.method.as_str(), request.path.as_deref()), ("POST", None));
        assert_eq!(request.headers["x-id"], "7");
        assert_eq!(request.body, b"body");
    }

    #[test]
    fn request_lines() {
        for (line, expected) in [
            ("PUT /a HTTP/1.1", Some(("PUT", "/a"))),
            ("POST /a/b#c", Some(("POST", "/a/b"))),
            ("POST https://example.com/hook?q HTTP/2", Some(("POST", "/hook?q"))),
            ("POST https://example.com HTTP/1.1", Some(("POST", "/"))),
            ("Host: /a", None),
            ("HOST /a b", None),
            ("POST", None),
        ] {
            assert_eq!(request_line(line), expected, "{line}");
        }
    }

    #[test]
    fn bodies_are_bytes() {
        let request = SavedRequest::parse(b"A: b\r\n\r\n\xff\x00\n").unwrap();
        assert_eq!(request.body, b"\xff\x00\n");
        assert_eq!(parse("\n{}").body, b"{}", "no headers at all");
        assert_eq!(parse("A: b\n").body, b"");
        assert_eq!(parse("").headers.len(), 0);
    }

    #[test]
    fn a_bad_line_is_named() {
        let error = |raw: &str| SavedRequest::parse(raw.as_bytes()).unwrap_err().to_string();
        assert!(error("POST /a HTTP/1.1\nA: b\nnonsense\n\n").starts_with("line 3:"));
        assert!(error("A: b\n folded\n\n").starts_with("line 2:"));
        assert!(error("A b: c\n\n").starts_with("line 1:"));
        assert!(error("A: b\x01\n\n").starts_with("line 1:"));
        assert!(SavedRequest::parse(b"A: \xff\n\n").is_err());
    }

    #[test]
    fn repeated_headers_are_kept() {
        assert_eq!(parse("A: 1\nA: 2\n\n").headers.get_all("a").iter().count(), 2);
    }

    #[test]
    fn the_text_of_curl_is_read() {
        let text = "*   Trying 127.0.0.1:8080...\n* Connected\n> POST /webhooks/stripe?a=1 HTTP/1.1\r\n> Host: a\r\n> Stripe-Signature: t=1,v1=ab\r\n> \n* upload completely sent off\n< HTTP/1.1 401 Unauthorized\n< content-type: application/json\n< \n{}";
        let request = SavedRequest::read(text.as_bytes()).unwrap();
        assert_eq!((request.method.as_str(), request.path.as_deref()), ("POST", Some("/webhooks/stripe?a=1")));
        assert_eq!(request.headers["stripe-signature"], "t=1,v1=ab");
        assert_eq!((request.headers.len(), request.body.len()), (2, 0));
        assert!(SavedRequest::read(b"* nothing\n> nothing\n").is_err());
    }

    #[test]
    fn a_har_file_is_read() {
        let har = r#" {"log":{"version":"1.2","entries":[
            {"request":{"method":"GET","url":"https://a.example/","headers":[]}},
            {"request":{"method":"POST","url":"https://a.example/hook?x=1#f","headers":[{"name":":authority","value":"a"},{"name":"X-Id","value":"7"}],
             "postData":{"mimeType":"application/json","text":"{\"a\": 1}"}}}]}}"#;
        let request = SavedRequest::read(har.as_bytes()).unwrap();
        assert_eq!(request.path.as_deref(), Some("/hook?x=1"));
        assert_eq!(request.headers["x-id"], "7");
        assert_eq!(request.body, br#"{"a": 1}"#);
        assert!(SavedRequest::read(br#"{"log":{"entries":[]}}"#).is_err());
        assert_eq!(
            SavedRequest::read(b"A: b\n\n{\"entries\":1}").unwrap().body,
            b"{\"entries\":1}",
            "raw HTTP, not a HAR file"
        );
    }

    #[test]
    fn a_body_of_another_length_is_doubtful() {
        assert!(parse("Content-Length: 4\n\nbody").doubts().is_empty());
        let doubts = parse("Content-Length: 4\n\nbody\n").doubts();
        assert!(doubts[0].contains("says 4 bytes, but the saved body has 5"), "{doubts:?}");
        assert_eq!(parse("Transfer-Encoding: chunked\nContent-Encoding: gzip\n\n").doubts().len(), 2);
    }
}
