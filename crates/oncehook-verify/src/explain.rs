//! Why a request was refused, in plain words for a person at a terminal.
//!
//! A verifier says only "the signature does not match". This module tries the mistakes that people make
//! (a body that a proxy changed, a secret read the wrong way, another provider's preset) and reports the
//! one that would have explained it. It is for `oncehook verify` and for tests: nothing here decides about a
//! request, and a variant that matches is never accepted. It prints neither secrets nor expected signatures.

use std::borrow::Cow;

use crate::{
    encoding::{Encoding, KeyEncoding},
    fetch::FetchedKey,
    preset::Preset,
    rejection::Rejection,
    request::Request,
    scheme::{Algorithm, Integrity, Scheme},
    secret::Secret,
    settings::Settings,
    setup::SetupError,
    time::UnixMicros,
    verifier::Verifier,
};

/// The byte order mark that some editors put before UTF-8.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// At most this many foreign headers are named.
const MAX_NAMED_HEADERS: usize = 6;

/// The verdict and what may have led to it.
#[derive(Debug, Clone)]
pub struct Explanation {
    /// What [`Verifier::verify`] said.
    pub verdict: Result<Facts, Rejection>,
    /// Sentences for a person, the likeliest cause first.
    pub findings: Vec<String>,
}

/// What is known about a genuine request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// When it was signed, if the scheme signs a time.
    pub signed_at: Option<UnixMicros>,
    /// Which of the secrets matched, counted from 1.
    pub secret_position: usize,
    /// What the signature covers.
    pub integrity: Integrity,
}

/// Verifies a request and, if it is refused, looks for the cause.
///
/// # Errors
///
/// The same as [`Verifier::new`].
pub fn explain(
    scheme: &Scheme,
    secrets: &[Secret],
    tolerance_secs: Option<u64>,
    request: &Request<'_>,
    now: UnixMicros,
) -> Result<Explanation, SetupError> {
    let settings = Settings { tolerance_secs, ..Settings::default() };
    explain_with(scheme, secrets, &settings, request, now, None)
}

/// The same for a source with settings and, where the scheme fetches its keys, with the answer to its
/// [`crate::KeyRequest`].
///
/// # Errors
///
/// The same as [`Verifier::with`].
pub fn explain_with(
    scheme: &Scheme,
    secrets: &[Secret],
    settings: &Settings,
    request: &Request<'_>,
    now: UnixMicros,
    fetched: Option<&FetchedKey>,
) -> Result<Explanation, SetupError> {
    let verifier = Verifier::with(scheme, secrets, settings.clone())?;
    let verdict = verifier.verify_with(request, now, fetched).map(|verified| Facts {
        signed_at: verified.signed_at(),
        secret_position: verified.secret_index() + 1,
        integrity: verifier.integrity(),
    });
    let mut findings = Vec::new();
    match &verdict {
        Ok(facts) => describe(facts, secrets.len(), &mut findings),
        Err(rejection) => {
            findings.push(sentence(&rejection.to_string()));
            let attempt = Attempt { scheme, secrets, settings, request, now, fetched };
            match rejection {
                Rejection::MissingHeader { .. } => attempt.look_at_headers(&mut findings),
                Rejection::NoKnownSignature => {
                    findings.push("The header is there, but in the form of another scheme or version; older or newer kinds are ignored on purpose.".to_owned());
                    attempt.look_at_headers(&mut findings);
                }
                Rejection::TooOld { .. } => findings.push("The signature is good. Either this is an old request sent again, or this machine's clock is ahead; if the sender repeats the first timestamp on retries, raise the tolerance of this source.".to_owned()),
                Rejection::InFuture { .. } => findings.push("The signature is good. One of the two clocks is wrong; check this machine's.".to_owned()),
                Rejection::MalformedTimestamp => findings.push("The timestamp must be digits only, in the unit of the scheme.".to_owned()),
                Rejection::ChallengeContent => findings.push("This provider has its challenges signed with the same key, by anybody who asks for it. A genuine event never looks like a challenge; whoever sent this has most likely forged it.".to_owned()),
                Rejection::MalformedSignature => attempt.try_encodings(&mut findings),
                Rejection::SignatureMismatch => attempt.try_mistakes(&mut findings),
                _ => {}
            }
        }
    }
    Ok(Explanation { verdict, findings })
}

fn describe(facts: &Facts, secrets: usize, findings: &mut Vec<String>) {
    if secrets > 1 {
        findings.push(format!("Secret {} of {secrets} matched.", facts.secret_position));
    }
    findings.push(match facts.integrity {
        Integrity::Body => "The whole body is signed.".to_owned(),
        Integrity::Fields => "Some fields are signed; the body is not.".to_owned(),
        Integrity::None => "The sender knew the secret. Nothing of the request is signed.".to_owned(),
    });
    if facts.signed_at.is_none() {
        findings
            .push("No time is signed, so a copy of this request stays valid; only its key stops a replay.".to_owned());
    }
}

/// One request that was refused, with everything needed to try it again in other ways.
struct Attempt<'a> {
    scheme: &'a Scheme,
    secrets: &'a [Secret],
    settings: &'a Settings,
    request: &'a Request<'a>,
    now: UnixMicros,
    fetched: Option<&'a FetchedKey>,
}

