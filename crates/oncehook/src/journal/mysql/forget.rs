//! Forgetting on MariaDB and MySQL: texts.
//!
//! Does not: drop day partitions. A unique key of a partitioned table would have to hold the day.

use std::convert::Infallible;
use std::sync::Mutex;

use super::connection::Session;
use super::engine_error::EngineError;
use super::{Mysql, read};
use crate::event::EventId;
use crate::journal::Forgotten;
use crate::journal::server::forget::{Batch, ForgetSql, Forgets, Round};

/// What stands in the way of forgetting: something pending, or something that an operator may still want and that ended
/// (or, if it is held, came) not long enough ago. `$1` is now, `$2` is how long such things are kept; null is for ever.
macro_rules! kept {
    () => {
        "
   (EXISTS (SELECT 1 FROM oncehook_deliveries d WHERE d.event = e.id
               AND (d.state IN ('ready', 'running', 'retrying', 'parked')
                    OR d.state = 'dead' AND COALESCE(COALESCE(d.settled_at, e.received_at) > $1 - $2, TRUE)))
 OR EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = e.id AND f.flag = 'quarantined'
               AND COALESCE(e.received_at > $1 - $2, TRUE)))"
    };
}

/// The table that a list of events becomes.
macro_rules! ids {
    ($number:literal) => {
        concat!("JSON_TABLE($", $number, ", '$[*]' COLUMNS (id VARCHAR(32) PATH '$')) t ")
    };
}

/// Removes the rows of a table beside events.
macro_rules! beside {
    ($table:literal, $column:literal) => {
        concat!("DELETE o FROM ", ids!(1), "STRAIGHT_JOIN ", $table, " o ON o.", $column, " = UNHEX(t.id)")
    };
}

impl Forgets for Mysql {
    type Place = Infallible;

    const FORGET: ForgetSql = ForgetSql {
        clock: "SELECT state FROM oncehook_entities WHERE scope = $1 AND entity = $2",
        newest: "SELECT received_at FROM oncehook_events ORDER BY id DESC LIMIT 1",
        remember_clock: "INSERT INTO oncehook_entities (scope, entity, state) VALUES ($1, $2, $3)
                         ON DUPLICATE KEY UPDATE state = $3",
        // Named locks are the whole server's, and belong to the session: they end with it, too.
        lock: "SELECT GET_LOCK(CONCAT('oncehook-forget-', LEFT(SHA2(DATABASE(), 256), 40)), 0)",
        unlock: Some("DO RELEASE_LOCK(CONCAT('oncehook-forget-', LEFT(SHA2(DATABASE(), 256), 40)))"),
        bucket_ahead: "SELECT MIN(bucket) FROM oncehook_buckets FORCE INDEX (PRIMARY)
                        WHERE value = $3 AND bucket BETWEEN $1 AND $2",
        look: concat!(
            "SELECT e.id, e.received_at <= $5 AND NOT ",
            kept!(),
            " FROM oncehook_events e WHERE e.id >= $3 AND e.id < $4 ORDER BY e.id LIMIT $6"
        ),
        lock_events: concat!(
            "SELECT e.id FROM (SELECT * FROM ",
            ids!(1),
            ") t STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id) FOR UPDATE SKIP LOCKED"
        ),
        look_again: concat!(
            "SELECT e.id FROM ",
            ids!(3),
            "STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id) WHERE NOT ",
            kept!()
        ),
        delete: &[
            concat!(
                "DELETE b FROM ",
                ids!(1),
                "STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)
                 STRAIGHT_JOIN oncehook_bodies b ON b.source = e.source AND b.digest = e.digest AND b.event = e.id
                 WHERE NOT e.key_signed"
            ),
            beside!("oncehook_deliveries", "event"),
            beside!("oncehook_attempts", "event"),
            beside!("oncehook_conflicts", "event"),
            beside!("oncehook_duplicates", "event"),
            beside!("oncehook_flags", "event"),
            beside!("oncehook_spool_aliases", "event"),
            beside!("oncehook_events", "id"),
        ],
        keys: "SELECT source, `key`, expires_at FROM oncehook_keys
                WHERE source > $1 OR source = $1 AND `key` > $2 ORDER BY source, `key` LIMIT $3",
        delete_keys: "DELETE k FROM JSON_TABLE($2, '$[*]' COLUMNS (
                               source VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]', name VARCHAR(510) PATH '$[1]')) t
                        STRAIGHT_JOIN oncehook_keys k ON k.source = t.source AND k.`key` = UNHEX(t.name)
                       WHERE k.expires_at <= $1
                         AND NOT EXISTS (SELECT 1 FROM oncehook_deliveries d WHERE d.event = k.event
                                            AND d.state IN ('ready', 'running', 'retrying', 'parked', 'dead'))
                         AND NOT EXISTS (SELECT 1 FROM oncehook_flags f
                                          WHERE f.event = k.event AND f.flag = 'quarantined')",
        delete_audit: "DELETE FROM oncehook_audit WHERE at <= $1 ORDER BY id LIMIT $2",
    };

    fn round(&self) -> &Mutex<Round<Infallible>> {
        &self.round
    }

    async fn step(
        _session: &mut Session,
        _batch: &Batch<'_>,
        place: &Infallible,
        _forgotten: &mut Forgotten,
    ) -> Result<Round<Infallible>, EngineError> {
        match *place {}
    }

    async fn before_delete(session: &mut Session) -> Result<(), EngineError> {
        read::wait_for_index(session).await
    }

    async fn forget_buckets(session: &mut Session, gone: &[EventId]) -> Result<(), EngineError> {
        read::forget_buckets(session, gone).await
    }
}
