//! An event: one verified, identified thing that happened, on its way into the journal, and the id it gets there.
//!
//! Promises: the body is the bytes that were received, untouched; an [`EventId`] is a valid UUIDv7 whose first 63
//! meaningful bits ([`EventId::sequence`]) grow strictly within one journal.
//!
//! Does not: decide whether an event is new. Only a journal's append does that.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use bytes::Bytes;
use oncehook_verify::{EventKey, Integrity, Quarantine, UnixMicros};
use serde::{Deserialize, Serialize, Serializer};
use smallvec::SmallVec;
use uuid::Uuid;

use crate::delivery::RouteName;

checked_name!(
    /// The name of a source.
    SourceName,
    BadSourceName,
    "a source name has 1 to 64 characters of a-z, 0-9, '-' and '_'"
);

impl SourceName {
    /// The source of the self-test's probes. Not a valid name, so it can never meet a real source.
    #[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
    pub(crate) fn probe() -> Self {
        Self(crate::journal::PROBE_SOURCE.into())
    }
}

/// The id of an event: a UUIDv7.
///
/// Its 48 bits of milliseconds and the 15 bits after them form a number, the [`sequence`](Self::sequence), that grows
/// strictly within a journal. The embedded journal uses that number as the row's key, so that events are always
/// appended at the end of their table and an id needs no index of its own. The other 59 bits are drawn once per
/// process, so that two nodes never make the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(Uuid);

const TAIL_BITS: u32 = 59;
const TAIL_MASK: u64 = (1 << TAIL_BITS) - 1;

impl EventId {
    /// The time in the id. It is never before the receipt, and after it if the clock was set back since an earlier event.
    pub fn time(&self) -> UnixMicros {
        UnixMicros((self.sequence() >> 15) * 1_000)
    }

    fn from_sequence(sequence: u64, tail: u64) -> Self {
        let millis = sequence >> 15;
        let counter = sequence & 0x7fff;
        let high = (millis << 16) | (0x7 << 12) | (counter >> 3);
        let low = (0b10 << 62) | ((counter & 0b111) << TAIL_BITS) | (tail & TAIL_MASK);
        Self(Uuid::from_u64_pair(high, low))
    }

    /// The id from the sixteen bytes that a journal stores.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(Uuid::from_bytes(bytes))
    }

    /// The sixteen bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// Writes the id as text into a buffer, without allocating.
    pub fn encode<'b>(&self, buffer: &'b mut [u8; 36]) -> &'b str {
        self.0.as_hyphenated().encode_lower(buffer)
    }

    /// An id above every one that is written so from its beginning, and below all others that are above those. Nothing if
    /// no id begins so, or it is too short to choose by: fewer than eight characters.
    pub fn after_all_that_begin(beginning: &str) -> Option<Self> {
        let fits = |(at, char): (usize, char)| match at {
            8 | 13 | 18 | 23 => char == '-',
            _ => matches!(char, '0'..='9' | 'a'..='f'),
        };
        if !(8..36).contains(&beginning.len()) || !beginning.chars().enumerate().all(fits) {
            return None;
        }
        let digits: String = beginning.chars().filter(|char| *char != '-').collect();
        let highest = u128::from_str_radix(&format!("{digits:f<32}"), 16).ok()?;
        let sequence = u64::try_from(Self(Uuid::from_u128(highest)).sequence()).ok()?;
        Some(Self::from_sequence(sequence + 1, 0))
    }

    /// Milliseconds and counter: 63 bits, never negative, strictly growing within one journal.
    pub fn sequence(&self) -> i64 {
        let (high, low) = self.0.as_u64_pair();
        let counter = ((high & 0xfff) << 3) | ((low >> TAIL_BITS) & 0b111);
        // 48 + 15 bits: the sign bit stays clear.
        (((high >> 16) << 15) | counter).cast_signed()
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_hyphenated().fmt(f)
    }
}

impl FromStr for EventId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Uuid::try_parse(text).map(Self)
    }
}

impl Serialize for EventId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for EventId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Hands out event ids. A journal owns one; it is given the time and the last id it must stay above.
#[derive(Debug, Default)]
pub struct EventIds {
    last: u64,
    tail: u64,
}

impl EventIds {
    /// Ids that stay above `last` even if the clock was set back since. `tail` is drawn at random once per process.
    pub fn above(last: i64, tail: u64) -> Self {
        Self { last: u64::try_from(last).unwrap_or(0), tail }
    }

    /// Stays above this id too, which another process has made.
    pub fn stay_above(&mut self, sequence: i64) {
        self.last = self.last.max(u64::try_from(sequence).unwrap_or(0));
    }

    /// The next id at this time.
    pub fn next(&mut self, now: UnixMicros) -> EventId {
        let millis = u64::try_from(now.0 / 1_000).unwrap_or(0);
        self.last = (self.last + 1).max(millis << 15);
        EventId::from_sequence(self.last, self.tail)
    }
}

