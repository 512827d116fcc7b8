//! A history on MariaDB, loaded in bulk: the same that `history` loads elsewhere.
//!
//! Promises: each table is written in the order of its key, events and deliveries side by side; the server's settings are those of
//! a server that syncs every commit again when this returns, and nothing is left to be written out.
//! Does not: read what it has written. Every row follows from its number.

use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;

use super::super::body;
use super::super::store::Store;
use super::history::{History, LATER_MICROS, ODD_STATE, PART, WINDOW_MICROS};
use super::progress;

/// While a history is loaded, nobody waits for the disk, and pages are written out as fast as it takes them.
const LOADING: [(&str, &str); 3] =
    [("innodb_flush_log_at_trx_commit", "2"), ("innodb_io_capacity_max", "40000"), ("innodb_io_capacity", "20000")];

/// Does something with these settings, and puts the old ones back.
fn loading(store: &Store, load: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut before = Vec::new();
    for (name, value) in LOADING {
        before.push((name, store.number(&format!("SELECT @@GLOBAL.{name}"))?));
        store.run(&format!("SET GLOBAL {name} = {value}"))?;
    }
    let loaded = load().and_then(|()| write_out(store));
    for (name, value) in before.into_iter().rev() {
        store.run(&format!("SET GLOBAL {name} = {value}"))?;
    }
    loaded
}

/// The longest that it may take to write out what is only in memory.
const WRITTEN_OUT: Duration = Duration::from_secs(300);

/// Writes out what is only in memory, so that it does not disturb what is measured.
fn write_out(store: &Store) -> anyhow::Result<()> {
    let most = store.number("SELECT CAST(@@GLOBAL.innodb_max_dirty_pages_pct AS SIGNED)")?;
    store.run("SET GLOBAL innodb_max_dirty_pages_pct = 0")?;
    let dirty = "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = 'INNODB_BUFFER_POOL_PAGES_DIRTY'";
    let begun = Instant::now();
    while store.number(dirty)? > 100 && begun.elapsed() < WRITTEN_OUT {
        std::thread::sleep(Duration::from_millis(100));
    }
    store.run(&format!("SET GLOBAL innodb_max_dirty_pages_pct = {most}"))
}

/// Adds the events from one number to another.
pub fn load(store: &Store, history: &History, from: usize, to: usize) -> anyhow::Result<()> {
    loading(store, || {
        for first in (from..to).step_by(PART) {
            let last = (first + PART).min(to);
            std::thread::scope(|scope| {
                let deliveries = scope.spawn(|| store.run(&deliveries(history, first, last)));
                store.run(&events(history, first, last))?;
                deliveries.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread that loads has panicked")))
            })?;
            progress(&format!("{last} of {to} events written"));
        }
        std::thread::scope(|scope| {
            let buckets = scope.spawn(|| store.run(&buckets(history, from, to)));
            store.run(&keys(history, from, to))?;
            progress("keys written");
            buckets.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a thread that loads has panicked")))
        })?;
        progress("the search index written");
        // Several statements at once are answered as one; their tables are small enough to be looked at again each time.
        store.run("ANALYZE TABLE oncehook_events, oncehook_keys, oncehook_deliveries, oncehook_buckets")
    })
}

/// Removes what was accepted behind a history.
pub fn trim(store: &Store, last: UnixMicros) -> anyhow::Result<()> {
    let first = first_id(last.0 + 1_000);
    let bucket = ((last.0 + 1_000) / 1_000) >> 12;
    loading(store, || {
        store.run(&format!(
            "DELETE k FROM oncehook_events e STRAIGHT_JOIN oncehook_keys k ON k.source = e.source AND k.`key` = e.`key` WHERE e.id >= {first};
             DELETE FROM oncehook_events WHERE id >= {first};
             DELETE FROM oncehook_deliveries WHERE event >= {first};
             DELETE FROM oncehook_buckets WHERE bucket > {bucket};
             UPDATE oncehook_indexed SET last = LEAST(last, {first});
             TRUNCATE orders"
        ))
    })
}

/// The first id of a time, in SQL.
pub fn first_id(micros: i64) -> String {
    format!("x'{:012x}00000000000000000000'", micros / 1_000)
}

/// The numbers of some events, with what follows from them. MariaDB has tables of numbers.
fn numbers(history: &History, from: usize, to: usize) -> String {
    let (first, step) = (history.time_of(0).0, history.step_micros());
    // 99 is what waits.
    let odd = if history.waiting { "99" } else { "IF(seq < 10000, seq % 100 % 99, 0)" };
    format!(
        "(SELECT seq AS n, {first} + seq * {step} AS at, {odd} AS odd FROM seq_{from}_to_{}) numbers",
        to.saturating_sub(1)
    )
}

const ID: &str =
    "UNHEX(CONCAT(LPAD(HEX(at DIV 1000), 12, '0'), '7', LPAD(HEX(n % 4096), 3, '0'), '8', LPAD(HEX(n), 15, '0')))";
const KEY: &str = "CONCAT('evt_', LEFT(SHA2(n, 256), 16))";
const SOURCE: &str = "IF(odd = 8, 'old-shop', 'shop')";
const TYPE: &str = "IF(odd = 7, 'payment_intent.old', 'payment_intent.succeeded')";
const ENTITY: &str = "IF(odd = 12, 'pi_busy', CONCAT('pi_old_', n))";

