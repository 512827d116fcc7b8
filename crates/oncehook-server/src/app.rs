//! The gateway, put together: journal, gate, two listeners, the worker, and the watch that keeps asking whether duplicates
//! are still recognised.
//!
//! Promises: the end comes. Every part has a deadline, whether the journal answers or not.
//!
//! [`App::run`] takes listeners and a shutdown future, so tests run the real thing on free ports.

use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::intake::{Intake, Spool};
use oncehook::journal::{Deliveries, Journal, JournalReader, Retention, SelfTestError};
use oncehook::observe::Metrics;
use oncehook::worker::Worker;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::backlog;
use crate::config::Config;
use crate::http::admin::{self, Admin};
use crate::http::gate::Gate;
use crate::http::listener::{self, ended};
use crate::replay::Replays;
use crate::spool;

/// How often the self-test runs (R44). The gate follows its verdict.
const SELF_TEST_EVERY: Duration = Duration::from_secs(60);

/// How soon it is repeated after it failed: what it met may have been a passing trouble.
const SELF_TEST_AGAIN: Duration = Duration::from_secs(1);

/// How long to wait for the self-test's verdict.
const SELF_TEST_WAIT: Duration = Duration::from_secs(15);

/// How long the end may wait for whom.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// What waits in the spool goes into the journal.
    spool: Duration,
    /// Longer than the worker grants its attempts, and time to write down how they ended.
    worker: Duration,
    /// The journal.
    close: Duration,
}

const USUAL_PATIENCE: Patience = Patience {
    spool: Duration::from_secs(10),
    worker: Duration::from_secs(15),
    close: Duration::from_secs(30),
};

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
    patience: Patience,
    clock: Clock,
}

impl App {
    /// Puts a gateway in front of a journal. The journal has passed its self-test when it was opened.
    #[must_use]
    pub fn new<J: Journal + JournalReader + Deliveries>(
        config: Config,
        journal: Arc<J>,
        clock: Clock,
    ) -> Self {
        let metrics = Arc::new(Metrics::new());
        let writer: Arc<dyn Journal> = journal.clone();
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
        let gate = Arc::new(Gate::new(config, Arc::clone(&writer), clock.clone(), Arc::clone(&metrics)));
        let admin = Arc::new(Admin {
            spool_alarm,
            gate: Arc::clone(&gate),
            journal: Arc::clone(&writer),
            reader: Arc::clone(&journal) as Arc<dyn JournalReader>,
            deliveries: journal,
            worker: OnceLock::new(),
            routes,
            replays: Replays::default(),
            metrics,
            access,
            limits,
            self_test: watch::Sender::new(Ok(())),
        });
        let (roles, lease, patience) = (Roles::ALL, None, USUAL_PATIENCE);
        Self { gate, admin, journal: writer, retention, roles, lease, patience, clock }
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

    /// Serves until `shutdown` is done; then refuses new connections, lets open requests and attempts finish, gives leases
    /// back, and closes the journal. A gateway that accepts nothing needs no listener for it.
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
        let watching = tokio::spawn(watch_journal(Arc::clone(&self.admin), ended.clone()));
        let draining = spool::start(&self.admin);
        let fast_path = self.roles.ingest.then(|| self.start_fast_path());
        let waiting = self.roles.ingest.then(|| self.start_waiting());
        let serve = |listener| listener::serve_ingress(listener, Arc::clone(&self.gate), ended.clone());
        let ingress =
            ingress.into().filter(|_| self.roles.ingest).map(|listener| tokio::spawn(serve(listener)));
        let admin_end = watch::Sender::new(false);
        let router = admin::router(Arc::clone(&self.admin), self.roles.admin);
        let limits = self.admin.limits.clone();
        let admin = tokio::spawn(listener::serve_admin(admin, router, limits, admin_end.subscribe()));

        shutdown.await;
        tracing::info!("shutting down: finishing open requests");
        // A receiver may be gone if its task has ended early.
        let _ = end.send(true);
        // A panic in one of these has been reported by its task; the journal is closed all the same.
        if let Some(ingress) = ingress {
            let _ = ingress.await;
        }
        // They only remember and look; there is nothing to finish.
        fast_path.iter().chain(&waiting).for_each(tokio::task::JoinHandle::abort);
        self.admin.replays.cancel_all();
        let left = match draining {
            Some(draining) => draining.finish(self.patience.spool).await,
            None => 0,
        };
        if let Some(worker) = worker
            && tokio::time::timeout(self.patience.worker, worker.stop()).await.is_err()
        {
            // Their leases run out, or are void at the next start.
            tracing::error!("the worker did not stop in time; the journal did not take back what it held");
        }
        if tokio::time::timeout(self.patience.close, self.journal.close()).await.is_err() {
            tracing::error!("the journal did not close in time");
        }
        let _ = admin_end.send(true);
        let _ = admin.await;
        let _ = watching.await;
        self.gate.log_rejections();
        tracing::info!("stopped");
        left
    }

