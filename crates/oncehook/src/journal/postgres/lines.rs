//! The lines of entities: who stands before whom, and who lets whom go on.
//!
//! Whoever decides whose turn it is, and whoever settles a delivery that others may wait for, first locks the row of (route,
//! entity) in `entities`, in the order of their names, and keeps it until the end of the transaction. Statements after that see
//! what the one before has left. So a delivery cannot be taken out of the queue while the one that it waits for ends.
//!
//! Due deliveries are looked for together with their lines: where either is locked, somebody else is at it, and both are passed
//! over. So workers share the entities among themselves and do not wait for each other. Under the lock of a line nobody waits for
//! deliveries.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use oncehook_verify::UnixMicros;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::connection::{EngineError, Session};
use super::queries::{event_id, uuid};
use super::queue::{int, number};
use crate::delivery::{DeliveryState, Fence, RouteName, Verdict};
use crate::event::EventId;
use crate::ordering::{Candidate, Line, Mark, NO_TIME, OnDead, Place, Standing};
use crate::route::Route;

/// So many lines are looked after in one go.
const LOOKED_AFTER: i64 = 1_000;

/// A delivery that is due, without its event's body.
pub(super) struct Peeked {
    pub(super) candidate: Candidate,
    pub(super) attempt: u32,
    pub(super) parked_at: Option<UnixMicros>,
    /// Whether it stands in the line of its entity.
    pub(super) in_line: bool,
    /// Whether that line is locked. It is not if nobody has locked it ever.
    pub(super) locked: bool,
}

/// The line of a delivery `d` of route `$2`, locked. To be joined.
pub(super) const LINE: &str = "
    LEFT JOIN LATERAL (SELECT n.entity FROM oncehook.entities n WHERE n.scope = $2 AND n.entity = d.entity
                          FOR UPDATE SKIP LOCKED) AS line ON true";

/// Nobody else is at that line: it is locked now; or there is none; or it was never made, and nobody else is about to make it,
/// for whom the second to come would wait.
pub(super) const FREE_LINE: &str = "
    AND (line.entity IS NOT NULL OR d.entity IS NULL
         OR ((SELECT true FROM oncehook.entities n WHERE n.scope = $2 AND n.entity = d.entity LIMIT 1) IS NULL
             AND pg_try_advisory_xact_lock(hashtextextended(d.entity, hashtextextended($2, 0)))))";

/// Due deliveries, locked with their lines until the transaction ends.
pub(super) struct Peek {
    pub(super) due: Vec<Peeked>,
    /// The transaction's time.
    pub(super) now: UnixMicros,
    /// Since when the first has been due.
    pub(super) first: Option<i64>,
}

/// Those of a route, the longest due first, from this due time on.
pub(super) async fn peek(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    limit: usize,
    from: i64,
) -> Result<Peek, EngineError> {
    let sql = format!(
        "WITH due AS MATERIALIZED (
           SELECT d.event, d.epoch, d.attempt, d.parked_at, d.run_at, d.entity IS NOT NULL AS in_line,
                  line.entity IS NOT NULL AS locked
             FROM oncehook.deliveries d {LINE}
            WHERE d.route = $2 AND d.state IN ('ready', 'retrying')
              AND d.run_at BETWEEN $3 AND coalesce($1::bigint, oncehook.micros()) {FREE_LINE}
            ORDER BY d.run_at, d.event, d.epoch LIMIT {limit}
              FOR UPDATE OF d SKIP LOCKED
         )
         SELECT d.event, d.epoch, d.attempt, d.parked_at, d.in_line, e.entity, e.version, e.occurred_at, e.type, d.locked,
                coalesce($1::bigint, oncehook.micros()), d.run_at
           FROM due d CROSS JOIN LATERAL (SELECT * FROM oncehook.events WHERE id = d.event LIMIT 1) e
          ORDER BY d.run_at, d.event, d.epoch"
    );
    let rows = session.rows(&sql, &[&given, &route.name.as_str(), &from]).await?;
    let now = UnixMicros(rows.first().map_or(0, |row| row.get(10)));
    let first = rows.first().map(|row| row.get(11));
    let peeked = rows.iter().map(|row| {
        let version: Option<i64> = row.get(6);
        Peeked {
            candidate: Candidate {
                entity: row.get(5),
                place: Place { version, event: event_id(row.get(0)), epoch: number(row.get(1)) },
                mark: Mark { version, at: row.get::<_, Option<i64>>(7).map(UnixMicros) },
                kind: row.get(8),
            },
            attempt: number(row.get(2)),
            parked_at: row.get::<_, Option<i64>>(3).map(UnixMicros),
            in_line: row.get(4),
            locked: row.get(9),
        }
    });
    Ok(Peek { due: peeked.collect(), now, first })
}

