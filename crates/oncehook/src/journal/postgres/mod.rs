//! PostgreSQL, in a schema of its own (`oncehook`) beside the user's tables.
//!
//! Promises: every connection talks to a primary that syncs its log (`fsync`, `full_page_writes` and `synchronous_commit` are
//! read back, not assumed) and keeps its session (`pooler` refuses others). Needs PostgreSQL 14 or later.
//!
//! `queries` has the texts of an append, `deliver` those of the way out (from the `front` of a queue on), `user_sql`, `wrapped` and
//! `function` run the user's statements and Rust code in the transaction that settles them, `operate` and `read` have the texts for
//! operators and readers, `forget`, `days` and `sweep` remove what is old, `wake` tells other nodes. `guard` is for routes whose
//! effects are in another database than the journal.
//!
//! Does not: decide anything. `journal::server` does.

mod connection;
mod days;
mod deliver;
mod forget;
mod front;
mod function;
mod guard;
mod hosts;
mod incarnation;
mod operate;
#[cfg(feature = "planted")]
mod planted;
mod pooler;
mod queries;
mod read;
mod schema;
mod sweep;
mod tls;
mod user_sql;
mod value;
mod wake;
mod wrapped;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

use super::BoxFuture;
use crate::journal::server::ServerJournal;
use crate::journal::server::engine::{Engine, Purpose};
use crate::journal::server::error::EngineError;
use crate::journal::server::pool::Pool;
use crate::journal::server::shared::Shared;
pub use crate::journal::server::{OpenError, ServerOptions as PostgresOptions};
use connection::Session;
pub use guard::PostgresElsewhere;

/// The journal on PostgreSQL.
pub type PostgresJournal = ServerJournal<Postgres>;

/// PostgreSQL, and how to reach one database of it.
pub struct Postgres {
    place: hosts::Place,
    handler_time: Duration,
    /// Where the queues of routes begin.
    fronts: front::Fronts,
    /// What the last look at the database's identity showed.
    seen: Mutex<Option<incarnation::Seen>>,
}

impl Engine for Postgres {
    type Session = Session;

    const KIND: &'static str = "postgres";
    // A lost connection is noticed without asking.
    const IDENTITY_EVERY: Duration = Duration::from_secs(1);
    fn new(url: &str, handler_time: Duration) -> Result<Self, OpenError> {
        Ok(Self {
            place: hosts::Place::new(url)?,
            handler_time,
            fronts: front::Fronts::default(),
            seen: Mutex::default(),
        })
    }

    fn shown(&self) -> String {
        self.place.shown()
    }

    async fn open(&self, purpose: Purpose) -> Result<Session, EngineError> {
        self.open_hearing(purpose, |_| {}).await
    }

    async fn make_ready(session: &mut Session, given: Option<i64>) -> Result<(), EngineError> {
        days::make(session, given, false).await
    }

    async fn identity(&self, session: &mut Session) -> Result<String, EngineError> {
        incarnation::name(self, session).await
    }

    async fn share_changes(
        shared: Arc<Shared>,
        pool: Arc<Pool<Self>>,
        end: watch::Receiver<bool>,
    ) -> Result<BoxFuture<'static, ()>, EngineError> {
        let session = wake::hear(&shared, &pool.engine).await?;
        Ok(Box::pin(async move {
            tokio::join!(
                wake::announce(Arc::clone(&shared), Arc::clone(&pool), end.clone()),
                wake::listen(shared, Arc::clone(&pool.engine), session, end)
            );
        }))
    }
}
