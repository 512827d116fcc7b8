//! The gateway, put together: journal, gate, two listeners, the worker, and the watch that keeps asking whether duplicates
//! are still recognised.
//!
//! Promises: the end comes within [`END`] of the signal, whether the journal answers or not. Every part is told at once; the
//! journal is closed last, when nobody can store anything any more.
//!
//! [`App::run`] takes listeners and a shutdown future, so tests run the real thing on free ports.

use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::intake::{Intake, Spool};
use oncehook::journal::open::Opened;
use oncehook::journal::{Journal, Retention, SelfTestError};
use oncehook::observe::Metrics;
use oncehook::worker::{Worker, WorkerHandle};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use crate::backlog;
use crate::config::Config;
use crate::http::admin::{self, Admin};
use crate::http::gate::Gate;
use crate::http::listener::{self, ended};
use crate::pauses::{self, Pauses};
use crate::replay::Replays;
use crate::spool;

/// How often the self-test runs (R44). The gate follows its verdict.
const SELF_TEST_EVERY: Duration = Duration::from_secs(60);

/// How soon it is repeated after it failed: what it met may have been a passing trouble.
const SELF_TEST_AGAIN: Duration = Duration::from_secs(1);

/// How long to wait for the self-test's verdict.
const SELF_TEST_WAIT: Duration = Duration::from_secs(15);

/// The whole end takes so long at most, from the signal on: what supervisors grant before they kill.
const END: Duration = Duration::from_secs(30);

/// What is kept of it for the journal's close, however long the others take.
const CLOSE: Duration = Duration::from_secs(5);

/// What is kept of it for the admin listener, which answers until the journal is closed.
const ADMIN: Duration = Duration::from_secs(1);

/// Whoever waits for a result has so long to hear it after the worker has stopped.
const LAST_LOOK: Duration = Duration::from_millis(100);

/// Senders that were refused and do not come back cannot notice that the journal stores again. After so long it is probed.
const PROBE_AFTER: Duration = Duration::from_secs(1);

/// Events and keys that are looked at when something is to be forgotten: few, so that accepting does not wait.
const FORGET_BATCH: usize = 500;

/// How often the journal's health is looked at.
const HEALTH_EVERY: Duration = Duration::from_millis(250);

/// Which parts of the work a gateway does. Others do the rest on the same journal. Health and metrics are always served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Roles {
    /// Accepts webhooks.
    pub ingest: bool,
    /// Runs what is due.
    pub worker: bool,
    /// Serves the API.
    pub admin: bool,
}

impl Roles {
    /// A gateway that does everything.
    pub const ALL: Self = Self { ingest: true, worker: true, admin: true };
}

/// A gateway that is built but not running.
pub struct App {
    gate: Arc<Gate>,
    admin: Arc<Admin>,
    journal: Arc<dyn Journal>,
    retention: Retention,
    roles: Roles,
    lease: Option<Duration>,
    clock: Clock,
}

impl App {
    /// Puts a gateway in front of a journal. The journal has passed its self-test when it was opened.
    #[must_use]
    pub fn new(config: Config, journal: impl Into<Opened>, clock: Clock) -> Self {
        let Opened { journal, deliveries, reader } = journal.into();
        let metrics = Arc::new(Metrics::new());
        let access = admin::Access::new(&config.server);
        let limits = config.server.limits.clone();
        let routes = config.routes.clone();
        let spool_alarm = config.spool.alarm;
        let retention = Retention {
            payload: config.retention_payload,
            dead: config.retention_dead,
            audit: config.retention_audit,
            batch: FORGET_BATCH,
        };
        let gate = Arc::new(Gate::new(config, Arc::clone(&journal), clock.clone(), Arc::clone(&metrics)));
        let admin = Arc::new(Admin {
            spool_alarm,
            gate: Arc::clone(&gate),
            journal: Arc::clone(&journal),
            reader,
            deliveries,
            worker: OnceLock::new(),
            routes,
            replays: Replays::default(),
            pauses: Pauses::default(),
            metrics,
            access,
            limits,
            self_test: watch::Sender::new(Ok(())),
        });
        Self { gate, admin, journal, retention, roles: Roles::ALL, lease: None, clock }
    }

    /// With a spool beside the journal.
    #[must_use]
    pub fn with_spool(self, spool: Spool, after: Duration) -> Self {
        let intake = Intake::new(spool, after, Arc::clone(&self.admin.metrics));
        self.gate.set_intake(Arc::new(intake));
        self
    }

