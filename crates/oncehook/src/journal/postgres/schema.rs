//! The tables: made step by step, and compared with what this program expects before it uses them.
//!
//! All steps run in one transaction under an advisory lock, together with the rows that record them, so nodes that start
//! at once do it once, and one that is killed at any statement leaves nothing behind. A migration that was recorded with
//! another text is an error: the schema was made by another program.

use std::collections::BTreeSet;

use super::OpenError;
use super::connection::Session;

struct Migration {
    name: &'static str,
    sql: &'static str,
}

const MIGRATIONS: &[Migration] = &[
    Migration { name: "001_journal", sql: include_str!("migrations/001_journal.sql") },
    Migration { name: "002_spool_aliases", sql: include_str!("migrations/002_spool_aliases.sql") },
    Migration { name: "003_order", sql: include_str!("migrations/003_order.sql") },
    Migration { name: "004_days", sql: include_str!("migrations/004_days.sql") },
];

/// Nobody else's lock has this number: it is `oncehook` in ASCII.
const MIGRATION_LOCK: i64 = 0x6f6e_6365_686f_6f6b;

const MIGRATIONS_TABLE: &str = r#"CREATE SCHEMA IF NOT EXISTS oncehook;
CREATE TABLE IF NOT EXISTS oncehook.migrations (
  name       text COLLATE "C" CONSTRAINT migrations_once PRIMARY KEY,
  digest     text COLLATE "C" NOT NULL,
  applied_at bigint NOT NULL
)"#;

/// Brings the schema up to date. Returns the names of the migrations that were applied now.
pub(super) async fn migrate(session: &Session) -> Result<Vec<String>, OpenError> {
    // One who waits here for another node's migration waits longer than for a row, but not for ever.
    let patience = "SET LOCAL lock_timeout = 9000; SET LOCAL statement_timeout = 9000";
    session.run(&format!("BEGIN; {patience}; SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")).await?;
    let made = session.row("SELECT to_regclass('oncehook.migrations') IS NOT NULL", &[]).await?;
    if !made.is_some_and(|row| row.get(0)) {
        // Only now, so that a role that may not create schemas can use one that exists.
        session.run(MIGRATIONS_TABLE).await?;
    }
    let mut applied = Vec::new();
    for migration in MIGRATIONS {
        if apply(session, migration).await? {
            applied.push(migration.name.to_owned());
        }
    }
    session.run("COMMIT").await?;
    refuse_unknown_migrations(session).await?;
    Ok(applied)
}

async fn apply(session: &Session, migration: &Migration) -> Result<bool, OpenError> {
    let digest = hex::encode(oncehook_verify::digest(migration.sql.as_bytes()));
    let sql = "SELECT digest FROM oncehook.migrations WHERE name = $1";
    let recorded = session.row(sql, &[&migration.name]).await?.map(|row| row.get::<_, String>(0));
    match recorded {
        Some(recorded) if recorded == digest => Ok(false),
        Some(_) => {
            Err(OpenError::Schema(format!("migration {} was made by another program", migration.name)))
        }
        None => {
            session.run(migration.sql).await?;
            let sql = "INSERT INTO oncehook.migrations (name, digest, applied_at) VALUES ($1, $2, oncehook.micros())";
            session.change(sql, &[&migration.name, &digest]).await?;
            Ok(true)
        }
    }
}

async fn refuse_unknown_migrations(session: &Session) -> Result<(), OpenError> {
    for row in session.rows("SELECT name FROM oncehook.migrations ORDER BY name", &[]).await? {
        let name: &str = row.get(0);
        if !MIGRATIONS.iter().any(|migration| migration.name == name) {
            return Err(OpenError::Schema(format!(
                "the schema was made by a newer oncehook (migration {name})"
            )));
        }
    }
    Ok(())
}

/// What the catalogue says about our schema once every migration has run, a line for each table, column, index, trigger
/// and rule. A test makes a schema and compares.
const EXPECTED: &str = include_str!("shape.txt");

/// Compares our part of the catalogue with what the migrations make: columns with types and collations, keys and indexes
/// with all that could make them useless (not unique, INVALID, another operator class), tables that are not logged,
/// triggers and rules.
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
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    let expected: BTreeSet<&str> = expected.iter().map(String::as_str).collect();
    if let Some(line) = expected.difference(&found).next() {
        return Err(OpenError::Schema(format!("this is missing, or not as this program made it: {line}")));
    }
    match found.difference(&expected).next() {
        Some(line) => Err(OpenError::Schema(format!("this is not ours, but stands in our schema: {line}"))),
        None => Ok(()),
    }
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
