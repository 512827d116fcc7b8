//! Texts for what operators order and pause.

use super::Mysql;
use crate::journal::server::operate::{OperateSql, Operates};

impl Operates for Mysql {
    const OPERATE: OperateSql = OperateSql {
        entity_and_routes: "SELECT DISTINCT e.entity, d.route
                              FROM oncehook_events e LEFT JOIN oncehook_deliveries d ON d.event = e.id
                             WHERE e.id = $1 ORDER BY d.route",
        lock_queues: "SELECT e.scope
                        FROM (SELECT * FROM JSON_TABLE($1, '$[*]' COLUMNS (route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$')) t) t
                        STRAIGHT_JOIN oncehook_entities e ON e.scope = t.route AND e.entity = $2 FOR UPDATE",
        lock_event: "SELECT 1 FROM oncehook_events WHERE id = $1 FOR UPDATE",
        is_held: "SELECT 1 FROM oncehook_flags WHERE event = $1 AND flag = 'quarantined'",
        lock_deliveries: "SELECT route, epoch, state, attempt, state = 'running' AND lease_until > $1
                            FROM oncehook_deliveries WHERE event = $2 ORDER BY route, epoch FOR UPDATE",
        revive: "UPDATE JSON_TABLE($3, '$[*]' COLUMNS (
                          route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]', epoch INT UNSIGNED PATH '$[1]',
                          state VARCHAR(16) CHARACTER SET utf8mb4 PATH '$[2]', most INT UNSIGNED PATH '$[3]')) t
                 STRAIGHT_JOIN oncehook_deliveries d ON d.event = $2 AND d.route = t.route AND d.epoch = t.epoch
                    SET d.state = t.state, d.run_at = $1, d.settled_at = NULL, d.cause = NULL,
                        d.attempt_limit = t.most, d.blocked_at = NULL, d.parked_at = NULL",
        lose_attempts: "UPDATE JSON_TABLE($3, '$[*]' COLUMNS (
                                 route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]', epoch INT UNSIGNED PATH '$[1]')) t
                        STRAIGHT_JOIN oncehook_attempts a
                              ON a.event = $2 AND a.route = t.route AND a.epoch = t.epoch AND a.finished_at IS NULL
                           SET a.finished_at = $1, a.outcome = 'lost'",
        skip: "UPDATE JSON_TABLE($3, '$[*]' COLUMNS (
                        route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]', epoch INT UNSIGNED PATH '$[1]')) t
               STRAIGHT_JOIN oncehook_deliveries d ON d.event = $2 AND d.route = t.route AND d.epoch = t.epoch
                  SET d.state = 'skipped', d.settled_at = $1, d.lease_until = NULL, d.blocked_at = NULL,
                      d.parked_at = NULL, d.run_at = IF(d.run_at = 9223372036854775807, $1, d.run_at)",
        enqueue: "INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at, entity, version)
                  SELECT $2, t.route, $3, 'ready', $1, l.entity, l.version
                    FROM JSON_TABLE($4, '$[*]' COLUMNS (route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$')) t
                    LEFT JOIN (SELECT entity, version FROM oncehook_deliveries
                                WHERE event = $2 AND entity IS NOT NULL LIMIT 1) l ON TRUE
                  ON DUPLICATE KEY UPDATE epoch = oncehook_deliveries.epoch",
        release: "DELETE FROM oncehook_flags WHERE event = $1 AND flag = 'quarantined'",
        audit: "INSERT INTO oncehook_audit (at, who, action, subject, reason, detail) VALUES ($1, $2, $3, $4, $5, $6)",
        // A row that stays as it is does not count as affected.
        pause: "INSERT INTO oncehook_pauses (at, kind, name) VALUES ($1, $2, $3)
                ON DUPLICATE KEY UPDATE at = oncehook_pauses.at",
        resume: "DELETE FROM oncehook_pauses WHERE kind = $1 AND name = $2",
        pauses: "SELECT p.kind, p.name, p.at, a.who, a.reason
                   FROM oncehook_pauses p
                   LEFT JOIN oncehook_audit a ON a.id = (SELECT MIN(b.id) FROM oncehook_audit b
                      WHERE b.subject = CONCAT(p.kind, ':', p.name) AND b.action = 'pause' AND b.at >= p.at)
                  ORDER BY p.kind = 'source', p.name",
    };
}