    /// With some of the work only.
    #[must_use]
    pub fn with_roles(mut self, roles: Roles) -> Self {
        self.roles = roles;
        self
    }

    /// With leases of another length than the usual one. For tests: see [`Worker::start_with_lease`].
    #[must_use]
    pub fn with_lease(mut self, lease: Option<Duration>) -> Self {
        self.lease = lease;
        self
    }

    /// Serves until `shutdown` is done. Then, all at once, it refuses new connections and lets open requests finish, stops claiming,
    /// lets attempts finish and gives leases back, and drains the spool; at last it closes the journal. A gateway that accepts nothing needs no listener for it.
    ///
    /// Returns how many events wait in the spool: the next start will drain them.
    pub async fn run(
        self,
        ingress: impl Into<Option<TcpListener>>,
        admin: TcpListener,
        shutdown: impl Future<Output = ()>,
    ) -> u64 {
        let (end, ended) = watch::channel(false);
        let worker = self.roles.worker.then(|| self.start_worker());
        self.gate.set_open(true);
        let admin_parts = Arc::clone(&self.admin);
        tokio::spawn(async move { backlog::warn_of_left_behind(&admin_parts).await });
        let pauses = tokio::spawn(pauses::follow(Arc::clone(&self.admin), ended.clone()));
        let watching = tokio::spawn(watch_journal(Arc::clone(&self.admin), ended.clone()));
        let draining = spool::start(&self.admin);
        let fast_path = self.roles.ingest.then(|| self.start_fast_path());
        let waiting = self.roles.ingest.then(|| self.start_waiting());
        let serve = |listener| listener::serve_ingress(listener, Arc::clone(&self.gate), ended.clone());
        let ingress = ingress.into().filter(|_| self.roles.ingest).map(|listener| tokio::spawn(serve(listener)));
        let admin_end = watch::Sender::new(false);
        let router = admin::router(Arc::clone(&self.admin), self.roles.admin);
        let limits = self.admin.limits.clone();
        let admin = tokio::spawn(listener::serve_admin(admin, router, limits, admin_end.subscribe()));

        shutdown.await;
        let told_at = Instant::now();
        let (by, close_by) = (told_at + END - CLOSE - ADMIN, told_at + END - ADMIN);
        self.say_stopping();
        // Everybody is told at once. A receiver may be gone if its task has ended early.
        let _ = end.send(true);
        self.admin.replays.cancel_all();
        let accepting = async {
            if let Some(ingress) = ingress {
                in_time("the ingress", by, ingress).await;
            }
            // They only remember and look; there is nothing to finish.
            fast_path.iter().chain(&waiting).chain([&pauses]).for_each(JoinHandle::abort);
            match draining {
                Some(draining) => draining.finish(by).await,
                None => 0,
            }
        };
        let (spooled, ()) = tokio::join!(accepting, self.stop_worker(worker, by));
        // Nobody can store anything any more.
        let closed = tokio::time::timeout_at(close_by, self.journal.close()).await.is_ok();
        let _ = admin_end.send(true);
        in_time("the admin listener", told_at + END, admin).await;
        in_time("the watch over the journal", told_at + END, watching).await;
        self.gate.log_rejections();
        self.say_stopped(told_at.elapsed(), spooled, closed);
        spooled
    }

    /// Stops the worker, then lets everybody go who waits for a result.
    async fn stop_worker(&self, worker: Option<Worker>, by: Instant) {
        let Some(worker) = worker else { return };
        if tokio::time::timeout_at(by, worker.stop()).await.is_err() {
            // Their leases run out, or are void at the next start.
            tracing::error!("the worker did not stop in time; the journal did not take back what it held");
        }
        tokio::time::sleep(LAST_LOOK).await;
        self.gate.waiting.let_go();
    }

    fn say_stopping(&self) {
        let (requests, attempts, spooled) = self.under_way();
        tracing::info!(
            "stopping: {requests} open requests, {attempts} attempts under way, {spooled} events in the spool; at most {} s",
            END.as_secs()
        );
    }

    fn say_stopped(&self, took: Duration, spooled: u64, closed: bool) {
        let (requests, attempts, _) = self.under_way();
        let left = format!("{requests} open requests, {attempts} attempts, {spooled} events in the spool");
        let took = format!("{:.1} s", took.as_secs_f64());
        match closed {
            true => tracing::info!("stopped after {took}; left: {left}"),
            false => tracing::error!(
                "stopped after {took}, and the journal did not close; left: {left}; the next start goes on as after a crash"
            ),
        }
    }

