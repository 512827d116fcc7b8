-- The journal. Values from outside are bytes (bytea) or checked text; times are microseconds since 1970 (UTC), of this
-- database's clock where they decide anything. Text compares byte by byte (COLLATE "C"). Accepting an event writes one
-- row to keys, one to events, and one narrow row to deliveries for each route that wants it. Several nodes write here,
-- and two of them may use the same sequence, so an event's key is its whole id. Ids grow with time, so new rows still
-- go to the end of the index. There are no foreign keys: rows that belong together are written in one statement and
-- forgotten in one transaction.

-- The database's time in microseconds, the same throughout a transaction.
CREATE FUNCTION oncehook.micros() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
  RETURN (extract(epoch FROM pg_catalog.now()) * 1000000)::bigint;

-- The first id of a time. The first 48 bits of an id are milliseconds.
CREATE FUNCTION oncehook.first_id(micros bigint) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN (lpad(to_hex(greatest(micros / 1000, 0)), 12, '0') || repeat('0', 20))::uuid;

-- The bucket of an id: about four seconds, for the search index.
CREATE FUNCTION oncehook.bucket(id uuid) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
  RETURN ('x' || left(id::text, 8) || substr(id::text, 10, 4))::bit(48)::bigint >> 12;

-- The ledger: the memory of keys. A key outlives its event.
CREATE TABLE oncehook.keys (
  source     text COLLATE "C" NOT NULL,
  key        bytea  NOT NULL CONSTRAINT keys_key_length CHECK (octet_length(key) BETWEEN 1 AND 255),
  event      uuid   NOT NULL,
  digest     bytea  NOT NULL CONSTRAINT keys_digest_length CHECK (octet_length(digest) = 32),
  first_seen bigint NOT NULL,
  expires_at bigint NOT NULL,
  CONSTRAINT keys_once PRIMARY KEY (source, key)
);

-- Immutable. Events and attempts are partitioned by day (UTC), so that forgetting a day is dropping a table. A day is a
-- range of ids. The nodes make days ahead of time while the journal runs (`days`); the default partition, the rest,
-- takes the rows of every day that has no partition.
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
  body        bytea   NOT NULL,
  version     bigint -- the version of the entity that the event reports, as the provider counts
) PARTITION BY RANGE (id);
CREATE TABLE oncehook.events_rest PARTITION OF oncehook.events DEFAULT;

-- Small and mutable: one event for one route in one epoch. attempt is the fence: it only grows, and a worker that
-- settles must name it. attempt_limit is set where it differs from the route's limit (a manual retry raises it). A
-- success is recorded here (settled_at, attempt); only failures and leases have rows in attempts, so the usual case
-- costs one row. entity and version are set where a route of the event's source uses them, and on parked deliveries. A
-- delivery that waits behind another of its entity has no due time: its run_at is the largest number.
CREATE TABLE oncehook.deliveries (
  event         uuid    NOT NULL,
  route         text COLLATE "C" NOT NULL,
  epoch         integer NOT NULL DEFAULT 0,
  state         text COLLATE "C" NOT NULL CONSTRAINT deliveries_state
                CHECK (state IN ('ready', 'running', 'retrying', 'parked', 'succeeded', 'dead', 'superseded',
                                 'skipped')),
  attempt       integer NOT NULL DEFAULT 0,
  attempt_limit integer,
  run_at        bigint  NOT NULL,
  lease_until   bigint,
  lease_limit   integer, -- the limit that the leased attempt was given
  settled_at    bigint,
  result        text COLLATE "C",
  error         text COLLATE "C",
  cause         text COLLATE "C" CONSTRAINT deliveries_cause
                CHECK (cause IN ('destination', 'handler', 'ours', 'poison', 'prerequisite')),
  entity        text COLLATE "C",
  version       bigint,
  blocked_at    bigint, -- since when it has waited behind another delivery of its entity
  parked_at     bigint, -- since when it has waited for a prerequisite
  CONSTRAINT deliveries_once PRIMARY KEY (event, route, epoch)
-- Every row is updated at least once: vacuum has to free the old versions before the table grows by them.
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);

-- The queue of a route: what is due, in order. It holds only waiting deliveries, so it stays small in a long history.
CREATE INDEX deliveries_due ON oncehook.deliveries (route, run_at, event, epoch) WHERE state IN ('ready', 'retrying');

-- Leases that may run out.
CREATE INDEX deliveries_leased ON oncehook.deliveries (route, lease_until) WHERE state = 'running';

-- The queue of an entity on a route, in order.
CREATE INDEX deliveries_line ON oncehook.deliveries (route, entity, version NULLS FIRST, event, epoch)
 WHERE entity IS NOT NULL AND state IN ('ready', 'retrying', 'running', 'dead');

-- Whether a delivery of an entity is running.
CREATE INDEX deliveries_busy ON oncehook.deliveries (route, entity) WHERE entity IS NOT NULL AND state = 'running';

-- Deliveries that wait behind another of their entity, the longest first.
CREATE INDEX deliveries_blocked ON oncehook.deliveries (route, blocked_at)
 WHERE blocked_at IS NOT NULL AND state IN ('ready', 'retrying');