    fn start_fast_path(&self) -> tokio::task::JoinHandle<()> {
        let (path, clock) = (self.gate.fast_path(), self.clock.clone());
        let (journal, reader) = (Arc::clone(&self.journal), Arc::clone(&self.admin.reader));
        tokio::spawn(async move { path.run(&*journal, &*reader, &clock).await })
    }

    fn start_waiting(&self) -> tokio::task::JoinHandle<()> {
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

/// Opens the gate while the journal stores and its self-test passes, and closes it otherwise.
async fn watch_journal(admin: Arc<Admin>, mut end: watch::Receiver<bool>) {
    let mut health = tokio::time::interval(HEALTH_EVERY);
    let mut logged = tokio::time::interval(Duration::from_secs(1));
    let mut test_at = tokio::time::Instant::now() + SELF_TEST_EVERY;
    loop {
        tokio::select! {
            _ = health.tick() => {
                let open = admin.self_test.borrow().is_ok() && admin.journal.state().failing.is_none();
                if admin.gate.is_open() != open {
                    admin.gate.set_open(open);
                    tracing::warn!(open, "the gate changed");
                }
            }
            _ = logged.tick() => admin.gate.log_rejections(),
            () = tokio::time::sleep_until(test_at) => {
                let verdict = tokio::time::timeout(SELF_TEST_WAIT, admin.journal.self_test()).await;
                let verdict = verdict.unwrap_or_else(|_| Err(SelfTestError("no verdict in time".to_owned())));
                let again = if verdict.is_ok() { SELF_TEST_EVERY } else { SELF_TEST_AGAIN };
                test_at = tokio::time::Instant::now() + again;
                if let Err(error) = &verdict {
                    tracing::error!(%error, "duplicates may not be recognised; refusing events");
                    admin.gate.set_open(false);
                }
                let _before = admin.self_test.send_replace(verdict);
            }
            () = ended(&mut end) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::atomic::{AtomicBool, Ordering};

    use oncehook::delivery::{Claim, Fence, RouteName, Settled, Settlement};
    use oncehook::event::{EventId, NewEvents, SourceName};
    use oncehook::journal::memory::MemoryJournal;
    use oncehook::journal::{
        AppendError, Backlog, BoxFuture, EventDetail, EventPage, EventQuery, Forgotten, JournalState, Layer,
        Order, OrderError, Ordered, Pausable, Pause, Progress, ReadError, Stats, StoredBody, Ticket, Who,
        WorkError,
    };
    use oncehook::route::Route;
    use oncehook_verify::UnixMicros;

    use super::*;

    /// A journal on a disk that hangs: whoever asks gets no answer.
    struct Hanging {
        inner: MemoryJournal,
        asked: AtomicBool,
        changes: watch::Sender<u64>,
    }

    impl Hanging {
        fn hang<T: 'static>(&self) -> BoxFuture<'_, T> {
            self.asked.store(true, Ordering::Relaxed);
            Box::pin(std::future::pending())
        }
    }

    impl Journal for Hanging {
        fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
            self.inner.submit(events)
        }
        fn note_duplicate(&self, _: EventId, _: &SourceName, _: UnixMicros, _: IpAddr, _: Layer) -> bool {
            true
        }
        fn state(&self) -> JournalState {
            self.inner.state()
        }
        fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
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
        fn claim(
            &self,
            _: Arc<Route>,
            _: usize,
            _: Duration,
        ) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>> {
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
        fn forget(&self, _: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>> {
            self.hang()
        }
    }

    #[tokio::test]
    async fn the_end_comes_even_if_the_journal_never_answers() {
        let config = r#"
            [[source]]
            name = "gitlab"
            provider = "gitlab"
            secrets = ["file:Cargo.toml"]
            [[route]]
            name = "orders"
            source = "gitlab"
            [route.sql]
            statement = "SELECT 1"
        "#;
        let config = Config::parse("test", config).unwrap();
        let journal = Arc::new(Hanging {
            inner: MemoryJournal::new(),
            asked: AtomicBool::new(false),
            changes: watch::Sender::new(0),
        });
        let mut app = App::new(config, Arc::clone(&journal), Clock::system());
        let moment = Duration::from_millis(100);
        app.patience = Patience { spool: moment, worker: moment, close: moment };
        let listen = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (ingress, admin) = (listen().await, listen().await);
        let asked = async {
            while !journal.asked.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let end = app.run(ingress, admin, asked);
        assert!(tokio::time::timeout(Duration::from_secs(20), end).await.is_ok(), "it waits for ever");
    }
}
