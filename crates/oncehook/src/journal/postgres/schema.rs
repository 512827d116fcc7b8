//! The tables, in PostgreSQL's words.
//!
//! The migration runs in one transaction under an advisory lock, together with the row that records it. So a node that is
//! killed at any statement leaves nothing behind.

use super::connection::{EngineError, Session};
use super::{OpenError, Postgres, days, pooler};
use crate::journal::migration::Migration;
use crate::journal::server::schema::Schema;

/// The number of the advisory lock: `oncehook` in ASCII.
const MIGRATION_LOCK: i64 = 0x6f6e_6365_686f_6f6b;

const MIGRATIONS_TABLE: &str = r#"CREATE SCHEMA IF NOT EXISTS oncehook;
CREATE TABLE IF NOT EXISTS oncehook.migrations (
  name       text COLLATE "C" CONSTRAINT migrations_once PRIMARY KEY,
  digest     text COLLATE "C" NOT NULL,
  applied_at bigint NOT NULL
)"#;

impl Schema for Postgres {
    const MIGRATION: Migration = Migration { name: "001_journal", sql: include_str!("migrations/001_journal.sql") };
    const RECORDED: &'static str = "SELECT name, digest FROM oncehook.migrations ORDER BY name";
    const RECORD: &'static str =
        "INSERT INTO oncehook.migrations (name, digest, applied_at) VALUES ($1, $2, oncehook.micros())";
    const SHAPE: &'static str = SHAPE;
    const EXPECTED: &'static str = include_str!("shape.txt");

    async fn begin_migration(&self, session: &mut Session) -> Result<(), OpenError> {
        pooler::refuse(self, session).await?;
        // A node that waits here for another node's migration waits longer than for a row, but not for ever.
        let patience = "SET LOCAL lock_timeout = 9000; SET LOCAL statement_timeout = 9000";
        session.run(&format!("BEGIN; {patience}; SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")).await?;
        let made = session.row("SELECT to_regclass('oncehook.migrations') IS NOT NULL", &[]).await?;
        if !made.is_some_and(|row| row.get(0)) {
            // Only where it is missing: a role that may not create schemas can use one that exists.
            session.run(MIGRATIONS_TABLE).await?;
        }
        Ok(())
    }

    async fn make_tables(session: &mut Session) -> Result<(), EngineError> {
        session.run(Self::MIGRATION.sql).await
    }

    async fn end_migration(session: &mut Session) -> Result<(), EngineError> {
        session.run("COMMIT").await
    }

    /// Each day of events or attempts must be like the rest of them, under its own name.
    fn expected_for(found: &[String]) -> Vec<String> {
        let of_day = |(table, day): (&str, &str)| {
            let rest = format!("{table}_rest");
            let of_rest = Self::EXPECTED.lines().filter(|line| line.contains(&rest));
            of_rest.map(|line| line.replace(&rest, day)).collect::<Vec<_>>()
        };
        found.iter().filter_map(|line| day_of(line)).flat_map(of_day).collect()
    }
}

/// The table and its day that a line of the shape begins to tell about.
fn day_of(line: &str) -> Option<(&str, &str)> {
    let name = line.strip_prefix("table ")?.split(' ').next()?;
    let (table, day) = name.split_once('_').filter(|(table, _)| ["events", "attempts"].contains(table))?;
    days::is_name(day).then_some((table, name))
}

/// Columns with types and collations, keys and indexes with all that could make them useless (not unique, INVALID, another
/// operator class), tables that are not logged, triggers, rules and partitions.
const SHAPE: &str = r#"
SELECT 'table ' || c.relname || ' persistence ' || c.relpersistence::text COLLATE "C" AS line
  FROM pg_catalog.pg_class c WHERE c.relnamespace = 'oncehook'::regnamespace AND c.relkind IN ('r', 'p')
UNION ALL
SELECT 'column ' || c.relname || '.' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
       || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
       || coalesce(' collate ' || o.collname, '')
  FROM pg_catalog.pg_attribute a
  JOIN pg_catalog.pg_class c ON c.oid = a.attrelid AND c.relkind IN ('r', 'p', 'v')
  LEFT JOIN pg_catalog.pg_collation o ON o.oid = a.attcollation
 WHERE c.relnamespace = 'oncehook'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT 'index ' || i.relname || ' on ' || t.relname || ' ('
       || (SELECT string_agg(coalesce(a.attname, '?') || ' ' || p.opcname, ', ' ORDER BY k.place)
             FROM unnest(x.indkey::int2[], x.indclass::oid[]) WITH ORDINALITY AS k(attribute, class, place)
             LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.attribute
             LEFT JOIN pg_catalog.pg_opclass p ON p.oid = k.class)
       || ')' || CASE WHEN x.indisunique THEN ' unique' ELSE '' END
       || CASE WHEN x.indisvalid AND x.indisready AND x.indislive THEN '' ELSE ' INVALID' END
       || CASE WHEN x.indimmediate THEN '' ELSE ' deferred' END
       || CASE WHEN x.indpred IS NULL THEN '' ELSE ' partial' END
  FROM pg_catalog.pg_index x
  JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
  JOIN pg_catalog.pg_class t ON t.oid = x.indrelid
 WHERE t.relnamespace = 'oncehook'::regnamespace
UNION ALL
SELECT 'trigger ' || g.tgname || ' on ' || t.relname
  FROM pg_catalog.pg_trigger g JOIN pg_catalog.pg_class t ON t.oid = g.tgrelid
 WHERE t.relnamespace = 'oncehook'::regnamespace AND NOT g.tgisinternal
UNION ALL
SELECT 'rule ' || r.rulename || ' on ' || t.relname
  FROM pg_catalog.pg_rewrite r JOIN pg_catalog.pg_class t ON t.oid = r.ev_class
 WHERE t.relnamespace = 'oncehook'::regnamespace AND t.relkind IN ('r', 'p')
UNION ALL
SELECT 'inherits ' || c.relname || ' from ' || t.relname
  FROM pg_catalog.pg_inherits h JOIN pg_catalog.pg_class c ON c.oid = h.inhrelid JOIN pg_catalog.pg_class t ON t.oid = h.inhparent
 WHERE t.relnamespace = 'oncehook'::regnamespace AND t.relkind = 'r'
UNION ALL
-- Bounds that are what the name says go without saying.
SELECT 'partition ' || c.relname || ' of ' || t.relname
       || CASE WHEN b.bounds = CASE WHEN c.relname = t.relname || '_rest' THEN 'DEFAULT'
                                    WHEN c.relname ~ ('^' || t.relname || '_[0-9]{8}$') THEN
                 (SELECT format('FOR VALUES FROM (%L) TO (%L)', oncehook.first_id(d.day * 86400000000),
                                oncehook.first_id((d.day + 1) * 86400000000))
                    FROM (SELECT (to_date(right(c.relname, 8), 'YYYYMMDD') - DATE '1970-01-01')::bigint AS day) d) END
               THEN '' ELSE coalesce(' ' || b.bounds, '') END
  FROM pg_catalog.pg_inherits h JOIN pg_catalog.pg_class c ON c.oid = h.inhrelid JOIN pg_catalog.pg_class t ON t.oid = h.inhparent
 CROSS JOIN LATERAL (SELECT pg_get_expr(c.relpartbound, c.oid) AS bounds) b
 WHERE t.relnamespace = 'oncehook'::regnamespace AND t.relkind = 'p'"#;