    /// Open requests, attempts that run, events in the spool.
    fn under_way(&self) -> (i64, usize, u64) {
        let attempts = self.admin.worker.get().map_or(0, WorkerHandle::under_way);
        let spooled = self.gate.intake().map_or(0, |intake| intake.spool().state().events);
        (self.admin.metrics.in_flight.get(), attempts, spooled)
    }

    fn start_fast_path(&self) -> JoinHandle<()> {
        let (path, clock) = (self.gate.fast_path(), self.clock.clone());
        let (journal, reader) = (Arc::clone(&self.journal), Arc::clone(&self.admin.reader));
        tokio::spawn(async move { path.run(&*journal, &*reader, &clock).await })
    }

    fn start_waiting(&self) -> JoinHandle<()> {
        let (gate, reader) = (Arc::clone(&self.gate), Arc::clone(&self.admin.reader));
        tokio::spawn(async move { gate.waiting.run(&*reader).await })
    }

    fn start_worker(&self) -> Worker {
        let admin = &self.admin;
        let (deliveries, metrics) = (Arc::clone(&admin.deliveries), Arc::clone(&admin.metrics));
        let (routes, retention, clock) = (&admin.routes, self.retention, self.clock.clone());
        let worker = match self.lease {
            None => Worker::start(deliveries, routes, retention, clock, metrics),
            Some(lease) => Worker::start_with_lease(deliveries, routes, retention, clock, metrics, lease),
        };
        // An app runs once, so nobody has set it before.
        let _ = admin.worker.set(worker.handle());
        worker
    }
}

/// Waits for a task until the deadline, then ends it. A panic in it has been reported by the task.
async fn in_time(what: &str, by: Instant, mut task: JoinHandle<()>) {
    if tokio::time::timeout_at(by, &mut task).await.is_err() {
        tracing::error!("{what} did not end in time");
        task.abort();
    }
}

/// Opens the gate while the journal stores and its self-test passes, and closes it otherwise. The self-test runs beside, one at a
/// time, so that the gate follows the journal also while a verdict takes long.
async fn watch_journal(admin: Arc<Admin>, mut end: watch::Receiver<bool>) {
    let mut health = tokio::time::interval(HEALTH_EVERY);
    let mut logged = tokio::time::interval(Duration::from_secs(1));
    let mut testing = JoinSet::new();
    let mut tested_at = Instant::now();
    let mut test_at = tested_at + SELF_TEST_EVERY;
    let mut ready = true;
    loop {
        tokio::select! {
            _ = health.tick() => {
                follow_journal(&admin, &mut ready);
                if admin.gate.fast_path().trouble().is_some_and(|trouble| trouble.last.elapsed() >= PROBE_AFTER) {
                    test_at = test_at.min(tested_at + SELF_TEST_AGAIN);
                }
            }
            _ = logged.tick() => admin.gate.log_rejections(),
            () = tokio::time::sleep_until(test_at), if testing.is_empty() => {
                testing.spawn(self_test(Arc::clone(&admin.journal)));
            }
            Some(tested) = testing.join_next(), if !testing.is_empty() => {
                let (began, verdict) = tested.unwrap_or_else(|error| {
                    (Instant::now(), Err(SelfTestError(error.to_string())))
                });
                tested_at = Instant::now();
                test_at = tested_at + if verdict.is_ok() { SELF_TEST_EVERY } else { SELF_TEST_AGAIN };
                match &verdict {
                    Ok(()) => admin.gate.fast_path().probed(began),
                    Err(error) => {
                        tracing::error!(%error, "the ledger's self-test did not pass; refusing events until it does");
                        admin.gate.set_open(false);
                    }
                }
                let _before = admin.self_test.send_replace(verdict);
            }
            () = ended(&mut end) => return,
        }
    }
}

/// Sets the gate by how the journal is, and says when the gateway becomes ready or is no longer.
fn follow_journal(admin: &Admin, ready: &mut bool) {
    let open = admin.self_test.borrow().is_ok() && admin.journal.state().failing.is_none();
    admin.gate.set_open(open);
    let reason = admin.failing().or_else(|| admin.self_test.borrow().as_ref().err().map(ToString::to_string));
    if *ready != reason.is_none() {
        *ready = reason.is_none();
        match reason {
            None => tracing::info!("ready: the journal stores events again"),
            Some(reason) => tracing::warn!(reason, "not ready: the journal does not store events"),
        }
    }
}

