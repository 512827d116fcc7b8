//! Which headers of a request tell about its event, and therefore go along when the event is forwarded.
//!
//! An entry is the name of a header, or the opening of a family of names with a `*` behind it (`ce-*`).
//!
//! Does not: know what is a credential. The caller takes out the headers of the signature
//! ([`Scheme::signature_headers`](crate::Scheme::signature_headers)).

use http::HeaderName;
use serde::Deserialize;

/// The headers that go along with a forwarded event.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Vec<String>")]
pub struct EventHeaders {
    names: Vec<HeaderName>,
    /// How the names of families begin, in lower case.
    openings: Vec<String>,
}

impl EventHeaders {
    /// Is this header, written in lower case, one of them?
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.names.iter().any(|known| known.as_str() == name)
            || self.openings.iter().any(|opening| name.starts_with(opening.as_str()))
    }

    /// Adds a header.
    pub fn add(&mut self, name: HeaderName) {
        if !self.contains(name.as_str()) {
            self.names.push(name);
        }
    }

    /// Takes a header out.
    pub fn remove(&mut self, name: &HeaderName) {
        self.names.retain(|known| known != name);
    }

    /// The entries, for people.
    pub fn entries(&self) -> impl Iterator<Item = String> {
        let openings = self.openings.iter().map(|opening| format!("{opening}*"));
        self.names.iter().map(ToString::to_string).chain(openings)
    }
}

impl TryFrom<Vec<String>> for EventHeaders {
    type Error = String;

    fn try_from(entries: Vec<String>) -> Result<Self, Self::Error> {
        let mut headers = Self::default();
        for entry in entries {
            let (text, is_family) = match entry.strip_suffix('*') {
                Some(opening) => (opening, true),
                None => (entry.as_str(), false),
            };
            let name: HeaderName = text.parse().map_err(|_| format!("{entry:?} is not a header name"))?;
            match is_family {
                true => headers.openings.push(name.as_str().to_owned()),
                false => headers.add(name),
            }
        }
        Ok(headers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Preset, Secret, Signer, UnixMicros, request::Request};

    fn headers(entries: &[&str]) -> Result<EventHeaders, String> {
        EventHeaders::try_from(entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn names_and_families_are_found() {
        let mut found = headers(&["X-Event", "ce-*"]).unwrap();
        assert!(found.contains("x-event") && found.contains("ce-type") && !found.contains("x-event-id"));
        found.remove(&HeaderName::from_static("x-event"));
        assert!(!found.contains("x-event"));
        assert_eq!(found.entries().collect::<Vec<_>>(), ["ce-*"]);
        for bad in ["", "*", "a b", "x\n", "ü"] {
            assert!(headers(&[bad]).is_err(), "{bad:?}");
        }
    }

    /// Names that the gateway gives to every forwarded request: the provider's own value cannot stand there too.
    fn is_ours(name: &HeaderName) -> bool {
        name.as_str() == "idempotency-key" || name.as_str().starts_with("webhook-")
    }

    #[test]
    fn r21_every_preset_forwards_what_identifies_its_events() {
        for preset in Preset::all() {
            for name in preset.identify.headers() {
                assert!(
                    is_ours(name) || preset.forward.contains(name.as_str()),
                    "{}: {name} is not forwarded",
                    preset.name
                );
            }
        }
    }

    #[test]
    fn r9_no_preset_forwards_a_signature_a_token_or_a_time_that_only_the_signature_needs() {
        let words = ["signature", "hmac", "secret", "password", "passcode", "auth", "jwt", "cookie", "api-key"];
        for preset in Preset::all() {
            let name = &preset.name;
            for header in preset.verify.signature_headers() {
                assert!(!preset.forward.contains(header.as_str()), "{name}: {header} is the signature");
            }
            for header in preset.verify.time_headers() {
                assert!(
                    !preset.forward.contains(header.as_str()) || preset.identify.headers().contains(&header),
                    "{name}: {header} is there for the signature only"
                );
            }
            for entry in preset.forward.entries() {
                assert!(!words.iter().any(|word| entry.contains(word)), "{name}: {entry}");
                // An idempotency token is an id, not a credential.
                assert!(!entry.contains("token") || entry.contains("idempotency-token"), "{name}: {entry}");
                assert!(!is_ours(&entry.trim_end_matches('*').parse().unwrap()), "{name}: {entry} is ours");
            }
        }
    }

    /// What the signer of each scheme writes, apart from ids and times that identify the event, stays here.
    #[test]
    fn r9_what_a_signer_writes_is_not_forwarded() {
        let mut signed = 0;
        for preset in Preset::all() {
            let Ok(secret) = Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw") else { continue };
            let Ok(signer) = Signer::new(&preset.verify, &secret) else { continue };
            let now = UnixMicros::from_secs(1_700_000_000);
            let (given, body) = preset.sample.render("id_1", None, now).unwrap();
            let request = Request { method: "POST", path: "/", headers: &given, body: &body };
            let Ok(written) = signer.sign(&request, "id_1", now) else { continue };
            signed += 1;
            for (name, _) in written.iter() {
                assert!(
                    !preset.forward.contains(name.as_str()) || preset.identify.headers().contains(&name),
                    "{}: {name}",
                    preset.name
                );
            }
        }
        assert!(signed > 60, "only {signed} presets could sign their sample");
    }
}
