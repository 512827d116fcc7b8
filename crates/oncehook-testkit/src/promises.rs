//! What senders were promised: every 2xx that they got, to be checked against what is stored (FAULTS.md, I1 and I5).
//!
//! Shared by all connections of a test. A promise that contradicts an earlier one is a panic on the spot: the same key must
//! lead to the same event for ever, through any number of crashes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};
use tokio::task::JoinHandle;

use crate::gateway::{Gateway, SECRET, now};
use crate::random::Random;
use crate::sender::{Answer, Provider, Wire, ask, stripe_body};

/// The promises of one journal, by key.
#[derive(Default)]
pub struct Promises {
    by_key: Mutex<HashMap<String, Promise>>,
}

struct Promise {
    event: String,
    /// Whether one of the answers was `accepted`. Two copies in flight at once may be answered in any order.
    accepted: bool,
}

/// What a check has seen.
#[derive(Debug, Clone, Copy)]
pub struct Kept {
    /// Keys that were answered 2xx, all of them stored.
    pub promised: usize,
    /// Events stored: the promised ones, and those whose answer was lost.
    pub stored: usize,
}

impl Promises {
    /// Takes down an answer to a key's delivery. Returns whether it is a promise, that is, a 2xx.
    pub fn record(&self, key: &str, answer: &Answer) -> bool {
        if !(200..300).contains(&answer.status) {
            return false;
        }
        let json = answer.json();
        let event = json["event"].as_str().unwrap_or_else(|| panic!("a 2xx without an event: {answer:?}"));
        let accepted = match json["status"].as_str() {
            Some("accepted") => true,
            Some("duplicate") => false,
            _ => panic!("{key}: an unexpected answer: {json}"),
        };
        let mut by_key = self.by_key.lock().unwrap();
        let promise =
            by_key.entry(key.to_owned()).or_insert_with(|| Promise { event: event.to_owned(), accepted: false });
        assert_eq!(promise.event, event, "{key} now leads to another event");
        assert!(!(accepted && promise.accepted), "{key} was accepted twice");
        promise.accepted |= accepted;
        true
    }

    /// How many keys were promised.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_key.lock().unwrap().len()
    }

    /// Whether nothing was promised yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Asks a gateway for all events: every promised key is there, under its id, and no key or id is there twice.
    pub async fn check(&self, gateway: &Gateway) -> Kept {
        let events = gateway.events().await;
        let stored = events.iter().map(|event| {
            let text = |field: &str| event[field].as_str().unwrap().to_owned();
            (text("key"), text("id"))
        });
        self.compare(stored.collect())
    }

    /// Reads the file of a gateway that has ended: as [`check`](Self::check), and every stored body, promised or not, is
    /// byte for byte what `body_of` its key says; the ledger and the events agree; SQLite finds the file sound.
    pub fn check_file(&self, path: &Path, body_of: impl Fn(&str) -> Vec<u8>) -> Kept {
        let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE).unwrap();
        let verdict: String = connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        assert_eq!(verdict, "ok", "integrity_check of {}", path.display());
        let odd: i64 = connection
            .query_row(
                "SELECT (SELECT count(*) FROM oncehook_keys k LEFT JOIN oncehook_events e ON e.id = k.event
                          WHERE e.source IS NOT k.source OR e.key IS NOT k.key OR e.digest IS NOT k.digest)
                      + (SELECT count(*) FROM oncehook_events e
                          WHERE e.seq <= coalesce((SELECT value FROM oncehook_meta WHERE name = 'ledger_to'), 0)
                            AND NOT EXISTS (SELECT 1 FROM oncehook_keys k
                                             WHERE k.source = e.source AND k.key = e.key AND k.event = e.id))",
                [],
                |row| row.get(0),
            )
            .unwrap();
        assert_eq!(odd, 0, "keys without their event, or events that should have been merged without their key");
        let mut statement =
            connection.prepare("SELECT CAST(key AS TEXT), lower(hex(id)), body FROM oncehook_events").unwrap();
        let rows = statement
            .query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get::<_, Vec<u8>>(2)?)))
            .unwrap();
        let mut stored = Vec::new();
        for row in rows {
            let (key, id, body) = row.unwrap();
            assert!(body == body_of(&key), "{key} is stored with other bytes than were sent");
            let parts = [&id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]];
            stored.push((key, parts.join("-")));
        }
        self.compare(stored)
    }

    fn compare(&self, stored: Vec<(String, String)>) -> Kept {
        let ids: HashSet<&str> = stored.iter().map(|(_, id)| id.as_str()).collect();
        assert_eq!(ids.len(), stored.len(), "an id was given twice");
        let count = stored.len();
        let stored: HashMap<String, String> = stored.into_iter().collect();
        assert_eq!(stored.len(), count, "a key is stored twice");
        let by_key = self.by_key.lock().unwrap();
        let lost: Vec<&String> = by_key.keys().filter(|key| !stored.contains_key(*key)).collect();
        assert!(lost.is_empty(), "{} of {} acknowledged events are lost: {lost:?}", lost.len(), by_key.len());
        for (key, promise) in by_key.iter() {
            assert_eq!(stored[key], promise.event, "{key} is stored under another id than was acknowledged");
        }
        Kept { promised: by_key.len(), stored: count }
    }
}

