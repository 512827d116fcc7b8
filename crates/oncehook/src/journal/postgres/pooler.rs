//! Poolers that lend one server session to several connections (PgBouncer with `pool_mode = transaction` or `statement`).
//!
//! The journal needs sessions of its own: prepared statements, time limits (without `idle_in_transaction_session_timeout` the
//! locks of a frozen worker stay for ever, without `synchronous_commit` an answer may promise too much) and `LISTEN` belong to
//! a session, and would be lost, or met by strangers. So such a pooler is refused before anything is made.
//!
//! Does not: mind a pooler that lends a session for as long as the connection lasts (`pool_mode = session`).

use super::connection::{EngineError, Purpose, Session, first_text};
use super::{OpenError, Postgres};
use crate::journal::server::engine::Engine;

const TOLD: &str = "two connections were given the same server session: there is a pooler in transaction mode in between \
                    (PgBouncer?). oncehook needs sessions of its own: let journal.url lead to PostgreSQL itself (a node uses \
                    about 16 connections), or set pool_mode = session for this database";

/// How often the two are compared. A busy pooler may give them different sessions now and then.
const ROUNDS: usize = 5;

/// Refuses a pooler that shares sessions: two open connections to a server are two of its processes.
pub(super) async fn refuse(engine: &Postgres, one: &Session) -> Result<(), OpenError> {
    let other = engine.open(Purpose::Listen).await?;
    for _ in 0..ROUNDS {
        if process(one).await? == process(&other).await? {
            return Err(OpenError::Pooler(TOLD));
        }
    }
    Ok(())
}

/// The server process behind a connection. Not prepared: that is one of the things that would not work.
async fn process(session: &Session) -> Result<String, EngineError> {
    let answer = super::connection::in_time(session.simple_query("SELECT pg_backend_pid()")).await?;
    let process = first_text(&answer).map(str::to_owned);
    process.ok_or_else(|| EngineError::other("the server did not say which process it is"))
}
