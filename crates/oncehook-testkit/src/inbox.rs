//! A destination as it should be written: it applies each `Idempotency-Key` once, however often it arrives. A test decides
//! how it answers meanwhile.
//!
//! Promises: an effect is noted before the answer, so a sender that dies in between sends again to somebody who knows. Effects
//! are counted by event too: a key that changed from one attempt to the next shows as a second effect of its event.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::receiver::{Arrived, Receiver, Reply};

/// How an inbox answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    /// It applies and says so.
    Well,
    /// It applies, and says so when its mood changes.
    Hesitant,
    /// It applies nothing and answers with this status.
    Failing(u16),
}

/// The destination. It stops listening when it is dropped or [closed](Self::close).
pub struct Inbox {
    receiver: Option<Receiver>,
    address: SocketAddr,
    book: Arc<Mutex<Book>>,
}

struct Book {
    mood: Mood,
    /// What those wait for who are kept waiting.
    gate: watch::Sender<bool>,
    /// Requests, by the event in their body.
    arrivals: BTreeMap<String, usize>,
    /// The event that each key was applied for.
    applied: HashMap<String, String>,
    /// Requests that found it failing.
    refused: usize,
}

impl Inbox {
    /// Listens on a free port of 127.0.0.1.
    pub async fn start() -> Self {
        let book = Book {
            mood: Mood::Well,
            gate: watch::Sender::new(false),
            arrivals: BTreeMap::new(),
            applied: HashMap::new(),
            refused: 0,
        };
        let mut inbox =
            Self { receiver: None, address: SocketAddr::from(([127, 0, 0, 1], 0)), book: Arc::new(Mutex::new(book)) };
        inbox.open().await;
        inbox
    }

    /// Listens again, where it listened before.
    pub async fn open(&mut self) {
        let book = Arc::clone(&self.book);
        let script = move |_: usize, arrived: &Arrived| lock(&book).take(arrived);
        let receiver = Receiver::start_at(self.address, script).await;
        self.address = receiver.address();
        self.receiver = Some(receiver);
    }

    /// Refuses connections from now on, and drops those that are open.
    pub async fn close(&mut self) {
        self.receiver = None;
        // The task that listens ends in its own time.
        while TcpStream::connect(self.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    }

    /// A URL of it.
    #[must_use]
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Changes how it answers. All who wait are answered.
    pub fn set(&self, mood: Mood) {
        let mut book = lock(&self.book);
        book.mood = mood;
        book.gate.send_replace(true);
        book.gate = watch::Sender::new(false);
    }

    /// How many requests have arrived.
    #[must_use]
    pub fn arrivals(&self) -> usize {
        lock(&self.book).arrivals.values().sum()
    }

    /// How many different events have arrived.
    #[must_use]
    pub fn seen(&self) -> usize {
        lock(&self.book).arrivals.len()
    }

    /// How many requests found it failing.
    #[must_use]
    pub fn refused(&self) -> usize {
        lock(&self.book).refused
    }

    /// How many effects there are.
    #[must_use]
    pub fn effects(&self) -> usize {
        lock(&self.book).applied.len()
    }

    /// The event of every effect.
    #[must_use]
    pub fn applied(&self) -> Vec<String> {
        lock(&self.book).applied.values().cloned().collect()
    }

    /// Each of these events has taken effect exactly once, and no other has.
    pub fn check_once<'e>(&self, events: impl IntoIterator<Item = &'e str>) {
        let book = lock(&self.book);
        let mut effects: BTreeMap<&str, usize> = BTreeMap::new();
        for event in book.applied.values() {
            *effects.entry(event).or_default() += 1;
        }
        for event in events {
            assert_eq!(effects.remove(event), Some(1), "effects of {event} at its destination");
        }
        assert!(effects.is_empty(), "effects of events that are not there: {effects:?}");
    }
}

impl Book {
    fn take(&mut self, arrived: &Arrived) -> Reply {
        let key = arrived.header("idempotency-key").expect("every request has a key").to_owned();
        let body: Value = serde_json::from_slice(&arrived.body).expect("the original body");
        let event = body["id"].as_str().expect("the id of the event").to_owned();
        *self.arrivals.entry(event.clone()).or_default() += 1;
        if let Mood::Failing(status) = self.mood {
            self.refused += 1;
            return Reply::status(status, "not now");
        }
        let known = self.applied.entry(key).or_insert_with(|| event.clone());
        assert_eq!(*known, event, "two events under one key");
        let done = Reply::status(200, "");
        match self.mood {
            Mood::Hesitant => Reply::Held(self.gate.subscribe(), Box::new(done)),
            Mood::Well | Mood::Failing(_) => done,
        }
    }
}

fn lock(book: &Mutex<Book>) -> MutexGuard<'_, Book> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}
