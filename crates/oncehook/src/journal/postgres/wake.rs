//! Waking the workers of other nodes: `NOTIFY` after something may have become due, `LISTEN` to hear of it.
//!
//! Only a wake-up. A notification that is lost (a broken connection, a pooler in between) costs at most the time until a
//! worker looks by itself, about a second (fault 48).
//!
//! Notifications are sent apart from the transactions they are about, and at most every few milliseconds: inside, each
//! would make its commit wait for all other commits of the database that notify.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::Postgres;
use super::connection::{EngineError, Pool, Purpose, Session};
use crate::journal::server::shared::Shared;
use crate::retry::{Chance, Reconnect};

/// At most one notification in this time.
const ANNOUNCE_EVERY: Duration = Duration::from_millis(20);

/// How often a listener looks whether its connection is still there.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Tells the other nodes of changes until the journal is closed or gone.
pub(super) async fn announce(shared: Arc<Shared>, pool: Arc<Pool>, mut end: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = shared.announce.notified() => {}
            _ = end.changed() => return,
        }
        if let Ok(session) = pool.take().await
            && session.rows("SELECT pg_notify('oncehook', $1)", &[&shared.node]).await.is_ok()
        {
            session.keep();
        }
        tokio::time::sleep(ANNOUNCE_EVERY).await;
    }
}

/// Opens a connection that hears of other nodes' changes.
pub(super) async fn hear(shared: &Arc<Shared>, engine: &Postgres) -> Result<Session, EngineError> {
    let hearer = Arc::clone(shared);
    let heard = move |payload: &str| {
        // What this node did, its workers know already.
        if payload != hearer.node {
            hearer.woken();
        }
    };
    let session = engine.open_hearing(Purpose::Listen, heard).await?;
    session.run("LISTEN oncehook").await?;
    Ok(session)
}

/// Keeps such a connection until the journal is closed or gone.
pub(super) async fn listen(
    shared: Arc<Shared>,
    engine: Arc<Postgres>,
    mut session: Session,
    mut end: watch::Receiver<bool>,
) {
    let mut reconnect = Reconnect::new(Chance::random());
    loop {
        let wait = if session.is_closed() { reconnect.wait() } else { LOOK_EVERY };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = end.changed() => return,
        }
        if session.is_closed()
            && let Ok(anew) = hear(&shared, &engine).await
        {
            session = anew;
            reconnect.is_back();
            // Something may have happened while nothing listened.
            shared.woken();
        }
    }
}
