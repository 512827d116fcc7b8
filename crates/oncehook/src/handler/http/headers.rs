//! The headers of a request: those of every attempt, those of this one, and those of the configuration.
//!
//! Promises: what frames the message or carries our promises (`Host`, `Transfer-Encoding`, `Idempotency-Key`, `webhook-*`, …)
//! cannot be configured. The signature is made with the data of the `standard-webhooks` preset, with which a receiver made
//! from it verifies.

use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use oncehook_verify::{Preset, Request, Signer, UnixMicros};

use super::HttpOptions;
use crate::delivery::{Cause, Claim, Failure, HandedEvent};

/// Names that belong to the connection, to the message's frame, or to us.
const TAKEN: [&str; 13] = [
    "connection",
    "content-encoding",
    "content-length",
    "expect",
    "host",
    "idempotency-key",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Families of names that are ours.
const TAKEN_FAMILIES: [&str; 2] = ["webhook-", "oncehook-"];

/// Words shorter than this are not worth hiding, and hiding them would spoil every other text.
const HIDDEN_WORD: usize = 8;

pub(super) struct Headers {
    signer: Option<Signer>,
    configured: HeaderMap,
    /// Whether the body is a template, which is JSON whatever the event was.
    templated: bool,
}

impl Headers {
    pub(super) fn new(options: &HttpOptions) -> Result<Self, String> {
        let signer = match &options.secret {
            None => None,
            Some(secret) => {
                let preset =
                    Preset::named("standard-webhooks").ok_or("the preset standard-webhooks is missing")?;
                Some(Signer::new(&preset.verify, secret).map_err(|error| error.to_string())?)
            }
        };
        Ok(Self { signer, configured: configured(&options.headers)?, templated: options.body.is_some() })
    }

    /// All headers of one attempt.
    pub(super) fn of_attempt(
        &self,
        claim: &Claim,
        body: &[u8],
        now: UnixMicros,
    ) -> Result<HeaderMap, Failure> {
        let key = claim.fence.delivery.idempotency_key();
        let mut headers = HeaderMap::with_capacity(12 + self.configured.len());
        let mut put = |name: &'static str, text: &str| {
            // A type or an id that cannot stand in a header is left out; the body has it.
            if let Ok(value) = HeaderValue::from_str(text) {
                headers.insert(HeaderName::from_static(name), value);
            }
        };
        put("idempotency-key", &key);
        put("webhook-id", &key);
        put("webhook-timestamp", &now.as_secs().to_string());
        put("oncehook-event", &claim.event.id.to_string());
        put("oncehook-source", claim.event.source.as_str());
        put("oncehook-attempt", &claim.fence.attempt.to_string());
        if let Some(kind) = &claim.event.kind {
            put("oncehook-type", kind);
        }
        let content_type = if self.templated {
            Some(HeaderValue::from_static("application/json"))
        } else {
            content_type(&claim.event)
        };
        if let Some(value) = content_type {
            headers.insert(CONTENT_TYPE, value);
        }
        if let Some(signer) = &self.signer {
            let request = Request { method: "POST", path: "/", headers: &HeaderMap::new(), body };
            let signed = signer.sign(&request, &key, now).map_err(|error| {
                Failure::permanent(Cause::Ours, format!("the request cannot be signed: {error}"))
            })?;
            for (name, value) in signed {
                headers.insert(name, value);
            }
        }
        for (name, value) in &self.configured {
            headers.insert(name, value.clone());
        }
        Ok(headers)
    }
}

/// The type of the original body.
fn content_type(event: &HandedEvent) -> Option<HeaderValue> {
    event.headers.split(|byte| *byte == b'\n').find_map(|line| {
        let (name, value) = line.split_at_checked(line.iter().position(|byte| *byte == b':')?)?;
        if !name.eq_ignore_ascii_case(b"content-type") {
            return None;
        }
        HeaderValue::from_bytes(value.strip_prefix(b":")?.trim_ascii()).ok()
    })
}

/// The configured headers, checked.
fn configured(pairs: &[(String, String)]) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::with_capacity(pairs.len());
    for (name, value) in pairs {
        let name: HeaderName =
            name.parse().map_err(|_| format!("{name:?} cannot be the name of a header"))?;
        let text = name.as_str();
        if TAKEN.contains(&text) || TAKEN_FAMILIES.iter().any(|family| text.starts_with(family)) {
            return Err(format!("the header `{text}` cannot be set; oncehook decides about it"));
        }
        let mut value = HeaderValue::from_str(value)
            .map_err(|_| format!("the value of the header `{text}` holds characters that a header cannot"))?;
        value.set_sensitive(true);
        if headers.insert(name.clone(), value).is_some() {
            return Err(format!("the header `{name}` is set twice"));
        }
    }
    Ok(headers)
}

/// What must not come back to us in an error, should the other side echo its request. The secret is not sent at all.
pub(super) fn hidden_words(options: &HttpOptions) -> Vec<String> {
    let words = options.headers.iter().flat_map(|(_, value)| value.split_whitespace());
    words.filter(|word| word.len() >= HIDDEN_WORD).map(str::to_owned).collect()
}
