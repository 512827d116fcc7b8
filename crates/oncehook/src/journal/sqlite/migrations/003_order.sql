-- The order of an entity's events. The table of deliveries is made anew, because a dead one may have one more cause; the views
-- on it go first and come back unchanged.
DROP VIEW oncehook_retry_logs;
DROP VIEW oncehook_processed_events;
DROP VIEW oncehook_event_status;

-- Which version of its entity an event tells about, as the provider counts.
ALTER TABLE oncehook_events ADD COLUMN version INTEGER;

-- The newest version that took effect. (version counts effects, last_at is the newest time.)
ALTER TABLE oncehook_entities ADD COLUMN newest INTEGER;

ALTER TABLE oncehook_deliveries RENAME TO oncehook_deliveries_before;

-- Small and mutable: one event for one route in one epoch. attempt is the fence: it only grows, and whoever settles names
-- it. attempt_limit is set where it differs from the route's own (a manual retry raises it). A success is recorded here
-- (settled_at, attempt); only failures and leases have rows in oncehook_attempts, so that the usual case costs one row.
-- entity and version stand here where a route of the event's source looks at them, and at parked ones. What waits for its turn
-- has no due time: run_at is the largest number.
CREATE TABLE oncehook_deliveries (
  event         INTEGER NOT NULL,
  route         TEXT    NOT NULL,
  epoch         INTEGER NOT NULL DEFAULT 0,
  state         TEXT    NOT NULL CHECK (state IN ('ready', 'running', 'retrying', 'parked',
                                                  'succeeded', 'dead', 'superseded', 'skipped')),
  attempt       INTEGER NOT NULL DEFAULT 0,
  attempt_limit INTEGER,
  run_at        INTEGER NOT NULL,
  lease_until   INTEGER,
  lease_limit   INTEGER, -- the limit that the leased attempt was given
  settled_at    INTEGER,
  result        TEXT,
  error         TEXT,
  cause         TEXT CHECK (cause IN ('destination', 'handler', 'ours', 'poison', 'prerequisite')),
  entity        TEXT,
  version       INTEGER,
  blocked_at    INTEGER, -- since when it has waited for its turn
  parked_at     INTEGER, -- since when it has waited for a prerequisite
  PRIMARY KEY (event, route, epoch)
) STRICT, WITHOUT ROWID;

INSERT INTO oncehook_deliveries (event, route, epoch, state, attempt, attempt_limit, run_at, lease_until, lease_limit,
                                 settled_at, result, error, cause)
SELECT event, route, epoch, state, attempt, attempt_limit, run_at, lease_until, lease_limit, settled_at, result, error, cause
  FROM oncehook_deliveries_before;

DROP TABLE oncehook_deliveries_before;

-- The queue of a route: what is due, in order. Holds only what waits, so it stays small however long the history.
CREATE INDEX oncehook_deliveries_due ON oncehook_deliveries (route, run_at) WHERE state IN ('ready', 'retrying');

-- Leases that may run out.
CREATE INDEX oncehook_deliveries_leased ON oncehook_deliveries (route, lease_until) WHERE state = 'running';

-- Dead letters, for people.
CREATE INDEX oncehook_deliveries_dead ON oncehook_deliveries (event) WHERE state = 'dead';

-- The line of an entity on a route: everybody who stands in it, in order.
CREATE INDEX oncehook_deliveries_line ON oncehook_deliveries (route, entity, version, event, epoch)
 WHERE entity IS NOT NULL AND state IN ('ready', 'retrying', 'running', 'dead');

-- Whether one of an entity is under way.
CREATE INDEX oncehook_deliveries_busy ON oncehook_deliveries (route, entity) WHERE entity IS NOT NULL AND state = 'running';

-- What waits for a prerequisite: by when it is looked at again, and by the entity whose next success wakes it.
CREATE INDEX oncehook_deliveries_parked ON oncehook_deliveries (route, run_at) WHERE state = 'parked';
CREATE INDEX oncehook_deliveries_parked_entity ON oncehook_deliveries (entity) WHERE state = 'parked';

-- What waits for its turn, the longest first.
CREATE INDEX oncehook_deliveries_blocked ON oncehook_deliveries (route, blocked_at)
 WHERE blocked_at IS NOT NULL AND state IN ('ready', 'retrying');

-- An event's status, derived: quarantined, else unrouted, else the worst of its deliveries.
CREATE VIEW oncehook_event_status AS
SELECT e.seq AS event,
       CASE
         WHEN EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = e.seq AND f.flag = 'quarantined') THEN 'quarantined'
         ELSE coalesce((SELECT d.state FROM oncehook_deliveries d WHERE d.event = e.seq
                         ORDER BY CASE d.state WHEN 'dead' THEN 0 WHEN 'parked' THEN 1 WHEN 'retrying' THEN 2
                                               WHEN 'running' THEN 3 WHEN 'ready' THEN 4 WHEN 'superseded' THEN 5
                                               WHEN 'skipped' THEN 6 ELSE 7 END
                         LIMIT 1), 'unrouted')
       END AS status
  FROM oncehook_events e;

-- The two tables people expect to find.
CREATE VIEW oncehook_processed_events AS
SELECT lower(printf('%s-%s-%s-%s-%s', substr(hex(e.id), 1, 8), substr(hex(e.id), 9, 4), substr(hex(e.id), 13, 4),
                    substr(hex(e.id), 17, 4), substr(hex(e.id), 21))) AS event_id,
       e.source, CAST(e.key AS TEXT) AS key, e.type, e.entity, s.status,
       strftime('%Y-%m-%dT%H:%M:%fZ', e.received_at / 1000000.0, 'unixepoch') AS received_at,
       coalesce(d.journal + d.memory + d.redis, 0) AS duplicates
  FROM oncehook_events e
  JOIN oncehook_event_status s ON s.event = e.seq
  LEFT JOIN oncehook_duplicates d ON d.event = e.seq;

CREATE VIEW oncehook_retry_logs AS
SELECT e.source, CAST(e.key AS TEXT) AS key, a.route, a.epoch, a.attempt, a.outcome, a.error,
       strftime('%Y-%m-%dT%H:%M:%fZ', a.started_at / 1000000.0, 'unixepoch') AS started_at,
       strftime('%Y-%m-%dT%H:%M:%fZ', a.finished_at / 1000000.0, 'unixepoch') AS finished_at
  FROM (SELECT event, route, epoch, attempt, outcome, error, started_at, finished_at FROM oncehook_attempts
        UNION ALL
        -- A success that was never leased stands in the delivery itself.
        SELECT d.event, d.route, d.epoch, d.attempt, 'succeeded', NULL, d.settled_at, d.settled_at
          FROM oncehook_deliveries d
         WHERE d.state = 'succeeded'
           AND NOT EXISTS (SELECT 1 FROM oncehook_attempts a WHERE a.event = d.event AND a.route = d.route
                              AND a.epoch = d.epoch AND a.attempt = d.attempt)) a
  JOIN oncehook_events e ON e.seq = a.event;
