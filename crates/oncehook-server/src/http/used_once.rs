//! Values that a sender uses for one event only, and the event each came with.
//!
//! Where a signature covers little more than such a value (Mailgun: a time and a token), whoever has seen one request can put
//! another event into it. A value that comes again with another key tells.
//!
//! Promises: a value is remembered for as long as its signed time may be accepted, as far as the memory goes; the oldest is
//! forgotten first.
//!
//! Does not: outlive a restart, and is not shared between nodes. The signed time bounds what that lets through.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use oncehook_verify::{EventKey, digest};

/// Values held for a source: some megabytes.
const MAX_VALUES: usize = 1 << 16;

/// The values of one source.
pub(super) struct UsedOnce {
    kept: Duration,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    /// The digest of the key that each came with.
    keys: HashMap<[u8; 32], [u8; 32]>,
    order: VecDeque<([u8; 32], Instant)>,
}

impl UsedOnce {
    /// `tolerance_secs` is how far a signed time may be off, on both sides.
    pub(super) fn new(tolerance_secs: Option<u64>) -> Self {
        let kept = Duration::from_secs(tolerance_secs.unwrap_or(3_600).saturating_mul(2));
        Self { kept, seen: Mutex::default() }
    }

    /// Did the value come before with another key?
    pub(super) fn is_used_by_another(&self, value: [u8; 32], key: &EventKey, now: Instant) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = &mut *seen;
        while let Some((oldest, at)) = seen.order.front() {
            if now.saturating_duration_since(*at) <= self.kept && seen.order.len() < MAX_VALUES {
                break;
            }
            seen.keys.remove(oldest);
            seen.order.pop_front();
        }
        let key = digest(key.as_bytes());
        match seen.keys.get(&value) {
            Some(first) => *first != key,
            None => {
                seen.keys.insert(value, key);
                seen.order.push_back((value, now));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r11_a_value_belongs_to_the_first_key_until_it_is_forgotten() {
        let used = UsedOnce::new(Some(900));
        let key = |text: &str| EventKey::from_parts(&[text.as_bytes()]);
        let start = Instant::now();
        assert!(!used.is_used_by_another([1; 32], &key("a"), start));
        assert!(!used.is_used_by_another([1; 32], &key("a"), start), "a retry");
        assert!(used.is_used_by_another([1; 32], &key("b"), start));
        assert!(used.is_used_by_another([1; 32], &key("b"), start + Duration::from_secs(1_800)));
        assert!(!used.is_used_by_another([1; 32], &key("b"), start + Duration::from_secs(1_801)));
        for number in 0..MAX_VALUES as u64 * 2 {
            let value = digest(&number.to_be_bytes());
            assert!(!used.is_used_by_another(value, &key("c"), start + Duration::from_secs(1_801)));
        }
        let seen = used.seen.lock().unwrap();
        assert!(seen.keys.len() <= MAX_VALUES && seen.order.len() == seen.keys.len());
    }
}