-- Deliveries that wait for a prerequisite: by the time of the next look, and by the entity whose next success wakes
-- them.
CREATE INDEX deliveries_parked ON oncehook.deliveries (route, run_at) WHERE state = 'parked';
CREATE INDEX deliveries_parked_entity ON oncehook.deliveries (entity) WHERE state = 'parked';

-- Lists for people, in the order of events: dead letters, and deliveries that were set aside.
CREATE INDEX deliveries_dead ON oncehook.deliveries (event, route) WHERE state = 'dead';
CREATE INDEX deliveries_aside ON oncehook.deliveries (event, state) WHERE state IN ('parked', 'superseded', 'skipped');

-- Append-only: attempts that were leased or that failed. Partitioned like their events.
CREATE TABLE oncehook.attempts (
  event       uuid    NOT NULL,
  route       text COLLATE "C" NOT NULL,
  epoch       integer NOT NULL,
  attempt     integer NOT NULL,
  started_at  bigint  NOT NULL,
  finished_at bigint,
  outcome     text COLLATE "C" CONSTRAINT attempts_outcome
              CHECK (outcome IN ('succeeded', 'failed', 'lost', 'given_back')),
  error       text COLLATE "C",
  CONSTRAINT attempts_once PRIMARY KEY (event, route, epoch, attempt)
) PARTITION BY RANGE (event);
CREATE TABLE oncehook.attempts_rest PARTITION OF oncehook.attempts DEFAULT;

-- Days that were dropped, as ranges of ids. The rows of other tables that belong to their events are still to be
-- deleted.
CREATE TABLE oncehook.sweeps (
  first  uuid CONSTRAINT sweeps_once PRIMARY KEY,
  beyond uuid NOT NULL
);

-- Sources and routes whose handling an operator has stopped.
CREATE TABLE oncehook.pauses (
  kind text COLLATE "C" NOT NULL CONSTRAINT pauses_kind CHECK (kind IN ('source', 'route')),
  name text COLLATE "C" NOT NULL,
  at   bigint NOT NULL,
  CONSTRAINT pauses_once PRIMARY KEY (kind, name)
);

-- Other bodies that came under a known key. The row with an empty digest counts the bodies that were not kept.
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

-- Further copies of an event, counted in memory and stored about twice a second.
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

-- What is unusual about an event.
CREATE TABLE oncehook.flags (
  event  uuid   NOT NULL,
  flag   text COLLATE "C" NOT NULL CONSTRAINT flags_flag
         CHECK (flag IN ('conflict', 'suspected_replay', 'quarantined')),
  at     bigint NOT NULL,
  reason text COLLATE "C",
  CONSTRAINT flags_once PRIMARY KEY (event, flag)
);

-- Quarantined events in their order, for people.
CREATE INDEX flags_held ON oncehook.flags (event) WHERE flag = 'quarantined';

-- The state of an entity for a route or a machine (scope). Only entities that need one have a row. The row of (route,
-- entity) is also the lock under which workers decide which delivery of the entity runs next.
CREATE TABLE oncehook.entities (
  scope   text COLLATE "C" NOT NULL,
  entity  text COLLATE "C" NOT NULL,
  version bigint NOT NULL DEFAULT 0, -- counts effects
  last_at bigint,                    -- the newest time that took effect
  state   text COLLATE "C",
  newest  bigint,                    -- the newest version, as the provider counts, that took effect
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

-- Counts per source since the journal was made. Forgetting events does not lower them. Every writer adds to the rows of
-- its own shard; with one row per source, all accepts of the source would wait for each other's commits.
CREATE TABLE oncehook.totals (
  source      text COLLATE "C" NOT NULL,
  shard       smallint NOT NULL,
  events      bigint NOT NULL DEFAULT 0,
  duplicates  bigint NOT NULL DEFAULT 0,
  conflicts   bigint NOT NULL DEFAULT 0,
  quarantined bigint NOT NULL DEFAULT 0,
  CONSTRAINT totals_once PRIMARY KEY (source, shard)
) WITH (fillfactor = 50);

-- The first event with a body, for sources whose keys are unsigned: the same body under another key is a suspected
-- replay.
CREATE TABLE oncehook.bodies (
  source text COLLATE "C" NOT NULL,
  digest bytea NOT NULL,
  event  uuid  NOT NULL,
  CONSTRAINT bodies_once PRIMARY KEY (source, digest)
);

-- For the sweep of a dropped day: without its event, a body's row cannot be found by its key.
CREATE INDEX bodies_event ON oncehook.bodies (event);

-- Ids that the spool of a node answered for events that have another id here, because another node was first with the
-- key.
CREATE TABLE oncehook.spool_aliases (
  alias uuid CONSTRAINT spool_aliases_once PRIMARY KEY,
  event uuid NOT NULL
);
CREATE INDEX spool_aliases_event ON oncehook.spool_aliases (event);

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

-- The two tables that people expect to find.
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
        -- A success that was never leased is recorded in the delivery itself.
        SELECT d.event, d.route, d.epoch, d.attempt, 'succeeded', NULL, d.settled_at, d.settled_at
          FROM oncehook.deliveries d
         WHERE d.state = 'succeeded'
           AND NOT EXISTS (SELECT 1 FROM oncehook.attempts a WHERE a.event = d.event AND a.route = d.route
                              AND a.epoch = d.epoch AND a.attempt = d.attempt)) a
  JOIN oncehook.events e ON e.id = a.event;
