//! A history, loaded in bulk with SQL: what accepting and handling its events would have left.
//!
//! Promises: keys, events, settled deliveries and counts are there, in the order in which the journal would have written them;
//! on a server the search index too (the embedded journal writes its own when it is opened). A part can be
//! loaded behind one that is there. The keys are scattered ([`scattered`]), so that scattered ones of later events fall
//! among them, and those that grow with time ([`ordered`]) behind them all. What is odd (another source, type, entity or
//! status) is among the first [`SHORT`] events only: in a long history it lies deep.
//! Does not: go through the front door, or keep the file or the server durable while it loads.

use std::time::{Duration, Instant};

use oncehook::event::EventIds;
use oncehook_verify::{UnixMicros, digest};
use rusqlite::{Connection, params};

use super::super::body;
use super::super::store::Store;
use super::{mariadb, progress};

/// Events of a short history, and those of a long one among which the filters find something.
pub const SHORT: usize = 10_000;

/// Events that are loaded between two signs of life.
pub(super) const PART: usize = 250_000;

/// How long a key is remembered.
pub(super) const WINDOW_MICROS: i64 = 35 * 86_400 * 1_000_000;

/// A due time that does not come while anything is measured.
pub(super) const LATER_MICROS: i64 = 365 * 86_400 * 1_000_000;

/// A history to load.
#[derive(Clone)]
pub struct History {
    /// Events when it is complete.
    pub count: usize,
    /// The time of its last event.
    pub until: UnixMicros,
    /// The time from its first to its last event; zero: a millisecond each.
    pub over: Duration,
    /// Whether its events still wait to be handled.
    pub waiting: bool,
    /// The bytes of a body.
    pub size: usize,
}

impl History {
    pub(super) fn step_micros(&self) -> i64 {
        let over = i64::try_from(self.over.as_micros()).unwrap_or(i64::MAX);
        if over == 0 { 1_000 } else { (over / self.count.max(1) as i64).max(1) }
    }

    /// The time of an event.
    pub fn time_of(&self, number: usize) -> UnixMicros {
        let behind = self.count.saturating_sub(number) as i64;
        UnixMicros(self.until.0 - self.step_micros() * behind)
    }