impl Attempt<'_> {
    /// Which signatures are there instead, and whose are they?
    fn look_at_headers(&self, findings: &mut Vec<String>) {
        let looks_signed = |name: &str| ["signature", "hmac", "token", "-sig"].iter().any(|part| name.contains(part));
        let expected = |name: &http::HeaderName| self.scheme.signature_headers().any(|header| header == name);
        let present: Vec<&http::HeaderName> =
            self.request.headers.keys().filter(|name| looks_signed(name.as_str()) && !expected(name)).collect();
        for preset in Preset::all() {
            if preset.verify.signature_headers().any(|header| present.contains(&header)) {
                findings.push(format!(
                    "The request carries a signature of {}: is provider = \"{}\" meant?",
                    preset.title, preset.name
                ));
            }
        }
        if present.is_empty() {
            findings.push("No header of the request looks like a signature: is the secret set at the sender, and does a proxy remove headers?".to_owned());
        } else {
            let names: Vec<&str> = present.iter().take(MAX_NAMED_HEADERS).map(|name| name.as_str()).collect();
            findings.push(format!("Headers that look like signatures: {}.", names.join(", ")));
        }
    }

    fn try_mistakes(&self, findings: &mut Vec<String>) {
        let before = findings.len();
        self.try_urls(findings);
        self.try_bodies(findings);
        self.try_secrets(findings);
        self.try_encodings(findings);
        if findings.len() == before {
            findings.push("No common mistake explains it: most likely the secret belongs to another endpoint, or the body was changed on the way.".to_owned());
        }
    }

    /// Would the signature fit another form of the address?
    fn try_urls(&self, findings: &mut Vec<String>) {
        let Some(url) = self.settings.url.as_deref().filter(|_| self.scheme.needs_url()) else { return };
        for variant in url_variants(url, self.request) {
            if variant != url && self.would_match_at(self.scheme, self.secrets, self.request.body, Some(&variant)) {
                findings.push(format!(
                    "The signature fits the address {variant}, not the configured one: set `url` to exactly what was entered at the sender."
                ));
                return;
            }
        }
    }

    /// Would the signature fit another form of the body?
    fn try_bodies(&self, findings: &mut Vec<String>) {
        for (body, finding) in body_variants(self.request.body) {
            if body != self.request.body && self.would_match(self.scheme, self.secrets, &body) {
                findings.push(format!("The signature fits the body {finding}."));
                return;
            }
        }
    }

    /// Would the signature fit the secret read in another way?
    fn try_secrets(&self, findings: &mut Vec<String>) {
        for (index, secret) in self.secrets.iter().enumerate() {
            let position = index + 1;
            let text = secret.reveal();
            let bare = text.trim();
            let again = |text: &str| Secret::new(text).ok().map(|secret| vec![secret]);
            if bare != text
                && again(bare).is_some_and(|secrets| self.would_match(self.scheme, &secrets, self.request.body))
            {
                findings.push(format!("Secret {position} has white space around it; without it the signature fits."));
                return;
            }
            for (key, strip, finding) in [
                (KeyEncoding::Utf8, false, "as plain text, prefix and all"),
                (KeyEncoding::Utf8, true, "as plain text without its prefix"),
                (KeyEncoding::Base64, true, "as base64 after its prefix"),
                (KeyEncoding::Hex, true, "as hexadecimal"),
            ] {
                let mut scheme = self.scheme.clone();
                for rule in &mut scheme.keys {
                    rule.key = if rule.algorithm == Algorithm::Ed25519 { rule.key } else { key };
                    rule.prefix.clear();
                }
                let read = if strip { strip_kind(bare) } else { bare };
                if again(read).is_some_and(|secrets| self.would_match(&scheme, &secrets, self.request.body)) {
                    findings
                        .push(format!("Secret {position} fits if it is read {finding}: is this the right provider?"));
                    return;
                }
            }
        }
    }

    /// Would the signature fit if it were written in another encoding?
    fn try_encodings(&self, findings: &mut Vec<String>) {
        for (encoding, name) in
            [(Encoding::Hex, "hexadecimal"), (Encoding::Base64, "base64"), (Encoding::Base64Url, "URL-safe base64")]
        {
            if self.scheme.encoding.is_none_or(|expected| expected == encoding) {
                continue;
            }
            let mut scheme = self.scheme.clone();
            scheme.encoding = Some(encoding);
            if self.would_match(&scheme, self.secrets, self.request.body) {
                findings.push(format!("The signature is right but written in {name}, which this scheme does not use."));
                return;
            }
        }
    }

    fn would_match(&self, scheme: &Scheme, secrets: &[Secret], body: &[u8]) -> bool {
        self.would_match_at(scheme, secrets, body, self.settings.url.as_deref())
    }

    fn would_match_at(&self, scheme: &Scheme, secrets: &[Secret], body: &[u8], url: Option<&str>) -> bool {
        let settings = Settings { url: url.map(str::to_owned), tolerance_secs: None, ..self.settings.clone() };
        let Ok(verifier) = Verifier::with(scheme, secrets, settings) else { return false };
        let request = Request { body, ..*self.request };
        match verifier.verify_with(&request, self.now, self.fetched) {
            Ok(_) => true,
            Err(rejection) => rejection.is_genuine(),
        }
    }
}

