//! What the mistakes of a server journal look like on PostgreSQL. Only in builds with the feature `planted`.

use super::Postgres;
use crate::journal::server::planted::Mistakes;

impl Mistakes for Postgres {
    const SYNCED: &'static str = "SET synchronous_commit = on";
    const UNSYNCED: &'static str = "SET synchronous_commit = off";
    const FENCE: &'static str = "d.attempt = t.attempt AND (d.state || '') = 'running'";
    const FORGET_KEYS: &'static str =
        "DELETE FROM oncehook.keys k USING unnest($2::text[], $3::bytea[]) AS t(source, key)
        WHERE k.source = t.source AND k.key = t.key AND k.first_seen < $1";
}
