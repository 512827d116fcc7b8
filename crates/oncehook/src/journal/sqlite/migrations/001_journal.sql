-- The journal. Text and numbers from outside are bytes (BLOB) or checked text; times are microseconds since 1970 (UTC).
-- Accepting an event writes one row to oncehook_events, and one narrow row to oncehook_deliveries for each route that
-- wants it. Everything else is written later, in batches, or only for unusual events.
--
-- Conditions on rows that every event writes use OR, never IN with three or more values: SQLite makes, fills and drops
-- a temporary table for such an IN each time it writes a row.

-- Facts about this journal: how far the work behind the accepts has come.
CREATE TABLE oncehook_meta (
  name  TEXT PRIMARY KEY,
  value ANY NOT NULL
) STRICT, WITHOUT ROWID;

-- Immutable. For rows above meta.ledger_to, the event's row is also the only durable record of its key. seq is the
-- first 63 bits of the id (milliseconds and a counter), so new rows go to the end of the table, and finding an id needs
-- no index.
CREATE TABLE oncehook_events (
  seq            INTEGER PRIMARY KEY,
  id             BLOB    NOT NULL CHECK (length(id) = 16),
  source         TEXT    NOT NULL,
  key            BLOB    NOT NULL,
  key_signed     INTEGER NOT NULL,
  type           TEXT,
  entity         TEXT,
  occurred_at    INTEGER,
  received_at    INTEGER NOT NULL,
  key_expires_at INTEGER NOT NULL,
  integrity      TEXT    NOT NULL CHECK (integrity = 'body' OR integrity = 'fields' OR integrity = 'none'),
  digest         BLOB    NOT NULL CHECK (length(digest) = 32),
  headers        BLOB    NOT NULL,
  body           BLOB    NOT NULL,
  version        INTEGER -- the version of the entity that the event reports, as the provider counts
) STRICT;

-- Events whose ids run ahead of their receipt, because the clock was set back. (An id's milliseconds are above 15
-- bits.)
CREATE INDEX oncehook_events_ahead ON oncehook_events (seq, received_at) WHERE seq / 32768 > received_at / 1000 + 1000;

-- The ledger: the memory of keys. Both columns compare byte by byte. A key outlives its event. The writer inserts keys
-- sorted, one generation at a time. Keys of events above meta.ledger_to may not be here yet: for them the event's row
-- is the record, and the writer holds the key in memory.
CREATE TABLE oncehook_keys (
  source     TEXT    NOT NULL COLLATE BINARY,
  key        BLOB    NOT NULL CHECK (length(key) BETWEEN 1 AND 255),
  event      BLOB    NOT NULL CHECK (length(event) = 16),
  digest     BLOB    NOT NULL CHECK (length(digest) = 32),
  first_seen INTEGER NOT NULL,
  expires_at INTEGER NOT NULL,
  CONSTRAINT oncehook_keys_once PRIMARY KEY (source, key)
) STRICT, WITHOUT ROWID;

-- Small and mutable: one event for one route in one epoch. attempt is the fence: it only grows, and a worker that
-- settles must name it. attempt_limit is set where it differs from the route's limit (a manual retry raises it). A
-- success is recorded here (settled_at, attempt); only failures and leases have rows in oncehook_attempts, so the usual
-- case costs one row. entity and version are set where a route of the event's source uses them, and on parked
-- deliveries. A delivery that waits behind another of its entity has no due time: its run_at is the largest number.
CREATE TABLE oncehook_deliveries (
  event         INTEGER NOT NULL,
  route         TEXT    NOT NULL,
  epoch         INTEGER NOT NULL DEFAULT 0,
  state         TEXT    NOT NULL CHECK (state = 'ready' OR state = 'succeeded' OR state = 'running'
                           OR state = 'retrying' OR state = 'parked' OR state = 'dead' OR state = 'superseded'
                           OR state = 'skipped'),
  attempt       INTEGER NOT NULL DEFAULT 0,
  attempt_limit INTEGER,
  run_at        INTEGER NOT NULL,
  lease_until   INTEGER,
  lease_limit   INTEGER, -- the limit that the leased attempt was given
  settled_at    INTEGER,
  result        TEXT,
  error         TEXT,
  cause         TEXT CHECK (cause = 'destination' OR cause = 'handler' OR cause = 'ours' OR cause = 'poison'
                           OR cause = 'prerequisite'),
  entity        TEXT,
  version       INTEGER,
  blocked_at    INTEGER, -- since when it has waited behind another delivery of its entity
  parked_at     INTEGER, -- since when it has waited for a prerequisite
  PRIMARY KEY (event, route, epoch)
) STRICT, WITHOUT ROWID;

