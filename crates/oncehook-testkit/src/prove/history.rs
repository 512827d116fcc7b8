//! What was sent and what was answered: the senders' side of the proof.
//!
//! Senders are as bad as real ones: half of the requests are copies, some carry another body under a known id, some hang up
//! before they have heard the answer. A promise is a 2xx with the event's id; the first one of a key is kept for ever, and a later
//! answer that names another event is a promise broken.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::task::JoinHandle;

use crate::gateway::{SECRET, now};
use crate::random::Random;
use crate::sender::{Answer, Provider, Wire, stripe_body};

/// How senders behave, in percent of their requests.
#[derive(Debug, Clone, Copy)]
pub struct Manners {
    /// Copies of an earlier event.
    pub again: u64,
    /// Of the copies, those with another body.
    pub changed: u64,
    /// Requests whose sender does not wait for the answer.
    pub hang_up: u64,
}

impl Default for Manners {
    fn default() -> Self {
        Self { again: 50, changed: 4, hang_up: 10 }
    }
}

/// Everything that one deployment's senders did and heard.
pub struct History {
    provider: Provider,
    manners: Manners,
    sent: AtomicU64,
    /// Seconds that the gateway's clock, and so the senders', is ahead.
    shift: AtomicI64,
    heard: Mutex<Heard>,
}

/// What was heard.
#[derive(Debug, Default, Clone)]
pub struct Heard {
    /// The event that each key was promised.
    pub promised: HashMap<String, String>,
    /// Keys that were promised once more, as another event, and that event. Only a spool may do that, and then the two are one.
    pub others: Vec<(String, String)>,
    /// Keys under which a changed body was accepted as if it were new.
    pub broken: Vec<String>,
    /// Answers of 2xx.
    pub acknowledged: u64,
    /// Answers `duplicate`.
    pub duplicates: u64,
    /// Answers `conflict`.
    pub conflicts: u64,
    /// Answers 503.
    pub refused: u64,
    /// Requests that were sent whole, and whose sender went away.
    pub hung_up: u64,
    /// Requests whose answer never came because the connection ended.
    pub cut: u64,
    /// Answers that should not be.
    pub odd: Vec<String>,
}

/// Senders at work.
pub struct Sending {
    stop: Arc<AtomicBool>,
    connections: Vec<JoinHandle<()>>,
}

impl Sending {
    /// Lets requests under way end.
    pub async fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for connection in self.connections {
            connection.await.unwrap();
        }
    }
}

impl History {
    /// Nothing yet.
    #[must_use]
    pub fn new(manners: Manners) -> Arc<Self> {
        Arc::new(Self {
            provider: Provider::new("stripe", SECRET, "stripe"),
            manners,
            sent: AtomicU64::new(0),
            shift: AtomicI64::new(0),
            heard: Mutex::default(),
        })
    }

