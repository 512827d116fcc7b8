//! `oncehook verify`: checks a saved request as the gateway would, and explains.
//!
//! Promises: the verdict is the gateway's own (same scheme, same secrets, same code); neither a secret nor an expected
//! signature is printed. Exit code 0 means genuine, 1 refused.
//!
//! Does not: send or store anything.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use http::{HeaderName, HeaderValue};
use oncehook::clock::Clock;
use oncehook_verify::{Facts, FetchedKey, Item, Rejection, Request, Unidentified, UnixMicros, Verifier, explain_with};
use serde_json::json;

use super::request::{SavedRequest, parse_header, parse_headers, read_input};
use super::source::{Chosen, SourceArgs};
use super::{Shared, print, print_json, text};

/// Keys and types are cut here; `--json` has them whole.
const MAX_SHOWN: usize = 200;

/// How many events of a batch are listed.
const MAX_LISTED: usize = 20;

#[derive(Debug, clap::Args)]
pub(super) struct Verify {
    #[command(flatten)]
    source: SourceArgs,
    /// A file with the request: raw HTTP, the text of curl -v, or a HAR file; - for standard input. curl -v shows no
    /// body: give it with --body
    #[arg(long, value_name = "FILE", required_unless_present_any = ["header", "headers", "body"],
          conflicts_with_all = ["header", "headers"])]
    request: Option<PathBuf>,
    /// A header, as 'Name: value'; may be repeated
    #[arg(long, value_name = "HEADER", value_parser = parse_header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// A file with one 'Name: value' per line
    #[arg(long, value_name = "FILE")]
    headers: Option<PathBuf>,
    /// A file with the body, byte for byte; - for standard input
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// The query of the request, without its question mark
    #[arg(long, value_name = "QUERY", conflicts_with = "request")]
    query: Option<String>,
    /// A file with the key that the provider publishes, where it does: a certificate (PEM) or a set of keys (JSON)
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// When the request arrived: RFC 3339 or Unix seconds [default: now]
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true)]
    at: Option<UnixMicros>,
    /// Seconds that a signed timestamp may be off [default: the source's]
    #[arg(long, value_name = "SECONDS")]
    tolerance: Option<u64>,
}

/// Everything that is known about the request.
struct Report {
    verdict: Result<Genuine, Rejection>,
    findings: Vec<String>,
}

struct Genuine {
    facts: Facts,
    content: Content,
}

/// What a genuine request is.
enum Content {
    Handshake,
    Events(Vec<Item>),
    Unidentified(Unidentified),
}

