//! The guards of effects in a database of the user's on PostgreSQL.
//!
//! They stand in a schema of their own, `oncehook_guard`, so that a journal may live in the same database. Every
//! statement that writes guards names its conflict target, so a table or a key that was changed is an error.

use super::Postgres;
use super::connection::{EngineError, Session};
use super::user_sql::{Settings, Trouble};
use crate::journal::server::external::{ExternalDatabase, GuardSql, Guards, Shape, Write};
use crate::journal::server::user_sql::UserSql;

/// A database of the user's on PostgreSQL.
pub type PostgresElsewhere = ExternalDatabase<Postgres>;

/// While the user's statements run in the transaction of a guard, and afterwards.
pub(super) const SETTINGS: Settings = Settings {
    theirs: "SET LOCAL lock_timeout TO DEFAULT; SET LOCAL plan_cache_mode = auto",
    ours: "SET LOCAL plan_cache_mode = force_custom_plan",
};

/// `attempt` is the one that wrote the row. `journal` says whose delivery or entity it is, because several gateways
/// may use the database. Of an entity, `version` counts effects; `newest` and `last_at` are those of the newest one.
const TABLES: &str = r#"
CREATE TABLE IF NOT EXISTS oncehook_guard.oncehook_applied (
  event   uuid NOT NULL,
  route   text COLLATE "C" NOT NULL,
  epoch   integer NOT NULL,
  attempt integer NOT NULL,
  void    boolean NOT NULL,
  result  text,
  journal bigint NOT NULL,
  at      timestamptz NOT NULL,
  CONSTRAINT applied_once PRIMARY KEY (event, route, epoch)
) WITH (fillfactor = 90);
CREATE TABLE IF NOT EXISTS oncehook_guard.oncehook_applied_entities (
  journal bigint NOT NULL,
  scope   text COLLATE "C" NOT NULL,
  entity  text COLLATE "C" NOT NULL,
  version bigint NOT NULL DEFAULT 0,
  newest  bigint,
  last_at bigint,
  state   text COLLATE "C",
  CONSTRAINT applied_entities_once PRIMARY KEY (journal, scope, entity)
) WITH (fillfactor = 90)"#;

