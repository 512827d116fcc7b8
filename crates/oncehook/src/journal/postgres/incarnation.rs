//! Which life of the database this is. See [`Incarnation`](crate::journal::Incarnation).
//!
//! The name is made of what changes whenever committed rows may be gone:
//!
//! - the cluster's system identifier and the database's oid: another server, or a dump restored elsewhere;
//! - the oid and the file of the ledger's table: a dump restored into the same database, or a truncated table;
//! - the timeline: a promoted replica, and a restore to a point in time;
//! - when the server was started: files that were put back (the same cluster, the same timeline) need a start to be used.
//!
//! So every restart of the server is another life, although nothing is lost by most of them. The caches are warmed again.
//!
//! A connection of its own is asked every second, and is looked at more often: when it is gone or silent, it is in doubt
//! which life it is, and nothing is believed until another connection has told. What that leaves: a server that is replaced
//! by another one is noticed when the connection breaks, within a few seconds if it just falls silent; and a machine that
//! is put back together with its memory looks the same unless the log's position went back before our eyes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::Shared;
use super::connection::{Connector, EngineError, Purpose, Session};
use crate::retry::{Chance, Reconnect};

/// How often the connection is looked at, and how often the database is asked.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const ASK_EVERY: u32 = 10;

/// The longest that the answer may take.
const ANSWER: Duration = Duration::from_secs(2);

/// What tells one life from another, and how far its log has come.
const SIGNS: &str = "SELECT (SELECT system_identifier FROM pg_control_system())::text
       || ' ' || (SELECT oid FROM pg_database WHERE datname = current_database())
       || ' ' || 'oncehook.keys'::regclass::oid || ' ' || coalesce(pg_relation_filenode('oncehook.keys'), 0)
       || ' ' || left(pg_walfile_name(pg_current_wal_lsn()), 8)
       || ' ' || (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
       pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint";

/// The name of the present life.
pub(super) async fn name(session: &Session) -> Result<String, EngineError> {
    signs(session).await.map(|(name, _)| name)
}

async fn signs(session: &Session) -> Result<(String, i64), EngineError> {
    let asked = timeout(ANSWER, session.row(SIGNS, &[])).await;
    let row = asked.map_err(|_| EngineError::other("no answer about the database's identity in time"))??;
    let row = row.ok_or_else(|| EngineError::other("the database does not tell its identity"))?;
    let signs: String = row.get(0);
    let digest = oncehook_verify::digest(signs.as_bytes());
    Ok((hex::encode(digest.get(..16).unwrap_or(&digest)), row.get(1)))
}

/// What the last look showed.
struct Seen {
    name: String,
    position: i64,
    /// Tells lives apart that have the same name.
    suffix: String,
}

impl Seen {
    /// The name of the life that these signs belong to.
    fn judge(before: Option<Self>, name: String, position: i64) -> Self {
        match before {
            // The log never goes back while a server lives.
            Some(before) if before.name == name && position < before.position => {
                tracing::error!("the database's log went back: it was put back to an earlier time");
                Self { name, position, suffix: format!("-{:016x}", super::random()) }
            }
            Some(before) if before.name == name => Self { position, ..before },
            _ => Self { name, position, suffix: String::new() },
        }
    }
}

/// Keeps asking until the journal is closed or gone.
pub(super) async fn watch(shared: Arc<Shared>, connector: Arc<Connector>, mut end: watch::Receiver<bool>) {
    let mut session: Option<Session> = None;
    let mut seen: Option<Seen> = None;
    let mut looks = 0_u32;
    let mut reconnect = Reconnect::new(Chance::random());
    loop {
        let mut wait = LOOK_EVERY;
        let lost = session.as_ref().is_none_or(|session| session.is_closed());
        if lost || looks.is_multiple_of(ASK_EVERY) {
            if lost && session.take().is_some() {
                shared.incarnation.doubt();
            }
            let told = match &session {
                Some(session) => signs(session).await,
                None => match connector.open(Purpose::Read).await {
                    Ok(anew) => signs(session.insert(anew)).await,
                    Err(error) => Err(error),
                },
            };
            match told {
                Ok((name, position)) => {
                    let now = Seen::judge(seen.take(), name, position);
                    shared.incarnation.confirm(&format!("{}{}", now.name, now.suffix));
                    seen = Some(now);
                    reconnect.is_back();
                }
                Err(_) => {
                    session = None;
                    shared.incarnation.doubt();
                    wait = reconnect.wait().max(LOOK_EVERY);
                }
            }
        }
        looks = looks.wrapping_add(1);
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = end.changed() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Seen;

    #[test]
    fn r17_a_log_that_went_back_is_another_life_for_good() {
        let see = |before, name: &str, position| Seen::judge(before, name.to_owned(), position);
        let first = see(None, "a", 100);
        let later = see(Some(first), "a", 200);
        assert_eq!(later.suffix, "");
        let back = see(Some(later), "a", 150);
        assert_ne!(back.suffix, "");
        let suffix = back.suffix.clone();
        let on = see(Some(back), "a", 500);
        assert_eq!(on.suffix, suffix, "it does not become the first life again");
        assert_eq!(see(Some(on), "b", 10).suffix, "", "another server has another log");
    }
}