/// An event as the front door hands it to a journal. Usually it has no id yet: the journal gives one if the event is new.
#[derive(Debug, Clone)]
pub struct NewEvent {
    /// The id under which an intake before the journal has accepted it, if one has. A journal that can keeps it, and
    /// says `New` again if it holds this very event already; the receipt tells which id the event has.
    pub id: Option<EventId>,
    /// The front door it came through; keys are scoped to it.
    pub source: SourceName,
    /// The idempotency key.
    pub key: EventKey,
    /// Whether the sender's signature covers the key. If not, the same body under a new key is a suspected replay.
    pub key_signed: bool,
    /// The event's type, as the provider names it.
    pub kind: Option<String>,
    /// What the event is about.
    pub entity: Option<String>,
    /// When it happened, as the provider says.
    pub occurred_at: Option<UnixMicros>,
    /// Which version of its entity it tells about, as the provider counts.
    pub version: Option<i64>,
    /// When it arrived here.
    pub received_at: UnixMicros,
    /// Until when the key is remembered at least.
    pub expires_at: UnixMicros,
    /// How much of the request the signature covered.
    pub integrity: Integrity,
    /// The headers that matter: `name: value` lines, bytes as received.
    pub headers: Bytes,
    /// The body, byte for byte.
    pub body: Bytes,
    /// Digest of the body without its volatile fields.
    pub digest: [u8; 32],
    /// Set if the event must be stored but not run until an operator releases it.
    pub quarantine: Option<Quarantine>,
    /// The routes that want it. A delivery for each is written with the event, unless the event is held.
    pub routes: SmallVec<[RouteName; 2]>,
    /// Whether one of them, or one that follows them, looks at the entity: then its deliveries are found by it.
    pub by_entity: bool,
    /// Who delivered it.
    pub peer: IpAddr,
}

impl NewEvent {
    /// A probe of a journal's self-test.
    #[cfg(any(feature = "sqlite", feature = "postgres", feature = "mysql"))]
    pub(crate) fn probe(key: &EventKey, digest: u8, at: UnixMicros) -> Self {
        Self {
            id: None,
            source: SourceName::probe(),
            key: key.clone(),
            key_signed: true,
            kind: None,
            entity: None,
            occurred_at: None,
            version: None,
            received_at: at,
            expires_at: at,
            integrity: Integrity::None,
            headers: Bytes::new(),
            body: Bytes::new(),
            digest: [digest; 32],
            quarantine: None,
            routes: SmallVec::new(),
            by_entity: false,
            peer: std::net::Ipv4Addr::UNSPECIFIED.into(),
        }
    }

    /// Whether the front door has seen that this is a replay. Then it is held, and flagged as a suspected replay too.
    pub fn is_replay(&self) -> bool {
        self.quarantine == Some(Quarantine::SuspectedReplay)
    }

    /// Until when its key is remembered, if it is stored under this id.
    ///
    /// Ids never go back. An id that is days ahead of the receipt means that the clock was set back by days since earlier
    /// events, and a window that begins by such a clock would be over too early.
    pub(crate) fn remembered_until(&self, id: EventId) -> UnixMicros {
        let behind = id.time().0.saturating_sub(self.received_at.0);
        let set_back = i64::try_from(crate::journal::JUMP.as_micros()).is_ok_and(|jump| behind > jump);
        if set_back { UnixMicros(self.expires_at.0.saturating_add(behind)) } else { self.expires_at }
    }
}

/// The events of one request. They become durable together or not at all.
pub type NewEvents = SmallVec<[NewEvent; 1]>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_uuid_v7_and_their_sequence_survives_the_round_trip() {
        let mut ids = EventIds::above(0, u64::MAX);
        let now = UnixMicros(1_700_000_000_123_456);
        let first = ids.next(now);
        assert_eq!(first.0.get_version_num(), 7);
        assert_eq!(first.0.get_variant(), uuid::Variant::RFC4122);
        assert_eq!(first.sequence() >> 15, 1_700_000_000_123);
        let mut previous = first;
        for _ in 0..100_000 {
            let next = ids.next(now);
            assert!(next > previous && next.sequence() == previous.sequence() + 1);
            previous = next;
        }
        assert_eq!(previous.to_string().parse::<EventId>().unwrap(), previous);
    }

    #[test]
    fn fault_18_ids_keep_growing_when_the_clock_goes_back() {
        let mut ids = EventIds::above(0, 7);
        let late = ids.next(UnixMicros(2_000_000_000_000_000));
        let mut reopened = EventIds::above(late.sequence(), 8);
        let early = reopened.next(UnixMicros(1_000_000_000_000_000));
        assert!(early.sequence() > late.sequence());
    }

    #[test]
    fn source_names_are_checked() {
        assert!(SourceName::new("stripe-eu_2").is_ok());
        for bad in ["", "Stripe", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert!(SourceName::new(bad).is_err(), "{bad:?}");
        }
    }
}