/// Puts deliveries into the lines of their entities that were made before the route looked at them.
pub(super) async fn adopt(session: &Session, route: &Route, due: &[Peeked]) -> Result<(), EngineError> {
    let strange = due.iter().filter(|due| !due.in_line && due.candidate.entity.is_some());
    let (events, epochs): (Vec<Uuid>, Vec<i32>) =
        strange.map(|due| (uuid(due.candidate.place.event), int(due.candidate.place.epoch))).unzip();
    if events.is_empty() {
        return Ok(());
    }
    session
        .change(
            "UPDATE oncehook.deliveries d SET entity = e.entity, version = e.version
               FROM unnest($2::uuid[], $3::integer[]) AS t(event, epoch)
              CROSS JOIN LATERAL (SELECT entity, version FROM oncehook.events WHERE id = t.event LIMIT 1) e
              WHERE d.event = t.event AND d.route = $1 AND d.epoch = t.epoch",
            &[&route.name.as_str(), &events, &epochs],
        )
        .await?;
    Ok(())
}

/// Locks entities of a route until the end of the transaction.
pub(super) async fn lock(
    session: &Session,
    route: &RouteName,
    entities: &BTreeSet<&str>,
) -> Result<(), EngineError> {
    let entities: Vec<&str> = entities.iter().copied().collect();
    if entities.is_empty() {
        return Ok(());
    }
    session
        .change(
            "INSERT INTO oncehook.entities (scope, entity) SELECT $1, entity FROM unnest($2::text[]) AS t(entity)
             ON CONFLICT (scope, entity) DO NOTHING",
            &[&route.as_str(), &entities],
        )
        .await?;
    session
        .rows(
            "SELECT 1 FROM unnest($2::text[]) AS t(entity) -- in their order
              CROSS JOIN LATERAL (SELECT 1 FROM oncehook.entities n WHERE n.scope = $1 AND n.entity = t.entity FOR UPDATE) line",
            &[&route.as_str(), &entities],
        )
        .await?;
    Ok(())
}

/// The lines of entities that are locked. `wanted`: how many candidates of each there are.
pub(super) async fn of(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    wanted: &BTreeMap<&str, i64>,
) -> Result<HashMap<String, Line>, EngineError> {
    let entities: Vec<&str> = wanted.keys().copied().collect();
    let lengths: Vec<i64> = wanted.values().copied().collect();
    let mut lines: HashMap<String, Line> =
        entities.iter().map(|entity| ((*entity).to_owned(), Line::default())).collect();
    let ordering = &route.ordering;
    let sql = "SELECT d.entity, d.event, d.epoch, d.version, d.state, false
                 FROM oncehook.deliveries d WHERE d.route = $1 AND d.entity = ANY ($2) AND d.state = 'running'
                  -- Asked once for all: usually nothing is.
                  AND EXISTS (SELECT 1 FROM oncehook.deliveries WHERE route = $1 AND entity IS NOT NULL AND state = 'running')
               UNION ALL
               SELECT u.entity, d.event, d.epoch, d.version, d.state,
                      d.state IN ('ready', 'retrying') AND d.run_at <= coalesce($6::bigint, oncehook.micros())
                 FROM unnest($2::text[], $3::bigint[]) AS u(entity, length)
                CROSS JOIN LATERAL (
                  SELECT event, epoch, version, state, run_at FROM oncehook.deliveries
                   WHERE route = $1 AND entity = u.entity AND state IN ('ready', 'retrying', 'running', 'dead')
                     AND (state <> 'dead' OR $4) AND $5
                   ORDER BY version NULLS FIRST, event, epoch LIMIT u.length) d";
    let blocking_dead = ordering.on_dead == OnDead::Block;
    let name = route.name.as_str();
    let asked =
        [&name as &(dyn ToSql + Sync), &entities, &lengths, &blocking_dead, &ordering.by_entity, &given];
    for row in session.rows(sql, &asked).await? {
        let state = DeliveryState::parse(row.get(4));
        let state = state.ok_or_else(|| EngineError::other("a delivery's state is damaged"))?;
        let place = Place { event: event_id(row.get(1)), epoch: number(row.get(2)), version: row.get(3) };
        if let Some(line) = lines.get_mut(row.get::<_, &str>(0)) {
            line.running |= state == DeliveryState::Running;
            line.front.push((place, state));
            if row.get(5) {
                line.due.push(place);
            }
        }
    }
    // One that runs was told twice.
    for line in lines.values_mut() {
        line.front.sort_unstable_by_key(|(place, _)| *place);
        line.front.dedup_by_key(|(place, _)| *place);
    }
    if ordering.remembers() {
        for (entity, standing) in standings(session, &ordering.scope(name), &entities).await? {
            if let Some(line) = lines.get_mut(&entity) {
                line.standing = standing;
            }
        }
    }
    Ok(lines)
}

