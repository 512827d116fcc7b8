-- The journal, in the user's database; every name begins with oncehook_. Every value that decides something (names,
-- keys, types, entities) is VARBINARY, so that it compares byte by byte under any collation of the database. Times are
-- microseconds since 1970 (UTC), of this database's clock where they decide anything. The views show text. Accepting an
-- event writes one row to keys, one to events, and one narrow row to deliveries for each route that wants it. Several
-- nodes write here, and two of them may use the same sequence, so an event's key is its whole id. Ids grow with time,
-- so new rows still go to the end of their table. There are no foreign keys: rows that belong together are written and
-- forgotten in one transaction.
--
-- The server ends a transaction at every statement that makes a table. So each statement here can be repeated: a node
-- that is killed half-way starts again from the first one.

-- The ledger: the memory of keys. A key outlives its event. The only unique key is the one that decides.
CREATE TABLE IF NOT EXISTS oncehook_keys (
  source     VARBINARY(64)  NOT NULL,
  `key`      VARBINARY(255) NOT NULL,
  event      BINARY(16)     NOT NULL,
  digest     BINARY(32)     NOT NULL,
  first_seen BIGINT         NOT NULL,
  expires_at BIGINT         NOT NULL,
  PRIMARY KEY (source, `key`),
  CONSTRAINT oncehook_keys_length CHECK (LENGTH(`key`) >= 1)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Immutable. The size is stored beside the body, so that a list need not read a body to show its size.
CREATE TABLE IF NOT EXISTS oncehook_events (
  id          BINARY(16)     NOT NULL PRIMARY KEY,
  source      VARBINARY(64)  NOT NULL,
  `key`       VARBINARY(255) NOT NULL,
  key_signed  TINYINT        NOT NULL,
  type        VARBINARY(255),
  entity      VARBINARY(255),
  occurred_at BIGINT,
  received_at BIGINT         NOT NULL,
  integrity   ENUM('body', 'fields', 'none') CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  digest      BINARY(32)     NOT NULL,
  size        INT UNSIGNED   NOT NULL,
  headers     MEDIUMBLOB     NOT NULL,
  body        LONGBLOB       NOT NULL,
  -- The version of the entity that the event reports, as the provider counts.
  version     BIGINT
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Small and mutable: one event for one route in one epoch. attempt is the fence: it only grows, and a worker that
-- settles must name it. attempt_limit is set where it differs from the route's limit (a manual retry raises it);
-- lease_limit is the limit that the leased attempt was given. A success is recorded here (settled_at, attempt); only
-- failures and leases have rows in attempts, so the usual case costs one row. entity and version are set where a route
-- of the event's source uses them, and on parked deliveries. A delivery that waits behind another of its entity has no
-- due time: its run_at is the largest number. blocked_at is since when it has waited so, parked_at since when it has
-- waited for a prerequisite.
--
-- Three columns follow from the others. place and place_at say where a delivery is in the one index that all queues
-- share: 0 waits, 1 is leased, 2 is dead, 3 is parked, 4 is superseded, 5 is skipped; null succeeded. What ended without
-- success has no place_at, so within its route it is in the order of events, for lists. line is how a delivery is found by its entity. Its first letter
-- separates the entity's queue (l) from its running delivery (r) and its parked ones (p), so that a search for one kind
-- never reads the others. What is over has null.
CREATE TABLE IF NOT EXISTS oncehook_deliveries (
  event         BINARY(16)    NOT NULL,
  route         VARBINARY(64) NOT NULL,
  epoch         INT UNSIGNED  NOT NULL DEFAULT 0,
  state         ENUM('ready', 'running', 'retrying', 'parked', 'succeeded', 'dead', 'superseded', 'skipped')
                CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  attempt       INT UNSIGNED  NOT NULL DEFAULT 0,
  attempt_limit INT UNSIGNED,
  run_at        BIGINT        NOT NULL,
  lease_until   BIGINT,
  lease_limit   INT UNSIGNED,
  settled_at    BIGINT,
  result        MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  error         MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  cause         ENUM('destination', 'handler', 'ours', 'poison', 'prerequisite') CHARACTER SET ascii COLLATE ascii_bin,
  place         TINYINT UNSIGNED GENERATED ALWAYS AS
                (CASE state WHEN 'ready' THEN 0 WHEN 'retrying' THEN 0 WHEN 'running' THEN 1 WHEN 'dead' THEN 2
                            WHEN 'parked' THEN 3 WHEN 'superseded' THEN 4 WHEN 'skipped' THEN 5 END) STORED,
  place_at      BIGINT GENERATED ALWAYS AS
                (CASE state WHEN 'ready' THEN run_at WHEN 'retrying' THEN run_at WHEN 'parked' THEN run_at
                            WHEN 'running' THEN lease_until END) STORED,
  entity        VARBINARY(255),
  version       BIGINT,
  blocked_at    BIGINT,
  parked_at     BIGINT,
  line          VARBINARY(256) GENERATED ALWAYS AS
                (CASE state WHEN 'ready' THEN CONCAT('l', entity) WHEN 'retrying' THEN CONCAT('l', entity)
                            WHEN 'dead' THEN CONCAT('l', entity) WHEN 'running' THEN CONCAT('r', entity)
                            WHEN 'parked' THEN CONCAT('p', entity) END) STORED,
  PRIMARY KEY (event, route, epoch),
  KEY oncehook_deliveries_place (place, route, place_at, event, epoch),
  KEY oncehook_deliveries_line (line, route, version, event, epoch)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Append-only: attempts that were leased or that failed.
CREATE TABLE IF NOT EXISTS oncehook_attempts (
  event       BINARY(16)    NOT NULL,
  route       VARBINARY(64) NOT NULL,
  epoch       INT UNSIGNED  NOT NULL,
  attempt     INT UNSIGNED  NOT NULL,
  started_at  BIGINT        NOT NULL,
  finished_at BIGINT,
  outcome     ENUM('succeeded', 'failed', 'lost', 'given_back') CHARACTER SET ascii COLLATE ascii_bin,
  error       MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  PRIMARY KEY (event, route, epoch, attempt)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Sources and routes whose handling an operator has stopped.
CREATE TABLE IF NOT EXISTS oncehook_pauses (
  kind ENUM('source', 'route') CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  name VARBINARY(64) NOT NULL,
  at   BIGINT        NOT NULL,
  PRIMARY KEY (kind, name)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Other bodies that came under a known key. The row with an empty digest counts the bodies that were not kept.
CREATE TABLE IF NOT EXISTS oncehook_conflicts (
  event    BINARY(16)    NOT NULL,
  digest   VARBINARY(32) NOT NULL,
  count    BIGINT        NOT NULL,
  first_at BIGINT        NOT NULL,
  last_at  BIGINT        NOT NULL,
  headers  MEDIUMBLOB    NOT NULL,
  body     LONGBLOB      NOT NULL,
  PRIMARY KEY (event, digest)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Further copies of an event, counted in memory and stored about twice a second.
-- latest: the last few, [[time, peer], …], oldest first.
CREATE TABLE IF NOT EXISTS oncehook_duplicates (
  event    BINARY(16) NOT NULL PRIMARY KEY,
  journal  BIGINT     NOT NULL DEFAULT 0,
  memory   BIGINT     NOT NULL DEFAULT 0,
  redis    BIGINT     NOT NULL DEFAULT 0,
  first_at BIGINT     NOT NULL,
  last_at  BIGINT     NOT NULL,
  latest   TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What is unusual about an event. The second key finds the quarantined events in their order.
CREATE TABLE IF NOT EXISTS oncehook_flags (
  event  BINARY(16) NOT NULL,
  flag   ENUM('conflict', 'suspected_replay', 'quarantined') CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  at     BIGINT     NOT NULL,
  reason TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  PRIMARY KEY (event, flag),
  KEY oncehook_flags_flag (flag, event)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The state of an entity for a route or a machine (scope). Only entities that need one have a row. The row of (route,
-- entity) is also the lock under which workers decide which delivery of the entity runs next. version counts effects,
-- last_at is the newest time that took effect, and newest the newest version, as the provider counts, that did.
CREATE TABLE IF NOT EXISTS oncehook_entities (
  scope   VARBINARY(128) NOT NULL,
  entity  VARBINARY(255) NOT NULL,
  version BIGINT         NOT NULL DEFAULT 0,
  last_at BIGINT,
  state   VARBINARY(255),
  newest  BIGINT,
  PRIMARY KEY (scope, entity)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- What operators did, and why.
CREATE TABLE IF NOT EXISTS oncehook_audit (
  id      BIGINT         NOT NULL AUTO_INCREMENT PRIMARY KEY,
  at      BIGINT         NOT NULL,
  who     TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  action  VARBINARY(64)  NOT NULL,
  subject VARBINARY(128) NOT NULL,
  reason  TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  detail  MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  KEY oncehook_audit_subject (subject, id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Counts per source since the journal was made. Forgetting events does not lower them. Every writer adds to the rows of
-- its own shard; with one row per source, all accepts of the source would wait for each other's commits.
CREATE TABLE IF NOT EXISTS oncehook_totals (
  source      VARBINARY(64)     NOT NULL,
  shard       SMALLINT UNSIGNED NOT NULL,
  events      BIGINT            NOT NULL DEFAULT 0,
  duplicates  BIGINT            NOT NULL DEFAULT 0,
  conflicts   BIGINT            NOT NULL DEFAULT 0,
  quarantined BIGINT            NOT NULL DEFAULT 0,
  PRIMARY KEY (source, shard)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The first event with a body, for sources whose keys are unsigned: the same body under another key is a suspected
-- replay.
CREATE TABLE IF NOT EXISTS oncehook_bodies (
  source VARBINARY(64) NOT NULL,
  digest BINARY(32)    NOT NULL,
  event  BINARY(16)    NOT NULL,
  PRIMARY KEY (source, digest)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Ids that the spool of a node answered for events that have another id here, because another node was first with the
-- key.
CREATE TABLE IF NOT EXISTS oncehook_spool_aliases (
  alias BINARY(16) NOT NULL PRIMARY KEY,
  event BINARY(16) NOT NULL,
  KEY oncehook_spool_aliases_event (event)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The search index of lists, filled behind the accepts: which values occur in a bucket, about four seconds of ids
-- (milliseconds divided by 4096), and there the first and the last millisecond. value is a hash of the field's letter and
-- the text, so a row may promise what is not there. bucket is looked up when its events are forgotten.
CREATE TABLE IF NOT EXISTS oncehook_buckets (
  value  BIGINT   NOT NULL,
  bucket BIGINT   NOT NULL,
  first  SMALLINT NOT NULL,
  last   SMALLINT NOT NULL,
  PRIMARY KEY (value, bucket),
  KEY oncehook_buckets_bucket (bucket)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The last event that, with all before it, is in the index. One row; the node that fills the index has it locked.
CREATE TABLE IF NOT EXISTS oncehook_indexed (
  one  TINYINT    NOT NULL PRIMARY KEY,
  last BINARY(16) NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

INSERT IGNORE INTO oncehook_indexed (one, last) VALUES (1, REPEAT(x'00', 16));

-- A number for each start of the server. The table is in memory, so every start empties it. Only caches depend on it.
CREATE TABLE IF NOT EXISTS oncehook_life (
  one  TINYINT NOT NULL PRIMARY KEY,
  life BIGINT  NOT NULL
) ENGINE = MEMORY;

-- An event's status, derived: quarantined, else unrouted, else the worst of its deliveries.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW oncehook_event_status AS
SELECT e.id AS event,
       CASE
         WHEN EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = e.id AND f.flag = 'quarantined') THEN 'quarantined'
         ELSE COALESCE((SELECT CONVERT(d.state USING utf8mb4) FROM oncehook_deliveries d WHERE d.event = e.id
                         ORDER BY FIELD(d.state, 'dead', 'parked', 'retrying', 'running', 'ready', 'superseded',
                                        'skipped', 'succeeded')
                         LIMIT 1), 'unrouted')
       END AS status
  FROM oncehook_events e;

-- The two tables that people expect to find.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW oncehook_processed_events AS
SELECT LOWER(HEX(e.id)) AS event_id, CONVERT(e.source USING utf8mb4) AS source, CONVERT(e.`key` USING utf8mb4) AS `key`,
       CONVERT(e.type USING utf8mb4) AS type, CONVERT(e.entity USING utf8mb4) AS entity, s.status AS status,
       TIMESTAMPADD(MICROSECOND, e.received_at, '1970-01-01') AS received_at,
       COALESCE(d.journal + d.memory + d.redis, 0) AS duplicates
  FROM oncehook_events e
  JOIN oncehook_event_status s ON s.event = e.id
  LEFT JOIN oncehook_duplicates d ON d.event = e.id;

-- A success that was never leased is recorded in the delivery itself.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW oncehook_retry_logs AS
SELECT CONVERT(e.source USING utf8mb4) AS source, CONVERT(e.`key` USING utf8mb4) AS `key`,
       CONVERT(a.route USING utf8mb4) AS route, a.epoch AS epoch, a.attempt AS attempt,
       CONVERT(a.outcome USING utf8mb4) AS outcome, a.error AS error,
       TIMESTAMPADD(MICROSECOND, a.started_at, '1970-01-01') AS started_at,
       TIMESTAMPADD(MICROSECOND, a.finished_at, '1970-01-01') AS finished_at
  FROM oncehook_attempts a JOIN oncehook_events e ON e.id = a.event
UNION ALL
SELECT CONVERT(e.source USING utf8mb4), CONVERT(e.`key` USING utf8mb4), CONVERT(d.route USING utf8mb4), d.epoch,
       d.attempt, 'succeeded', NULL, TIMESTAMPADD(MICROSECOND, d.settled_at, '1970-01-01'),
       TIMESTAMPADD(MICROSECOND, d.settled_at, '1970-01-01')
  FROM oncehook_deliveries d JOIN oncehook_events e ON e.id = d.event
 WHERE d.state = 'succeeded'
   AND NOT EXISTS (SELECT 1 FROM oncehook_attempts a WHERE a.event = d.event AND a.route = d.route
                      AND a.epoch = d.epoch AND a.attempt = d.attempt);