-- The queue of a route: what is due, in order. It holds only waiting deliveries, so it stays small in a long history.
CREATE INDEX oncehook_deliveries_due ON oncehook_deliveries (route, run_at) WHERE state IN ('ready', 'retrying');

-- Leases that may run out.
CREATE INDEX oncehook_deliveries_leased ON oncehook_deliveries (route, lease_until) WHERE state = 'running';

-- The queue of an entity on a route, in order.
CREATE INDEX oncehook_deliveries_line ON oncehook_deliveries (route, entity, version, event, epoch)
 WHERE entity IS NOT NULL AND (state = 'ready' OR state = 'retrying' OR state = 'running' OR state = 'dead');

-- Whether a delivery of an entity is running.
CREATE INDEX oncehook_deliveries_busy ON oncehook_deliveries (route, entity)
 WHERE entity IS NOT NULL AND state = 'running';

-- Deliveries that wait behind another of their entity, the longest first.
CREATE INDEX oncehook_deliveries_blocked ON oncehook_deliveries (route, blocked_at)
 WHERE blocked_at IS NOT NULL AND state IN ('ready', 'retrying');

-- Deliveries that wait for a prerequisite: by the time of the next look, and by the entity whose next success wakes
-- them.
CREATE INDEX oncehook_deliveries_parked ON oncehook_deliveries (route, run_at) WHERE state = 'parked';
CREATE INDEX oncehook_deliveries_parked_entity ON oncehook_deliveries (entity) WHERE state = 'parked';

-- Lists for people, in the order of events: dead letters, and deliveries that were set aside.
CREATE INDEX oncehook_deliveries_dead ON oncehook_deliveries (event) WHERE state = 'dead';
CREATE INDEX oncehook_deliveries_aside ON oncehook_deliveries (event, state)
 WHERE state = 'parked' OR state = 'superseded' OR state = 'skipped';

-- Append-only: attempts that were leased or that failed.
CREATE TABLE oncehook_attempts (
  event       INTEGER NOT NULL,
  route       TEXT    NOT NULL,
  epoch       INTEGER NOT NULL,
  attempt     INTEGER NOT NULL,
  started_at  INTEGER NOT NULL,
  finished_at INTEGER,
  outcome     TEXT CHECK (outcome IN ('succeeded', 'failed', 'lost', 'given_back')),
  error       TEXT,
  PRIMARY KEY (event, route, epoch, attempt)
) STRICT, WITHOUT ROWID;

-- Sources and routes whose handling an operator has stopped.
CREATE TABLE oncehook_pauses (
  kind TEXT    NOT NULL CHECK (kind IN ('source', 'route')),
  name TEXT    NOT NULL,
  at   INTEGER NOT NULL,
  PRIMARY KEY (kind, name)
) STRICT, WITHOUT ROWID;

-- Other bodies that came under a known key. The row with an empty digest counts the bodies that were not kept.
CREATE TABLE oncehook_conflicts (
  event    INTEGER NOT NULL,
  digest   BLOB    NOT NULL CHECK (length(digest) IN (0, 32)),
  count    INTEGER NOT NULL,
  first_at INTEGER NOT NULL,
  last_at  INTEGER NOT NULL,
  headers  BLOB    NOT NULL,
  body     BLOB    NOT NULL,
  PRIMARY KEY (event, digest)
) STRICT;

-- Further copies of an event, counted in memory and stored about twice a second.
-- latest: the last few, JSON [[time, peer], …], oldest first.
CREATE TABLE oncehook_duplicates (
  event    INTEGER PRIMARY KEY,
  journal  INTEGER NOT NULL DEFAULT 0,
  memory   INTEGER NOT NULL DEFAULT 0,
  redis    INTEGER NOT NULL DEFAULT 0,
  first_at INTEGER NOT NULL,
  last_at  INTEGER NOT NULL,
  latest   TEXT    NOT NULL
) STRICT;

-- What is unusual about an event.
CREATE TABLE oncehook_flags (
  event  INTEGER NOT NULL,
  flag   TEXT    NOT NULL CHECK (flag IN ('conflict', 'suspected_replay', 'quarantined')),
  at     INTEGER NOT NULL,
  reason TEXT,
  PRIMARY KEY (event, flag)
) STRICT, WITHOUT ROWID;