/// Addresses that differ from the configured one as people's do: scheme, slash, port, the host and path of the request.
fn url_variants(url: &str, request: &Request<'_>) -> Vec<String> {
    let base = url.split(['?', '#']).next().unwrap_or_default();
    let (scheme, rest) = base.split_once("://").unwrap_or(("https", base));
    let (host, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let bare = host.split(':').next().unwrap_or(host);
    let called = request.headers.get(http::header::HOST).and_then(|host| host.to_str().ok());
    let own_path = request.path.split('?').next().unwrap_or_default();
    let slashed = if path.ends_with('/') { path.trim_end_matches('/').to_owned() } else { format!("{path}/") };
    let mut variants = Vec::new();
    for scheme in [scheme, "https", "http"] {
        let port = if scheme == "https" { 443 } else { 80 };
        for host in [host.to_owned(), bare.to_owned(), format!("{bare}:{port}"), called.unwrap_or(host).to_owned()] {
            if !host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b':')) {
                continue;
            }
            for path in [path, &slashed, own_path] {
                variants.push(format!("{scheme}://{host}{path}"));
            }
        }
    }
    variants
}

/// Forms of the body that something on the way may have changed, each with what then happened.
fn body_variants(body: &[u8]) -> Vec<(Cow<'_, [u8]>, &'static str)> {
    let mut variants: Vec<(Cow<'_, [u8]>, &'static str)> = Vec::new();
    let with_end = |end: &[u8]| Cow::Owned([body, end].concat());
    if let Some(rest) = body.strip_suffix(b"\n") {
        let rest = rest.strip_suffix(b"\r").unwrap_or(rest);
        variants.push((Cow::Borrowed(rest), "without the line ending at its end: something added one"));
    }
    variants.push((with_end(b"\n"), "with a line feed at its end: something removed it"));
    variants.push((with_end(b"\r\n"), "with CR LF at its end: something removed it"));
    match body.strip_prefix(BOM) {
        Some(rest) => variants.push((Cow::Borrowed(rest), "without its byte order mark: something added one")),
        None => {
            variants.push((Cow::Owned([BOM, body].concat()), "with a byte order mark before it: something removed it"));
        }
    }
    let unix = without_cr(body);
    variants.push((Cow::Owned(with_cr(&unix)), "with CR LF line endings: something changed them to LF"));
    variants.push((Cow::Owned(unix), "with LF line endings: something changed them to CR LF"));
    if serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok() {
        variants.push((
            Cow::Owned(respaced(body, b",", b":")),
            "as compact JSON: something parsed it and wrote it anew with spaces",
        ));
        variants.push((
            Cow::Owned(respaced(body, b", ", b": ")),
            "as JSON with a space after commas and colons: something parsed it and wrote it anew",
        ));
    }
    variants
}

fn without_cr(body: &[u8]) -> Vec<u8> {
    let mut unix = Vec::with_capacity(body.len());
    let mut bytes = body.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        if !(byte == b'\r' && bytes.peek() == Some(&b'\n')) {
            unix.push(byte);
        }
    }
    unix
}

fn with_cr(unix: &[u8]) -> Vec<u8> {
    let mut dos = Vec::with_capacity(unix.len());
    for byte in unix {
        if *byte == b'\n' {
            dos.push(b'\r');
        }
        dos.push(*byte);
    }
    dos
}

/// Valid JSON with other white space between its tokens; strings are untouched.
fn respaced(json: &[u8], comma: &[u8], colon: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(json.len());
    let (mut in_string, mut escaped) = (false, false);
    for byte in json {
        if in_string {
            out.push(*byte);
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b' ' | b'\t' | b'\r' | b'\n' => {}
            b',' => out.extend_from_slice(comma),
            b':' => out.extend_from_slice(colon),
            b'"' => {
                in_string = true;
                out.push(b'"');
            }
            other => out.push(*other),
        }
    }
    out
}

/// The secret without the prefix that names its kind.
fn strip_kind(text: &str) -> &str {
    ["whsec_", "whpk_", "whsk_"].iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text)
}

/// A rejection as a sentence of its own.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => format!("{}{}.", first.to_uppercase(), chars.as_str()),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn respacing_leaves_strings_alone() {
        let json = br#"{ "a" : "x, \" : y" , "b":[1,2] }"#;
        assert_eq!(respaced(json, b",", b":"), br#"{"a":"x, \" : y","b":[1,2]}"#);
        assert_eq!(respaced(json, b", ", b": "), br#"{"a": "x, \" : y", "b": [1, 2]}"#);
    }

    #[test]
    fn line_endings_change_both_ways() {
        assert_eq!(without_cr(b"a\r\nb\rc\n"), b"a\nb\rc\n");
        assert_eq!(with_cr(b"a\nb"), b"a\r\nb");
    }
}
