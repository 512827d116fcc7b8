//! How fast events take effect on the embedded journal, side by side with the bare limit.
//!
//! - **bare**: the user's statement alone, in batches of the same size, on SQLite with the same settings.
//! - **drain**: a backlog is worked off: claim, parameters from JSON, the statement, settlement, commit.
//! - **sustained**: events are accepted and take effect at the same time.
//! - **http**: a backlog is posted to a receiver in this process that answers at once, 64 requests at a time.
//! - **poison**: a backlog of 10,000 with one event that always fails, against one without.
//! - **history**: append and drain with a million stored events, against an empty store, runs interleaved.
//! - **janitor**: the time an append takes while 100,000 events are forgotten, against the time without.
//!
//! All in one process, without HTTP: what is measured is the journal and the worker. Prints ratios; times say little on a
//! shared machine.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use oncehook::clock::Clock;
use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Expression, Handler, HttpHandler, HttpOptions, SqlHandler};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Journal, Retention};
use oncehook::observe::Metrics;
use oncehook::route::{Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::random::Random;
use oncehook_testkit::receiver::{Receiver, Reply};
use oncehook_verify::{EventKey, Integrity, UnixMicros, digest};
use rusqlite::{Connection, params};

const INSERT: &str = "INSERT INTO orders (payment, amount, event_key) VALUES (:payment, :amount, :key) ON CONFLICT (payment) DO NOTHING";
const TABLE: &str = "CREATE TABLE IF NOT EXISTS orders
  (id INTEGER PRIMARY KEY, payment TEXT NOT NULL UNIQUE, amount INTEGER NOT NULL, event_key TEXT NOT NULL)";
const BATCH: usize = 256;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (mut events, mut rounds, mut parts) = (100_000, 3, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--events" => events = arguments.next().context("--events N")?.parse()?,
            "--rounds" => rounds = arguments.next().context("--rounds N")?.parse()?,
            part => parts.push(part.to_owned()),
        }
    }
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|one| one == part);
    if wanted("effects") {
        effects(events, rounds).await?;
    }
    if wanted("http") {
        http(events / 5, rounds).await?;
    }
    if wanted("poison") {
        poison(rounds).await?;
    }
    if wanted("history") {
        history(1_000_000, rounds.max(5)).await?;
    }
    if wanted("janitor") {
        janitor().await?;
    }
    Ok(())
}

/// A journal in a directory of its own.
struct Bench {
    directory: tempfile::TempDir,
    journal: Arc<SqliteJournal>,
    clock: Clock,
    made: usize,
}

impl Bench {
    fn new() -> anyhow::Result<Self> {
        let directory = tempfile::tempdir_in(std::env::current_dir()?.join("target"))?;
        Connection::open(directory.path().join("bench.db"))?.execute_batch(TABLE)?;
        Self::open(directory)
    }

