-- The journal, in the user's database; every name begins with oncehook_. Whatever decides (names, keys, types, entities) is
-- VARBINARY, so that it compares byte by byte whatever the database's collation; times are microseconds since 1970 (UTC), of this
-- database's clock where they decide anything. The views show text.
-- Accepting an event costs one row in keys, one in events, and one narrow row in deliveries for each route that wants it.
-- Several nodes write here, and two of them may use the same sequence, so an event's key is its whole id; ids grow with
-- time, so new rows still go to the end of their table. No foreign keys: rows that belong together are written and forgotten in one
-- transaction. A statement that makes a table ends the transaction it is in, so each can be repeated.

-- The ledger: the memory of keys. It outlives the event. Its only unique key is the one that decides.
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

-- Immutable. The size stands beside the body so that nobody reads a body to learn it.
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
  body        LONGBLOB       NOT NULL
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Small and mutable: one event for one route in one epoch. attempt is the fence: it only grows, and whoever settles names
-- it. attempt_limit is set where it differs from the route's own (a manual retry raises it); lease_limit is the limit that the leased
-- attempt was given. A success is recorded here (settled_at, attempt); only failures and leases have rows in attempts, so that the
-- usual case costs one row.
-- place and place_at follow from the rest: where a delivery stands in the one index that all queues share (0 waits, 1 is leased, 2 is
-- dead, 3 is parked, 4 is superseded, 5 is skipped, null succeeded). What is over never stands between those that wait. What ended
-- without success has no place_at, so within its route it is in the order of events, for lists.
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
  cause         ENUM('destination', 'handler', 'ours', 'poison') CHARACTER SET ascii COLLATE ascii_bin,
  place         TINYINT UNSIGNED GENERATED ALWAYS AS
                (CASE state WHEN 'ready' THEN 0 WHEN 'retrying' THEN 0 WHEN 'running' THEN 1 WHEN 'dead' THEN 2 WHEN 'parked' THEN 3
                 WHEN 'superseded' THEN 4 WHEN 'skipped' THEN 5 END)
                STORED,
  place_at      BIGINT GENERATED ALWAYS AS
                (CASE state WHEN 'ready' THEN run_at WHEN 'retrying' THEN run_at WHEN 'parked' THEN run_at
                            WHEN 'running' THEN lease_until END) STORED,
  PRIMARY KEY (event, route, epoch),
  KEY oncehook_deliveries_place (place, route, place_at, event, epoch)
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

-- Other bodies that came under a known key. An empty digest sums up those beyond the ones that are kept.
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

-- Further deliveries of an event, added up in memory and stored about twice a second.
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

-- What is odd about an event: conflict, suspected_replay, quarantined.
CREATE TABLE IF NOT EXISTS oncehook_flags (
  event  BINARY(16) NOT NULL,
  flag   ENUM('conflict', 'suspected_replay', 'quarantined') CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  at     BIGINT     NOT NULL,
  reason TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
  PRIMARY KEY (event, flag)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Per (route or machine, entity), only for those that need it.
CREATE TABLE IF NOT EXISTS oncehook_entities (
  scope   VARBINARY(64)  NOT NULL,
  entity  VARBINARY(255) NOT NULL,
  version BIGINT         NOT NULL DEFAULT 0,
  last_at BIGINT,
  state   VARBINARY(255),
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

-- Counts per source since the journal was made; forgetting events does not lower them. Every writer adds to rows of its
-- own shard, or all accepts of a source would wait for each other's commits.
CREATE TABLE IF NOT EXISTS oncehook_totals (
  source      VARBINARY(64)     NOT NULL,
  shard       SMALLINT UNSIGNED NOT NULL,
  events      BIGINT            NOT NULL DEFAULT 0,
  duplicates  BIGINT            NOT NULL DEFAULT 0,
  conflicts   BIGINT            NOT NULL DEFAULT 0,
  quarantined BIGINT            NOT NULL DEFAULT 0,
  PRIMARY KEY (source, shard)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- The first event with a body, for sources whose keys are unsigned: the same body under another key is a suspected replay.
CREATE TABLE IF NOT EXISTS oncehook_bodies (
  source VARBINARY(64) NOT NULL,
  digest BINARY(32)    NOT NULL,
  event  BINARY(16)    NOT NULL,
  PRIMARY KEY (source, digest)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- Ids that the spool of a node has answered for events that have another one here: another node was first with the key.
CREATE TABLE IF NOT EXISTS oncehook_spool_aliases (
  alias BINARY(16) NOT NULL PRIMARY KEY,
  event BINARY(16) NOT NULL,
  KEY oncehook_spool_aliases_event (event)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

-- A number for each life of the server: in memory, so every start empties it. Nothing but caches depends on it.
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
                         ORDER BY FIELD(d.state, 'dead', 'parked', 'retrying', 'running', 'ready', 'superseded', 'skipped', 'succeeded')
                         LIMIT 1), 'unrouted')
       END AS status
  FROM oncehook_events e;

-- The two tables people expect to find.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW oncehook_processed_events AS
SELECT LOWER(HEX(e.id)) AS event_id, CONVERT(e.source USING utf8mb4) AS source, CONVERT(e.`key` USING utf8mb4) AS `key`,
       CONVERT(e.type USING utf8mb4) AS type, CONVERT(e.entity USING utf8mb4) AS entity, s.status AS status,
       TIMESTAMPADD(MICROSECOND, e.received_at, '1970-01-01') AS received_at,
       COALESCE(d.journal + d.memory + d.redis, 0) AS duplicates
  FROM oncehook_events e
  JOIN oncehook_event_status s ON s.event = e.id
  LEFT JOIN oncehook_duplicates d ON d.event = e.id;

-- A success that was never leased stands in the delivery itself.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW oncehook_retry_logs AS
SELECT CONVERT(e.source USING utf8mb4) AS source, CONVERT(e.`key` USING utf8mb4) AS `key`, CONVERT(a.route USING utf8mb4) AS route,
       a.epoch AS epoch, a.attempt AS attempt, CONVERT(a.outcome USING utf8mb4) AS outcome, a.error AS error,
       TIMESTAMPADD(MICROSECOND, a.started_at, '1970-01-01') AS started_at,
       TIMESTAMPADD(MICROSECOND, a.finished_at, '1970-01-01') AS finished_at
  FROM oncehook_attempts a JOIN oncehook_events e ON e.id = a.event
UNION ALL
SELECT CONVERT(e.source USING utf8mb4), CONVERT(e.`key` USING utf8mb4), CONVERT(d.route USING utf8mb4), d.epoch, d.attempt, 'succeeded',
       NULL, TIMESTAMPADD(MICROSECOND, d.settled_at, '1970-01-01'), TIMESTAMPADD(MICROSECOND, d.settled_at, '1970-01-01')
  FROM oncehook_deliveries d JOIN oncehook_events e ON e.id = d.event
 WHERE d.state = 'succeeded'
   AND NOT EXISTS (SELECT 1 FROM oncehook_attempts a WHERE a.event = d.event AND a.route = d.route
                      AND a.epoch = d.epoch AND a.attempt = d.attempt);