impl Verify {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let chosen = self.source.choose(shared)?;
        let saved = self.saved_request()?;
        let report = self.check(&chosen, &saved)?;
        match shared.json {
            true => print_json(&report.to_json().to_string()),
            false => print(&report.lines().join("\n")),
        }
        Ok(if report.verdict.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn saved_request(&self) -> anyhow::Result<SavedRequest> {
        if let Some(path) = &self.request {
            let saved = SavedRequest::read(&read_input(path)?).with_context(|| format!("read {}", path.display()))?;
            return match &self.body {
                None => Ok(saved),
                Some(body) => Ok(SavedRequest { body: read_input(body)?, ..saved }),
            };
        }
        let mut headers = match &self.headers {
            None => http::HeaderMap::new(),
            Some(path) => {
                let text = String::from_utf8(read_input(path)?).context("the headers are not text")?;
                parse_headers(&text, 0).with_context(|| format!("read {}", path.display()))?
            }
        };
        for (name, value) in &self.header {
            headers.try_append(name.clone(), value.clone()).context("there are too many headers")?;
        }
        let body = self.body.as_deref().map(read_input).transpose()?.unwrap_or_default();
        let path = self.query.as_ref().map(|query| format!("/?{query}"));
        Ok(SavedRequest { method: "POST".to_owned(), path, headers, body })
    }

    fn check(&self, chosen: &Chosen, saved: &SavedRequest) -> anyhow::Result<Report> {
        let usual_path = format!("/webhooks/{}", chosen.name);
        let request = Request {
            method: &saved.method,
            path: saved.path.as_deref().unwrap_or(&usual_path),
            headers: &saved.headers,
            body: &saved.body,
        };
        let now = self.at.unwrap_or_else(|| Clock::system().now());
        let mut settings = chosen.settings.clone();
        settings.tolerance_secs = self.tolerance.or(settings.tolerance_secs);
        if chosen.scheme.needs_url() && settings.url.is_none() {
            bail!(
                "this provider signs the address it calls: give it with --public-url, exactly as it was entered there"
            );
        }
        let verifier = Verifier::with(&chosen.scheme, &chosen.secrets, settings.clone())?;
        let key = self.published_key(&verifier, &request)?;
        let explanation = explain_with(&chosen.scheme, &chosen.secrets, &settings, &request, now, key.as_ref())?;
        let mut findings = explanation.findings;
        let verdict = match explanation.verdict {
            Ok(facts) => Ok(Genuine { facts, content: content(chosen, &verifier, key.as_ref(), &request, now)? }),
            Err(rejection) => {
                // The verdict says it already.
                let said = rejection.to_string();
                findings.retain(|finding| !finding.trim_end_matches('.').eq_ignore_ascii_case(&said));
                // What is wrong with the file explains the signature, so it comes first.
                let mut doubts = saved.doubts();
                if !doubts.is_empty() {
                    findings.retain(|finding| !finding.starts_with("No common mistake"));
                }
                doubts.append(&mut findings);
                findings = doubts;
                if matches!(rejection, Rejection::TooOld { .. }) && self.at.is_none() {
                    findings.push("A saved request grows old: --at TIME judges it as of its arrival.".to_owned());
                }
                Err(rejection)
            }
        };
        Ok(Report { verdict, findings })
    }
}

impl Verify {
    /// The key that the provider publishes, from the file that was given for it.
    fn published_key(&self, verifier: &Verifier, request: &Request<'_>) -> anyhow::Result<Option<FetchedKey>> {
        let Ok(Some(wanted)) = verifier.key_request(request) else { return Ok(None) };
        let Some(path) = &self.key else {
            bail!("the key is published at {}: save what stands there and give it with --key", wanted.url());
        };
        let key = verifier.read_key(&wanted, &read_input(path)?);
        Ok(Some(key.with_context(|| format!("read {}", path.display()))?))
    }
}

/// What the gateway would take the request for. It has just been found genuine, at the same moment.
fn content(
    chosen: &Chosen,
    verifier: &Verifier,
    key: Option<&FetchedKey>,
    request: &Request<'_>,
    now: UnixMicros,
) -> anyhow::Result<Content> {
    let verified = verifier.verify_with(request, now, key)?;
    if chosen.handshakes.answer(&verified, verifier).is_some() {
        return Ok(Content::Handshake);
    }
    Ok(match chosen.identifier.identify(&verified) {
        Ok(identified) => Content::Events(identified.items().to_vec()),
        Err(unidentified) => Content::Unidentified(unidentified),
    })
}

impl Report {
    fn lines(&self) -> Vec<String> {
        let mut lines = match &self.verdict {
            Ok(genuine) => genuine.lines(),
            Err(rejection) => vec![format!("refused: {rejection} [{}]", rejection.code())],
        };
        lines.extend(self.findings.iter().map(|finding| format!("  - {}", text::shown(finding, 1_000))));
        lines
    }

    fn to_json(&self) -> serde_json::Value {
        match &self.verdict {
            Ok(Genuine { facts, content }) => json!({
                "genuine": true,
                "signed_at": facts.signed_at.map(UnixMicros::to_rfc3339),
                "secret": facts.secret_position,
                "integrity": facts.integrity.as_str(),
                "handshake": matches!(content, Content::Handshake),
                "events": content.items().iter().map(item_json).collect::<Vec<_>>(),
                "unidentified": content.unidentified().map(|why| json!({ "code": why.code(), "message": why.to_string() })),
                "findings": self.findings,
            }),
            Err(rejection) => json!({
                "genuine": false,
                "code": rejection.code(),
                "message": rejection.to_string(),
                "findings": self.findings,
            }),
        }
    }
}

impl Genuine {
    fn lines(&self) -> Vec<String> {
        // What the signature covers is among the findings.
        let Facts { signed_at, secret_position, .. } = self.facts;
        let signed = signed_at.map_or_else(|| "no signed time".to_owned(), |at| format!("signed {}", at.to_rfc3339()));
        let genuine = format!("genuine: {signed}, matched secret {secret_position}");
        match &self.content {
            Content::Handshake => {
                vec![format!("{genuine}; a handshake, which the gateway answers and does not store")]
            }
            Content::Unidentified(why) => {
                vec![format!("{genuine}; but the gateway answers 400: {why} [{}]", why.code())]
            }
            Content::Events(items) => match items.as_slice() {
                [only] => vec![genuine, format!("  {}", item_line(only))],
                items => {
                    let mut lines = vec![format!("{genuine}; a batch of {} events", items.len())];
                    lines.extend(items.iter().take(MAX_LISTED).map(|item| format!("  {}", item_line(item))));
                    lines
                }
            },
        }
    }
}

impl Content {
    fn items(&self) -> &[Item] {
        match self {
            Self::Events(items) => items,
            Self::Handshake | Self::Unidentified(_) => &[],
        }
    }

