//! What was promised against what is there: I1 to I5 of `docs/PROOF.md`, as numbers.
//!
//! Does not: panic on what it finds. A planted mistake must show here, and nowhere else.

use std::collections::{BTreeMap, HashMap};

use super::history::{Heard, History};

/// What a database holds when all is quiet.
#[derive(Debug, Default)]
pub struct Facts {
    /// Key, id and digest of the body of every stored event.
    pub events: Vec<(String, String, [u8; 32])>,
    /// The key of every effect, by the place where it happened: each event has one in each.
    pub effects: BTreeMap<&'static str, Vec<String>>,
    /// How many deliveries are in each state.
    pub states: BTreeMap<String, u64>,
    /// Dead deliveries without a reason.
    pub unexplained: u64,
    /// Ids that a spool has given out, and the stored event that each of them is.
    pub aliases: HashMap<String, String>,
    /// Deliveries that must end dead, one for each stored event, because their route can do nothing else.
    pub hopeless: bool,
}

/// What came of a scenario.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Tally {
    /// Keys that were answered 2xx.
    pub acked: u64,
    /// Events that are stored.
    pub stored: u64,
    /// Promised and not there, or there and without effect.
    pub lost: u64,
    /// Effects beyond the first.
    pub doubled: u64,
    /// Answers that another body came under a known key.
    pub conflicted: u64,
    /// Deliveries that ended dead.
    pub dead: u64,
    /// Whatever else should not be, in words.
    pub odd: Vec<String>,
    /// Some of what was lost or doubled, for people.
    pub examples: Vec<String>,
}

impl Tally {
    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.lost == 0 && self.doubled == 0 && self.odd.is_empty()
    }

    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        self.acked += other.acked;
        self.stored += other.stored;
        self.lost += other.lost;
        self.doubled += other.doubled;
        self.conflicted += other.conflicted;
        self.dead += other.dead;
        self.odd.extend(other.odd.iter().cloned());
        self.examples.extend(other.examples.iter().cloned());
    }
}

/// Compares. Examples of what is wrong are named, three of each kind.
#[must_use]
pub fn audit(heard: &Heard, facts: &Facts) -> Tally {
    let mut tally = Tally {
        acked: heard.promised.len() as u64,
        stored: facts.events.len() as u64,
        conflicted: heard.conflicts,
        dead: facts.states.get("dead").copied().unwrap_or(0),
        ..Tally::default()
    };
    let mut notes = Notes::default();
    // I1: every promise is stored, under its id.
    let mut stored: HashMap<&str, Vec<&str>> = HashMap::new();
    for (key, id, _) in &facts.events {
        stored.entry(key).or_default().push(id);
    }
    let is_stored = |key: &str, event: &str| {
        let event = facts.aliases.get(event).map_or(event, String::as_str);
        stored.get(key).is_some_and(|ids| ids.contains(&event))
    };
    for (key, event) in &heard.promised {
        if !is_stored(key, event) {
            tally.lost += 1;
            notes.add("promised and not stored", key);
        }
    }
    for (key, event) in &heard.others {
        // Two names of one event are one event; two events are a promise broken.
        let is_alias = |id: &String| facts.aliases.contains_key(id);
        let renamed = is_alias(event) || heard.promised.get(key).is_some_and(is_alias);
        if !renamed || !is_stored(key, event) {
            tally.lost += 1;
            notes.add("promised as two events", key);
        }
    }
    for key in &heard.broken {
        tally.lost += 1;
        notes.add("another body accepted as new", key);
    }
    // I2: one effect in each place for every stored event, and I3: none for any other.
    for (place, keys) in &facts.effects {
        let mut counts: HashMap<&str, u64> = HashMap::new();
        for key in keys {
            *counts.entry(key).or_default() += 1;
        }
        for key in stored.keys() {
            match counts.remove(key) {
                None => {
                    tally.lost += 1;
                    notes.add(&format!("without effect in {place}"), key);
                }
                Some(1) => {}
                Some(count) => {
                    tally.doubled += count - 1;
                    notes.add(&format!("{count} effects in {place}"), key);
                }
            }
        }
        for key in counts.keys() {
            tally.odd.push(format!("{key} has an effect in {place} and is not stored"));
        }
    }
    // I4: nothing is left half done, and what is dead says why.
    for (state, count) in &facts.states {
        if !matches!(state.as_str(), "succeeded" | "dead" | "superseded" | "skipped") {
            tally.odd.push(format!("{count} deliveries are {state} after the end"));
        }
    }
    let expected_dead = if facts.hopeless { tally.stored } else { 0 };
    if tally.dead != expected_dead {
        tally.odd.push(format!("{} deliveries are dead and should be {expected_dead}", tally.dead));
    }
    if facts.unexplained > 0 {
        tally.odd.push(format!("{} dead deliveries give no reason", facts.unexplained));
    }
    // I5: the bytes that were sent.
    for (key, _, digest) in &facts.events {
        if *digest != oncehook_verify::digest(&History::body_of(key)) {
            tally.odd.push(format!("{key} is stored with other bytes than were sent"));
        }
    }
    tally.odd.extend(heard.odd.iter().take(5).cloned());
    tally.examples = notes.0.into_iter().map(|(what, keys)| format!("{what}: {}", keys.join(", "))).collect();
    tally
}

