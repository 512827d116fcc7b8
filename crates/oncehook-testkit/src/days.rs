//! Days of a journal on PostgreSQL, planted with SQL: many events at once, and whatever can stand beside an event.
//!
//! Promises: what is planted looks as if the journal had stored and applied it, each event one millisecond after the one before, from
//! the beginning of the day on. Does not: make the day's partitions, unless it is asked to ([`make`]).

use oncehook::event::EventId;

/// A day in microseconds.
pub const DAY: i64 = 86_400_000_000;

/// Days of more events than this are dropped, smaller ones go row by row.
pub const FEW: i64 = 10_000;

/// The statements that make a day (counted from 1970) as the journal does.
#[must_use]
pub fn make(day: i64) -> String {
    let table = |table: &str| {
        format!(
            "EXECUTE format('CREATE TABLE oncehook.{table}_%1$s (LIKE oncehook.{table} INCLUDING ALL);
                             ALTER TABLE oncehook.{table} ATTACH PARTITION oncehook.{table}_%1$s FOR VALUES FROM (%2$L) TO (%3$L)',
                            to_char(DATE '1970-01-01' + {day}, 'YYYYMMDD'), oncehook.first_id({day} * {DAY}),
                            oncehook.first_id(({day} + 1) * {DAY}));"
        )
    };
    format!("DO $$ BEGIN {} {} END $$;", table("events"), table("attempts"))
}

/// The statement that makes the journal believe its clock: it was there yesterday, although its newest event is old.
#[must_use]
pub fn believe_clock() -> &'static str {
    "INSERT INTO oncehook.entities (scope, entity, state)
     VALUES ('clock:forgetting', 'seen', oncehook.micros() - 86400000000)
     ON CONFLICT (scope, entity) DO NOTHING"
}

/// The statements that store so many events of a day. All of them were applied at the second attempt.
#[must_use]
pub fn plant(day: i64, count: i64) -> String {
    format!(
        "CREATE TEMP TABLE t AS
         SELECT n, oncehook.first_id(at) AS id, at, convert_to('old_{day}_' || n, 'UTF8') AS key,
                sha256(convert_to('{day}_' || n, 'UTF8')) AS digest
           FROM (SELECT n, {day} * {DAY} + n * 1000 AS at FROM generate_series(1::bigint, {count}) AS n) AS s;
         INSERT INTO oncehook.events (id, source, key, key_signed, type, entity, received_at, integrity, digest, headers, body)
         SELECT id, 'shop', key, false, 'order.paid', 'order-' || n, at, 'body', digest, ''::bytea, '{{}}'::bytea FROM t;
         INSERT INTO oncehook.keys (source, key, event, digest, first_seen, expires_at)
         SELECT 'shop', key, id, digest, at, at + 90 * {DAY} FROM t;
         INSERT INTO oncehook.deliveries (event, route, state, attempt, run_at, settled_at)
         SELECT id, 'orders', 'succeeded', 2, at, at FROM t;
         INSERT INTO oncehook.attempts (event, route, epoch, attempt, started_at, finished_at, outcome)
         SELECT id, 'orders', 0, 1, at, at, 'failed' FROM t;
         INSERT INTO oncehook.bodies (source, digest, event) SELECT 'shop', digest, id FROM t;
         INSERT INTO oncehook.duplicates (event, journal, first_at, last_at, latest)
         SELECT id, 1, at, at, '[]' FROM t WHERE n % 3 = 0;
         INSERT INTO oncehook.conflicts (event, digest, count, first_at, last_at, headers, body)
         SELECT id, ''::bytea, 1, at, at, ''::bytea, ''::bytea FROM t WHERE n % 3 = 0;
         INSERT INTO oncehook.flags (event, flag, at) SELECT id, 'conflict', at FROM t WHERE n % 3 = 0;
         INSERT INTO oncehook.spool_aliases (alias, event) SELECT gen_random_uuid(), id FROM t WHERE n % 3 = 0;
         INSERT INTO oncehook.buckets (value, bucket, first, last) SELECT DISTINCT n, oncehook.bucket(id), 0, 4095 FROM t"
    )
}

/// The id of a planted event.
#[must_use]
pub fn planted(day: i64, number: i64) -> EventId {
    let millis = u64::try_from(day * DAY / 1_000 + number).unwrap();
    let mut bytes = [0; 16];
    bytes[..6].copy_from_slice(&millis.to_be_bytes()[2..]);
    EventId::from_bytes(bytes)
}

/// The statement that counts rows that belong to no event, a line for each table that has some; also days whose sweep is not
/// over.
#[must_use]
pub fn left_over() -> String {
    let tables = ["deliveries", "attempts", "conflicts", "duplicates", "flags", "spool_aliases", "bodies"];
    let counts = tables.map(|table| {
        format!(
            "SELECT '{table}', count(*) FROM oncehook.{table} t
              WHERE NOT EXISTS (SELECT 1 FROM oncehook.events e WHERE e.id = t.event)"
        )
    });
    format!(
        "SELECT * FROM ({} UNION ALL SELECT 'buckets', count(*) FROM oncehook.buckets b
           WHERE NOT EXISTS (SELECT 1 FROM oncehook.events e WHERE oncehook.bucket(e.id) = b.bucket)
         UNION ALL SELECT 'sweeps', count(*) FROM oncehook.sweeps) AS t(name, rows) WHERE rows > 0",
        counts.join(" UNION ALL ")
    )
}