    fn unidentified(&self) -> Option<Unidentified> {
        match self {
            Self::Unidentified(why) => Some(*why),
            Self::Handshake | Self::Events(_) => None,
        }
    }
}

fn item_line(item: &Item) -> String {
    let mut line = format!("event key {}", text::shown(&item.key.display(), MAX_SHOWN));
    let known = [("type", item.kind.as_deref()), ("entity", item.entity.as_deref())];
    for (name, value) in known {
        if let Some(value) = value {
            line.push_str(&format!(", {name} {}", text::shown(value, MAX_SHOWN)));
        }
    }
    if let Some(at) = item.occurred_at {
        line.push_str(&format!(", occurred {}", at.to_rfc3339()));
    }
    if let Some(why) = item.quarantine {
        line.push_str(&format!("; it would be quarantined: {}", why.as_str()));
    }
    line
}

fn item_json(item: &Item) -> serde_json::Value {
    json!({
        "key": item.key.display(),
        "type": item.kind,
        "entity": item.entity,
        "occurred_at": item.occurred_at.map(UnixMicros::to_rfc3339),
        "digest": hex::encode(item.digest),
        "quarantine": item.quarantine.map(|why| why.as_str()),
    })
}

fn parse_time(text: &str) -> Result<UnixMicros, String> {
    match text.parse::<i64>() {
        Ok(seconds) => Ok(UnixMicros::from_secs(seconds)),
        Err(_) => UnixMicros::parse_rfc3339(text)
            .ok_or_else(|| "write a time such as 2026-11-15T02:20:17Z, or Unix seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use oncehook_verify::{Preset, Secret};

    use super::super::source::from_preset;
    use super::*;

    fn stripe() -> Chosen {
        from_preset(Preset::named("stripe").unwrap(), vec![Secret::new("whsec_test").unwrap()]).unwrap()
    }

    /// Signs a body at second 1000 and checks what `verify` says about it at another second.
    fn check(signed: &[u8], received: &[u8], at: i64) -> Vec<String> {
        let chosen = stripe();
        let signer = oncehook_verify::Signer::new(&chosen.scheme, &chosen.secrets[0]).unwrap();
        let headers = http::HeaderMap::new();
        let request = Request { method: "POST", path: "/", headers: &headers, body: signed };
        let mut saved =
            SavedRequest { method: "POST".into(), path: None, headers: headers.clone(), body: received.to_vec() };
        for (name, value) in signer.sign(&request, "id", UnixMicros::from_secs(1_000)).unwrap() {
            saved.headers.insert(name, value);
        }
        let at = at.to_string();
        let command = <Wrapper as clap::Parser>::parse_from(["x", "--body", "-", "--at", &at]);
        command.verify.check(&chosen, &saved).unwrap().lines()
    }

    #[derive(clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        verify: Verify,
    }

    #[test]
    fn a_genuine_request_is_identified() {
        let body = br#"{"id":"evt_1","type":"a.b","data":{"object":{"id":"pi\u001b_1"}}}"#;
        let lines = check(body, body, 1_100);
        assert_eq!(
            lines,
            [
                "genuine: signed 1970-01-01T00:16:40.000000Z, matched secret 1",
                "  event key evt_1, type a.b; it would be quarantined: unusable_entity",
                "  - The whole body is signed.",
            ]
        );
    }

    #[test]
    fn a_changed_body_is_explained_once() {
        let lines = check(b"{}", b"{}\n", 1_000);
        assert_eq!(lines[0], "refused: the signature does not match [signature_mismatch]");
        assert!(lines[1].starts_with("  - The signature fits the body without the line ending"), "{lines:?}");
        assert_eq!(lines.len(), 2, "{lines:?}");
    }

    #[test]
    fn an_old_request_is_refused() {
        assert!(check(b"{}", b"{}", 1_301)[0].ends_with("[too_old]"));
    }

    #[test]
    fn times() {
        assert_eq!(parse_time("1000"), Ok(UnixMicros::from_secs(1_000)));
        assert_eq!(parse_time("1970-01-01T00:16:40Z"), Ok(UnixMicros::from_secs(1_000)));
        assert!(parse_time("now").is_err());
    }
}