-- The state of an entity for a route or a machine (scope). Only entities that need one have a row.
CREATE TABLE oncehook_entities (
  scope   TEXT    NOT NULL,
  entity  TEXT    NOT NULL,
  version INTEGER NOT NULL DEFAULT 0, -- counts effects
  last_at INTEGER,                    -- the newest time that took effect
  state   TEXT,
  newest  INTEGER,                    -- the newest version, as the provider counts, that took effect
  PRIMARY KEY (scope, entity)
) STRICT, WITHOUT ROWID;

-- What operators did, and why.
CREATE TABLE oncehook_audit (
  id      INTEGER PRIMARY KEY,
  at      INTEGER NOT NULL,
  who     TEXT    NOT NULL,
  action  TEXT    NOT NULL,
  subject TEXT    NOT NULL,
  reason  TEXT,
  detail  TEXT
) STRICT;

-- The entries about one event.
CREATE INDEX oncehook_audit_subject ON oncehook_audit (subject);

-- Counts per source since the journal was made. Forgetting events does not lower them.
CREATE TABLE oncehook_totals (
  source      TEXT PRIMARY KEY,
  events      INTEGER NOT NULL DEFAULT 0,
  duplicates  INTEGER NOT NULL DEFAULT 0,
  conflicts   INTEGER NOT NULL DEFAULT 0,
  quarantined INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- The search index of lists: one row per block of consecutive events says what the block may hold. Written once per
-- block behind the accepts, so it costs an accept next to nothing. Lists read the few events behind the last block one
-- by one.
CREATE TABLE oncehook_blocks (
  last     INTEGER PRIMARY KEY,
  first    INTEGER NOT NULL,
  sources  TEXT    NOT NULL, -- JSON list
  types    TEXT,             -- JSON list; NULL if there are too many
  entities BLOB    NOT NULL, -- Bloom filter
  unrouted INTEGER           -- whether an event of the block had no delivery when the block was written
) STRICT;

-- The same for groups of blocks, so that a list need not read every block of a long history: Bloom filters of what a
-- group holds. Each value goes to the filter of its own cell, and the filters of a cell are stored side by side.
CREATE TABLE oncehook_groups (
  cell  INTEGER NOT NULL,
  last  INTEGER NOT NULL, -- the group's last event
  first INTEGER NOT NULL,
  items BLOB    NOT NULL, -- Bloom filter
  PRIMARY KEY (cell, last)
) STRICT, WITHOUT ROWID;

-- The first event with a body, for sources whose keys are unsigned: the same body under another key is a suspected
-- replay. Filled behind the accepts up to meta.replays_to.
CREATE TABLE oncehook_bodies (
  source TEXT    NOT NULL,
  digest BLOB    NOT NULL,
  event  INTEGER NOT NULL,
  PRIMARY KEY (source, digest)
) STRICT, WITHOUT ROWID;

-- Ids that the spool of a node answered for events that have another id here.
CREATE TABLE oncehook_spool_aliases (
  alias BLOB    PRIMARY KEY CHECK (length(alias) = 16),
  event INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX oncehook_spool_aliases_event ON oncehook_spool_aliases (event);

-- An event's status, derived: quarantined, else unrouted, else the worst of its deliveries.
CREATE VIEW oncehook_event_status AS
SELECT e.seq AS event,
       CASE
         WHEN EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = e.seq AND f.flag = 'quarantined')
           THEN 'quarantined'
         ELSE coalesce((SELECT d.state FROM oncehook_deliveries d WHERE d.event = e.seq
                         ORDER BY CASE d.state WHEN 'dead' THEN 0 WHEN 'parked' THEN 1 WHEN 'retrying' THEN 2
                                               WHEN 'running' THEN 3 WHEN 'ready' THEN 4 WHEN 'superseded' THEN 5
                                               WHEN 'skipped' THEN 6 ELSE 7 END
                         LIMIT 1), 'unrouted')
       END AS status
  FROM oncehook_events e;

-- The two tables that people expect to find.
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
        -- A success that was never leased is recorded in the delivery itself.
        SELECT d.event, d.route, d.epoch, d.attempt, 'succeeded', NULL, d.settled_at, d.settled_at
          FROM oncehook_deliveries d
         WHERE d.state = 'succeeded'
           AND NOT EXISTS (SELECT 1 FROM oncehook_attempts a WHERE a.event = d.event AND a.route = d.route
                              AND a.epoch = d.epoch AND a.attempt = d.attempt)) a
  JOIN oncehook_events e ON e.seq = a.event;
