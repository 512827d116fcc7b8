//! What is sent: Stripe events, signed beforehand, the same bytes for every stack.

use http::{HeaderMap, HeaderValue};
use oncehook_verify::UnixMicros;

use crate::gateway::{SECRET, now};
use crate::random::Random;
use crate::sender::Provider;

/// Which events come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Load {
    /// Every event is new; keys scatter over the ledger.
    Fresh,
    /// Every event is new; keys grow with time.
    Ordered,
    /// Every event comes twice, the copy a little later.
    Half,
    /// A thousand events over and over.
    Storm,
    /// Every event is new, and the events are about 10,000 entities.
    Entities,
}

/// How many entities the events of [`Load::Entities`] are about.
const ENTITIES: usize = 10_000;

/// How many events a storm repeats.
pub const STORM_KEYS: usize = 1_000;

/// A copy comes at most so many requests after its original.
const COPY_WITHIN: u64 = 2_000;

impl Load {
    /// As the report names it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Ordered => "fresh, time-ordered keys",
            Self::Half => "50 % duplicates",
            Self::Storm => "storm",
            Self::Entities => "fresh, 10,000 entities",
        }
    }

    /// So many requests with bodies of about `size` bytes.
    #[must_use]
    pub fn requests(self, count: usize, size: usize) -> Vec<Vec<u8>> {
        let provider = Provider::new("stripe", SECRET, "stripe");
        let now = now();
        let object = |number: usize| if self == Self::Entities { number % ENTITIES } else { number };
        let one = |number: usize| request_about(&provider, number, object(number), self == Self::Ordered, size, now);
        match self {
            Self::Fresh | Self::Ordered | Self::Entities => (0..count).map(one).collect(),
            Self::Storm => (0..STORM_KEYS).map(one).collect(),
            Self::Half => with_copies((0..count.div_ceil(2)).map(one).collect()),
        }
    }

    /// How many different events are among so many requests.
    #[must_use]
    pub fn events(self, requests: usize) -> usize {
        match self {
            Self::Fresh | Self::Ordered | Self::Entities => requests,
            Self::Half => requests / 2,
            Self::Storm => STORM_KEYS,
        }
    }
}

/// Every request and, some places later, its copy.
fn with_copies(originals: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut random = Random::new(11);
    let places = originals.len() as u64 * 2;
    let mut placed: Vec<(u64, usize)> = Vec::with_capacity(originals.len() * 2);
    for number in 0..originals.len() {
        let at = number as u64 * 2;
        placed.push((at, number));
        placed.push(((at + 1 + random.next() % COPY_WITHIN).min(places), number));
    }
    placed.sort_unstable();
    placed.into_iter().map(|(_, number)| originals[number].clone()).collect()
}

/// A signed Stripe event of about the wanted size.
#[must_use]
pub fn request(provider: &Provider, number: usize, ordered: bool, size: usize, now: UnixMicros) -> Vec<u8> {
    request_about(provider, number, number, ordered, size, now)
}

/// The same about one of many objects.
fn request_about(
    provider: &Provider,
    number: usize,
    object: usize,
    ordered: bool,
    size: usize,
    now: UnixMicros,
) -> Vec<u8> {
    let scattered = Random::new(number as u64).next();
    let id = if ordered {
        format!("evt_1PxZ{number:012}{:08x}", scattered as u32)
    } else {
        format!("evt_{scattered:016x}{:08x}", number as u32)
    };
    let head = format!(
        "{{\"id\":\"{id}\",\"object\":\"event\",\"type\":\"payment_intent.succeeded\",\"created\":{},\"data\":{{\"object\":{{\"id\":\"pi_{object}\",\"amount\":1999,\"note\":\"",
        now.as_secs()
    );
    let tail = "\"}},\"livemode\":true,\"pending_webhooks\":1}";
    let padding = "x".repeat(size.saturating_sub(head.len() + tail.len()));
    let mut headers = HeaderMap::new();
    headers.insert("content-type", HeaderValue::from_static("application/json; charset=utf-8"));
    headers.insert("user-agent", HeaderValue::from_static("Stripe/1.0 (+https://stripe.com/docs/webhooks)"));
    provider.request(&headers, format!("{head}{padding}{tail}").as_bytes(), &id, now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_of_half_comes_twice_and_its_copy_later() {
        let requests = Load::Half.requests(4_000, 300);
        assert_eq!(requests.len(), 4_000);
        let mut seen = std::collections::HashMap::new();
        for request in &requests {
            *seen.entry(request.clone()).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 2_000);
        assert!(seen.values().all(|times| *times == 2));
    }
}
