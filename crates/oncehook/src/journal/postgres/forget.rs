//! Forgetting: old events, then the keys that outlive them, then the audit; a small batch at a time.
//!
//! Promises: what is pending is never forgotten, dead and quarantined events only when the operator said how long they are
//! kept; a key only after its window and when nothing more can come of its event. Each batch is one short transaction, and
//! of several nodes one forgets at a time. An event is locked before it is looked at for the last time, so an order that
//! comes at that moment finds it whole or finds nothing.
//!
//! A round goes over the events from the oldest on, then over the ledger. Where it is, is kept in memory by the caller; a
//! restart begins a new round, which costs reading and nothing else.
//!
//! Does not: drop day partitions. The tables are not partitioned.

use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::search;
use crate::journal::{Forgotten, Retention};

/// Where a round is.
#[derive(Debug, Clone)]
pub(super) enum Round {
    /// Among the events, behind this one.
    Events(Uuid),
    /// In the ledger, behind this key.
    Keys(String, Vec<u8>),
}

impl Default for Round {
    fn default() -> Self {
        Self::Events(Uuid::nil())
    }
}

/// One node at a time: the number is `forget` in ASCII.
const LOCK: &str = "SELECT pg_try_advisory_xact_lock(112632776975732)";

/// Forgets a batch. Returns also where the round is then.
pub(super) async fn batch(
    session: &Session,
    given: Option<i64>,
    round: &Round,
    retention: &Retention,
) -> Result<(Forgotten, Round), EngineError> {
    session.run("BEGIN").await?;
    let mut forgotten = Forgotten::default();
    let locked = session.row(LOCK, &[]).await?.is_some_and(|row| row.get(0));
    if !locked {
        session.run("COMMIT").await?;
        return Ok((forgotten, round.clone()));
    }
    let next = match round {
        Round::Events(after) => events(session, given, *after, retention, &mut forgotten).await?,
        Round::Keys(source, key) => keys(session, given, (source, key), retention, &mut forgotten).await?,
    };
    let sql = "DELETE FROM oncehook.audit WHERE id IN (
                 SELECT id FROM oncehook.audit WHERE at <= coalesce($1::bigint, oncehook.micros()) - $2 ORDER BY id LIMIT $3)";
    let audit = session.change(sql, &[&given, &micros(retention.audit), &limit(retention.batch)]).await?;
    session.run("COMMIT").await?;
    forgotten.audit = usize::try_from(audit).unwrap_or(usize::MAX);
    forgotten.more = next.is_some() || forgotten.audit == retention.batch;
    Ok((forgotten, next.unwrap_or_default()))
}

fn limit(batch: usize) -> i64 {
    i64::try_from(batch).unwrap_or(i64::MAX)
}

/// An age. One that is longer than there has been time is as long as that.
fn micros(age: std::time::Duration) -> i64 {
    i64::try_from(age.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 2)
}

/// What stands in the way of forgetting: something pending, or something that an operator may still want and that ended
/// (or, if it is held, came) not long enough ago. `$2` is how long such things are kept; null is for ever.
const KEPT: &str = "
    EXISTS (SELECT 1 FROM oncehook.deliveries d WHERE d.event = e.id
               AND (d.state IN ('ready', 'running', 'retrying', 'parked')
                    OR d.state = 'dead' AND ($2::bigint IS NULL OR coalesce(d.settled_at, e.received_at)
                                             > coalesce($1::bigint, oncehook.micros()) - $2)))
 OR EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = e.id AND f.flag = 'quarantined'
               AND ($2::bigint IS NULL OR e.received_at > coalesce($1::bigint, oncehook.micros()) - $2))";

