//! The tables: made by one migration, and compared with what this program expects before it uses them.
//!
//! The migration runs in one transaction under an advisory lock, together with the row that records it. So of several
//! nodes that start at once one makes the tables, and a node that is killed at any statement leaves nothing behind. A
//! journal that another version made is refused (`journal::migration`).

use super::OpenError;
use super::connection::Session;
use crate::journal::migration::{Migration, compare};

const MIGRATION: Migration = Migration { name: "001_journal", sql: include_str!("migrations/001_journal.sql") };

/// The number of the advisory lock: `oncehook` in ASCII.
const MIGRATION_LOCK: i64 = 0x6f6e_6365_686f_6f6b;

const MIGRATIONS_TABLE: &str = r#"CREATE SCHEMA IF NOT EXISTS oncehook;
CREATE TABLE IF NOT EXISTS oncehook.migrations (
  name       text COLLATE "C" CONSTRAINT migrations_once PRIMARY KEY,
  digest     text COLLATE "C" NOT NULL,
  applied_at bigint NOT NULL
)"#;

/// Makes the tables where there are none. Returns the names of the migrations that were applied now.
pub(super) async fn migrate(session: &Session) -> Result<Vec<String>, OpenError> {
    // A node that waits here for another node's migration waits longer than for a row, but not for ever.
    let patience = "SET LOCAL lock_timeout = 9000; SET LOCAL statement_timeout = 9000";
    session.run(&format!("BEGIN; {patience}; SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")).await?;
    let made = session.row("SELECT to_regclass('oncehook.migrations') IS NOT NULL", &[]).await?;
    if !made.is_some_and(|row| row.get(0)) {
        // Only where it is missing: a role that may not create schemas can use one that exists.
        session.run(MIGRATIONS_TABLE).await?;
    }
    let rows = session.rows("SELECT name, digest FROM oncehook.migrations ORDER BY name", &[]).await?;
    let recorded: Vec<(String, String)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let mut applied = Vec::new();
    if MIGRATION.is_due(&recorded).map_err(OpenError::Schema)? {
        session.run(MIGRATION.sql).await?;
        let sql = "INSERT INTO oncehook.migrations (name, digest, applied_at) VALUES ($1, $2, oncehook.micros())";
        session.change(sql, &[&MIGRATION.name, &MIGRATION.digest()]).await?;
        applied.push(MIGRATION.name.to_owned());
    }
    session.run("COMMIT").await?;
    Ok(applied)
}

/// What the catalogue says about the schema that the migration makes, a line for each table, column, index, trigger and
/// rule. A test makes a schema and compares.
const EXPECTED: &str = include_str!("shape.txt");

/// Compares our part of the catalogue with what the migration makes: columns with types and collations, keys and
/// indexes with all that could make them useless (not unique, INVALID, another operator class), tables that are not
/// logged, triggers and rules.
///
/// This is what finds a renamed column, a dropped, invalid or changed unique key and a folding collation (fault 105)
/// before the first request. Each day of events or attempts must be like the rest of them, under its own name.
pub(super) async fn check(session: &Session) -> Result<(), OpenError> {
    let found = shape(session).await?;
    let mut expected: Vec<String> = EXPECTED.lines().map(str::to_owned).collect();
    for (table, day) in found.iter().filter_map(|line| day_of(line)) {
        let rest = format!("{table}_rest");
        let of_rest = EXPECTED.lines().filter(|line| line.contains(&rest));
        expected.extend(of_rest.map(|line| line.replace(&rest, day)));
    }
    compare(expected.iter().map(String::as_str), found.iter().map(String::as_str)).map_err(OpenError::Schema)
}

/// The table and its day that a line of the shape begins to tell about.
fn day_of(line: &str) -> Option<(&str, &str)> {
    let name = line.strip_prefix("table ")?.split(' ').next()?;
    let (table, day) = name.split_once('_').filter(|(table, _)| ["events", "attempts"].contains(table))?;
    (day.len() == 8 && day.bytes().all(|byte| byte.is_ascii_digit())).then_some((table, name))
}

/// Our part of the catalogue.
pub(super) async fn shape(session: &Session) -> Result<Vec<String>, OpenError> {
    let rows = session.rows(SHAPE, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

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
 WHERE t.relnamespace = 'oncehook'::regnamespace AND t.relkind = 'p'
 ORDER BY 1"#;
