//! Does a long history slow anything down? Append, drain and every filter of the list, with and without it, in turns.
//!
//! Promises: the history is loaded with SQL and is what accepting it would have left (keys, events, settled deliveries,
//! counts, the search index), spread over the last 30 days, with 200-byte bodies. What the filters look for is among its first 10,000 events
//! only, so in the long history it lies deep, and in the short one (10,000 events) the same pages are found.
//! Does not: go through the front door, or measure HTTP.

use std::time::{Duration, Instant};

use oncehook::journal::{EventQuery, EventStatus};
use oncehook_testkit::random::Random;
use oncehook_verify::{EventKey, UnixMicros, digest};
use rusqlite::{Connection, params};

use super::store::{Engine, Store};
use super::{Bench, median, rate};

/// Events of the short history, and those of a long one among which the filters find something.
const SHORT: usize = 10_000;

/// What is appended and drained in one run.
const RUN: usize = 20_000;

/// A history to load.
pub struct History {
    pub count: usize,
    pub random: bool,
    /// The time of its last event.
    pub until: UnixMicros,
    /// The time from its first to its last event; zero: a millisecond each.
    pub over: Duration,
}

impl History {
    /// The time of an event.
    fn step_micros(&self) -> i64 {
        let over = i64::try_from(self.over.as_micros()).unwrap_or(i64::MAX);
        if over == 0 { 1_000 } else { (over / self.count.max(1) as i64).max(1) }
    }

    fn first_micros(&self) -> i64 {
        self.until.0 - self.step_micros() * self.count as i64
    }
}

/// What the history costs at worst: the slower of append and claim, as a part of the speed without it.
#[derive(serde::Serialize)]
pub struct Growth {
    /// Keys that grow with time.
    ordered: f64,
    /// Scattered keys.
    random: f64,
}

/// Compares a store with a history to one without, for both kinds of keys.
pub async fn run(engine: Engine, stored: usize, rounds: usize) -> anyhow::Result<Growth> {
    let month = Duration::from_secs(30 * 86_400);
    let mut worst = [0.0; 2];
    for (random, worst) in [false, true].into_iter().zip(&mut worst) {
        let keys = if random { "random" } else { "time-ordered" };
        let mut full = with_history(engine, stored, random, month).await?;
        let mut empty = Bench::new(engine).await?;
        let (mut appends, mut drains) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let mut measured = Vec::new();
            for bench in [&mut empty, &mut full] {
                let started = Instant::now();
                bench.append(RUN, random, None).await?;
                let appended = rate(RUN, started);
                let started = Instant::now();
                let worker = bench.work();
                bench.applied(bench.made).await?;
                measured.push((appended, rate(RUN, started)));
                worker.stop().await;
            }
            if let [empty, full] = measured.as_slice() {
                appends.push(full.0 / empty.0);
                drains.push(full.1 / empty.1);
            }
        }
        let (append, claim) = (median(appends), median(drains));
        println!("growth: {stored} events, {keys} keys: append {append:.2}, claim {claim:.2} of empty");
        *worst = f64::min(append, claim);
        empty.journal.close().await;
        if random {
            full.journal.close().await;
        } else {
            lists(engine, full, stored, rounds, month).await?;
        }
    }
    let [ordered, random] = worst;
    Ok(Growth { ordered, random })
}