    /// What is odd about an event, by its number.
    fn oddity(&self, number: usize) -> Odd {
        if self.waiting {
            return Odd::Waiting;
        }
        match number % 100 {
            _ if number >= SHORT => Odd::No,
            7 => Odd::Type,
            8 => Odd::Source,
            9 => Odd::State("dead"),
            10 => Odd::State("skipped"),
            11 => Odd::Unrouted,
            12 => Odd::Entity,
            13 => Odd::State("superseded"),
            14 => Odd::State("parked"),
            15 => Odd::State("retrying"),
            16 => Odd::State("ready"),
            17 => Odd::Held,
            _ => Odd::No,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Odd {
    No,
    Type,
    Source,
    Entity,
    Unrouted,
    Held,
    State(&'static str),
    Waiting,
}

/// A key that is scattered over the ledger: the same for the same number, never the same for another.
pub fn scattered(number: usize) -> String {
    let digest = digest(number.to_string().as_bytes());
    format!("evt_{:016x}", u64::from_be_bytes(digest.first_chunk().copied().unwrap_or_default()))
}

/// A key that grows with the number, and stands behind all scattered ones.
pub fn ordered(number: usize) -> String {
    format!("evt_z{number:015x}")
}

/// Adds the events from one number to another to a journal that nobody has open.
pub fn load(store: &Store, history: &History, from: usize, to: usize) -> anyhow::Result<()> {
    let begun = Instant::now();
    match store {
        Store::Sqlite(_) => load_file(store.file()?, history, from, to)?,
        Store::Postgres(_) => load_server(store, history, from, to)?,
        Store::Mysql(_) => mariadb::load(store, history, from, to)?,
    }
    progress(&format!("{to} events loaded, the last {} in {:.0} s", to - from, begun.elapsed().as_secs_f64()));
    Ok(())
}

/// Removes what was accepted behind a history, from a journal that nobody has open.
pub fn trim(store: &Store, last: UnixMicros) -> anyhow::Result<()> {
    match store {
        Store::Sqlite(_) => {
            let sequence = ((last.0 / 1_000) << 15) | 0x7fff;
            let connection = store.file()?;
            connection.pragma_update(None, "synchronous", "OFF")?;
            connection.execute_batch(&format!(
                "BEGIN;
                 DELETE FROM oncehook_keys WHERE (source, key) IN (SELECT source, key FROM oncehook_events WHERE seq > {sequence});
                 DELETE FROM oncehook_events WHERE seq > {sequence};
                 DELETE FROM oncehook_deliveries WHERE event > {sequence};
                 DELETE FROM oncehook_blocks WHERE last > {sequence};
                 DELETE FROM oncehook_groups WHERE last > {sequence};
                 UPDATE oncehook_meta SET value = {sequence} WHERE name = 'ledger_to';
                 UPDATE oncehook_meta SET value = min(value, {sequence}) WHERE name = 'replays_to';
                 DELETE FROM orders;
                 COMMIT"
            ))?;
        }
        Store::Postgres(_) => {
            let first = format!("oncehook.first_id({})", last.0 + 1_000);
            store.run(&format!(
                "DELETE FROM oncehook.keys k USING oncehook.events e
                  WHERE e.id >= {first} AND k.source = e.source AND k.key = e.key;
                 DELETE FROM oncehook.events WHERE id >= {first};
                 DELETE FROM oncehook.deliveries WHERE event >= {first};
                 DELETE FROM oncehook.buckets WHERE bucket > oncehook.bucket({first});
                 UPDATE oncehook.indexed SET last = least(last, {first});
                 TRUNCATE orders RESTART IDENTITY"
            ))?;
        }
        Store::Mysql(_) => mariadb::trim(store, last)?,
    }
    Ok(())
}

fn load_file(mut connection: Connection, history: &History, from: usize, to: usize) -> anyhow::Result<()> {
    // Whoever loads a file can load it again: no log, no sync.
    for (name, value) in [("journal_mode", "OFF"), ("synchronous", "OFF"), ("cache_size", "-1048576")] {
        connection.pragma_update_and_check(None, name, value, |_| Ok(())).or_else(no_answer)?;
    }
    let mut keys = Vec::with_capacity(to - from);
    let mut ids = EventIds::above(0, 1);
    for first in (from..to).step_by(PART) {
        let last = (first + PART).min(to);
        let transaction = connection.transaction()?;
        insert(&transaction, history, &mut ids, &mut keys, first..last)?;
        transaction.commit()?;
        progress(&format!("{last} of {to} events written"));
    }
    // In the ledger's own order, as a merge would.
    keys.sort_unstable();
    for (number, part) in keys.chunks(1_000_000).enumerate() {
        let transaction = connection.transaction()?;
        {
            let mut insert = transaction.prepare(
                "INSERT INTO oncehook_keys (source, key, event, digest, first_seen, expires_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )?;
            for (source, key, id, at) in part {
                insert.execute(params![source, key.as_bytes(), id, digest(key.as_bytes()), at, at + WINDOW_MICROS])?;
            }
        }
        transaction.commit()?;
        progress(&format!("{} of {} keys written", number * 1_000_000 + part.len(), keys.len()));
    }
    // Every key is in its table, and all of them are signed: there is no replay to look for among them.
    connection.execute_batch(
        "INSERT INTO oncehook_meta (name, value)
         SELECT name.column1, (SELECT max(seq) FROM oncehook_events) FROM (VALUES ('ledger_to'), ('replays_to')) name
          WHERE true ON CONFLICT (name) DO UPDATE SET value = excluded.value",
    )?;
    for source in ["shop", "old-shop"] {
        let count = keys.iter().filter(|(of, ..)| *of == source).count();
        connection.execute(
            "INSERT INTO oncehook_totals (source, events) VALUES (?1, ?2)
             ON CONFLICT (source) DO UPDATE SET events = events + excluded.events",
            params![source, i64::try_from(count)?],
        )?;
    }
    connection.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(())).or_else(no_answer)?;
    Ok(())
}

/// Some settings answer with their value and some with nothing.
fn no_answer(error: rusqlite::Error) -> rusqlite::Result<()> {
    match error {
        rusqlite::Error::QueryReturnedNoRows => Ok(()),
        error => Err(error),
    }
}

/// Source, key, id and time.
type LedgerKey = (&'static str, String, [u8; 16], i64);

fn insert(
    connection: &Connection,
    history: &History,
    ids: &mut EventIds,
    keys: &mut Vec<LedgerKey>,
    numbers: std::ops::Range<usize>,
) -> anyhow::Result<()> {
    let mut events = connection.prepare(
        "INSERT INTO oncehook_events (seq, id, source, key, key_signed, type, entity, occurred_at, received_at,
                                      key_expires_at, integrity, digest, headers, body)
         VALUES (?1, ?2, ?3, ?4, 1, ?5, ?6, ?7, ?7, ?8, 'body', ?9, x'', ?10)",
    )?;
    let mut deliveries = connection.prepare(
        "INSERT INTO oncehook_deliveries (event, route, state, attempt, run_at, settled_at, error, cause)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?;
    let mut flags = connection.prepare(
        "INSERT INTO oncehook_flags (event, flag, at, reason) VALUES (?1, 'quarantined', ?2, 'missing_key')",
    )?;
    for number in numbers {
        let at = history.time_of(number);
        let (id, key, odd) = (ids.next(at), scattered(number), history.oddity(number));
        let source = if odd == Odd::Source { "old-shop" } else { "shop" };
        let kind = if odd == Odd::Type { "payment_intent.old" } else { "payment_intent.succeeded" };
        let entity = if odd == Odd::Entity { "pi_busy".to_owned() } else { format!("pi_old_{number}") };
        let (expires, body) = (at.0 + WINDOW_MICROS, body(&key, number, false, history.size));
        let (sequence, digest) = (id.sequence(), digest(key.as_bytes()));
        let row = params![
            sequence,
            id.as_bytes(),
            source,
            key.as_bytes(),
            kind,
            entity,
            at.0,
            expires,
            digest,
            body.as_bytes()
        ];
        events.execute(row)?;
        let none = None::<&str>;
        match odd {
            Odd::Unrouted => {}
            Odd::Held => {
                flags.execute(params![sequence, at.0])?;
            }
            Odd::Waiting => {
                deliveries.execute(params![sequence, "orders", "ready", 0, at.0, None::<i64>, none, none])?;
            }
            // A route that nobody runs, at a time that does not come.
            Odd::State(state @ ("parked" | "retrying" | "ready")) => {
                let due = history.until.0 + LATER_MICROS;
                deliveries.execute(params![sequence, "elsewhere", state, 0, due, None::<i64>, none, none])?;
            }
            Odd::State(state) => {
                let (error, cause) = if state == "dead" { (Some("refused"), Some("handler")) } else { (none, none) };
                deliveries.execute(params![sequence, "orders", state, 1, at.0, Some(at.0), error, cause])?;
            }
            Odd::No | Odd::Type | Odd::Source | Odd::Entity => {
                deliveries.execute(params![sequence, "orders", "succeeded", 1, at.0, Some(at.0), none, none])?;
            }
        }
        keys.push((source, key, *id.as_bytes(), at.0));
    }
    Ok(())
}

/// The odd ones by their number, as [`History::oddity`] has them.
pub(super) const ODD_STATE: &str =
    "CASE odd WHEN 9 THEN 'dead' WHEN 10 THEN 'skipped' WHEN 13 THEN 'superseded' WHEN 14 THEN 'parked'
                                  WHEN 15 THEN 'retrying' WHEN 16 THEN 'ready' ELSE 'succeeded' END";

fn load_server(store: &Store, history: &History, from: usize, to: usize) -> anyhow::Result<()> {
    // Fewer checkpoints while so much is written, and indexes of scattered values afterwards, in their own order.
    let settings =
        [("max_wal_size", "16GB"), ("full_page_writes", "off"), ("autovacuum", "off"), ("wal_compression", "off")];
    for (name, value) in settings {
        store.run(&format!("ALTER SYSTEM SET {name} = '{value}'"))?;
    }
    store.run("SELECT pg_reload_conf()")?;
    store.run(&days(history.time_of(from), history.time_of(to)))?;
    store.run(
        "ALTER TABLE oncehook.keys DROP CONSTRAINT keys_once; DROP INDEX oncehook.buckets_value; DROP INDEX oncehook.buckets_bucket",
    )?;
    // A server's backend keeps one core busy.
    let parts: Vec<usize> = (from..to).step_by(PART).collect();
    for firsts in parts.chunks(2) {
        std::thread::scope(|scope| {
            let loading: Vec<_> = firsts
                .iter()
                .map(|first| scope.spawn(move || store.run(&part(history, *first, (first + PART).min(to)))))
                .collect();
            loading.into_iter().try_for_each(|part| {
                part.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread that loads has panicked")))
            })
        })?;
        let last = firsts.last().map_or(to, |first| (first + PART).min(to));
        progress(&format!("{last} of {to} events written"));
    }
    for (what, sql) in [
        ("keys", "ALTER TABLE oncehook.keys ADD CONSTRAINT keys_once PRIMARY KEY (source, key)"),
        ("values", "CREATE INDEX buckets_value ON oncehook.buckets (value, bucket)"),
        ("buckets", "CREATE INDEX buckets_bucket ON oncehook.buckets USING brin (bucket) WITH (pages_per_range = 16)"),
    ] {
        store.run(&format!("SET maintenance_work_mem = '1GB'; {sql}"))?;
        progress(&format!("index of the {what} built"));
    }
    let sources = "SELECT CASE WHEN n < 10000 AND n % 100 = 8 THEN 'old-shop' ELSE 'shop' END AS source";
    store.run(&format!(
        "INSERT INTO oncehook.totals (source, shard, events)
         SELECT source, 0, count(*) FROM ({sources} FROM generate_series({from}, {to} - 1) n) e GROUP BY source
         ON CONFLICT (source, shard) DO UPDATE SET events = oncehook.totals.events + excluded.events;
         UPDATE oncehook.indexed SET last = oncehook.first_id({})",
        history.time_of(to).0
    ))?;
    // A vacuum cannot run in a transaction, and several statements at once are one.
    for table in ["events", "keys", "deliveries", "buckets"] {
        store.run(&format!("VACUUM (ANALYZE) oncehook.{table}"))?;
        progress(&format!("{table} vacuumed"));
    }
    store.run("CHECKPOINT")?;
    for (name, _) in settings {
        store.run(&format!("ALTER SYSTEM RESET {name}"))?;
    }
    store.run("SELECT pg_reload_conf()")
}

/// Makes the days between two times, as the journal made each of them while it was ahead, if events are parted into days.
fn days(from: UnixMicros, to: UnixMicros) -> String {
    format!(
        "DO $$
         DECLARE
           day bigint;
           name text;
         BEGIN
           IF (SELECT relkind FROM pg_class WHERE oid = 'oncehook.events'::regclass) <> 'p' THEN
             RETURN;
           END IF;
           FOR day IN {} .. {} LOOP
             name := 'events_' || to_char(to_timestamp(day * 86400) AT TIME ZONE 'UTC', 'YYYYMMDD');
             IF to_regclass('oncehook.' || name) IS NULL THEN
               EXECUTE format('CREATE TABLE oncehook.%I (LIKE oncehook.events INCLUDING ALL)', name);
               EXECUTE format('ALTER TABLE oncehook.events ATTACH PARTITION oncehook.%I FOR VALUES FROM (%L) TO (%L)', name,
                              oncehook.first_id(day * 86400000000), oncehook.first_id((day + 1) * 86400000000));
             END IF;
           END LOOP;
         END $$",
        from.0 / 86_400_000_000,
        to.0 / 86_400_000_000
    )
}

/// The statements for some events.
fn part(history: &History, from: usize, to: usize) -> String {
    let step = history.step_micros();
    let (first, later) = (history.time_of(0).0, history.until.0 + LATER_MICROS);
    // 99 is what waits.
    let odd = if history.waiting { "99" } else { "CASE WHEN n < 10000 THEN n % 100 % 99 ELSE 0 END" };
    // The ends of a body as `body` writes it.
    let written = body("@", 0, false, 0);
    let (before, behind) = written.split_once('@').unwrap_or_default();
    let (middle, behind) = behind.split_once("pi_000000000000").unwrap_or_default();
    let (amount, behind) = behind.split_once(":0,").unwrap_or_default();
    let (padding, end) = behind.split_at(behind.len().saturating_sub(4));
    let fill = history.size.saturating_sub(written.len() + 25);
    format!(
        "SET synchronous_commit = off; SET work_mem = '256MB';
         CREATE TEMP TABLE loaded AS
         SELECT n, at, odd, key,
                (lpad(to_hex(at / 1000), 12, '0') || '7' || lpad(to_hex(n % 4096), 3, '0') || '8' || lpad(to_hex(n), 15, '0'))::uuid AS id,
                CASE WHEN odd = 8 THEN 'old-shop' ELSE 'shop' END AS source,
                CASE WHEN odd = 7 THEN 'payment_intent.old' ELSE 'payment_intent.succeeded' END AS type,
                CASE WHEN odd = 12 THEN 'pi_busy' ELSE 'pi_old_' || n END AS entity
           FROM (SELECT n, {first} + n * {step} AS at, {odd} AS odd, 'evt_' || left(encode(sha256(n::text::bytea), 'hex'), 16) AS key
                   FROM generate_series({from}::bigint, {to} - 1) AS n) numbers;
         INSERT INTO oncehook.events (id, source, key, key_signed, type, entity, occurred_at, received_at, integrity, digest,
                                      headers, body)
         SELECT id, source, key::bytea, true, type, entity, at, at, 'body', sha256(key::bytea), '',
                convert_to('{before}' || key || '{middle}pi_' || lpad(n::text, 12, '0') || '{amount}:' || n || ',{padding}'
                           || repeat('x', {fill}) || '{end}', 'UTF8')
           FROM loaded ORDER BY n;
         INSERT INTO oncehook.keys (source, key, event, digest, first_seen, expires_at)
         SELECT source, key::bytea, id, sha256(key::bytea), at, at + {WINDOW_MICROS} FROM loaded ORDER BY n;
         INSERT INTO oncehook.deliveries (event, route, state, attempt, run_at, settled_at, error, cause)
         SELECT id, CASE WHEN odd IN (14, 15, 16) THEN 'elsewhere' ELSE 'orders' END,
                {ODD_STATE}, 1, CASE WHEN odd IN (14, 15, 16) THEN {later} ELSE at END,
                CASE WHEN odd NOT IN (14, 15, 16) THEN at END,
                CASE odd WHEN 9 THEN 'refused' END, CASE odd WHEN 9 THEN 'handler' END
           FROM loaded WHERE odd NOT IN (11, 17, 99) ORDER BY n;
         INSERT INTO oncehook.deliveries (event, route, state, run_at)
         SELECT id, 'orders', 'ready', at FROM loaded WHERE odd = 99 ORDER BY n;
         INSERT INTO oncehook.flags (event, flag, at, reason) SELECT id, 'quarantined', at, 'missing_key' FROM loaded WHERE odd = 17;
         -- The search index of lists, which is filled behind the accepts.
         INSERT INTO oncehook.buckets (value, bucket, first, last)
         SELECT ('x' || left(encode(sha256(convert_to(text, 'UTF8')), 'hex'), 16))::bit(64)::bigint, bucket, first, last
           FROM (SELECT v.text, at / 1000 >> 12 AS bucket, min(at / 1000 & 4095) AS first, max(at / 1000 & 4095) AS last
                   FROM loaded
                  CROSS JOIN LATERAL (VALUES ('s' || source), ('t' || type), ('e' || entity),
                                             (CASE WHEN odd IN (11, 17) THEN 'u' END)) AS v(text)
                  WHERE v.text IS NOT NULL GROUP BY 1, 2) AS found"
    )
}
