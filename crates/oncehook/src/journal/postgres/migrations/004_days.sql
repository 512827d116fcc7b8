-- Events and attempts in partitions of a day (UTC) each, so that forgetting a day is dropping a table. A day is a range of
-- ids, whose first 48 bits are milliseconds. Days are made ahead of time while the journal runs (`days`); the tables
-- until now become the rest: the partition of whatever has no day. Nothing is moved, and nothing is read.

ALTER TABLE oncehook.events RENAME TO events_rest;
ALTER INDEX oncehook.events_id RENAME TO events_rest_pkey;
CREATE TABLE oncehook.events (LIKE oncehook.events_rest INCLUDING ALL EXCLUDING INDEXES, CONSTRAINT events_id PRIMARY KEY (id))
  PARTITION BY RANGE (id);

ALTER TABLE oncehook.attempts RENAME TO attempts_rest;
ALTER INDEX oncehook.attempts_once RENAME TO attempts_rest_pkey;
CREATE TABLE oncehook.attempts (LIKE oncehook.attempts_rest INCLUDING ALL EXCLUDING INDEXES,
                                CONSTRAINT attempts_once PRIMARY KEY (event, route, epoch, attempt))
  PARTITION BY RANGE (event);

-- The views still look at the tables that were renamed.
DROP VIEW oncehook.processed_events, oncehook.retry_logs, oncehook.event_status;

ALTER TABLE oncehook.events ATTACH PARTITION oncehook.events_rest DEFAULT;
ALTER TABLE oncehook.attempts ATTACH PARTITION oncehook.attempts_rest DEFAULT;

-- Days that were dropped, as ranges of ids: what stood beside their events in other tables is yet to be swept.
CREATE TABLE oncehook.sweeps (
  first  uuid CONSTRAINT sweeps_once PRIMARY KEY,
  beyond uuid NOT NULL
);

-- For the sweep: with its event, the way to a body's row is gone.
CREATE INDEX bodies_event ON oncehook.bodies (event);

-- As before.
CREATE VIEW oncehook.event_status AS
SELECT e.id AS event,
       CASE
         WHEN EXISTS (SELECT 1 FROM oncehook.flags f WHERE f.event = e.id AND f.flag = 'quarantined') THEN 'quarantined'
         ELSE coalesce((SELECT d.state FROM oncehook.deliveries d WHERE d.event = e.id
                         ORDER BY CASE d.state WHEN 'dead' THEN 0 WHEN 'parked' THEN 1 WHEN 'retrying' THEN 2
                                               WHEN 'running' THEN 3 WHEN 'ready' THEN 4 WHEN 'superseded' THEN 5
                                               WHEN 'skipped' THEN 6 ELSE 7 END
                         LIMIT 1), 'unrouted')
       END AS status
  FROM oncehook.events e;

CREATE VIEW oncehook.processed_events AS
SELECT e.id AS event_id, e.source, encode(e.key, 'escape') AS key, e.type, e.entity, s.status,
       to_timestamp(e.received_at / 1000000.0) AS received_at,
       coalesce(d.journal + d.memory + d.redis, 0) AS duplicates
  FROM oncehook.events e
  JOIN oncehook.event_status s ON s.event = e.id
  LEFT JOIN oncehook.duplicates d ON d.event = e.id;

CREATE VIEW oncehook.retry_logs AS
SELECT e.source, encode(e.key, 'escape') AS key, a.route, a.epoch, a.attempt, a.outcome, a.error,
       to_timestamp(a.started_at / 1000000.0) AS started_at,
       to_timestamp(a.finished_at / 1000000.0) AS finished_at
  FROM (SELECT event, route, epoch, attempt, outcome, error, started_at, finished_at FROM oncehook.attempts
        UNION ALL
        SELECT d.event, d.route, d.epoch, d.attempt, 'succeeded', NULL, d.settled_at, d.settled_at
          FROM oncehook.deliveries d
         WHERE d.state = 'succeeded'
           AND NOT EXISTS (SELECT 1 FROM oncehook.attempts a WHERE a.event = d.event AND a.route = d.route
                              AND a.epoch = d.epoch AND a.attempt = d.attempt)) a
  JOIN oncehook.events e ON e.id = a.event;
