//! The events of a storm: genuine ones of a provider, signed at any moment, and the same id with another body.
//!
//! Promises: all copies of an event have the same body byte for byte; ids are new in every run, and of letters, digits and
//! underscores only, so that they can stand in a command, a URL or a statement as they are.

use bytes::Bytes;
use http::{HeaderValue, header};
use oncehook::clock::Clock;
use oncehook_verify::{Request, Sample, Signer, UnixMicros, Verifier};
use reqwest::Url;

use super::super::send::{Ready, Unsigned, path_of, plain_sample, sign, signer, target};
use super::super::source::Chosen;
use super::super::{random, text};

/// Makes events.
pub(super) struct Maker {
    chosen: Chosen,
    signer: Signer,
    sample: Sample,
    kind: Option<String>,
    url: Url,
    run: String,
    clock: Clock,
    began: UnixMicros,
}

/// One event: its id and the body of all its copies.
#[derive(Clone)]
pub(super) struct Event {
    unsigned: Unsigned,
}

impl Event {
    /// The id, under which its effects are counted.
    pub(super) fn key(&self) -> &str {
        &self.unsigned.id
    }
}

impl Maker {
    /// Fails if the first event cannot be signed, so that nothing is sent in vain.
    pub(super) fn new(chosen: Chosen, url: Option<Url>, kind: Option<String>) -> anyhow::Result<Self> {
        let sample = chosen.preset.map_or_else(plain_sample, |preset| preset.sample.clone());
        let mut url = target(url, &chosen, false)?;
        if let (Some(query), None) = (&sample.query, url.query()) {
            url.set_query(Some(query));
        }
        let mut settings = chosen.settings.clone();
        settings.url.get_or_insert_with(|| url.as_str().to_owned());
        let signer = signer(&chosen, &settings)?;
        let clock = Clock::system();
        let began = clock.now();
        let maker = Self { chosen, signer, sample, kind, url, run: random::hex::<6>()?, clock, began };
        maker.sign(&maker.event("check", 0, None)?, Age::Now)?;
        Ok(maker)
    }

    /// Where everything goes.
    pub(super) fn url(&self) -> &Url {
        &self.url
    }

    /// An event of a hazard. Later numbers happened later. With an entity it is about that.
    pub(super) fn event(&self, hazard: &str, number: u64, entity: Option<&str>) -> anyhow::Result<Event> {
        let id = format!("evt_storm_{}_{hazard}_{number}", self.run);
        let occurred = UnixMicros(self.began.0.saturating_add(i64::try_from(number)?.saturating_mul(1_000_000)));
        let (mut headers, body) = self.sample.render(&id, self.kind.as_deref(), occurred)?;
        headers.entry(header::CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
        let event = Event { unsigned: Unsigned { id, headers, body: body.into() } };
        match entity {
            None => Ok(event),
            Some(entity) => Ok(self.about(&event, entity).unwrap_or(event)),
        }
    }

    /// Signed now, or as if it had been a little while ago.
    pub(super) fn sign(&self, event: &Event, age: Age) -> anyhow::Result<Ready> {
        let now = self.clock.now();
        let at = match age {
            Age::Now => now,
            Age::Seconds(seconds) => UnixMicros(now.0.saturating_sub(seconds.saturating_mul(1_000_000))),
        };
        sign(&self.signer, &self.url, event.unsigned.clone(), &[], at)
    }

    /// The same event with another body. Nothing if this provider's events have no id apart from their body, so that
    /// another body is another event.
    pub(super) fn changed(&self, event: &Event) -> Option<Event> {
        let mut body = event.unsigned.body.to_vec();
        let json_end = body.iter().rposition(|byte| !byte.is_ascii_whitespace());
        match json_end {
            Some(end) if !self.sample.form && body.get(end) == Some(&b'}') => {
                body.splice(end..end, *b",\"oncehook_storm\":\"changed\"");
            }
            _ if self.sample.form => body.extend_from_slice(b"&oncehook_storm=changed"),
            _ => body.push(b'\n'),
        }
        let changed = self.with_body(event, body);
        let keys = (self.identity(event), self.identity(&changed));
        match keys {
            (Some((old, _)), Some((new, _))) if old != new => None,
            _ => Some(changed),
        }
    }

    /// The same event about another entity, if its entity stands in the body and is not its id.
    fn about(&self, event: &Event, entity: &str) -> Option<Event> {
        let (key, old) = self.identity(event)?;
        let (old, body) = (old?, &event.unsigned.body);
        let at = body.windows(old.len()).position(|window| window == old.as_bytes())?;
        let mut other = body.to_vec();
        other.splice(at..at + old.len(), entity.bytes());
        let event = self.with_body(event, other);
        (self.identity(&event)?.0 == key).then_some(event)
    }

    fn with_body(&self, event: &Event, body: Vec<u8>) -> Event {
        Event { unsigned: Unsigned { body: Bytes::from(body), ..event.unsigned.clone() } }
    }

    /// Key and entity as a gateway would read them. Nothing if that takes a key that we do not have: a signer's is private.
    fn identity(&self, event: &Event) -> Option<(Vec<u8>, Option<String>)> {
        let Ready { url, headers, body } = self.sign(event, Age::Now).ok()?;
        let mut settings = self.chosen.settings.clone();
        settings.url.get_or_insert_with(|| self.url.as_str().to_owned());
        let verifier = Verifier::with(&self.chosen.scheme, &self.chosen.secrets, settings).ok()?;
        let path = path_of(&url);
        let request = Request { method: "POST", path: &path, headers: &headers, body: &body };
        let verified = verifier.verify(&request, self.clock.now()).ok()?;
        let identified = self.chosen.identifier.identify(&verified).ok()?;
        let item = identified.items().first()?;
        Some((item.key.as_bytes().to_vec(), item.entity.clone()))
    }

    /// What it sends, for people.
    pub(super) fn shown(&self) -> String {
        let kind = self.kind.as_deref().unwrap_or(&self.sample.kind);
        format!("{} events `{}`", text::shown(&self.chosen.name, 64), text::shown(kind, 64))
    }
}

/// When a copy was signed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Age {
    Now,
    /// So many seconds ago.
    Seconds(i64),
}