#[derive(Default)]
struct Notes(BTreeMap<String, Vec<String>>);

impl Notes {
    fn add(&mut self, what: &str, key: &str) {
        let keys = self.0.entry(what.to_owned()).or_default();
        if keys.len() < 3 {
            keys.push(key.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(stored: &[&str], orders: &[&str]) -> Facts {
        let event =
            |key: &&str| (key.to_string(), format!("id_{key}"), oncehook_verify::digest(&History::body_of(key)));
        let orders = orders.iter().map(|&key| key.to_owned()).collect();
        Facts {
            events: stored.iter().map(event).collect(),
            effects: BTreeMap::from([("orders", orders)]),
            ..Facts::default()
        }
    }

    fn heard(promised: &[&str]) -> Heard {
        let promised = promised.iter().map(|&key| (key.to_owned(), format!("id_{key}"))).collect();
        Heard { promised, ..Heard::default() }
    }

    #[test]
    fn r47_what_is_lost_and_what_is_doubled_is_counted() {
        let check = |heard: &Heard, facts: &Facts, lost, doubled, odd| {
            let tally = audit(heard, facts);
            assert_eq!((tally.lost, tally.doubled, tally.odd.len()), (lost, doubled, odd), "{tally:?}");
        };
        check(&heard(&["evt_1"]), &facts(&["evt_1", "evt_2"], &["evt_1", "evt_2"]), 0, 0, 0);
        check(&heard(&["evt_1", "evt_3"]), &facts(&["evt_1"], &["evt_1"]), 1, 0, 0);
        check(&heard(&["evt_1"]), &facts(&["evt_1"], &[]), 1, 0, 0);
        check(&heard(&["evt_1"]), &facts(&["evt_1"], &["evt_1", "evt_1", "evt_1"]), 0, 2, 0);
        check(&heard(&[]), &facts(&[], &["evt_1"]), 0, 0, 1);
        let mut other = facts(&["evt_1"], &["evt_1"]);
        other.events[0].1 = "another id".to_owned();
        other.events[0].2 = [0; 32];
        other.states.insert("running".to_owned(), 1);
        check(&heard(&["evt_1"]), &other, 1, 0, 2);
        let broken = Heard { broken: vec!["evt_1".to_owned()], ..heard(&["evt_1"]) };
        check(&broken, &facts(&["evt_1"], &["evt_1"]), 1, 0, 0);
        // A spooled copy has an id of its own, and is the same event if the journal says so.
        let twice = Heard { others: vec![("evt_1".to_owned(), "spooled".to_owned())], ..heard(&["evt_1"]) };
        check(&twice, &facts(&["evt_1"], &["evt_1"]), 1, 0, 0);
        let aliases = std::collections::HashMap::from([("spooled".to_owned(), "id_evt_1".to_owned())]);
        check(&twice, &Facts { aliases, ..facts(&["evt_1"], &["evt_1"]) }, 0, 0, 0);
        // The dead are counted where all must die, and must say why.
        let mut hopeless = Facts { hopeless: true, ..facts(&["evt_1"], &["evt_1"]) };
        check(&heard(&["evt_1"]), &hopeless, 0, 0, 1);
        hopeless.states.insert("dead".to_owned(), 1);
        check(&heard(&["evt_1"]), &hopeless, 0, 0, 0);
        hopeless.unexplained = 1;
        check(&heard(&["evt_1"]), &hopeless, 0, 0, 1);
    }
}