async fn with_history(engine: Engine, count: usize, random: bool, over: Duration) -> anyhow::Result<Bench> {
    let bench = Bench::new(engine).await?;
    bench.journal.close().await;
    let started = Instant::now();
    load(&bench.store, &History { count, random, until: bench.clock.now(), over })?;
    let loaded = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let bench = Bench::open(bench.store).await?;
    let opened = started.elapsed().as_secs_f64();
    // The embedded journal writes its search index by itself, behind the accepts; a history that was accepted has it.
    while bench.journal.state().index_lag > 1_000 {
        anyhow::ensure!(started.elapsed() < Duration::from_secs(1_200), "the search index is not complete");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let indexed = started.elapsed().as_secs_f64();
    println!(
        "growth: {count} events loaded in {loaded:.0} s, opened in {opened:.2} s, indexed after {indexed:.0} s"
    );
    Ok(bench)
}

/// The time of a page of each list, in the long history and in the short one.
async fn lists(
    engine: Engine,
    long: Bench,
    stored: usize,
    rounds: usize,
    over: Duration,
) -> anyhow::Result<()> {
    // Both have what was appended a moment ago.
    let mut short = with_history(engine, SHORT, false, over).await?;
    short.append(long.made, false, None).await?;
    let worker = short.work();
    short.applied(short.made).await?;
    worker.stop().await;
    let page = || EventQuery { limit: 50, ..Default::default() };
    let status = |status| EventQuery { status: Some(status), ..page() };
    let old = UnixMicros(short.clock.now().0 - i64::try_from(over.as_micros())? / 2);
    let queries = [
        ("no filter", page()),
        ("source", EventQuery { source: Some("shop".to_owned()), ..page() }),
        ("source, rare", EventQuery { source: Some("old-shop".to_owned()), ..page() }),
        ("type", EventQuery { kind: Some("payment_intent.succeeded".to_owned()), ..page() }),
        ("type, rare", EventQuery { kind: Some("payment_intent.old".to_owned()), ..page() }),
        ("entity", EventQuery { entity: Some("pi_old_4711".to_owned()), ..page() }),
        ("entity, 100 events", EventQuery { entity: Some("pi_busy".to_owned()), ..page() }),
        ("key", EventQuery { key: Some(EventKey::from_parts(&[b"evt_-000000000001267"])), ..page() }),
        ("status succeeded", status(EventStatus::Succeeded)),
        ("status dead", status(EventStatus::Dead)),
        ("status skipped", status(EventStatus::Skipped)),
        ("status unrouted", status(EventStatus::Unrouted)),
        ("status ready", status(EventStatus::Ready)),
        ("since", EventQuery { since: Some(old), ..page() }),
        ("until", EventQuery { until: Some(old), ..page() }),
    ];
    for (name, query) in queries {
        let (mut times, mut found) = ([Vec::new(), Vec::new()], [0, 0]);
        for _ in 0..rounds.max(11) {
            for ((bench, times), found) in [&short, &long].into_iter().zip(&mut times).zip(&mut found) {
                let started = Instant::now();
                *found = bench.journal.list(query.clone()).await?.events.len();
                times.push(started.elapsed().as_secs_f64() * 1e3);
            }
        }
        anyhow::ensure!(
            found[0] == found[1],
            "{name}: {} events of the short history, {} of the long",
            found[0],
            found[1]
        );
        let [before, after] = times.map(median);
        println!(
            "growth: list by {name:<20} {:>3} events, {before:>7.2} ms in {SHORT}, {after:>7.2} ms in {stored}: {:.2} of the speed",
            found[0],
            before / after
        );
    }
    short.journal.close().await;
    long.journal.close().await;
    Ok(())
}

/// Fills a journal that nobody has open with a history.
pub fn load(store: &Store, history: &History) -> anyhow::Result<()> {
    match store {
        Store::Sqlite(_) => load_sqlite(&mut store.file()?, history),
        Store::Postgres(_) => load_postgres(store, history),
    }
}

/// What is odd about an event of a history: by its number, among the first ones only.
fn oddity(number: usize) -> usize {
    if number < SHORT { number % 100 } else { 0 }
}

fn load_sqlite(connection: &mut Connection, history: &History) -> anyhow::Result<()> {
    connection.pragma_update(None, "synchronous", "OFF")?;
    let transaction = connection.transaction()?;
    {
        let mut events = transaction.prepare(
            "INSERT INTO oncehook_events (seq, id, source, key, key_signed, type, entity, occurred_at, received_at,
                                          key_expires_at, integrity, digest, headers, body)
             VALUES (?1, ?2, ?3, ?4, 1, ?5, ?6, ?7, ?7, ?7 + 3024000000000, 'body', ?8, x'', ?9)",
        )?;
        let mut deliveries = transaction.prepare(
            "INSERT INTO oncehook_deliveries (event, route, state, attempt, run_at, settled_at, error, cause)
             VALUES (?1, 'orders', ?3, 1, ?2, ?2, ?4, ?5)",
        )?;
        let mut ids = oncehook::event::EventIds::above(0, 1);
        let body = format!("{{\"padding\":\"{}\"}}", "x".repeat(186));
        let mut random = Random::new(7);
        for number in 0..history.count {
            let at = UnixMicros(history.first_micros() + history.step_micros() * number as i64);
            let id = ids.next(at);
            let key = if history.random {
                format!("old_{:016x}", random.next())
            } else {
                format!("evt_-{number:015x}")
            };
            let odd = oddity(number);
            let source = if odd == 8 { "old-shop" } else { "shop" };
            let kind = if odd == 7 { "payment_intent.old" } else { "payment_intent.succeeded" };
            let entity = if odd == 12 { "pi_busy".to_owned() } else { format!("pi_old_{number}") };
            let digest = digest(key.as_bytes());
            events.execute(params![
                id.sequence(),
                id.as_bytes(),
                source,
                key.as_bytes(),
                kind,
                entity,
                at.0,
                digest,
                body.as_bytes()
            ])?;
            match odd {
                9 => deliveries.execute(params![id.sequence(), at.0, "dead", "refused", "handler"])?,
                10 => {
                    deliveries.execute(params![id.sequence(), at.0, "skipped", None::<&str>, None::<&str>])?
                }
                11 => 0,
                _ => deliveries.execute(params![
                    id.sequence(),
                    at.0,
                    "succeeded",
                    None::<&str>,
                    None::<&str>
                ])?,
            };
        }
    }
    // In the ledger's own order, as a merge would.
    transaction.execute_batch(
        "INSERT INTO oncehook_keys (source, key, event, digest, first_seen, expires_at)
         SELECT source, key, id, digest, received_at, key_expires_at FROM oncehook_events ORDER BY source, key;
         INSERT INTO oncehook_meta (name, value) SELECT 'ledger_to', max(seq) FROM oncehook_events
          WHERE true ON CONFLICT (name) DO UPDATE SET value = excluded.value;
         INSERT INTO oncehook_totals (source, events) SELECT source, count(*) FROM oncehook_events GROUP BY source",
    )?;
    transaction.commit()?;
    connection.pragma_update(None, "wal_checkpoint", "TRUNCATE").or_else(|error| match error {
        rusqlite::Error::ExecuteReturnedResults => Ok(()),
        error => Err(error),
    })?;
    Ok(())
}

