//! What the server journal asks of a database engine: connections, schema, and the steps that only the engine can say.
//!
//! An engine holds statements and row mapping. It decides nothing: what a duplicate is, which delivery may run, when a batch is
//! redone, what an order changes is decided by the code that calls it. One method is one step of the work for a whole batch;
//! an engine may take several statements for a step.
//!
//! Unless a method says otherwise it runs in a transaction that its caller has begun and will end.

use std::future::{Future, ready};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::OpenError;
use super::pool::Pool;
use super::shared::Shared;
use crate::event::{EventId, NewEvent};
use crate::journal::BoxFuture;
use crate::journal::decide::append::Known;
use crate::journal::sql::Result;
pub(in crate::journal) use crate::journal::sql::Session;
use crate::journal::sql::forget::Forgets;
use crate::journal::sql::story::Tells;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::journal) enum Purpose {
    /// Appends: short transactions over big batches.
    Append,
    /// Deliveries, orders, forgetting; the user's statements run here.
    Work,
    /// What people ask. Cannot write.
    Read,
    /// Waits for notifications, where the engine has them.
    Listen,
}

/// A database engine, and how to reach one database of it.
pub(in crate::journal) trait Engine: Sized + Send + Sync + 'static {
    type Session: Connected + Tells + Forgets;

    /// The word for it in [`JournalState`](crate::journal::JournalState).
    const KIND: &'static str;
    /// How often the database is asked for its identity. An engine that notices a lost connection by itself need not ask often.
    const IDENTITY_EVERY: Duration;

    /// Reads a URL. Errors do not repeat it: it holds a password.
    fn new(url: &str, handler_time: Duration) -> Result<Self, OpenError>;
    /// Where the URL leads, without what is secret.
    fn shown(&self) -> String;
    /// Opens a connection and checks that what it commits is durable.
    fn open(&self, purpose: Purpose) -> impl Future<Output = Result<Self::Session>> + Send;
    /// The largest body that the server reached last can store.
    fn largest_body(&self) -> usize {
        usize::MAX
    }

    /// Whatever else must be there before the first append. Its own transactions.
    fn make_ready(_session: &mut Self::Session, _given: Option<i64>) -> impl Future<Output = Result<()>> + Send {
        ready(Ok(()))
    }
    /// A name that changes whenever committed rows may be gone. Its own transaction.
    fn identity(&self, session: &mut Self::Session) -> impl Future<Output = Result<String>> + Send;
    /// Prepares to hear of other nodes, and returns the task that wakes this node's workers when another node did something, and
    /// the other way round, until `end` changes. What another node does after this has returned is heard.
    fn share_changes(
        shared: Arc<Shared>,
        pool: Arc<Pool<Self>>,
        end: watch::Receiver<bool>,
    ) -> impl Future<Output = Result<BoxFuture<'static, ()>>> + Send;
}

/// A connection to a server.
pub(in crate::journal) trait Connected: Session + Send + Sync + 'static {
    /// Begins a transaction that only reads, in one snapshot.
    const BEGIN_READ: &'static str;

    /// The database's time. Its own transaction.
    fn database_time(&mut self) -> impl Future<Output = Result<i64>> + Send;
    /// An error if what was read or committed on this connection may be lost with the primary although it was answered.
    fn check_replicated(&self) -> Result<()> {
        Ok(())
    }

    /// Whether a connection that was idle for this long can be lent again.
    fn survived(&mut self, _idle: Duration) -> impl Future<Output = bool> + Send {
        ready(!self.is_closed())
    }
    /// Whether the connection is known to be lost, without asking the server.
    fn is_closed(&self) -> bool;
    /// Asks the server, where the connection does not tell by itself.
    fn is_alive(&mut self) -> impl Future<Output = bool> + Send {
        ready(!self.is_closed())
    }
    /// It must not be lent again: something of its last use would show in the next.
    fn is_retired(&self) -> bool {
        false
    }
    /// How many bytes of events a batch may have at most.
    fn batch_bytes(&self) -> usize {
        usize::MAX
    }
}

/// What an append needs to know beside the events.
#[derive(Debug, Clone, Copy)]
pub(in crate::journal) struct AppendContext {
    /// The time that stands in for the database's in a test.
    pub(in crate::journal) given: Option<i64>,
    /// About the database's time.
    pub(in crate::journal) about_now: i64,
    /// Which rows of the totals this lane adds to, so that lanes do not wait for each other.
    pub(in crate::journal) shard: i64,
}

/// An event with the id that it gets if it is new.
#[derive(Debug, Clone, Copy)]
pub(in crate::journal) struct Candidate<'e> {
    pub(in crate::journal) id: EventId,
    pub(in crate::journal) event: &'e NewEvent,
}

impl Candidate<'_> {
    /// What the ledger knows of its key if it is new.
    pub(in crate::journal) fn known(&self) -> Known {
        Known::of(self.id, self.event)
    }

    /// Its source and key.
    pub(in crate::journal) fn key(&self) -> (&str, &[u8]) {
        (self.event.source.as_str(), self.event.key.as_bytes())
    }
}
