//! What the mistakes of a server journal look like on MariaDB. Only in builds with the feature `planted`.

use super::Mysql;
use crate::journal::server::planted::Mistakes;

impl Mistakes for Mysql {
    // A setting of the whole server: a user that may change it, and one node at a time.
    const SYNCED: &'static str = "SET GLOBAL innodb_flush_log_at_trx_commit = 1";
    const UNSYNCED: &'static str = "SET GLOBAL innodb_flush_log_at_trx_commit = 0";
    const FENCE: &'static str = "d.attempt = t.attempt AND d.state = 'running'";
    const FORGET_KEYS: &'static str = "DELETE k FROM JSON_TABLE($2, '$[*]' COLUMNS (
               source VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]', name VARCHAR(510) PATH '$[1]')) t
          STRAIGHT_JOIN oncehook_keys k ON k.source = t.source AND k.`key` = UNHEX(t.name) WHERE k.first_seen < $1";
}