impl Guards for Postgres {
    const GUARD: GuardSql = GuardSql {
        // A guard that another transaction is writing is not waited for for long: that transaction decides.
        begin: Some("BEGIN; SET LOCAL lock_timeout = 2000; SET LOCAL plan_cache_mode = force_custom_plan"),
        guards: Shape {
            name: "oncehook_guard.oncehook_applied",
            lines: "column at timestamp with time zone not null; column attempt integer not null; \
                    column epoch integer not null; column event uuid not null; \
                    column journal bigint not null; column result text; \
                    column route text not null collate C; column void boolean not null; \
                    key applied_once (event,route,epoch); table r logged",
        },
        entities: Shape {
            name: "oncehook_guard.oncehook_applied_entities",
            lines: "column entity text not null collate C; column journal bigint not null; \
                    column last_at bigint; column newest bigint; column scope text not null collate C; \
                    column state text collate C; column version bigint not null; \
                    key applied_entities_once (journal,scope,entity); table r logged",
        },
        // A trigger, a rule or a table that is not logged would show here too.
        shape: r#"
SELECT 'table ' || c.relkind::text || CASE c.relpersistence WHEN 'p' THEN ' logged' ELSE ' not logged' END
  FROM pg_catalog.pg_class c WHERE c.oid = to_regclass($1::text)
UNION ALL
SELECT 'column ' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
       || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
       || CASE WHEN o.collname IS NULL OR o.collname = 'default' THEN '' ELSE ' collate ' || o.collname END
  FROM pg_catalog.pg_attribute a LEFT JOIN pg_catalog.pg_collation o ON o.oid = a.attcollation
 WHERE a.attrelid = to_regclass($1::text) AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT 'key ' || i.relname || ' ('
       || (SELECT string_agg(a.attname, ',' ORDER BY k.place)
             FROM unnest(x.indkey::int2[]) WITH ORDINALITY AS k(attribute, place)
             JOIN pg_catalog.pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.attribute)
       || ')' || CASE WHEN x.indisvalid AND x.indisready AND x.indimmediate AND x.indpred IS NULL THEN ''
                      ELSE ' useless' END
  FROM pg_catalog.pg_index x JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
 WHERE x.indrelid = to_regclass($1::text) AND x.indisunique
UNION ALL
SELECT 'trigger ' || g.tgname FROM pg_catalog.pg_trigger g
 WHERE g.tgrelid = to_regclass($1::text) AND NOT g.tgisinternal
UNION ALL
SELECT 'rule ' || r.rulename FROM pg_catalog.pg_rewrite r WHERE r.ev_class = to_regclass($1::text)"#,
        write: Write::AtOnce(
            "INSERT INTO oncehook_guard.oncehook_applied AS a (event, route, epoch, attempt, void, journal, at)
             SELECT t.event, t.route, t.epoch, t.attempt, $6::boolean, $5::bigint, now()
               FROM unnest($1::uuid[], $2::text[], $3::integer[], $4::integer[]) AS t(event, route, epoch, attempt)
             ON CONFLICT (event, route, epoch) DO UPDATE
                SET attempt = excluded.attempt, void = excluded.void, result = NULL, journal = excluded.journal,
                    at = excluded.at
              WHERE a.void AND a.attempt < excluded.attempt
             RETURNING event, route, epoch",
        ),
        look: "SELECT event, route, epoch, a.attempt, a.void, a.result
                 FROM unnest($1::uuid[], $2::text[], $3::integer[]) AS t(event, route, epoch)
                 JOIN oncehook_guard.oncehook_applied a USING (event, route, epoch)",
        give_up: "UPDATE oncehook_guard.oncehook_applied a SET void = true
                    FROM unnest($1::uuid[], $2::text[], $3::integer[]) AS t(event, route, epoch)
                   WHERE a.event = t.event AND a.route = t.route AND a.epoch = t.epoch",
        keep_results: "UPDATE oncehook_guard.oncehook_applied a SET result = t.result
                         FROM unnest($1::uuid[], $2::text[], $3::integer[], $4::text[])
                              AS t(event, route, epoch, result)
                        WHERE a.event = t.event AND a.route = t.route AND a.epoch = t.epoch",
        aged: "SELECT event, route, epoch FROM oncehook_guard.oncehook_applied,
                      (SELECT least(now(), to_timestamp($7::bigint / 1000000.0)) AS now) AS t
                WHERE (event, route, epoch) > ($1::uuid, $2::text, $3::integer)
                  AND event < (lpad(to_hex((1000 * extract(epoch FROM t.now))::bigint - $4::bigint / 1000), 12, '0')
                               || repeat('0', 20))::uuid
                  AND route = $2::text AND journal = $5::bigint AND at < t.now - $4::bigint * interval '1 microsecond'
                ORDER BY event, route, epoch LIMIT $6::bigint",
        forget: "DELETE FROM oncehook_guard.oncehook_applied a
                  USING unnest($1::uuid[], $2::text[], $3::integer[]) AS t(event, route, epoch)
                  WHERE a.event = t.event AND a.route = t.route AND a.epoch = t.epoch",
        add_entities: "INSERT INTO oncehook_guard.oncehook_applied_entities (journal, scope, entity)
                       SELECT $2::bigint, $3::text, t.entity FROM unnest($1::text[]) AS t(entity)
                       ON CONFLICT (journal, scope, entity) DO NOTHING",
        lock_entities: "SELECT entity, newest, last_at, state, version FROM oncehook_guard.oncehook_applied_entities
                         WHERE journal = $2::bigint AND scope = $3::text AND entity = ANY ($1::text[])
                         ORDER BY entity FOR UPDATE",
        keep_entities: "UPDATE oncehook_guard.oncehook_applied_entities e
                           SET version = t.version, newest = t.newest, last_at = t.last_at, state = t.state
                          FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[])
                               AS t(entity, version, newest, last_at, state)
                         WHERE e.journal = $6::bigint AND e.scope = $7::text AND e.entity = t.entity",
    };

    /// A role that may not create schemas can use one that exists.
    async fn make_tables(session: &mut Session) -> Result<(), EngineError> {
        let lock = i64::from_be_bytes(*b"oncguard");
        session.run(&format!("BEGIN; SELECT pg_advisory_xact_lock({lock})")).await?;
        let schema = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = 'oncehook_guard'";
        if session.row(schema, &[]).await?.is_none() {
            session.run("CREATE SCHEMA oncehook_guard").await?;
        }
        session.run(&format!("{TABLES}; COMMIT")).await
    }

    fn commit_trouble(error: EngineError) -> Trouble {
        <Self as UserSql>::trouble(error)
    }
}
