//! The headers of a request: the provider's own, those of every attempt, those of this one, and those of the configuration.
//!
//! Promises: what frames the message or carries our promises (`Host`, `Transfer-Encoding`, `Idempotency-Key`, `webhook-*`, …)
//! cannot be configured, nor come from the provider. What an event says can neither end a header nor begin another. The
//! signature is made with the data of the `standard-webhooks` preset, with which a receiver made from it verifies.

use std::collections::HashSet;
use std::sync::OnceLock;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use oncehook_verify::{EventHeaders, Preset, Request, Secret, Signer, UnixMicros};
use url::Url;

use super::HttpOptions;
use super::hidden::{Hidden, is_credential};
use crate::delivery::{Cause, Claim, Failure, HandedEvent};
use crate::handler::HeaderTemplate;

/// No value that is made from an event is longer.
const LONGEST_VALUE: usize = 8 << 10;

pub(super) struct Headers {
    signer: Option<Signer>,
    configured: Vec<(HeaderName, HeaderValue)>,
    templates: Vec<(HeaderName, HeaderTemplate)>,
    /// Whether the body is a template, which is JSON whatever the event was.
    templated: bool,
    /// The provider's headers that go along with the original body.
    pub(super) forwarded: OnceLock<EventHeaders>,
}

/// May a header of this name be forwarded? Not what frames the message, what is ours, or what carries credentials.
pub fn may_be_forwarded(name: &str) -> bool {
    !is_taken(name) && !matches!(name, "authorization" | "cookie" | "content-type")
}

/// Names that belong to the connection, to the message's frame, or to us.
fn is_taken(name: &str) -> bool {
    let of_connection = matches!(name, "connection" | "expect" | "host" | "keep-alive" | "te" | "trailer" | "upgrade");
    let of_proxy = matches!(name, "proxy-authorization" | "proxy-connection");
    let of_frame = matches!(name, "content-encoding" | "content-length" | "transfer-encoding");
    let ours = name == "idempotency-key" || name.starts_with("webhook-") || name.starts_with("oncehook-");
    of_connection || of_proxy || of_frame || ours
}

impl Headers {
    /// Checks the headers of the configuration, those that are filled from events as far as they can be without one.
    pub(super) fn new(options: &HttpOptions) -> Result<Self, String> {
        let preset = Preset::named("standard-webhooks").ok_or("the preset standard-webhooks is missing")?;
        let signer = options.secret.as_ref().map(|secret| Signer::new(&preset.verify, secret)).transpose();
        let signer = signer.map_err(|error| error.to_string())?;
        let mut names = HashSet::new();
        let mut name_to_set = |name: &str| {
            let name: HeaderName = name.parse().map_err(|_| format!("{name:?} cannot be the name of a header"))?;
            match name.as_str() {
                taken if is_taken(taken) => {
                    Err(format!("the header `{name}` cannot be set; oncehook decides about it"))
                }
                _ if !names.insert(name.clone()) => Err(format!("the header `{name}` is set twice")),
                _ => Ok(name),
            }
        };
        let checked = |name: &HeaderName, text: &str| {
            let unfit = |_| format!("the value of the header `{name}` holds characters that a header cannot");
            HeaderValue::from_str(text).map_err(unfit)
        };
        let mut configured = Vec::with_capacity(options.headers.len());
        for (name, value) in &options.headers {
            let name = name_to_set(name)?;
            let mut value = checked(&name, value)?;
            value.set_sensitive(true);
            configured.push((name, value));
        }
        let mut templates = Vec::with_capacity(options.header_templates.len());
        for (name, template) in &options.header_templates {
            let name = name_to_set(name)?;
            template.texts.iter().try_for_each(|text| checked(&name, text).map(drop))?;
            templates.push((name, template.clone()));
        }
        let templated = options.body.is_some();
        Ok(Self { signer, configured, templates, templated, forwarded: OnceLock::new() })
    }

    /// All headers of one attempt.
    pub(super) fn of_attempt(&self, claim: &Claim, body: &[u8], now: UnixMicros) -> Result<HeaderMap, Failure> {
        let key = claim.fence.delivery.idempotency_key();
        let mut headers = HeaderMap::with_capacity(16 + self.configured.len() + self.templates.len());
        if let Some(forwarded) = self.forwarded.get().filter(|_| !self.templated) {
            for (name, value) in stored(&claim.event) {
                if forwarded.contains(name.as_str()) && may_be_forwarded(name.as_str()) {
                    headers.append(name, value);
                }
            }
        }
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
        if self.templated {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        } else if let Some((name, value)) = stored(&claim.event).find(|(name, _)| name == CONTENT_TYPE) {
            headers.insert(name, value);
        }
        if let Some(signer) = &self.signer {
            let request = Request { method: "POST", path: "/", headers: &HeaderMap::new(), body };
            let signed = signer
                .sign(&request, &key, now)
                .map_err(|error| Failure::permanent(Cause::Ours, format!("the request cannot be signed: {error}")))?;
            for (name, value) in signed {
                headers.insert(name, value);
            }
        }
        for (name, value) in &self.configured {
            headers.insert(name, value.clone());
        }
        for (name, template) in &self.templates {
            headers.insert(name, made_from_event(name, &template.fill(&claim.event)?)?);
        }
        Ok(headers)
    }
}

/// A value that may hold anything that a sender wrote. What would end the header, or hide in it, ends the delivery.
fn made_from_event(name: &HeaderName, text: &str) -> Result<HeaderValue, Failure> {
    let refused = |why: &str| {
        let message = format!("the header `{name}` cannot be sent: made from this event it {why}");
        Failure::permanent(Cause::Poison, message)
    };
    if text.len() > LONGEST_VALUE {
        return Err(refused(&format!("has {} bytes, and {LONGEST_VALUE} are allowed", text.len())));
    }
    if text.contains(char::is_control) {
        return Err(refused("holds a line break or another control character"));
    }
    HeaderValue::from_bytes(text.as_bytes()).map_err(|_| refused("holds characters that a header cannot"))
}

/// The headers of the original request, as far as they were kept.
fn stored(event: &HandedEvent) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
    event.headers.split(|byte| *byte == b'\n').filter_map(|line| {
        let (name, value) = line.split_at_checked(line.iter().position(|byte| *byte == b':')?)?;
        let name = HeaderName::from_bytes(name).ok()?;
        Some((name, HeaderValue::from_bytes(value.strip_prefix(b":")?.trim_ascii()).ok()?))
    })
}

/// What must not come back to us in an error or a result, should the other side repeat its request: the configured secrets,
/// and whatever stands in a header or a parameter whose name says that it is one.
pub(super) fn credentials(options: &HttpOptions, url: &Url) -> Hidden {
    let values = options.headers.iter().map(|(_, value)| value.as_str());
    let named = options.header_templates.iter().filter(|(name, _)| is_credential(name));
    let secret = options.secret.iter().map(Secret::reveal);
    let signing = secret.flat_map(|secret| [Some(secret), secret.strip_prefix("whsec_")]).flatten();
    Hidden::new(url, values.chain(named.flat_map(|(_, template)| &template.texts).map(String::as_str)).chain(signing))
}