/// Senders of Stripe events `evt_0`, `evt_1`, …, each signed at its moment, who send some of them again.
pub struct Senders {
    /// What they were promised.
    pub promises: Promises,
    provider: Provider,
    sent: AtomicU64,
    bytes: u64,
    again: u64,
}

/// Senders at work.
pub struct Sending {
    stop: Arc<AtomicBool>,
    connections: Vec<JoinHandle<Answers>>,
}

/// What senders heard.
#[derive(Debug, Default)]
pub struct Answers {
    /// Answers by status.
    pub statuses: BTreeMap<u16, u64>,
    /// Requests whose answer never came because the connection ended.
    pub cut: u64,
    /// The longest wait for an answer.
    pub slowest: Duration,
}

impl Answers {
    /// How many had this status.
    #[must_use]
    pub fn of(&self, status: u16) -> u64 {
        self.statuses.get(&status).copied().unwrap_or(0)
    }

    /// Adds another's.
    pub fn add(&mut self, other: Self) {
        for (status, count) in other.statuses {
            *self.statuses.entry(status).or_default() += count;
        }
        self.cut += other.cut;
        self.slowest = self.slowest.max(other.slowest);
    }
}

impl Senders {
    /// Events of `bytes` on average; `again` percent of the requests deliver an earlier event once more.
    #[must_use]
    pub fn new(bytes: u64, again: u64) -> Arc<Self> {
        let provider = Provider::new("stripe", SECRET, "stripe");
        Arc::new(Self { promises: Promises::default(), provider, sent: AtomicU64::new(0), bytes, again })
    }

    /// The body of an event: the same each time, of a size that depends on the event.
    #[must_use]
    pub fn body_of(&self, key: &str) -> Vec<u8> {
        let number: u64 = key.strip_prefix("evt_").and_then(|number| number.parse().ok()).unwrap();
        stripe_body(key, (self.bytes / 2 + number * 7_919 % self.bytes) as usize)
    }

    /// A new event's key, or an earlier one's.
    pub fn key(&self, random: &mut Random) -> String {
        let sent = self.sent.load(Ordering::Relaxed);
        let again = sent > 0 && random.below(100) < self.again;
        let number = if again { random.below(sent) } else { self.sent.fetch_add(1, Ordering::Relaxed) };
        format!("evt_{number}")
    }

    /// How many different events were sent, or are about to be.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// A signed request, as bytes for the wire.
    #[must_use]
    pub fn request(&self, key: &str) -> Vec<u8> {
        self.provider.request(&Default::default(), &self.body_of(key), key, now())
    }