    fn open(directory: tempfile::TempDir) -> anyhow::Result<Self> {
        let clock = Clock::system();
        let path = directory.path().join("bench.db");
        let journal =
            SqliteJournal::open(&SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(path) })?;
        Ok(Self { directory, journal: Arc::new(journal), clock, made: 0 })
    }

    /// Accepts events as the front door does: many at a time, each on its own.
    async fn append(&mut self, count: usize, random: bool, poison_at: Option<usize>) -> anyhow::Result<()> {
        let mut waiting = std::collections::VecDeque::new();
        for number in self.made..self.made + count {
            let event = event(number, random, poison_at == Some(number), self.clock.now());
            waiting.push_back(self.journal.submit([event].into_iter().collect())?);
            if waiting.len() >= BATCH
                && let Some(ticket) = waiting.pop_front()
            {
                ticket.await??;
            }
        }
        for ticket in waiting {
            ticket.await??;
        }
        self.made += count;
        Ok(())
    }

    fn work(&self) -> Worker {
        self.work_on(&routes())
    }

    fn work_on(&self, routes: &Routes) -> Worker {
        let year = Duration::from_secs(365 * 86_400);
        let retention = Retention { payload: year, dead: None, audit: year, batch: 200 };
        let deliveries = Arc::clone(&self.journal) as Arc<dyn Deliveries>;
        Worker::start(deliveries, routes, retention, self.clock.clone(), Arc::new(Metrics::new()))
    }

    /// Waits until all orders are there.
    async fn applied(&self, wanted: usize) -> anyhow::Result<()> {
        let reader = Connection::open(self.directory.path().join("bench.db"))?;
        loop {
            let last: Option<i64> = reader.query_row("SELECT max(id) FROM orders", [], |row| row.get(0))?;
            if last.unwrap_or(0) >= i64::try_from(wanted)? {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn routes() -> Routes {
    let bind: BTreeMap<String, Expression> =
        [("payment", "/data/object/id"), ("amount", "/data/object/amount"), ("key", "$key")]
            .into_iter()
            .map(|(name, value)| (name.to_owned(), Expression::parse(value).expect("an expression")))
            .collect();
    let handler = SqlHandler::new(&[INSERT], &bind, Dialect::Sqlite).expect("a statement");
    let name = RouteName::new("orders").expect("a name");
    let source = SourceName::new("shop").expect("a name");
    Routes::new(vec![Route::new(name, source, Handler::Sql(Arc::new(handler)))]).expect("routes")
}

/// An event of about 1 KB. Ordered keys grow with time, as most providers' do.
fn event(number: usize, random: bool, poison: bool, now: UnixMicros) -> NewEvent {
    let scattered = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let key = if random { format!("evt_{scattered:016x}") } else { format!("evt_{number:016x}") };
    let id = if poison { "null".to_owned() } else { format!("\"pi_{number:012}\"") };
    let body = format!(
        r#"{{"id":"{key}","type":"payment_intent.succeeded","data":{{"object":{{"id":{id},"amount":{number},"padding":"{}"}}}}}}"#,
        "x".repeat(880)
    );
    NewEvent {
        id: None,
        source: SourceName::new("shop").expect("a name"),
        key: EventKey::from_parts(&[key.as_bytes()]),
        key_signed: true,
        kind: Some("payment_intent.succeeded".to_owned()),
        entity: Some(format!("pi_{number:012}")),
        occurred_at: Some(now),
        received_at: now,
        expires_at: UnixMicros(now.0 + 35 * 86_400 * 1_000_000),
        integrity: Integrity::Body,
        headers: Bytes::from_static(b"content-type: application/json\n"),
        digest: digest(body.as_bytes()),
        body: Bytes::from(body),
        quarantine: None,
        routes: [RouteName::new("orders").expect("a name")].into_iter().collect(),
        peer: [127, 0, 0, 1].into(),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn rate(count: usize, since: Instant) -> f64 {
    count as f64 / since.elapsed().as_secs_f64()
}

/// The user's statement and nothing else.
fn bare(count: usize) -> anyhow::Result<f64> {
    let directory = tempfile::tempdir_in(std::env::current_dir()?.join("target"))?;
    let mut connection = Connection::open(directory.path().join("bare.db"))?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "cache_size", -65_536)?;
    connection.execute_batch(TABLE)?;
    let started = Instant::now();
    for first in (0..count).step_by(BATCH) {
        let transaction = connection.transaction()?;
        for number in first..(first + BATCH).min(count) {
            transaction.prepare_cached(INSERT)?.execute(rusqlite::named_params! {
                ":payment": format!("pi_{number:012}"),
                ":amount": i64::try_from(number)?,
                ":key": format!("evt_{number:016x}"),
            })?;
        }
        transaction.commit()?;
    }
    Ok(rate(count, started))
}

async fn drain(count: usize) -> anyhow::Result<f64> {
    let mut bench = Bench::new()?;
    bench.append(count, false, None).await?;
    let started = Instant::now();
    let worker = bench.work();
    bench.applied(count).await?;
    let rate = rate(count, started);
    worker.stop().await;
    bench.journal.close().await;
    Ok(rate)
}

async fn sustained(count: usize) -> anyhow::Result<f64> {
    let mut bench = Bench::new()?;
    let worker = bench.work();
    let started = Instant::now();
    bench.append(count, false, None).await?;
    bench.applied(count).await?;
    let rate = rate(count, started);
    worker.stop().await;
    bench.journal.close().await;
    Ok(rate)
}

async fn effects(count: usize, rounds: usize) -> anyhow::Result<()> {
    let (mut bares, mut drains, mut both) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        bares.push(bare(count)?);
        drains.push(drain(count).await?);
        both.push(sustained(count).await?);
    }
    let (bare, drain, both) = (median(bares), median(drains), median(both));
    println!("effects: bare statement           {bare:>9.0}/s");
    println!("effects: backlog drained          {drain:>9.0}/s  {:.2} of bare", drain / bare);
    println!("effects: accepted and applied     {both:>9.0}/s  {:.2} of bare", both / bare);
    Ok(())
}

async fn http(count: usize, rounds: usize) -> anyhow::Result<()> {
    let receiver = Receiver::start(|_, _| Reply::status(200, "ok")).await;
    let mut rates = Vec::new();
    for _ in 0..rounds {
        let mut bench = Bench::new()?;
        bench.append(count, false, None).await?;
        let handler = HttpHandler::new(HttpOptions::new(receiver.url("/"))).map_err(anyhow::Error::msg)?;
        let (name, source) = (RouteName::new("orders")?, SourceName::new("shop")?);
        let mut route = Route::new(name, source, Handler::Http(Arc::new(handler)));
        route.concurrency = 64;
        let started = Instant::now();
        let worker = bench.work_on(&Routes::new(vec![route])?);
        while bench.journal.backlog().await?.iter().any(|route| route.waiting + route.running > 0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        rates.push(rate(count, started));
        worker.stop().await;
        bench.journal.close().await;
    }
    println!("effects: posted over HTTP         {:>9.0}/s", median(rates));
    Ok(())
}

async fn poison(rounds: usize) -> anyhow::Result<()> {
    let count = 10_000;
    let (mut clean, mut poisoned) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for poison_at in [None, Some(count / 2)] {
            let mut bench = Bench::new()?;
            bench.append(count, false, poison_at).await?;
            let started = Instant::now();
            let worker = bench.work();
            bench.applied(count - usize::from(poison_at.is_some())).await?;
            let rates = if poison_at.is_some() { &mut poisoned } else { &mut clean };
            rates.push(rate(count, started));
            worker.stop().await;
            bench.journal.close().await;
        }
    }
    let (clean, poisoned) = (median(clean), median(poisoned));
    println!("poison: 10,000 without            {clean:>9.0}/s");
    println!("poison: 10,000 with one           {poisoned:>9.0}/s  {:.2} of without", poisoned / clean);
    Ok(())
}

/// Fills a journal with a history, in bulk and with SQL: events, keys and settled deliveries.
fn load_history(path: &Path, count: usize, random: bool, until: UnixMicros) -> anyhow::Result<()> {
    let mut connection = Connection::open(path)?;
    connection.pragma_update(None, "synchronous", "OFF")?;
    let transaction = connection.transaction()?;
    {
        let mut events = transaction.prepare(
            "INSERT INTO oncehook_events (seq, id, source, key, key_signed, type, entity, occurred_at, received_at,
                                          key_expires_at, integrity, digest, headers, body)
             VALUES (?1, ?2, 'shop', ?3, 1, 'payment_intent.succeeded', ?4, ?5, ?5, ?5 + 3024000000000, 'body', ?6, x'', ?7)",
        )?;
        let mut deliveries = transaction.prepare(
            "INSERT INTO oncehook_deliveries (event, route, state, attempt, run_at, settled_at)
             VALUES (?1, 'orders', 'succeeded', 1, ?2, ?2)",
        )?;
        let mut ids = oncehook::event::EventIds::above(0, 1);
        let body = format!("{{\"padding\":\"{}\"}}", "x".repeat(180));
        let mut random_source = Random::new(7);
        for number in 0..count {
            let at = UnixMicros(until.0 - ((count - number) as i64) * 1_000);
            let id = ids.next(at);
            let key = if random {
                format!("old_{:016x}", random_source.next())
            } else {
                format!("evt_-{number:015x}")
            };
            events.execute(params![
                id.sequence(),
                id.as_bytes(),
                key.as_bytes(),
                format!("pi_old_{number}"),
                at.0,
                digest(key.as_bytes()),
                body.as_bytes()
            ])?;
            deliveries.execute(params![id.sequence(), at.0])?;
        }
    }
    // In the ledger's own order, as a merge would.
    transaction.execute_batch(
        "INSERT INTO oncehook_keys (source, key, event, digest, first_seen, expires_at)
         SELECT source, key, id, digest, received_at, key_expires_at FROM oncehook_events ORDER BY source, key;
         INSERT INTO oncehook_meta (name, value) SELECT 'ledger_to', max(seq) FROM oncehook_events
          WHERE true ON CONFLICT (name) DO UPDATE SET value = excluded.value;
         INSERT INTO oncehook_totals (source, events) SELECT 'shop', count(*) FROM oncehook_events",
    )?;
    transaction.commit()?;
    connection.pragma_update(None, "wal_checkpoint", "TRUNCATE").or_else(|error| match error {
        rusqlite::Error::ExecuteReturnedResults => Ok(()),
        error => Err(error),
    })?;
    Ok(())
}

async fn history(stored: usize, rounds: usize) -> anyhow::Result<()> {
    let count = 40_000;
    for random in [false, true] {
        let mut full = Bench::new()?;
        full.journal.close().await;
        load_history(&full.directory.path().join("bench.db"), stored, random, full.clock.now())?;
        full = Bench::open(full.directory)?;
        let mut empty = Bench::new()?;
        let mut ratios = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let mut measured = Vec::new();
            for bench in [&mut empty, &mut full] {
                let started = Instant::now();
                bench.append(count, random, None).await?;
                let appended = rate(count, started);
                let started = Instant::now();
                let worker = bench.work();
                bench.applied(bench.made).await?;
                measured.push((appended, rate(count, started)));
                worker.stop().await;
            }
            if let [empty, full] = measured.as_slice() {
                ratios.0.push(full.0 / empty.0);
                ratios.1.push(full.1 / empty.1);
            }
        }
        let keys = if random { "random" } else { "time-ordered" };
        println!("history: {stored} stored, {keys} keys: append {:.2} of empty", median(ratios.0));
        println!("history: {stored} stored, {keys} keys: claim  {:.2} of empty", median(ratios.1));
        full.journal.close().await;
        empty.journal.close().await;
    }
    Ok(())
}

/// The 99th percentile of append times at a steady pace, in milliseconds.
async fn paced(bench: &mut Bench, seconds: u64) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    let mut tick = tokio::time::interval(Duration::from_millis(1));
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut waiting = tokio::task::JoinSet::new();
    while Instant::now() < until {
        tick.tick().await;
        for _ in 0..2 {
            let event = event(bench.made, false, false, bench.clock.now());
            bench.made += 1;
            let started = Instant::now();
            let ticket = bench.journal.submit([event].into_iter().collect())?;
            waiting.spawn(async move { ticket.await.map(|_| started.elapsed()) });
        }
        while let Some(done) = waiting.try_join_next() {
            times.push(done??.as_secs_f64() * 1e3);
        }
    }
    while let Some(done) = waiting.join_next().await {
        times.push(done??.as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times.get(times.len() * 99 / 100).copied().unwrap_or(f64::NAN))
}

async fn janitor() -> anyhow::Result<()> {
    let mut bench = Bench::new()?;
    bench.journal.close().await;
    let old = UnixMicros(bench.clock.now().0 - 40 * 86_400 * 1_000_000);
    load_history(&bench.directory.path().join("bench.db"), 100_000, false, old)?;
    bench = Bench::open(bench.directory)?;
    let before = paced(&mut bench, 10).await?;
    let month = Duration::from_secs(30 * 86_400);
    let retention = Retention { payload: month, dead: None, audit: month, batch: 200 };
    let nothing = Routes::default();
    let deliveries = Arc::clone(&bench.journal) as Arc<dyn Deliveries>;
    let worker =
        Worker::start(deliveries, &nothing, retention, bench.clock.clone(), Arc::new(Metrics::new()));
    let during = paced(&mut bench, 30).await?;
    let left: i64 = Connection::open(bench.directory.path().join("bench.db"))?.query_row(
        "SELECT count(*) FROM oncehook_events WHERE received_at < ?1",
        [old.0 + 1],
        |row| row.get(0),
    )?;
    worker.stop().await;
    bench.journal.close().await;
    println!("janitor: {} of 100000 events forgotten in 30 s", 100_000 - left);
    println!("janitor: append p99 {before:.1} ms before, {during:.1} ms during ({:.2}×)", during / before);
    Ok(())
}
