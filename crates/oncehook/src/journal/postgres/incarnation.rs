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
//! What that leaves: a machine that is put back together with its memory looks the same unless the log's position went back
//! before our eyes.

use std::sync::PoisonError;

use super::Postgres;
use super::connection::{EngineError, Session};
use crate::journal::server::shared::random;

/// What tells one life from another, and how far its log has come.
const SIGNS: &str = "SELECT (SELECT system_identifier FROM pg_control_system())::text
       || ' ' || (SELECT oid FROM pg_database WHERE datname = current_database())
       || ' ' || 'oncehook.keys'::regclass::oid || ' ' || coalesce(pg_relation_filenode('oncehook.keys'), 0)
       || ' ' || left(pg_walfile_name(pg_current_wal_lsn()), 8)
       || ' ' || (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
       pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint";

/// The name of the present life.
pub(super) async fn name(engine: &Postgres, session: &Session) -> Result<String, EngineError> {
    let row = session.row(SIGNS, &[]).await?;
    let row = row.ok_or_else(|| EngineError::other("the database does not tell its identity"))?;
    let signs: String = row.get(0);
    let digest = oncehook_verify::digest(signs.as_bytes());
    let name = hex::encode(digest.get(..16).unwrap_or(&digest));
    let mut seen = engine.seen.lock().unwrap_or_else(PoisonError::into_inner);
    let now = Seen::judge(seen.take(), name, row.get(1));
    let name = format!("{}{}", now.name, now.suffix);
    *seen = Some(now);
    Ok(name)
}

/// What the last look showed.
pub(super) struct Seen {
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
                Self { name, position, suffix: format!("-{:016x}", random()) }
            }
            Some(before) if before.name == name => Self { position, ..before },
            _ => Self { name, position, suffix: String::new() },
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
