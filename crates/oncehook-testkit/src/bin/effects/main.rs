//! How fast events take effect, side by side with the bare limit. `--journal postgres` measures on a server that this program
//! starts; without it the embedded journal is measured. `--journal mysql` (MariaDB) measures `growth` only.
//!
//! - **bare**: the user's statement alone, in batches of the same size, with the same settings and as many connections.
//! - **accept**: events are appended and nothing runs; on a server beside bare inserts of the same bodies.
//! - **drain**: a backlog is worked off: claim, parameters from JSON, the statement, settlement, commit.
//! - **sustained**: events are accepted and take effect at the same time.
//! - **http**: a backlog is posted to a receiver in this process that answers at once, 64 requests at a time.
//! - **poison**: a backlog of 10,000 with one event that always fails, against one without.
//! - **growth** (only when it is asked for): accepts, effects, every filter of the list, start-up, a backlog and forgetting, in a
//!   history that grows to `--stored` sizes (1, 5 and 10 million, parted by commas), against none; `--backlog` sizes, `--run`
//!   events in a run. Writes `growth.json`, `GROWTH.md` and pictures to `--out` (`bench`).
//! - **janitor**: the time an append takes while 100,000 events are forgotten, against the time without (embedded only).
//!
//! All in one process, without HTTP: what is measured is the journal and the worker. Prints ratios; times say little on a
//! shared machine.

mod bare;
mod growth;
mod store;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use growth::history::{self, History, ordered, scattered};
use oncehook::clock::Clock;
use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Expression, Handler, HttpHandler, HttpOptions, SqlHandler};
use oncehook::journal::{Deliveries, Retention};
use oncehook::observe::Metrics;
use oncehook::route::{Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::deliveries::WholeJournal;
use oncehook_testkit::receiver::{Receiver, Reply};
use oncehook_verify::{EventKey, Integrity, UnixMicros, digest};
use store::{Cost, Engine, Store};

/// Deliveries that the worker takes at once.
const BATCH: usize = 256;

/// Scattered keys of a history have smaller numbers.
const NEW: usize = 1 << 40;

/// Connections that share a batch on a server.
const LANES: usize = 2;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (mut events, mut rounds, mut parts) = (100_000, None, Vec::new());
    let mut engine = Engine::Sqlite;
    let mut plan = growth::Plan {
        sizes: vec![1_000_000, 5_000_000, 10_000_000],
        backlogs: vec![10_000, 100_000, 1_000_000],
        rounds: 5,
        run: None,
        out: "bench".into(),
    };
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--events" => events = arguments.next().context("--events N")?.parse()?,
            "--stored" => plan.sizes = sizes(&arguments.next().context("--stored N,N")?)?,
            "--backlog" => plan.backlogs = sizes(&arguments.next().context("--backlog N,N")?)?,
            "--run" => plan.run = Some(arguments.next().context("--run N")?.parse()?),
            "--out" => plan.out = arguments.next().context("--out DIRECTORY")?.into(),
            "--rounds" => rounds = Some(arguments.next().context("--rounds N")?.parse()?),
            "--journal" => {
                engine = match arguments.next().as_deref() {
                    Some("sqlite") => Engine::Sqlite,
                    Some("postgres") => Engine::Postgres,
                    Some("mysql") => Engine::Mysql,
                    _ => anyhow::bail!("--journal sqlite|postgres|mysql"),
                }
            }
            part if !part.starts_with('-') => parts.push(part.to_owned()),
            other => anyhow::bail!("unknown argument {other}"),
        }
    }
    if parts.iter().any(|part| part == "growth") {
        plan.rounds = rounds.unwrap_or(plan.rounds);
        return growth::run(engine, &plan).await;
    }
    anyhow::ensure!(engine != Engine::Mysql, "only `growth` is measured on MariaDB");
    let rounds = rounds.unwrap_or(3);
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|one| one == part);
    if wanted("effects") {
        effects(engine, events, rounds).await?;
    }
    if wanted("http") {
        http(engine, events / 5, rounds).await?;
    }
    if wanted("poison") {
        poison(engine, rounds).await?;
    }
    if wanted("janitor") && engine == Engine::Sqlite {
        janitor().await?;
    }
    Ok(())
}

/// Several sizes, parted by commas, in their order.
fn sizes(text: &str) -> anyhow::Result<Vec<usize>> {
    let mut sizes: Vec<usize> = text
        .split(',')
        .filter(|size| !size.is_empty())
        .map(|size| size.parse().with_context(|| format!("{size} is not a number")))
        .collect::<anyhow::Result<_>>()?;
    sizes.sort_unstable();
    Ok(sizes)
}

