//! Forgetting on MariaDB and MySQL: texts.
//!
//! Does not: drop day partitions. A unique key of a partitioned table would have to hold the day.

use std::convert::Infallible;

use super::connection::Session;
use super::engine_error::EngineError;
use super::read;
use crate::event::EventId;
use crate::journal::sql::forget::{Batch, Forgets, Round, is_done};

impl Forgets for Session {
    type Place = Infallible;

    const REMEMBER_CLOCK: &'static str = "INSERT INTO oncehook_entities (scope, entity, state) VALUES ($1, $2, $3)
        ON DUPLICATE KEY UPDATE state = $3";
    // Named locks are the whole server's, and belong to the session: they end with it, too.
    const LOCK: &'static str = "SELECT GET_LOCK(CONCAT('oncehook-forget-', LEFT(SHA2(DATABASE(), 256), 40)), 0)";
    const UNLOCK: Option<&'static str> =
        Some("DO RELEASE_LOCK(CONCAT('oncehook-forget-', LEFT(SHA2(DATABASE(), 256), 40)))");
    const LOCK_EVENTS: &'static str = "SELECT e.id FROM {ids|$1}
        STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id) FOR UPDATE SKIP LOCKED";
    const DELETE_BODIES: &'static str = "DELETE b FROM {ids|$1} STRAIGHT_JOIN oncehook_events e ON e.id = UNHEX(t.id)
        STRAIGHT_JOIN oncehook_bodies b ON b.source = e.source AND b.digest = e.digest AND b.event = e.id
        WHERE NOT e.key_signed";
    const DELETE_BESIDE: &'static str = "DELETE o FROM {ids|$1} STRAIGHT_JOIN oncehook_{} o ON o.event = UNHEX(t.id)";
    const DELETE_EVENTS: &'static str = "DELETE o FROM {ids|$1} STRAIGHT_JOIN oncehook_events o ON o.id = UNHEX(t.id)";
    const KEYS: &'static str = "SELECT source, `key`, expires_at, event FROM oncehook_keys
        WHERE source > $1 OR source = $1 AND `key` > $2 ORDER BY source, `key` LIMIT $3";
    const DELETE_KEYS: &'static str =
        concat!("DELETE k FROM {keys|$2} WHERE k.expires_at <= $1 AND ", is_done!("k.event"));
    const DELETE_AUDIT: &'static str = "DELETE FROM oncehook_audit WHERE at <= $1 ORDER BY id LIMIT $2";

    async fn step(&mut self, _batch: &mut Batch<'_>, place: &Infallible) -> Result<Round<Infallible>, EngineError> {
        match *place {}
    }

    async fn before_delete(&mut self) -> Result<(), EngineError> {
        read::wait_for_index(self).await
    }

    async fn forget_buckets(&mut self, gone: &[EventId]) -> Result<(), EngineError> {
        read::forget_buckets(self, gone).await
    }
}