/// Events that one statement loads.
const LOADED_AT_ONCE: usize = 250_000;

fn load_postgres(store: &Store, history: &History) -> anyhow::Result<()> {
    let (first, step) = (history.first_micros(), history.step_micros());
    let key = if history.random {
        "'old_' || left(md5(n::text), 16)"
    } else {
        "'evt_-' || lpad(to_hex(n), 15, '0')"
    };
    for from in (0..history.count).step_by(LOADED_AT_ONCE) {
        let to = (from + LOADED_AT_ONCE).min(history.count) - 1;
        store.run(&format!(
            "SET synchronous_commit = off;
             CREATE TEMP TABLE loaded AS
             SELECT n, {first} + n * {step} AS at,
                    CASE WHEN n < {SHORT} THEN n % 100 ELSE 0 END AS odd,
                    (lpad(to_hex(({first} + n * {step}) / 1000), 12, '0') || '7' || lpad(to_hex(n % 4096), 3, '0')
                     || '8' || lpad(to_hex(n), 15, '0'))::uuid AS id,
                    convert_to({key}, 'UTF8') AS key
               FROM generate_series({from}::bigint, {to}) AS n;
             INSERT INTO oncehook.events (id, source, key, key_signed, type, entity, occurred_at, received_at, integrity, digest,
                                          headers, body)
             SELECT id, CASE WHEN odd = 8 THEN 'old-shop' ELSE 'shop' END, key, true,
                    CASE WHEN odd = 7 THEN 'payment_intent.old' ELSE 'payment_intent.succeeded' END,
                    CASE WHEN odd = 12 THEN 'pi_busy' ELSE 'pi_old_' || n END, at, at, 'body', sha256(key), ''::bytea,
                    convert_to('{{\"padding\":\"' || repeat('x', 186) || '\"}}', 'UTF8')
               FROM loaded ORDER BY n;
             INSERT INTO oncehook.deliveries (event, route, state, attempt, run_at, settled_at, error, cause)
             SELECT id, 'orders', CASE odd WHEN 9 THEN 'dead' WHEN 10 THEN 'skipped' ELSE 'succeeded' END, 1, at, at,
                    CASE odd WHEN 9 THEN 'refused' END, CASE odd WHEN 9 THEN 'handler' END
               FROM loaded WHERE odd <> 11 ORDER BY n;
             -- What is marked for lists behind the accepts.
             INSERT INTO oncehook.marks (value, span)
             SELECT DISTINCT m.value, oncehook.span(e.id)
               FROM loaded l JOIN oncehook.events e ON e.id = l.id
              CROSS JOIN LATERAL (VALUES (hashtextextended('s' || e.source, 0)), (hashtextextended('t' || e.type, 0)),
                                         (hashtextextended('e' || e.entity, 0)),
                                         (CASE WHEN odd = 11 THEN hashtextextended('u', 0) END)) AS m(value)
              WHERE m.value IS NOT NULL ORDER BY 2, 1"
        ))?;
    }
    store.run(
        "SET synchronous_commit = off; SET work_mem = '256MB';
         INSERT INTO oncehook.keys (source, key, event, digest, first_seen, expires_at)
         SELECT source, key, id, digest, received_at, received_at + 3024000000000 FROM oncehook.events ORDER BY source, key;
         INSERT INTO oncehook.totals (source, shard, events) SELECT source, 0, count(*) FROM oncehook.events GROUP BY source;
         UPDATE oncehook.marked SET span = oncehook.span((SELECT id FROM oncehook.events ORDER BY id DESC LIMIT 1)) - 1;
         ANALYZE oncehook.events; ANALYZE oncehook.keys; ANALYZE oncehook.deliveries; ANALYZE oncehook.marks",
    )?;
    // A vacuum cannot run in a transaction, and several statements at once are one.
    for sql in ["VACUUM oncehook.events", "VACUUM oncehook.keys", "VACUUM oncehook.deliveries", "CHECKPOINT"]
    {
        store.run(sql)?;
    }
    Ok(())
}