fn events(history: &History, from: usize, to: usize) -> String {
    // The ends of a body as `body` writes it.
    let written = body("@", 0, false, 0);
    let (before, behind) = written.split_once('@').unwrap_or_default();
    let (middle, behind) = behind.split_once("pi_000000000000").unwrap_or_default();
    let (amount, behind) = behind.split_once(":0,").unwrap_or_default();
    let (padding, end) = behind.split_at(behind.len().saturating_sub(4));
    let fill = history.size.saturating_sub(written.len() + 25);
    let numbers = numbers(history, from, to);
    // A table in between, so that nothing is made twice; what is read from it comes in the order in which it was written.
    format!(
        "CREATE TEMPORARY TABLE loaded ENGINE = MyISAM
         SELECT n, at, odd, {ID} AS id, {KEY} AS name, {SOURCE} AS source, {TYPE} AS type, {ENTITY} AS entity FROM {numbers};
         CREATE TEMPORARY TABLE bodies ENGINE = MyISAM
         SELECT loaded.*, CONCAT('{before}', name, '{middle}pi_', LPAD(n, 12, '0'), '{amount}:', n, ',{padding}', REPEAT('x', {fill}), '{end}') AS body
           FROM loaded;
         INSERT INTO oncehook_events (id, source, `key`, key_signed, type, entity, occurred_at, received_at, integrity, digest, size,
                                      headers, body)
         SELECT id, source, name, 1, type, entity, at, at, 'body', UNHEX(SHA2(name, 256)), LENGTH(body), '', body FROM bodies"
    )
}

fn deliveries(history: &History, from: usize, to: usize) -> String {
    let (numbers, later) = (numbers(history, from, to), history.until.0 + LATER_MICROS);
    format!(
        "INSERT INTO oncehook_deliveries (event, route, state, attempt, run_at, settled_at, error, cause)
         SELECT {ID}, IF(odd IN (14, 15, 16), 'elsewhere', 'orders'), {ODD_STATE}, 1, IF(odd IN (14, 15, 16), {later}, at),
                IF(odd IN (14, 15, 16), NULL, at), IF(odd = 9, 'refused', NULL), IF(odd = 9, 'handler', NULL)
           FROM {numbers} WHERE odd NOT IN (11, 17, 99);
         INSERT INTO oncehook_deliveries (event, route, state, run_at) SELECT {ID}, 'orders', 'ready', at FROM {numbers} WHERE odd = 99;
         INSERT INTO oncehook_flags (event, flag, at, reason) SELECT {ID}, 'quarantined', at, 'missing_key' FROM {numbers} WHERE odd = 17"
    )
}

/// In the ledger's own order.
fn keys(history: &History, from: usize, to: usize) -> String {
    let numbers = numbers(history, from, to);
    format!(
        "SET SESSION sort_buffer_size = 536870912;
         INSERT INTO oncehook_keys (source, `key`, event, digest, first_seen, expires_at)
         SELECT source, name, id, UNHEX(SHA2(name, 256)), at, at + {WINDOW_MICROS}
           FROM (SELECT {SOURCE} AS source, {KEY} AS name, {ID} AS id, at FROM {numbers} ORDER BY source, name LIMIT {to}) sorted;
         INSERT INTO oncehook_totals (source, shard, events)
         SELECT {SOURCE}, 0, COUNT(*) FROM {numbers} GROUP BY 1
         ON DUPLICATE KEY UPDATE events = events + VALUES(events)"
    )
}

/// The search index of lists, which is filled behind the accepts. The index of the buckets is built when all of them are there.
fn buckets(history: &History, from: usize, to: usize) -> String {
    let numbers = numbers(history, from, to);
    let insert = |text: &str, odd: &str| {
        format!(
            "INSERT INTO oncehook_buckets (value, bucket, first, last)
             SELECT value, bucket, first, last
               FROM (SELECT CAST(CONV(LEFT(SHA2({text}, 256), 16), 16, -10) AS SIGNED) AS value, at DIV 1000 >> 12 AS bucket,
                            MIN(at DIV 1000 & 4095) AS first, MAX(at DIV 1000 & 4095) AS last
                       FROM {numbers} WHERE {odd} GROUP BY value, bucket ORDER BY value, bucket LIMIT {to}) sorted
             ON DUPLICATE KEY UPDATE first = LEAST(oncehook_buckets.first, VALUES(first)),
                                     last = GREATEST(oncehook_buckets.last, VALUES(last));"
        )
    };
    format!(
        "SET SESSION sort_buffer_size = 536870912, SESSION tmp_memory_table_size = 1073741824;
         ALTER TABLE oncehook_buckets DROP KEY oncehook_buckets_bucket;
         {} {} {} {}
         ALTER TABLE oncehook_buckets ADD KEY oncehook_buckets_bucket (bucket);
         UPDATE oncehook_indexed SET last = (SELECT {ID} FROM {numbers} WHERE n = {to} - 1)",
        insert(&format!("CONCAT('s', {SOURCE})"), "TRUE"),
        insert(&format!("CONCAT('t', {TYPE})"), "TRUE"),
        insert("'u'", "odd IN (11, 17)"),
        insert(&format!("CONCAT('e', {ENTITY})"), "TRUE"),
    )
}
