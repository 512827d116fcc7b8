-- The journal. Whatever comes from outside is bytes (bytea) or checked text; times are microseconds since 1970 (UTC), of
-- this database's clock where they decide anything. Text compares byte by byte (COLLATE "C").
-- Accepting an event costs one row in keys, one in events, and one narrow row in deliveries for each route that wants it.
-- Several nodes write here, and two of them may use the same sequence, so an event's key is its whole id; ids grow with
-- time, so new rows still go to the end of the index. No foreign keys: rows that belong together are written in one statement and
-- forgotten in one transaction.

-- The database's time in microseconds, the same throughout a transaction.
CREATE FUNCTION oncehook.micros() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
  RETURN (extract(epoch FROM pg_catalog.now()) * 1000000)::bigint;

-- The ledger: the memory of keys. It outlives the event.
CREATE TABLE oncehook.keys (
  source     text COLLATE "C" NOT NULL,
  key        bytea  NOT NULL CONSTRAINT keys_key_length CHECK (octet_length(key) BETWEEN 1 AND 255),
  event      uuid   NOT NULL,
  digest     bytea  NOT NULL CONSTRAINT keys_digest_length CHECK (octet_length(digest) = 32),
  first_seen bigint NOT NULL,
  expires_at bigint NOT NULL,
  CONSTRAINT keys_once PRIMARY KEY (source, key)
);

-- Immutable.
CREATE TABLE oncehook.events (
  id          uuid    CONSTRAINT events_id PRIMARY KEY,
  source      text COLLATE "C" NOT NULL,
  key         bytea   NOT NULL,
  key_signed  boolean NOT NULL,
  type        text COLLATE "C",
  entity      text COLLATE "C",
  occurred_at bigint,
  received_at bigint  NOT NULL,
  integrity   text COLLATE "C" NOT NULL CONSTRAINT events_integrity CHECK (integrity IN ('body', 'fields', 'none')),
  digest      bytea   NOT NULL CONSTRAINT events_digest_length CHECK (octet_length(digest) = 32),
  headers     bytea   NOT NULL,
  body        bytea   NOT NULL
);

-- Small and mutable: one event for one route in one epoch. attempt is the fence: it only grows, and whoever settles names
-- it. attempt_limit is set where it differs from the route's own (a manual retry raises it). A success is recorded here
-- (settled_at, attempt); only failures and leases have rows in attempts, so that the usual case costs one row.
CREATE TABLE oncehook.deliveries (
  event         uuid    NOT NULL,
  route         text COLLATE "C" NOT NULL,
  epoch         integer NOT NULL DEFAULT 0,
  state         text COLLATE "C" NOT NULL CONSTRAINT deliveries_state
                CHECK (state IN ('ready', 'running', 'retrying', 'parked', 'succeeded', 'dead', 'superseded', 'skipped')),
  attempt       integer NOT NULL DEFAULT 0,
  attempt_limit integer,
  run_at        bigint  NOT NULL,
  lease_until   bigint,
  lease_limit   integer, -- the limit that the leased attempt was given
  settled_at    bigint,
  result        text COLLATE "C",
  error         text COLLATE "C",
  cause         text COLLATE "C" CONSTRAINT deliveries_cause CHECK (cause IN ('destination', 'handler', 'ours', 'poison')),
  CONSTRAINT deliveries_once PRIMARY KEY (event, route, epoch)
-- Every row is updated at least once: what is left behind is to be swept before the table grows by it.
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);

-- The queue of a route: what is due, in order. Holds only what waits, so it stays small however long the history.
CREATE INDEX deliveries_due ON oncehook.deliveries (route, run_at, event, epoch) WHERE state IN ('ready', 'retrying');

-- Leases that may run out.
CREATE INDEX deliveries_leased ON oncehook.deliveries (route, lease_until) WHERE state = 'running';

-- Dead letters, and what was set aside, in the order of events, for people.
CREATE INDEX deliveries_dead ON oncehook.deliveries (event, route) WHERE state = 'dead';
CREATE INDEX deliveries_aside ON oncehook.deliveries (event, state) WHERE state IN ('parked', 'superseded', 'skipped');

-- Append-only: attempts that were leased or that failed.
CREATE TABLE oncehook.attempts (
  event       uuid    NOT NULL,
  route       text COLLATE "C" NOT NULL,
  epoch       integer NOT NULL,
  attempt     integer NOT NULL,
  started_at  bigint  NOT NULL,
  finished_at bigint,
  outcome     text COLLATE "C" CONSTRAINT attempts_outcome CHECK (outcome IN ('succeeded', 'failed', 'lost', 'given_back')),
  error       text COLLATE "C",
  CONSTRAINT attempts_once PRIMARY KEY (event, route, epoch, attempt)
);

-- Sources and routes whose handling an operator has stopped.
CREATE TABLE oncehook.pauses (
  kind text COLLATE "C" NOT NULL CONSTRAINT pauses_kind CHECK (kind IN ('source', 'route')),
  name text COLLATE "C" NOT NULL,
  at   bigint NOT NULL,
  CONSTRAINT pauses_once PRIMARY KEY (kind, name)
);

