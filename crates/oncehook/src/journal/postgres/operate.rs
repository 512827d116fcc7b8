//! Texts for what operators order and pause. While a day is dropped, orders wait.

use super::connection::{EngineError, Session, first_text, in_time};
use super::{Postgres, days};
use crate::journal::server::operate::{OperateSql, Operates};

impl Operates for Postgres {
    const OPERATE: OperateSql = OperateSql {
        entity_and_routes: "SELECT DISTINCT e.entity, d.route
                              FROM oncehook.events e LEFT JOIN oncehook.deliveries d ON d.event = e.id
                             WHERE e.id = $1 ORDER BY d.route",
        lock_queues: "SELECT 1 FROM oncehook.entities WHERE scope = ANY($1::text[]) AND entity = $2
                       ORDER BY scope FOR UPDATE",
        lock_event: "SELECT 1 FROM oncehook.events WHERE id = $1 FOR UPDATE",
        is_held: "SELECT 1 FROM oncehook.flags WHERE event = $1 AND flag = 'quarantined'",
        lock_deliveries: "SELECT route, epoch, state, attempt, state = 'running' AND lease_until > $1
                            FROM oncehook.deliveries WHERE event = $2 ORDER BY route, epoch FOR UPDATE",
        revive: "UPDATE oncehook.deliveries d
                    SET state = t.state, run_at = $1, settled_at = NULL, cause = NULL, attempt_limit = t.most,
                        blocked_at = NULL, parked_at = NULL
                   FROM unnest($3::text[], $4::integer[], $5::text[], $6::integer[]) AS t(route, epoch, state, most)
                  WHERE d.event = $2 AND d.route = t.route AND d.epoch = t.epoch",
        lose_attempts: "UPDATE oncehook.attempts a SET finished_at = $1, outcome = 'lost'
                          FROM unnest($3::text[], $4::integer[]) AS t(route, epoch)
                         WHERE a.event = $2 AND a.route = t.route AND a.epoch = t.epoch AND a.finished_at IS NULL",
        skip: "UPDATE oncehook.deliveries d
                  SET state = 'skipped', settled_at = $1, lease_until = NULL, blocked_at = NULL, parked_at = NULL,
                      run_at = CASE WHEN run_at = 9223372036854775807 THEN $1 ELSE run_at END
                 FROM unnest($3::text[], $4::integer[]) AS t(route, epoch)
                WHERE d.event = $2 AND d.route = t.route AND d.epoch = t.epoch",
        enqueue: "INSERT INTO oncehook.deliveries (event, route, epoch, state, run_at, entity, version)
                  SELECT $2, r.route, $3::integer, 'ready', $1::bigint, l.entity, l.version
                    FROM unnest($4::text[]) AS r(route)
                    LEFT JOIN (SELECT entity, version FROM oncehook.deliveries
                                WHERE event = $2 AND entity IS NOT NULL LIMIT 1) l ON true
                  ON CONFLICT (event, route, epoch) DO NOTHING",
        release: "DELETE FROM oncehook.flags WHERE event = $1 AND flag = 'quarantined'",
        audit: "INSERT INTO oncehook.audit (at, who, action, subject, reason, detail)
                VALUES ($1, $2, $3, $4, $5, $6)",
        pause: "INSERT INTO oncehook.pauses (at, kind, name) VALUES ($1, $2, $3) ON CONFLICT (kind, name) DO NOTHING",
        resume: "DELETE FROM oncehook.pauses WHERE kind = $1 AND name = $2",
        pauses: "SELECT p.kind, p.name, p.at, a.who, a.reason
                   FROM oncehook.pauses p
                   LEFT JOIN LATERAL (SELECT b.who, b.reason FROM oncehook.audit b
                      WHERE b.subject = p.kind || ':' || p.name AND b.action = 'pause' AND b.at >= p.at
                      ORDER BY b.id LIMIT 1) a ON true
                  ORDER BY p.kind, p.name",
    };

    async fn begin_order(session: &mut Session, given: Option<i64>) -> Result<i64, EngineError> {
        let time = given.map_or_else(|| "oncehook.micros()".to_owned(), |given| given.to_string());
        let no_drop = format!("SELECT pg_advisory_xact_lock_shared({})", days::ORDERS);
        let begin = format!("BEGIN; SELECT {time}; SET LOCAL lock_timeout = 5000; {no_drop}");
        let answer = in_time(session.simple_query(&begin)).await?;
        first_text(&answer).and_then(|text| text.parse().ok()).ok_or_else(EngineError::damaged)
    }
}