/// A journal in a store of its own.
struct Bench {
    store: Store,
    journal: Arc<dyn WholeJournal>,
    clock: Clock,
    made: usize,
    /// The bytes of a body, roughly.
    size: usize,
}

impl Bench {
    async fn new(engine: Engine) -> anyhow::Result<Self> {
        Self::open(Store::new(engine)?).await
    }

    async fn open(store: Store) -> anyhow::Result<Self> {
        let clock = Clock::system();
        let journal = store.open(&clock).await?;
        Ok(Self { store, journal, clock, made: 0, size: 1_000 })
    }

    fn with_size(self, size: usize) -> Self {
        Self { size, ..self }
    }

    /// Accepts events as the front door does: many at a time, each on its own.
    async fn append(&mut self, count: usize, random: bool, poison_at: Option<usize>) -> anyhow::Result<()> {
        let mut waiting = std::collections::VecDeque::new();
        for number in self.made..self.made + count {
            let event = event(number, random, poison_at == Some(number), self.size, self.clock.now());
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
        self.work_on(&routes(self.store.engine()))
    }

    fn work_on(&self, routes: &Routes) -> Worker {
        let year = Duration::from_secs(365 * 86_400);
        let retention = Retention { payload: year, dead: None, audit: year, batch: 200 };
        let deliveries = self.journal.clone() as Arc<dyn Deliveries>;
        Worker::start(deliveries, routes, retention, self.clock.clone(), Arc::new(Metrics::new()))
    }

    /// Waits until all orders are there.
    async fn applied(&self, wanted: usize) -> anyhow::Result<()> {
        let pause = Duration::from_millis(if self.store.engine() == Engine::Sqlite { 2 } else { 50 });
        while self.store.applied()? < wanted || !self.store.has_applied(wanted)? {
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }
}

fn routes(engine: Engine) -> Routes {
    let bind: BTreeMap<String, Expression> =
        [("payment", "/data/object/id"), ("amount", "/data/object/amount"), ("key", "$key")]
            .into_iter()
            .map(|(name, value)| (name.to_owned(), Expression::parse(value).expect("an expression")))
            .collect();
    let handler = SqlHandler::new(&[engine.statement()], &bind, engine.dialect()).expect("a statement");
    let name = RouteName::new("orders").expect("a name");
    let source = SourceName::new("shop").expect("a name");
    Routes::new(vec![Route::new(name, source, Handler::Sql(Arc::new(handler)))]).expect("routes")
}

/// A body of about so many bytes.
fn body(key: &str, number: usize, poison: bool, size: usize) -> String {
    let id = if poison { "null".to_owned() } else { format!("\"pi_{number:012}\"") };
    let head = format!(
        r#"{{"id":"{key}","type":"payment_intent.succeeded","data":{{"object":{{"id":{id},"amount":{number},"padding":""#
    );
    let padding = size.saturating_sub(head.len() + 4);
    format!("{head}{}\"}}}}}}", "x".repeat(padding))
}

/// An event. Ordered keys grow with time, as most providers' do.
fn event(number: usize, random: bool, poison: bool, size: usize, now: UnixMicros) -> NewEvent {
    let key = if random { scattered(NEW + number) } else { ordered(number) };
    let body = body(&key, number, poison, size);
    NewEvent {
        id: None,
        source: SourceName::new("shop").expect("a name"),
        key: EventKey::from_parts(&[key.as_bytes()]),
        key_signed: true,
        kind: Some("payment_intent.succeeded".to_owned()),
        entity: Some(format!("pi_{number:012}")),
        occurred_at: Some(now),
        version: None,
        received_at: now,
        expires_at: UnixMicros(now.0 + 35 * 86_400 * 1_000_000),
        integrity: Integrity::Body,
        headers: Bytes::from_static(b"content-type: application/json\n"),
        digest: digest(body.as_bytes()),
        body: Bytes::from(body),
        quarantine: None,
        routes: [RouteName::new("orders").expect("a name")].into_iter().collect(),
        by_entity: false,
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

/// How fast, and at what cost for each event.
struct Measured {
    rate: f64,
    cost: Cost,
}

/// Events are appended; nothing runs.
async fn accept(engine: Engine, count: usize) -> anyhow::Result<Measured> {
    let mut bench = Bench::new(engine).await?;
    bench.append(1_000, false, None).await?;
    let (before, started) = (bench.store.cost()?, Instant::now());
    bench.append(count, false, None).await?;
    let measured = Measured { rate: rate(count, started), cost: bench.store.cost()?.each(before, count) };
    bench.journal.close().await;
    Ok(measured)
}

/// A backlog is worked off.
async fn drain(engine: Engine, count: usize) -> anyhow::Result<Measured> {
    let mut bench = Bench::new(engine).await?;
    bench.append(count, false, None).await?;
    let (before, started) = (bench.store.cost()?, Instant::now());
    let worker = bench.work();
    bench.applied(count).await?;
    let measured = Measured { rate: rate(count, started), cost: bench.store.cost()?.each(before, count) };
    worker.stop().await;
    bench.journal.close().await;
    Ok(measured)
}

/// Events are accepted and take effect at the same time.
async fn sustained(engine: Engine, count: usize) -> anyhow::Result<Measured> {
    let mut bench = Bench::new(engine).await?;
    let (before, started) = (bench.store.cost()?, Instant::now());
    let worker = bench.work();
    bench.append(count, false, None).await?;
    bench.applied(count).await?;
    let measured = Measured { rate: rate(count, started), cost: bench.store.cost()?.each(before, count) };
    worker.stop().await;
    bench.journal.close().await;
    Ok(measured)
}

async fn effects(engine: Engine, count: usize, rounds: usize) -> anyhow::Result<()> {
    let (mut bares, mut bodies) = (Vec::new(), Vec::new());
    let (mut accepts, mut drains, mut both) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        bares.push(bare::effects(engine, count).await?);
        if engine == Engine::Postgres {
            bodies.push(bare::accepts(count).await?);
        }
        accepts.push(accept(engine, count).await?);
        drains.push(drain(engine, count).await?);
        both.push(sustained(engine, count).await?);
    }
    let bare = middle(bares);
    println!("effects: bare statement           {:>9.0}/s  {}", bare.rate, bare.cost);
    for (name, measured) in [("backlog drained     ", drains), ("accepted and applied", both)] {
        let measured = middle(measured);
        let ratio = measured.rate / bare.rate;
        println!("effects: {name}     {:>9.0}/s  {ratio:.2} of bare; {}", measured.rate, measured.cost);
    }
    let accept = middle(accepts);
    if bodies.is_empty() {
        println!("accepts: appended                 {:>9.0}/s  {}", accept.rate, accept.cost);
    } else {
        let bare = middle(bodies);
        let ratio = accept.rate / bare.rate;
        println!("accepts: bare inserts             {:>9.0}/s  {}", bare.rate, bare.cost);
        println!("accepts: appended                 {:>9.0}/s  {ratio:.2} of bare; {}", accept.rate, accept.cost);
    }
    Ok(())
}

/// The median by rate.
fn middle(mut measured: Vec<Measured>) -> Measured {
    measured.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    measured.remove(measured.len() / 2)
}

async fn http(engine: Engine, count: usize, rounds: usize) -> anyhow::Result<()> {
    let receiver = Receiver::start(|_, _| Reply::status(200, "ok")).await;
    let mut rates = Vec::new();
    for _ in 0..rounds {
        let mut bench = Bench::new(engine).await?;
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

async fn poison(engine: Engine, rounds: usize) -> anyhow::Result<()> {
    let count = 10_000;
    let (mut clean, mut poisoned) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for poison_at in [None, Some(count / 2)] {
            let mut bench = Bench::new(engine).await?;
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

/// The 99th percentile of append times at a steady pace, in milliseconds.
async fn paced(bench: &mut Bench, seconds: u64) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    let mut tick = tokio::time::interval(Duration::from_millis(1));
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut waiting = tokio::task::JoinSet::new();
    while Instant::now() < until {
        tick.tick().await;
        for _ in 0..2 {
            let event = event(bench.made, false, false, bench.size, bench.clock.now());
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
    let mut bench = Bench::new(Engine::Sqlite).await?;
    bench.journal.close().await;
    let old = UnixMicros(bench.clock.now().0 - 40 * 86_400 * 1_000_000);
    let count = 100_000;
    let past = History { count, until: old, over: Duration::ZERO, waiting: false, size: bench.size };
    history::load(&bench.store, &past, 0, count)?;
    bench = Bench::open(bench.store).await?;
    let before = paced(&mut bench, 10).await?;
    let month = Duration::from_secs(30 * 86_400);
    let retention = Retention { payload: month, dead: None, audit: month, batch: 200 };
    let nothing = Routes::default();
    let deliveries = bench.journal.clone() as Arc<dyn Deliveries>;
    let worker = Worker::start(deliveries, &nothing, retention, bench.clock.clone(), Arc::new(Metrics::new()));
    let during = paced(&mut bench, 30).await?;
    let left = bench.store.number(&format!("SELECT count(*) FROM oncehook_events WHERE received_at <= {}", old.0))?;
    worker.stop().await;
    bench.journal.close().await;
    println!("janitor: {} of 100000 events forgotten in 30 s", 100_000 - left);
    println!("janitor: append p99 {before:.1} ms before, {during:.1} ms during ({:.2}×)", during / before);
    Ok(())
}