-- Other bodies that came under a known key. An empty digest sums up those beyond the ones that are kept.
CREATE TABLE oncehook.conflicts (
  event    uuid   NOT NULL,
  digest   bytea  NOT NULL CONSTRAINT conflicts_digest_length CHECK (octet_length(digest) IN (0, 32)),
  count    bigint NOT NULL,
  first_at bigint NOT NULL,
  last_at  bigint NOT NULL,
  headers  bytea  NOT NULL,
  body     bytea  NOT NULL,
  CONSTRAINT conflicts_once PRIMARY KEY (event, digest)
);

-- Further deliveries of an event, added up in memory and stored about twice a second.
-- latest: the last few, [[time, peer], …], oldest first.
CREATE TABLE oncehook.duplicates (
  event    uuid   CONSTRAINT duplicates_once PRIMARY KEY,
  journal  bigint NOT NULL DEFAULT 0,
  memory   bigint NOT NULL DEFAULT 0,
  redis    bigint NOT NULL DEFAULT 0,
  first_at bigint NOT NULL,
  last_at  bigint NOT NULL,
  latest   jsonb  NOT NULL
);

-- What is odd about an event: conflict, suspected_replay, quarantined.
CREATE TABLE oncehook.flags (
  event  uuid   NOT NULL,
  flag   text COLLATE "C" NOT NULL CONSTRAINT flags_flag CHECK (flag IN ('conflict', 'suspected_replay', 'quarantined')),
  at     bigint NOT NULL,
  reason text COLLATE "C",
  CONSTRAINT flags_once PRIMARY KEY (event, flag)
);

-- What is held, in the order of events, for people.
CREATE INDEX flags_held ON oncehook.flags (event) WHERE flag = 'quarantined';

-- Per (route or machine, entity), only for those that need it.
CREATE TABLE oncehook.entities (
  scope   text COLLATE "C" NOT NULL,
  entity  text COLLATE "C" NOT NULL,
  version bigint NOT NULL DEFAULT 0,
  last_at bigint,
  state   text COLLATE "C",
  CONSTRAINT entities_once PRIMARY KEY (scope, entity)
);

-- What operators did, and why.
CREATE TABLE oncehook.audit (
  id      bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT audit_id PRIMARY KEY,
  at      bigint NOT NULL,
  who     text COLLATE "C" NOT NULL,
  action  text COLLATE "C" NOT NULL,
  subject text COLLATE "C" NOT NULL,
  reason  text COLLATE "C",
  detail  text COLLATE "C"
);
CREATE INDEX audit_subject ON oncehook.audit (subject, id);

-- Counts per source since the journal was made; forgetting events does not lower them. Every writer adds to rows of its
-- own shard, or all accepts of a source would wait for each other's commits.
CREATE TABLE oncehook.totals (
  source      text COLLATE "C" NOT NULL,
  shard       smallint NOT NULL,
  events      bigint NOT NULL DEFAULT 0,
  duplicates  bigint NOT NULL DEFAULT 0,
  conflicts   bigint NOT NULL DEFAULT 0,
  quarantined bigint NOT NULL DEFAULT 0,
  CONSTRAINT totals_once PRIMARY KEY (source, shard)
) WITH (fillfactor = 50);

-- The first event with a body, for sources whose keys are unsigned: the same body under another key is a suspected replay.
CREATE TABLE oncehook.bodies (
  source text COLLATE "C" NOT NULL,
  digest bytea NOT NULL,
  event  uuid  NOT NULL,
  CONSTRAINT bodies_once PRIMARY KEY (source, digest)
);

-- The search index of lists, filled behind the accepts: which values occur in a bucket, about four seconds of ids
-- (milliseconds divided by 4096), and there the first and the last millisecond. value is a hash of the field's letter and the
-- text, so a row may promise what is not there. Filled in the order of buckets; that is all the index on them needs to know.
CREATE TABLE oncehook.buckets (
  value  bigint   NOT NULL,
  bucket bigint   NOT NULL,
  first  smallint NOT NULL,
  last   smallint NOT NULL
);
-- Not unique: two rows of one value and bucket do no harm, and looking for the first would cost as much as writing another.
CREATE INDEX buckets_value ON oncehook.buckets (value, bucket);
CREATE INDEX buckets_bucket ON oncehook.buckets USING brin (bucket) WITH (pages_per_range = 16);

-- The last event that, with all before it, is in the index. One row; the node that fills the index has it locked.
CREATE TABLE oncehook.indexed (last uuid NOT NULL);
INSERT INTO oncehook.indexed (last) VALUES ('00000000-0000-0000-0000-000000000000');

-- The bucket of an event's id: the first 48 bits are milliseconds.
CREATE FUNCTION oncehook.bucket(id uuid) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN ('x' || left(id::text, 8) || substr(id::text, 10, 4))::bit(48)::bigint >> 12;

-- The first id of a time.
CREATE FUNCTION oncehook.first_id(micros bigint) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN (lpad(to_hex(greatest(micros / 1000, 0)), 12, '0') || repeat('0', 20))::uuid;

-- An event's status, derived: quarantined, else unrouted, else the worst of its deliveries.
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

-- The two tables people expect to find.
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
        -- A success that was never leased stands in the delivery itself.
        SELECT d.event, d.route, d.epoch, d.attempt, 'succeeded', NULL, d.settled_at, d.settled_at
          FROM oncehook.deliveries d
         WHERE d.state = 'succeeded'
           AND NOT EXISTS (SELECT 1 FROM oncehook.attempts a WHERE a.event = d.event AND a.route = d.route
                              AND a.epoch = d.epoch AND a.attempt = d.attempt)) a
  JOIN oncehook.events e ON e.id = a.event;