    /// Sends so many new events over so many connections, each once; all are accepted. Returns their keys.
    pub async fn send_new(self: &Arc<Self>, address: SocketAddr, count: usize, connections: usize) -> Vec<String> {
        let first = self.sent.fetch_add(count as u64, Ordering::Relaxed);
        let keys: Vec<String> = (first..first + count as u64).map(|number| format!("evt_{number}")).collect();
        let sending: Vec<_> = keys
            .chunks(count.div_ceil(connections))
            .map(|keys| {
                let (senders, keys) = (Arc::clone(self), keys.to_vec());
                tokio::spawn(async move {
                    let mut wire = Wire::connect(address).await.unwrap();
                    for key in keys {
                        let answer = wire.ask(&senders.request(&key)).await.unwrap();
                        assert!(senders.promises.record(&key, &answer), "{key}: {answer:?}");
                        assert_eq!(answer.json()["status"], "accepted", "{key}");
                    }
                })
            })
            .collect();
        for sending in sending {
            sending.await.unwrap();
        }
        keys
    }

    /// The event that a key was promised.
    #[must_use]
    pub fn event(&self, key: &str) -> String {
        self.promises.by_key.lock().unwrap()[key].event.clone()
    }

    /// Sends over so many connections until [`Sending::finish`], or until nobody listens any more.
    pub fn start(self: &Arc<Self>, address: SocketAddr, connections: usize, random: &mut Random) -> Sending {
        let stop = Arc::new(AtomicBool::new(false));
        let connections = (0..connections)
            .map(|_| {
                let (senders, stop, random) = (Arc::clone(self), Arc::clone(&stop), Random::new(random.next()));
                tokio::spawn(async move { senders.send(address, &stop, random).await })
            })
            .collect();
        Sending { stop, connections }
    }

    async fn send(&self, address: SocketAddr, stop: &AtomicBool, mut random: Random) -> Answers {
        let mut answers = Answers::default();
        while !stop.load(Ordering::Relaxed) {
            let Ok(mut wire) = Wire::connect(address).await else { break };
            while !stop.load(Ordering::Relaxed) {
                let key = self.key(&mut random);
                let started = Instant::now();
                let request = self.request(&key);
                let answered = tokio::time::timeout(Duration::from_secs(30), wire.ask(&request)).await;
                let Ok(answer) = answered.unwrap_or_else(|_| panic!("{key}: no answer in 30 s")) else {
                    answers.cut += 1;
                    break;
                };
                answers.slowest = answers.slowest.max(started.elapsed());
                *answers.statuses.entry(answer.status).or_default() += 1;
                if !self.promises.record(&key, &answer) {
                    assert_is_unavailable(&answer);
                    // A sender would wait longer; a storm of refusals would only heat the machine.
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        }
        answers
    }

    /// Sends some of the promised events once more: each is a duplicate of the event that was promised.
    pub async fn check_some(&self, address: SocketAddr, random: &mut Random, count: usize) {
        let keys: Vec<String> = self.promises.by_key.lock().unwrap().keys().cloned().collect();
        if keys.is_empty() {
            return;
        }
        for _ in 0..count {
            let key = random.pick(&keys);
            let answer = ask(address, &self.request(key)).await.unwrap();
            assert!(self.promises.record(key, &answer), "{key}: {answer:?}");
            assert_eq!(answer.json()["status"], "duplicate", "{key} was forgotten");
        }
    }
}

impl Sending {
    /// Lets requests under way be answered, and returns what was heard.
    pub async fn finish(self) -> Answers {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Answers::default();
        for connection in self.connections {
            all.add(connection.await.unwrap());
        }
        all
    }
}

/// The one other answer that a genuine event may get: 503, when to try again, and an error that names itself.
pub fn assert_is_unavailable(answer: &Answer) {
    assert_eq!(answer.status, 503, "{answer:?}");
    let seconds: u32 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds), "{answer:?}");
    assert!(answer.json()["error"]["code"].is_string(), "{answer:?}");
    assert!(answer.json()["error"]["message"].is_string(), "{answer:?}");
}
