//! Waking workers when another node did something: by looking, because this database tells nobody.
//!
//! What is looked at are the latest event and the latest order: two steps into an index, a few times a second, more often
//! while something happens. Only a wake-up: what is missed (a follow-up that another node released) costs at most the time
//! until a worker looks by itself, about a second. What this node did, its workers know already.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::connection::Pool;
use super::engine_error::EngineError;
use crate::journal::server::shared::Shared;
use crate::journal::server::value::Row as _;
use crate::retry::{Chance, Reconnect};

/// How long to wait before looking again: at least, after a change, and at most, when nothing happens.
const SOON: Duration = Duration::from_millis(20);
const LATE: Duration = Duration::from_millis(250);

/// The latest that was seen: an event and an order.
type Seen = (Option<Vec<u8>>, Option<i64>);

/// Looks until the journal is closed or gone.
pub(super) async fn look(shared: Arc<Shared>, pool: Arc<Pool>, mut end: watch::Receiver<bool>) {
    let mut seen: Option<Seen> = None;
    let mut wait = LATE;
    let mut reconnect = Reconnect::new(Chance::random());
    loop {
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = end.changed() => return,
        }
        // Whoever works learns of a lost database by itself.
        let Ok(now) = latest(&pool).await else {
            wait = reconnect.wait().max(LATE);
            continue;
        };
        reconnect.is_back();
        if seen.as_ref() == Some(&now) {
            wait = (wait * 3 / 2).min(LATE);
        } else {
            // Also at the first look: nobody knows what came before it.
            shared.woken();
            wait = SOON;
            seen = Some(now);
        }
    }
}

async fn latest(pool: &Pool) -> Result<Seen, EngineError> {
    let mut session = pool.take().await?;
    let sql = "SELECT (SELECT id FROM oncehook_events ORDER BY id DESC LIMIT 1), (SELECT MAX(id) FROM oncehook_audit)";
    let row = session.row(sql, Vec::new()).await?.ok_or_else(EngineError::damaged)?;
    let seen = (row.maybe_bytes(0)?.map(<[u8]>::to_vec), row.maybe_int(1)?);
    session.run("ROLLBACK").await?;
    session.keep();
    Ok(seen)
}
