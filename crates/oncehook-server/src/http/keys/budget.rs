//! How often a source may ask its provider for keys that turn out not to exist. Names of keys can be invented by anybody.
//!
//! Promises: within [`SHUNNED`] a source makes at most [`VAIN_CALLS`] calls in vain, and each peer at most [`PEER_CALLS`] of
//! them, so a forger spends a share of his own. Beyond that one call in [`RESERVE_EVERY`] is left, for the key that was asked
//! for most often: genuine senders all name the same key, forgers who name one key over and over burn it with one call. So a
//! genuine sender gets its key within moments even if it shares an address with the forger.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use oncehook_verify::KeyRequest;

use super::SHUNNED;

/// Calls in vain of a source within the time for which a failed address is left alone.
pub(super) const VAIN_CALLS: u32 = 32;

/// How many of them one peer may cause.
pub(super) const PEER_CALLS: u32 = 4;

/// How often a further call is made when those are used up.
pub(super) const RESERVE_EVERY: Duration = Duration::from_secs(1);

/// Keys whose askers are counted.
const MAX_ASKED: usize = 256;

pub(super) struct Budget {
    window_ends: Instant,
    spent: u32,
    /// At most as many as there are calls in a window.
    spent_by_peer: HashMap<IpAddr, u32>,
    reserve_at: Instant,
    /// How often each key was asked for in vain while there was no budget.
    asked: HashMap<KeyRequest, u32>,
}

impl Budget {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            window_ends: now + SHUNNED,
            spent: 0,
            spent_by_peer: HashMap::new(),
            reserve_at: now,
            asked: HashMap::new(),
        }
    }

    /// Pays for a call; `false` if it must not be made. A call counts as one in vain until it is given back.
    pub(super) fn pay(&mut self, call: &KeyRequest, peer: IpAddr, now: Instant) -> bool {
        if self.window_ends <= now {
            (self.window_ends, self.spent) = (now + SHUNNED, 0);
            self.spent_by_peer.clear();
            self.asked.clear();
        }
        let spent_by_peer = self.spent_by_peer.get(&peer).copied().unwrap_or(0);
        let usual = self.spent < VAIN_CALLS && spent_by_peer < PEER_CALLS;
        if !usual && !self.take_reserve(call, now) {
            return false;
        }
        self.spent = self.spent.saturating_add(1);
        self.spent_by_peer.insert(peer, spent_by_peer.saturating_add(1));
        true
    }

    /// The call was not in vain.
    pub(super) fn give_back(&mut self, peer: IpAddr) {
        self.spent = self.spent.saturating_sub(1);
        if let Some(spent) = self.spent_by_peer.get_mut(&peer) {
            *spent = spent.saturating_sub(1);
        }
    }

    /// Counts the question, and takes the reserve if it is there and no key was asked for more often.
    fn take_reserve(&mut self, call: &KeyRequest, now: Instant) -> bool {
        if self.asked.len() >= MAX_ASKED && !self.asked.contains_key(call) {
            self.asked.retain(|_, count| *count > 1);
        }
        if self.asked.len() >= MAX_ASKED && !self.asked.contains_key(call) {
            return false;
        }
        let count = self.asked.entry(call.clone()).or_insert(0);
        *count = count.saturating_add(1);
        let count = *count;
        if now < self.reserve_at || self.asked.values().any(|other| *other > count) {
            return false;
        }
        self.reserve_at = now + RESERVE_EVERY;
        self.asked.remove(call);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: impl std::fmt::Display) -> KeyRequest {
        KeyRequest::Certificate { url: format!("https://sns.us-east-1.amazonaws.com/{name}.pem") }
    }

    #[test]
    fn fault_72_a_peer_spends_its_own_share_and_no_more() {
        let now = Instant::now();
        let mut budget = Budget::new(now);
        let peer = |number: u8| IpAddr::from([192, 0, 2, number]);
        let paid = |budget: &mut Budget, from: u8, at: Instant| {
            (0..100).filter(|number| budget.pay(&key(format!("{from}-{number}")), peer(from), at)).count()
        };
        // The one more is the reserve.
        assert_eq!(paid(&mut budget, 1, now), PEER_CALLS as usize + 1);
        assert_eq!(paid(&mut budget, 2, now), PEER_CALLS as usize);
        let rest: usize = (3..200).map(|from| paid(&mut budget, from, now)).sum();
        assert!(rest <= VAIN_CALLS as usize, "{rest}");
        assert_eq!(paid(&mut budget, 201, now), 0, "the source has spent all");
        assert_eq!(paid(&mut budget, 201, now + SHUNNED), PEER_CALLS as usize + 1, "a while later");
    }

    #[test]
    fn fault_72_the_reserve_goes_to_the_key_that_is_asked_for_most() {
        let now = Instant::now();
        let mut budget = Budget::new(now);
        let peer = IpAddr::from([192, 0, 2, 1]);
        assert_eq!((0..300).filter(|number| budget.pay(&key(number), peer, now)).count(), PEER_CALLS as usize + 1);
        assert!(!budget.pay(&key("genuine"), peer, now));
        assert!(!budget.pay(&key("genuine"), peer, now));
        let later = now + RESERVE_EVERY;
        assert!((0..300).all(|number| !budget.pay(&key(1_000 + number), peer, later)), "asked for once");
        assert!(budget.pay(&key("genuine"), peer, later), "asked for most often");
        assert!(!budget.pay(&key("genuine"), peer, later), "one call at a time");
    }

    #[test]
    fn a_call_that_was_not_in_vain_costs_nothing() {
        let now = Instant::now();
        let mut budget = Budget::new(now);
        let peer = IpAddr::from([192, 0, 2, 1]);
        for number in 0..1_000 {
            assert!(budget.pay(&key(number), peer, now));
            budget.give_back(peer);
        }
    }
}