/// Goes on among the events. Returns where the round is then.
async fn events(
    session: &Session,
    given: Option<i64>,
    after: Uuid,
    retention: &Retention,
    forgotten: &mut Forgotten,
) -> Result<Option<Round>, EngineError> {
    let dead = retention.dead.map(micros);
    let sql = format!(
        "SELECT e.id, e.received_at > coalesce($1::bigint, oncehook.micros()) - $4 AS young, {KEPT} AS kept
           FROM oncehook.events e WHERE e.id > $3 ORDER BY e.id LIMIT $5"
    );
    let rows = session
        .rows(&sql, &[&given, &dead, &after, &micros(retention.payload), &limit(retention.batch)])
        .await?;
    // Events stand in the order in which they came; behind the first young one there are no old ones. (Nodes whose clocks
    // differ may mix the last of them; those are for the next round.)
    let old: Vec<(Uuid, bool)> =
        rows.iter().take_while(|row| !row.get::<_, bool>(1)).map(|row| (row.get(0), row.get(2))).collect();
    let chosen: Vec<Uuid> = old.iter().filter(|(_, kept)| !kept).map(|(id, _)| *id).collect();
    if !chosen.is_empty() {
        let sql = "SELECT id FROM oncehook.events WHERE id = ANY($1) ORDER BY id FOR UPDATE SKIP LOCKED";
        let locked: Vec<Uuid> = session.rows(sql, &[&chosen]).await?.iter().map(|row| row.get(0)).collect();
        // Looked at again now that nobody can order anything for them.
        let sql = format!("SELECT e.id FROM oncehook.events e WHERE e.id = ANY($3) AND NOT ({KEPT})");
        let rows = session.rows(&sql, &[&given, &dead, &locked]).await?;
        let gone: Vec<Uuid> = rows.iter().map(|row| row.get(0)).collect();
        delete(session, &gone).await?;
        forgotten.events = gone.len();
    }
    search::forget_marks(session, given, micros(retention.payload), limit(retention.batch)).await?;
    let through = old.len() < retention.batch;
    let reached = old.last().map_or(after, |(id, _)| *id);
    Ok(Some(if through { Round::Keys(String::new(), Vec::new()) } else { Round::Events(reached) }))
}

/// Removes events and all that stands beside them, except their keys.
async fn delete(session: &Session, events: &Vec<Uuid>) -> Result<(), EngineError> {
    for sql in [
        "DELETE FROM oncehook.bodies b USING oncehook.events e
          WHERE e.id = ANY($1) AND NOT e.key_signed AND b.source = e.source AND b.digest = e.digest AND b.event = e.id",
        "DELETE FROM oncehook.deliveries WHERE event = ANY($1)",
        "DELETE FROM oncehook.attempts   WHERE event = ANY($1)",
        "DELETE FROM oncehook.conflicts  WHERE event = ANY($1)",
        "DELETE FROM oncehook.duplicates WHERE event = ANY($1)",
        "DELETE FROM oncehook.flags      WHERE event = ANY($1)",
        "DELETE FROM oncehook.spool_aliases WHERE event = ANY($1)",
        "DELETE FROM oncehook.events     WHERE id = ANY($1)",
    ] {
        session.change(sql, &[events]).await?;
    }
    Ok(())
}

/// Goes on in the ledger. Returns where the round is then; nowhere if it is over.
async fn keys(
    session: &Session,
    given: Option<i64>,
    (source, key): (&str, &[u8]),
    retention: &Retention,
    forgotten: &mut Forgotten,
) -> Result<Option<Round>, EngineError> {
    let sql =
        "SELECT source, key FROM oncehook.keys WHERE (source, key) > ($1, $2) ORDER BY source, key LIMIT $3";
    let rows = session.rows(sql, &[&source, &key, &limit(retention.batch)]).await?;
    let (sources, keys): (Vec<&str>, Vec<&[u8]>) =
        rows.iter().map(|row| (row.get::<_, &str>(0), row.get::<_, &[u8]>(1))).unzip();
    if let (Some(last_source), Some(last_key)) = (sources.last(), keys.last()) {
        // A key goes if nothing more can come of its event, short of a forced replay. An event that is gone has neither of
        // these rows.
        let deleted = session
            .change(
                "DELETE FROM oncehook.keys k
                  USING unnest($2::text[], $3::bytea[]) AS t(source, key)
                  WHERE k.source = t.source AND k.key = t.key AND k.expires_at <= coalesce($1::bigint, oncehook.micros())
                    AND NOT EXISTS (SELECT 1 FROM oncehook.deliveries d WHERE d.event = k.event
                                       AND d.state IN ('ready', 'running', 'retrying', 'parked', 'dead'))
                    AND NOT EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = k.event AND f.flag = 'quarantined')",
                &[&given, &sources, &keys],
            )
            .await?;
        forgotten.keys = usize::try_from(deleted).unwrap_or(usize::MAX);
        if rows.len() == retention.batch {
            return Ok(Some(Round::Keys((*last_source).to_owned(), (*last_key).to_vec())));
        }
    }
    Ok(None)
}
