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

/// How often the self-test runs (R44). The gate follows its verdict.
const SELF_TEST_EVERY: Duration = Duration::from_secs(60);

/// How soon it is repeated after it failed: what it met may have been a passing trouble.
const SELF_TEST_AGAIN: Duration = Duration::from_secs(1);

/// How long to wait for the self-test's verdict, and for the journal to close.
const SELF_TEST_WAIT: Duration = Duration::from_secs(15);
const CLOSE_WAIT: Duration = Duration::from_secs(30);

/// How long to wait for the worker to stop: longer than it grants its attempts, and time to write down how they ended.
const WORKER_WAIT: Duration = Duration::from_secs(15);

/// Events and keys that are looked at when something is to be forgotten: few, so that accepting does not wait.
const FORGET_BATCH: usize = 500;

/// How often the journal's health is looked at.
const HEALTH_EVERY: Duration = Duration::from_millis(250);

/// A gateway that is built but not running.
pub struct App {
    gate: Arc<Gate>,
    admin: Arc<Admin>,
    journal: Arc<dyn Journal>,
    retention: Retention,
    lease: Option<Duration>,
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
        let retention = Retention {
            payload: config.retention_payload,
            dead: config.retention_dead,
            audit: config.retention_audit,
            batch: FORGET_BATCH,
        };
        let gate = Arc::new(Gate::new(config, Arc::clone(&writer), clock.clone(), Arc::clone(&metrics)));
        let admin = Arc::new(Admin {
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
        Self { gate, admin, journal: writer, retention, lease: None, clock }
    }

    /// With leases of another length than the usual one. For tests: see [`Worker::start_with_lease`].
    #[must_use]
    pub fn with_lease(mut self, lease: Option<Duration>) -> Self {
        self.lease = lease;
        self
    }

    /// Serves until `shutdown` is done; then refuses new connections, lets open requests and attempts finish, gives leases
    /// back, and closes the journal.
    pub async fn run(self, ingress: TcpListener, admin: TcpListener, shutdown: impl Future<Output = ()>) {
        let (end, ended) = watch::channel(false);
        let worker = self.start_worker();
        self.gate.set_open(true);
        let admin_parts = Arc::clone(&self.admin);
        tokio::spawn(async move { backlog::warn_of_left_behind(&admin_parts).await });
        let watching = tokio::spawn(watch_journal(Arc::clone(&self.admin), ended.clone()));
        let ingress = tokio::spawn(listener::serve_ingress(ingress, Arc::clone(&self.gate), ended.clone()));
        let admin_end = watch::Sender::new(false);
        let router = admin::router(Arc::clone(&self.admin));
        let limits = self.admin.limits.clone();
        let admin = tokio::spawn(listener::serve_admin(admin, router, limits, admin_end.subscribe()));

        shutdown.await;
        tracing::info!("shutting down: finishing open requests");
        // A receiver may be gone if its task has ended early.
        let _ = end.send(true);
        // A panic in one of these has been reported by its task; the journal is closed all the same.
        let _ = ingress.await;
        self.admin.replays.cancel_all();
        if tokio::time::timeout(WORKER_WAIT, worker.stop()).await.is_err() {
            // Their leases run out, or are void at the next start.
            tracing::error!("the worker did not stop in time; the journal did not take back what it held");
        }
        if tokio::time::timeout(CLOSE_WAIT, self.journal.close()).await.is_err() {
            tracing::error!("the journal did not close in time");
        }
        let _ = admin_end.send(true);
        let _ = admin.await;
        let _ = watching.await;
        self.gate.log_rejections();
        tracing::info!("stopped");
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
