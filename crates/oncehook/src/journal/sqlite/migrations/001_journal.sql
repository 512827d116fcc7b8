-- The journal. Whatever comes from outside is bytes (BLOB) or checked text; times are microseconds since 1970 (UTC).
-- Accepting an event costs one row in oncehook_events, and one narrow row in oncehook_deliveries for each route that wants
-- it. Everything else is written later, in batches, or only for odd events.

-- Facts about this journal: how far what is written behind the accepts has come.
CREATE TABLE oncehook_meta (
  name  TEXT PRIMARY KEY,
  value ANY NOT NULL
) STRICT, WITHOUT ROWID;

-- Immutable. A row above meta.ledger_to is also the only durable record of its key. seq is the first 63 bits of the id (milliseconds and a counter), so new rows go to the end of the table and
-- looking an id up needs no index.
CREATE TABLE oncehook_events (
  seq         INTEGER PRIMARY KEY,
  id          BLOB    NOT NULL CHECK (length(id) = 16),
  source      TEXT    NOT NULL,
  key         BLOB    NOT NULL,
  key_signed  INTEGER NOT NULL,
  type        TEXT,
  entity      TEXT,
  occurred_at INTEGER,
  received_at INTEGER NOT NULL,
  key_expires_at INTEGER NOT NULL,
  integrity   TEXT    NOT NULL CHECK (integrity IN ('body', 'fields', 'none')),
  digest      BLOB    NOT NULL CHECK (length(digest) = 32),
  headers     BLOB    NOT NULL,
  body        BLOB    NOT NULL
) STRICT;

-- The ledger: the memory of keys. Both columns compare byte by byte. It outlives the event. Keys come in sorted, a
-- generation at a time; those of the events above meta.ledger_to may not be here yet: there the event's row is the record,
-- and the writer holds the key in memory.
CREATE TABLE oncehook_keys (
  source     TEXT    NOT NULL COLLATE BINARY,
  key        BLOB    NOT NULL CHECK (length(key) BETWEEN 1 AND 255),
  event      BLOB    NOT NULL CHECK (length(event) = 16),
  digest     BLOB    NOT NULL CHECK (length(digest) = 32),
  first_seen INTEGER NOT NULL,
  expires_at INTEGER NOT NULL,
  CONSTRAINT oncehook_keys_once PRIMARY KEY (source, key)
) STRICT, WITHOUT ROWID;

-- Small and mutable: one event for one route in one epoch. attempt is the fence: it only grows, and whoever settles names
-- it. attempt_limit is set where it differs from the route's own (a manual retry raises it). A success is recorded here
-- (settled_at, attempt); only failures and leases have rows in oncehook_attempts, so that the usual case costs one row.
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
  cause         TEXT CHECK (cause IN ('destination', 'handler', 'ours', 'poison')),
  PRIMARY KEY (event, route, epoch)
) STRICT, WITHOUT ROWID;

-- The queue of a route: what is due, in order. Holds only what waits, so it stays small however long the history.
CREATE INDEX oncehook_deliveries_due ON oncehook_deliveries (route, run_at) WHERE state IN ('ready', 'retrying');

-- Leases that may run out.
CREATE INDEX oncehook_deliveries_leased ON oncehook_deliveries (route, lease_until) WHERE state = 'running';

-- Dead letters, for people.
CREATE INDEX oncehook_deliveries_dead ON oncehook_deliveries (event) WHERE state = 'dead';

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

-- Other bodies that came under a known key. An empty digest sums up those beyond the ones that are kept.
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

-- Further deliveries of an event, added up in memory and stored about twice a second.
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

-- What is odd about an event: conflict, suspected_replay, quarantined.
CREATE TABLE oncehook_flags (
  event  INTEGER NOT NULL,
  flag   TEXT    NOT NULL CHECK (flag IN ('conflict', 'suspected_replay', 'quarantined')),
  at     INTEGER NOT NULL,
  reason TEXT,
  PRIMARY KEY (event, flag)
) STRICT, WITHOUT ROWID;

-- Per (route or machine, entity), only for those that need it.
CREATE TABLE oncehook_entities (
  scope   TEXT    NOT NULL,
  entity  TEXT    NOT NULL,
  version INTEGER NOT NULL DEFAULT 0,
  last_at INTEGER,
  state   TEXT,
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

-- One event's part of it.
CREATE INDEX oncehook_audit_subject ON oncehook_audit (subject);

-- Counts per source since the journal was made. Forgetting events does not lower them.
CREATE TABLE oncehook_totals (
  source      TEXT PRIMARY KEY,
  events      INTEGER NOT NULL DEFAULT 0,
  duplicates  INTEGER NOT NULL DEFAULT 0,
  conflicts   INTEGER NOT NULL DEFAULT 0,
  quarantined INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

-- The search index for people: one row per block of consecutive events, saying what may be found in it. Written once per
-- block behind the accepts, so it costs an accept next to nothing. The events behind the last block are few; they are
-- looked at one by one.
CREATE TABLE oncehook_blocks (
  last     INTEGER PRIMARY KEY,
  first    INTEGER NOT NULL,
  sources  TEXT    NOT NULL, -- JSON list
  types    TEXT,             -- JSON list; NULL if there are too many
  entities BLOB    NOT NULL  -- Bloom filter
) STRICT;

-- The first event with a body, for sources whose keys are unsigned: the same body under another key is a suspected
-- replay. Filled behind the accepts up to meta.replays_to.
CREATE TABLE oncehook_bodies (
  source TEXT    NOT NULL,
  digest BLOB    NOT NULL,
  event  INTEGER NOT NULL,
  PRIMARY KEY (source, digest)
) STRICT, WITHOUT ROWID;

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