/// What is known of entities. Their line is locked, so nobody else changes it.
async fn standings(
    session: &Session,
    scope: &str,
    entities: &[&str],
) -> Result<HashMap<String, Standing>, EngineError> {
    let sql = "SELECT entity, newest, last_at, state, version FROM oncehook.entities WHERE scope = $1 AND entity = ANY ($2)";
    let rows = session.rows(sql, &[&scope, &entities]).await?;
    let known = |row: &Row| {
        let newest = Mark { version: row.get(1), at: row.get::<_, Option<i64>>(2).map(UnixMicros) };
        (row.get(0), Standing { newest, state: row.get(3), version: row.get(4) })
    };
    Ok(rows.iter().map(known).collect())
}

/// Takes deliveries out of the queue until somebody before them lets them go on.
pub(super) async fn block(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    places: impl Iterator<Item = Place>,
) -> Result<(), EngineError> {
    let (events, epochs): (Vec<Uuid>, Vec<i32>) =
        places.map(|place| (uuid(place.event), int(place.epoch))).unzip();
    if events.is_empty() {
        return Ok(());
    }
    session
        .change(
            "UPDATE oncehook.deliveries d
                SET run_at = $5, blocked_at = coalesce(d.blocked_at, $1::bigint, oncehook.micros())
               FROM unnest($3::uuid[], $4::integer[]) AS t(event, epoch)
              WHERE d.event = t.event AND d.route = $2 AND d.epoch = t.epoch AND (d.state || '') IN ('ready', 'retrying')",
            &[&given, &route.name.as_str(), &events, &epochs, &NO_TIME.0],
        )
        .await?;
    Ok(())
}

/// What a delivery of an entity came to.
pub(super) struct Came<'v> {
    pub(super) entity: &'v str,
    pub(super) mark: Mark,
    pub(super) kind: Option<&'v str>,
    pub(super) verdict: &'v Verdict,
}

/// What follows for others from what deliveries of a route came to, in their order. The lines are locked.
pub(super) async fn after(
    session: &Session,
    given: Option<i64>,
    route: &Route,
    came: &[Came<'_>],
) -> Result<(), EngineError> {
    let ordering = &route.ordering;
    let succeeded = |came: &&Came<'_>| matches!(came.verdict, Verdict::Succeeded(_));
    if ordering.remembers() {
        let scope = ordering.scope(route.name.as_str());
        let effects: Vec<&Came<'_>> = came.iter().filter(succeeded).collect();
        let entities: BTreeSet<&str> = effects.iter().map(|came| came.entity).collect();
        let entities: Vec<&str> = entities.into_iter().collect();
        if !entities.is_empty() {
            let mut known = standings(session, &scope, &entities).await?;
            for effect in effects {
                let standing = known.entry(effect.entity.to_owned()).or_default();
                ordering.advance(standing, effect.mark, effect.kind);
            }
            remember(session, &scope, &known).await?;
        }
    }
    // The last of an entity tells.
    let free: BTreeMap<&str, usize> =
        came.iter().map(|came| (came.entity, route.let_go_on(came.verdict))).collect();
    let_go_on(session, given, &route.name, &free.into_iter().collect::<Vec<_>>()).await
}

async fn remember(
    session: &Session,
    scope: &str,
    known: &HashMap<String, Standing>,
) -> Result<(), EngineError> {
    let known: BTreeMap<&String, &Standing> = known.iter().collect();
    let entities: Vec<&str> = known.keys().map(|entity| entity.as_str()).collect();
    let standings = || known.values();
    let versions: Vec<i64> = standings().map(|known| known.version).collect();
    let times: Vec<Option<i64>> = standings().map(|known| known.newest.at.map(|at| at.0)).collect();
    let states: Vec<Option<&str>> = standings().map(|known| known.state.as_deref()).collect();
    let newest: Vec<Option<i64>> = standings().map(|known| known.newest.version).collect();
    session
        .change(
            "INSERT INTO oncehook.entities (scope, entity, version, last_at, state, newest)
             SELECT $1, * FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[])
             ON CONFLICT (scope, entity) DO UPDATE
                SET version = excluded.version, last_at = excluded.last_at, state = excluded.state, newest = excluded.newest",
            &[&scope, &entities, &versions, &times, &states, &newest],
        )
        .await?;
    Ok(())
}