/// The verdict of one self-test, and when it began. No verdict in time is one.
async fn self_test(journal: Arc<dyn Journal>) -> (Instant, Result<(), SelfTestError>) {
    let began = Instant::now();
    let verdict = tokio::time::timeout(SELF_TEST_WAIT, journal.self_test()).await;
    (began, verdict.unwrap_or_else(|_| Err(SelfTestError("no verdict in time".to_owned()))))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use oncehook::delivery::{Claim, Fence, RouteName, Settled, Settlement};
    use oncehook::event::{EventId, NewEvents};
    use oncehook::intake::SpoolOptions;
    use oncehook::journal::memory::MemoryJournal;
    use oncehook::journal::{
        AppendError, Backlog, BoxFuture, Deliveries, EventDetail, EventPage, EventQuery, Forgotten, JournalReader,
        JournalState, KnownCopy, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress, ReadError, Receipt,
        Stats, StoredBody, Ticket, Who, WorkError,
    };
    use oncehook::route::Route;
    use oncehook_verify::UnixMicros;

    use super::*;

    /// A journal on a disk that hangs: whoever asks gets no answer.
    struct Hanging {
        inner: MemoryJournal,
        asked: AtomicBool,
        /// Whether appends hang too, and the answers that nobody will give.
        hangs_appends: AtomicBool,
        unanswered: Mutex<Vec<Answer>>,
        failing: Mutex<Option<String>>,
        self_tests: AtomicUsize,
        changes: watch::Sender<u64>,
    }

    type Answer = tokio::sync::oneshot::Sender<Result<Receipt, AppendError>>;

    impl Hanging {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                inner: MemoryJournal::new(),
                asked: AtomicBool::new(false),
                hangs_appends: AtomicBool::new(false),
                unanswered: Mutex::default(),
                failing: Mutex::default(),
                self_tests: AtomicUsize::new(0),
                changes: watch::Sender::new(0),
            })
        }

        fn hang<T: 'static>(&self) -> BoxFuture<'_, T> {
            self.asked.store(true, Ordering::Relaxed);
            Box::pin(std::future::pending())
        }
    }

    impl Journal for Hanging {
        fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
            if !self.hangs_appends.load(Ordering::Relaxed) {
                return self.inner.submit(events);
            }
            let (answer, ticket) = tokio::sync::oneshot::channel();
            self.unanswered.lock().unwrap().push(answer);
            Ok(ticket)
        }
        fn note_duplicates(&self, _: &[KnownCopy<'_>]) -> bool {
            true
        }
        fn state(&self) -> JournalState {
            JournalState { failing: self.failing.lock().unwrap().clone(), ..self.inner.state() }
        }
        fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
            self.self_tests.fetch_add(1, Ordering::Relaxed);
            self.hang()
        }
        fn close(&self) -> BoxFuture<'_, ()> {
            self.hang()
        }
    }

    impl JournalReader for Hanging {
        fn list(&self, _: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
            self.hang()
        }
        fn show(&self, _: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
            self.hang()
        }
        fn body(&self, _: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
            self.hang()
        }
        fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
            self.hang()
        }
    }

    impl Deliveries for Hanging {
        fn changes(&self) -> watch::Receiver<u64> {
            self.changes.subscribe()
        }
        fn apply(&self, _: Arc<Route>, _: usize) -> BoxFuture<'_, Result<Progress, WorkError>> {
            self.hang()
        }
        fn claim(&self, _: Arc<Route>, _: usize, _: Duration) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>> {
            self.hang()
        }
        fn call(&self, _: Arc<Route>, _: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
            self.hang()
        }
        fn settle(&self, _: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
            self.hang()
        }
        fn renew(&self, _: Vec<Fence>, _: Duration) -> BoxFuture<'_, Result<(), WorkError>> {
            self.hang()
        }
        fn give_back(&self, _: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>> {
            self.hang()
        }
        fn reclaim(&self, _: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>> {
            self.hang()
        }
        fn next_due(&self, _: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>> {
            self.hang()
        }
        fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>> {
            self.hang()
        }
        fn order(&self, _: Order) -> BoxFuture<'_, Result<Ordered, OrderError>> {
            self.hang()
        }
        fn set_paused(&self, _: Pause, _: Who) -> BoxFuture<'_, Result<(), WorkError>> {
            self.hang()
        }
        fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>> {
            self.hang()
        }
        fn pauses(&self) -> BoxFuture<'_, Result<Vec<Paused>, WorkError>> {
            self.hang()
        }
        fn forget(&self, _: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>> {
            self.hang()
        }
    }

    const TOKEN: &str = "the-token-of-the-test";

    const GITLAB: &str = r#"
        [[source]]
        name = "gitlab"
        provider = "gitlab"
        secrets = ["file:SECRET"]
        on_outage = "spool"
        [[route]]
        name = "orders"
        source = "gitlab"
        [route.sql]
        statement = "SELECT 1"
    "#;

    fn app(journal: &Arc<Hanging>) -> App {
        let secret = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(secret.path(), TOKEN).unwrap();
        let config = GITLAB.replace("SECRET", &secret.path().display().to_string());
        App::new(Config::parse("test", &config).unwrap(), Arc::clone(journal), Clock::system())
    }

    async fn listen() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.unwrap()
    }

    async fn eventually(what: &str, mut seen: impl FnMut() -> bool) {
        let begun = std::time::Instant::now();
        while !seen() {
            assert!(begun.elapsed() < Duration::from_secs(60), "never: {what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Everything hangs: a sender in the middle of its body, the journal with what the spool wants to hand on, the worker,
    /// the journal's close.
    #[tokio::test]
    async fn the_end_comes_even_if_the_journal_never_answers() {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::open(&SpoolOptions::new(directory.path().join("spool.db"))).unwrap();
        let journal = Hanging::new();
        journal.hangs_appends.store(true, Ordering::Relaxed);
        let app = app(&journal).with_spool(spool, Duration::from_millis(1));
        let (gate, metrics) = (Arc::clone(&app.gate), Arc::clone(&app.admin.metrics));
        let (ingress, admin) = (listen().await, listen().await);
        let at = ingress.local_addr().unwrap();
        let send = async |body: &str, length: usize| {
            let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
            let request = format!(
                "POST /webhooks/gitlab HTTP/1.1\r\nhost: x\r\nx-gitlab-token: {TOKEN}\r\ncontent-length: {length}\r\n\r\n{body}"
            );
            tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.unwrap();
            stream
        };
        let (told, mut at_the_signal) = (Arc::new(Mutex::new(None)), Vec::new());
        let shutdown = {
            let told = Arc::clone(&told);
            let (journal, gate) = (Arc::clone(&journal), Arc::clone(&gate));
            async move {
                at_the_signal.push(send("{}", 2).await);
                at_the_signal.push(send("{", 2).await);
                let spool = gate.intake().unwrap().spool();
                eventually("the worker asks", || journal.asked.load(Ordering::Relaxed)).await;
                eventually("an event is in the spool", || spool.state().events == 1).await;
                eventually("a body is under way", || metrics.in_flight.get() == 1).await;
                // From here on waiting costs no time.
                tokio::time::pause();
                *told.lock().unwrap() = Some(tokio::time::Instant::now());
                // Kept open until the test is over.
                std::mem::forget(at_the_signal);
            }
        };
        let left = app.run(ingress, admin, shutdown).await;
        let took = told.lock().unwrap().unwrap().elapsed();
        assert_eq!(left, 1, "the spool keeps what the journal did not take");
        assert!(took <= Duration::from_secs(31), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn r44_the_gate_follows_the_journal_while_a_self_test_hangs() {
        let journal = Hanging::new();
        let app = app(&journal);
        app.gate.set_open(true);
        let end = watch::Sender::new(false);
        let watching = tokio::spawn(watch_journal(Arc::clone(&app.admin), end.subscribe()));
        tokio::time::sleep(SELF_TEST_EVERY + Duration::from_secs(1)).await;
        assert_eq!(journal.self_tests.load(Ordering::Relaxed), 1, "a self-test is under way");
        *journal.failing.lock().unwrap() = Some("the disk is full".to_owned());
        tokio::time::sleep(2 * HEALTH_EVERY).await;
        assert!(!app.gate.is_open(), "the journal fails, and the gate is open");
        *journal.failing.lock().unwrap() = None;
        tokio::time::sleep(2 * HEALTH_EVERY).await;
        assert!(app.gate.is_open(), "the journal is well again, and the gate is closed");
        assert_eq!(journal.self_tests.load(Ordering::Relaxed), 1, "one at a time");
        // No verdict in time is a verdict.
        tokio::time::sleep(SELF_TEST_WAIT).await;
        assert!(!app.gate.is_open());
        end.send_replace(true);
        watching.await.unwrap();
    }
}