    /// What was heard so far.
    #[must_use]
    pub fn heard(&self) -> Heard {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The senders' clock goes with the gateway's.
    pub fn shift(&self, seconds: i64) {
        self.shift.store(seconds, Ordering::Relaxed);
    }

    /// The body of an event: the same each time, of a size that depends on the event.
    #[must_use]
    pub fn body_of(key: &str) -> Vec<u8> {
        let number: u64 = key.strip_prefix("evt_").and_then(|number| number.parse().ok()).unwrap_or(0);
        stripe_body(key, 300 + (number * 7_919 % 900) as usize)
    }

    /// A new event's key.
    pub fn new_key(&self) -> String {
        format!("evt_{}", self.sent.fetch_add(1, Ordering::Relaxed))
    }

    /// A signed request.
    #[must_use]
    pub fn request(&self, key: &str, changed: bool) -> Vec<u8> {
        let mut body = Self::body_of(key);
        if changed {
            body.truncate(body.len() - 1);
            body.extend_from_slice(b",\"changed\":true}");
        }
        let now = UnixMicros(now().0 + self.shift.load(Ordering::Relaxed) * 1_000_000);
        self.provider.request(&Default::default(), &body, key, now)
    }

    /// Takes an answer down. Returns whether it is a promise.
    pub fn record(&self, key: &str, changed: bool, answer: &Answer) -> bool {
        let mut heard = self.lock();
        if answer.status == 503 {
            heard.refused += 1;
            return false;
        }
        let json = answer.json();
        let (Some(event), Some(word)) = (json["event"].as_str(), json["status"].as_str()) else {
            heard.odd.push(format!("{key}: {} {}", answer.status, String::from_utf8_lossy(&answer.body)));
            return false;
        };
        heard.acknowledged += 1;
        match word {
            "duplicate" => heard.duplicates += 1,
            "conflict" => heard.conflicts += 1,
            _ => {}
        }
        // A changed body that came first is the event; the audit would find other bytes, so it is never sent first.
        if changed && word == "accepted" {
            heard.broken.push(key.to_owned());
            return true;
        }
        let first = heard.promised.entry(key.to_owned()).or_insert_with(|| event.to_owned()).clone();
        if first != event {
            heard.others.push((key.to_owned(), event.to_owned()));
        }
        true
    }

    /// Sends over so many connections until it is told to stop, or until nobody listens any more.
    pub fn send(self: &Arc<Self>, addresses: &[SocketAddr], connections: usize, random: &mut Random) -> Sending {
        let stop = Arc::new(AtomicBool::new(false));
        let connections = (0..connections)
            .map(|number| {
                let address = addresses[number % addresses.len()];
                let (history, stop) = (Arc::clone(self), Arc::clone(&stop));
                let mut random = Random::new(random.next());
                tokio::spawn(async move { history.connection(address, &stop, &mut random).await })
            })
            .collect();
        Sending { stop, connections }
    }

    async fn connection(&self, address: SocketAddr, stop: &AtomicBool, random: &mut Random) {
        while !stop.load(Ordering::Relaxed) {
            let Ok(mut wire) = Wire::connect(address).await else { return };
            while !stop.load(Ordering::Relaxed) {
                let (key, changed) = self.choose(random);
                let request = self.request(&key, changed);
                if random.below(100) < self.manners.hang_up {
                    self.hang_up(wire, &request, random).await;
                    break;
                }
                let answered = tokio::time::timeout(Duration::from_secs(60), wire.ask(&request)).await;
                match answered {
                    Ok(Ok(answer)) if self.record(&key, changed, &answer) => {}
                    // A sender would wait longer; a storm of refusals would only heat the machine.
                    Ok(Ok(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                    Ok(Err(_)) => {
                        self.lock().cut += 1;
                        break;
                    }
                    Err(_) => {
                        self.lock().odd.push(format!("{key}: no answer in 60 s"));
                        break;
                    }
                }
            }
        }
    }

    /// A new event, a copy of an earlier one, or another body under the id of one that was promised.
    fn choose(&self, random: &mut Random) -> (String, bool) {
        let sent = self.sent.load(Ordering::Relaxed);
        if sent == 0 || random.below(100) >= self.manners.again {
            return (self.new_key(), false);
        }
        let key = format!("evt_{}", random.below(sent));
        let changed = random.below(100) < self.manners.changed && self.lock().promised.contains_key(&key);
        (key, changed)
    }

    async fn hang_up(&self, mut wire: Wire, request: &[u8], random: &mut Random) {
        if wire.send(request).await.is_err() {
            return;
        }
        self.lock().hung_up += 1;
        tokio::time::sleep(Duration::from_micros(random.below(3_000))).await;
        if random.below(2) == 0 {
            let _ = wire.reset();
        }
    }

    /// Sends copies of one new event to these addresses in turn, all at the same moment.
    pub async fn race(self: &Arc<Self>, addresses: &[SocketAddr], copies: usize) {
        let key = self.new_key();
        let start = Arc::new(tokio::sync::Barrier::new(copies));
        let send = |address: &SocketAddr| {
            let (history, key, start, address) = (Arc::clone(self), key.clone(), Arc::clone(&start), *address);
            tokio::spawn(async move {
                let mut wire = Wire::connect(address).await.unwrap();
                let request = history.request(&key, false);
                start.wait().await;
                if let Ok(answer) = wire.ask(&request).await {
                    history.record(&key, false, &answer);
                }
            })
        };
        let senders: Vec<_> = addresses.iter().cycle().take(copies).map(send).collect();
        for sender in senders {
            sender.await.unwrap();
        }
    }

    /// Keys of events that were sent and whose senders were told nothing yet.
    #[must_use]
    pub fn unpromised(&self) -> Vec<String> {
        let heard = self.lock();
        let keys = (0..self.sent.load(Ordering::Relaxed)).map(|number| format!("evt_{number}"));
        keys.filter(|key| !heard.promised.contains_key(key)).collect()
    }

    /// Sends one event until it is promised; `false` if it is not within the time.
    pub async fn insist(&self, address: SocketAddr, key: &str, time: Duration) -> bool {
        let end = tokio::time::Instant::now() + time;
        while tokio::time::Instant::now() < end {
            if let Ok(answer) = crate::sender::ask(address, &self.request(key, false)).await
                && self.record(key, false, &answer)
            {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    }
}