/// Puts the first of those that wait for their turn in each line back into the queue, at most as many as are said. If it is not
/// their turn after all, they are taken out again when they are looked at.
pub(super) async fn let_go_on(
    session: &Session,
    given: Option<i64>,
    route: &RouteName,
    entities: &[(&str, usize)],
) -> Result<(), EngineError> {
    if entities.is_empty() {
        return Ok(());
    }
    let (entities, counts): (Vec<&str>, Vec<i64>) =
        entities.iter().map(|(entity, count)| (*entity, i64::try_from(*count).unwrap_or(i64::MAX))).unzip();
    session
        .change(
            "UPDATE oncehook.deliveries d SET run_at = coalesce($1::bigint, oncehook.micros())
               FROM (SELECT f.event, f.epoch FROM unnest($3::text[], $5::bigint[]) AS u(entity, count)
                      CROSS JOIN LATERAL (
                        SELECT event, epoch FROM oncehook.deliveries
                         WHERE route = $2 AND entity = u.entity AND state IN ('ready', 'retrying')
                           AND run_at + 0 = $4 -- by the line, not by the queue
                         ORDER BY version NULLS FIRST, event, epoch LIMIT u.count) f) AS n
              WHERE d.event = n.event AND d.route = $2 AND d.epoch = n.epoch AND d.run_at = $4
                -- Asked once for all: usually nobody waits.
                AND EXISTS (SELECT 1 FROM oncehook.deliveries
                             WHERE route = $2 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying'))",
            &[&given, &route.as_str(), &entities, &NO_TIME.0, &counts],
        )
        .await?;
    Ok(())
}

/// Something of these entities took effect: whatever waits for a prerequisite looks again. Returns whether there was any.
pub(super) async fn wake_parked(
    session: &Session,
    given: Option<i64>,
    entities: &[&str],
) -> Result<bool, EngineError> {
    if entities.is_empty() {
        return Ok(false);
    }
    let woken = session
        .change(
            "UPDATE oncehook.deliveries
                SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END,
                    run_at = coalesce($1::bigint, oncehook.micros())
              WHERE state = 'parked' AND entity = ANY ($2)
                -- Asked once for all: usually nothing is.
                AND EXISTS (SELECT 1 FROM oncehook.deliveries WHERE state = 'parked' AND entity IS NOT NULL)",
            &[&given, &entities],
        )
        .await?;
    Ok(woken > 0)
}

/// The same for the entities of events.
pub(super) async fn wake_parked_of(
    session: &Session,
    given: Option<i64>,
    events: &[Uuid],
) -> Result<bool, EngineError> {
    let woken = session
        .change(
            "UPDATE oncehook.deliveries
                SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END,
                    run_at = coalesce($1::bigint, oncehook.micros())
              WHERE state = 'parked' AND entity IN (SELECT entity FROM oncehook.events WHERE id = ANY ($2))",
            &[&given, &events],
        )
        .await?;
    Ok(woken > 0)
}

/// A parked delivery is found by its entity.
pub(super) async fn name_parked(session: &Session, events: &[Uuid]) -> Result<(), EngineError> {
    session
        .change(
            "UPDATE oncehook.deliveries d SET entity = e.entity FROM oncehook.events e
              WHERE d.event = ANY ($1) AND e.id = ANY ($1) AND e.id = d.event AND d.state = 'parked' AND d.entity IS NULL",
            &[&events],
        )
        .await?;
    Ok(())
}

/// What a leased delivery is about.
pub(super) struct About {
    pub(super) entity: String,
    pub(super) mark: Mark,
    pub(super) kind: Option<String>,
}

impl About {
    /// With what it came to.
    pub(super) fn came<'v>(&'v self, verdict: &'v Verdict) -> Came<'v> {
        Came { entity: &self.entity, mark: self.mark, kind: self.kind.as_deref(), verdict }
    }
}

/// What leased deliveries are about, where their events have an entity.
pub(super) async fn about(
    session: &Session,
    fences: &[&Fence],
) -> Result<HashMap<EventId, About>, EngineError> {
    let events: Vec<Uuid> = fences.iter().map(|fence| uuid(fence.delivery.event)).collect();
    let sql = "SELECT id, entity, version, occurred_at, type FROM oncehook.events WHERE id = ANY ($1) AND entity IS NOT NULL";
    let rows = session.rows(sql, &[&events]).await?;
    let about = |row: &Row| {
        let mark = Mark { version: row.get(2), at: row.get::<_, Option<i64>>(3).map(UnixMicros) };
        (event_id(row.get(0)), About { entity: row.get(1), mark, kind: row.get(4) })
    };
    Ok(rows.iter().map(about).collect())
}

/// Looks after those that wait for others: parked ones whose time has come, and the first of a line that nobody is before any
/// more. Returns whether something is due now. One transaction.
pub(super) async fn look_again(
    session: &Session,
    given: Option<i64>,
    route: &Route,
) -> Result<bool, EngineError> {
    let name = route.name.as_str();
    let mut woken = session
        .change(
            "UPDATE oncehook.deliveries
                SET state = CASE WHEN attempt > 0 THEN 'retrying' ELSE 'ready' END,
                    run_at = coalesce($1::bigint, oncehook.micros())
              WHERE route = $2 AND state = 'parked' AND run_at <= coalesce($1::bigint, oncehook.micros())",
            &[&given, &name],
        )
        .await?;
    if !route.ordering.is_serial() {
        woken += session
            .change(
                "UPDATE oncehook.deliveries SET run_at = coalesce($1::bigint, oncehook.micros())
                  WHERE route = $2 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = $3",
                &[&given, &name, &NO_TIME.0],
            )
            .await?;
        return Ok(woken > 0);
    }
    let waiting = session
        .rows(
            // Entities, not deliveries: a crowd of one would hide the others.
            "SELECT DISTINCT entity FROM oncehook.deliveries
              WHERE route = $1 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying') AND run_at = $2
                AND entity IS NOT NULL
              LIMIT $3",
            &[&name, &NO_TIME.0, &LOOKED_AFTER],
        )
        .await?;
    if waiting.is_empty() {
        return Ok(woken > 0);
    }
    let entities: BTreeSet<&str> = waiting.iter().map(|row| row.get(0)).collect();
    session.run("BEGIN").await?;
    lock(session, &route.name, &entities).await?;
    // Everybody in the line waits for his turn, and nobody has it.
    let stranded = session
        .rows(
            "SELECT u.entity FROM unnest($2::text[]) AS u(entity)
              CROSS JOIN LATERAL (
                SELECT run_at FROM oncehook.deliveries
                 WHERE route = $1 AND entity = u.entity AND state IN ('ready', 'retrying', 'dead') AND (state <> 'dead' OR $3)
                 ORDER BY version NULLS FIRST, event, epoch LIMIT 1) f
              WHERE f.run_at = $4
                AND NOT EXISTS (SELECT 1 FROM oncehook.deliveries r
                                 WHERE r.route = $1 AND r.entity = u.entity AND r.state = 'running')",
            &[
                &name,
                &entities.iter().copied().collect::<Vec<_>>(),
                &(route.ordering.by_entity && route.ordering.on_dead == OnDead::Block),
                &NO_TIME.0,
            ],
        )
        .await?;
    let stranded: Vec<&str> = stranded.iter().map(|row| row.get(0)).collect();
    let first: Vec<(&str, usize)> = stranded.iter().map(|entity| (*entity, 1)).collect();
    let_go_on(session, given, &route.name, &first).await?;
    session.run("COMMIT").await?;
    Ok(woken > 0 || !stranded.is_empty())
}
