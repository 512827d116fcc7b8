//! The front door's state: the sources, the journal behind them, and whether it is open.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use http::HeaderName;
use ipnet::IpNet;
use oncehook::clock::Clock;
use oncehook::event::SourceName;
use oncehook::fastpath::FastPath;
use oncehook::intake::Intake;
use oncehook::journal::{Journal, Layer};
use oncehook::observe::{Metrics, SourceMetrics};
use oncehook::route::Routes;
use oncehook_verify::{Ack, EventKey, Handshakes, Identifier, Integrity, UnixMicros, Verifier};

use super::arrivals::Arrivals;
use super::bodies::{Arrival, Bodies};
use super::keys::{KeyFetcher, KeyRing, KeySource, RememberedKeys, WebFetcher};
use super::rate::Limiter;
use super::rejections::{NO_SOURCE, Refusal, Rejections};
use super::used_once::UsedOnce;
use crate::config::{Config, Limits, OnOutage, WaitConfig};
use crate::waiting::Waiting;

/// Everything that answering a webhook needs. Shared by all connections.
pub struct Gate {
    pub(super) sources: HashMap<String, Source>,
    pub(super) routes: Routes,
    pub(super) journal: Arc<dyn Journal>,
    pub(super) fast_path: Arc<FastPath>,
    /// Where events wait while the journal is away. Set before the first request.
    intake: OnceLock<Arc<Intake>>,
    pub(super) clock: Clock,
    pub(super) limits: Limits,
    pub(super) trusted_proxies: Vec<IpNet>,
    /// Microseconds for which a key is remembered.
    pub(super) window_micros: i64,
    pub(super) metrics: Arc<Metrics>,
    pub(super) rejections: Rejections,
    /// Callers who wait for a result.
    pub(crate) waiting: Waiting,
    open: AtomicBool,
    in_flight: AtomicUsize,
    pub(super) bodies: Bodies,
}

/// A source at work.
pub(super) struct Source {
    pub(super) name: SourceName,
    pub(super) verifier: Arc<Verifier>,
    /// Keys that the provider publishes.
    pub(super) keys: Arc<KeyRing>,
    pub(super) identifier: Identifier,
    /// Values that the sender uses for one event only.
    pub(super) used_once: UsedOnce,
    pub(super) handshakes: Handshakes,
    /// The provider's own answer, if it insists on one.
    pub(super) ack: Option<Ack>,
    pub(super) allow_ips: Vec<IpNet>,
    pub(super) on_outage: OnOutage,
    /// The largest body in bytes.
    pub(super) body_bytes: usize,
    pub(super) limiter: Limiter,
    /// Where a handed-over secret waits, if the source takes one.
    pub(super) handover: Option<PathBuf>,
    /// Headers that carry the secret itself and must not be stored.
    pub(super) secret_headers: Vec<HeaderName>,
    /// Whose result the answer carries, if it waits for one.
    pub(super) wait: Option<WaitConfig>,
    /// Whether it is an endpoint that becomes idempotent, rather than a door for webhooks.
    pub(super) endpoint: bool,
    pub(super) metrics: SourceMetrics,
    /// Duplicates, conflicts and held events, as the log tells them.
    pub(super) arrivals: Arrivals,
}

impl Source {
    /// Whether a key stands in for one that the event should have had.
    pub(super) fn lacks_key(&self, key: &EventKey) -> bool {
        key.is_of_digest() && self.identifier.wants_key()
    }
}

impl Gate {
    /// A gate in front of a journal. It is closed until [`set_open`](Self::set_open).
    #[must_use]
    pub fn new(config: Config, journal: Arc<dyn Journal>, clock: Clock, metrics: Arc<Metrics>) -> Self {
        Self::with_fetcher(config, journal, clock, metrics, Arc::new(WebFetcher::default()))
    }

    /// The same with another way to get keys from providers.
    pub(super) fn with_fetcher(
        config: Config,
        journal: Arc<dyn Journal>,
        clock: Clock,
        metrics: Arc<Metrics>,
        fetcher: Arc<dyn KeyFetcher>,
    ) -> Self {
        let remembered = RememberedKeys::open(config.spool.path.with_extension("keys.json"));
        let in_flight_bytes = config.server.limits.in_flight_bytes;
        let largest = config.sources.iter().map(|source| source.body_bytes).max().unwrap_or(0);
        let mut sources = HashMap::new();
        for source in config.sources {
            let verifier = Arc::new(source.verifier);
            let keys = KeySource {
                name: source.name.to_string(),
                verifier: Arc::clone(&verifier),
                params: source.settings.params,
                clock: clock.clone(),
                // Requests that wait for a key hold a share of the memory for bodies, and at least one body.
                max_waiting_bytes: (in_flight_bytes / 8).max(source.body_bytes),
            };
            let running = Source {
                metrics: metrics.source(source.name.as_str()),
                arrivals: Arrivals::default(),
                name: source.name.clone(),
                keys: KeyRing::new(keys, Arc::clone(&fetcher), Arc::clone(&remembered)),
                used_once: UsedOnce::new(verifier.tolerance_secs()),
                verifier,
                identifier: source.identifier,
                handshakes: source.handshakes,
                ack: (source.ack != Ack::default()).then_some(source.ack),
                allow_ips: source.allow_ips,
                on_outage: source.on_outage,
                body_bytes: source.body_bytes,
                limiter: Limiter::new(source.rate_limits, Instant::now()),
                handover: source.handover,
                wait: source.wait,
                endpoint: source.endpoint,
                // A scheme that covers nothing compares a token, so its "signature" is the secret.
                secret_headers: match source.scheme.integrity() {
                    Integrity::None => source.scheme.signature_headers().cloned().collect(),
                    Integrity::Body | Integrity::Fields => Vec::new(),
                },
            };
            sources.insert(source.name.as_str().to_owned(), running);
        }
        let bodies = Bodies::new(in_flight_bytes, largest);
        Self {
            sources,
            routes: config.routes,
            journal,
            fast_path: Arc::new(config.dedup_redis.map_or_else(FastPath::default, FastPath::with_redis)),
            intake: OnceLock::new(),
            clock,
            waiting: Waiting::new(config.server.limits.waiting),
            limits: config.server.limits,
            trusted_proxies: config.server.trusted_proxies,
            window_micros: i64::try_from(config.dedup_window.as_micros()).unwrap_or(i64::MAX),
            metrics,
            rejections: Rejections::default(),
            open: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            bodies,
        }
    }

    /// Opens or closes the gate. While it is closed every webhook is answered 503.
    pub fn set_open(&self, open: bool) {
        self.open.store(open, Ordering::Release);
    }

    /// Whether webhooks are accepted.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// Puts a spool beside the journal. A second one is not taken.
    pub fn set_intake(&self, intake: Arc<Intake>) {
        // Nobody sets it twice.
        let _ = self.intake.set(intake);
    }

    /// The spool beside the journal, if there is one.
    #[must_use]
    pub fn intake(&self) -> Option<&Arc<Intake>> {
        self.intake.get()
    }

    /// The spool for a source's events, if it has one.
    pub(super) fn intake_of(&self, source: &Source) -> Option<&Intake> {
        self.intake().filter(|_| source.on_outage == OnOutage::Spool).map(|intake| &**intake)
    }

    /// Whether the spool takes events while the journal is away.
    #[must_use]
    pub fn has_usable_spool(&self) -> bool {
        self.intake().is_some_and(|intake| intake.spool().state().failing.is_none())
    }

    /// The time in which deliveries are due.
    #[must_use]
    pub fn steady(&self) -> UnixMicros {
        self.clock.steady()
    }

    /// The time in which events are received.
    #[must_use]
    pub fn now(&self) -> UnixMicros {
        self.clock.now()
    }

    /// Whether the key of a source's event stands in for one that it should have had.
    pub(crate) fn lacks_key(&self, source: &str, key: &EventKey) -> bool {
        self.sources.get(source).is_some_and(|source| source.lacks_key(key))
    }

    /// The names of the sources.
    pub fn source_names(&self) -> impl Iterator<Item = &str> {
        self.sources.keys().map(String::as_str)
    }

    /// What stands before the journal.
    #[must_use]
    pub fn fast_path(&self) -> Arc<FastPath> {
        Arc::clone(&self.fast_path)
    }

    /// Duplicates since the start, all sources together, by the layer that recognised them.
    #[must_use]
    pub fn duplicates(&self, layer: Layer) -> u64 {
        self.sources.values().map(|source| source.metrics.duplicates(layer)).sum()
    }

    /// Requests of a source that were refused for their signature since the start.
    #[must_use]
    pub fn rejected(&self, source: &str) -> u64 {
        self.sources.get(source).map_or(0, |source| source.metrics.rejected.get())
    }

    /// Counts a refusal, and has it logged. Every request that the front door refuses comes through here, once.
    pub(super) fn refuse(&self, source: Option<&Source>, sender: IpAddr, refusal: Refusal) {
        let (name, unavailable) = (source.map_or(NO_SOURCE, |source| source.name.as_str()), refusal.is_unavailable());
        self.metrics.count_refused(name, refusal.reason, unavailable);
        if let Some(source) = source.filter(|_| !unavailable) {
            source.metrics.rejected.inc();
        }
        self.rejections.count(name, sender, refusal);
    }

    /// Writes the log lines about refused requests, and about duplicates and odd events. Called about once a second.
    pub fn log_rejections(&self) {
        self.rejections.log();
        let now = Instant::now();
        self.sources.values().for_each(|source| source.arrivals.flush(source.name.as_str(), now));
    }

    /// A request on its way in. It holds no place yet.
    pub(super) fn visit(&self) -> Visit<'_> {
        Visit { gate: self, inside: false, bytes: 0 }
    }
}

/// A request on its way through the gate. Gives its place and its bytes back when dropped, however that comes about.
pub(super) struct Visit<'g> {
    gate: &'g Gate,
    inside: bool,
    bytes: usize,
}

impl Visit<'_> {
    /// Takes the bytes of a complete body from the common budget; `false` if there is no room.
    pub(super) fn take_bytes(&mut self, bytes: usize) -> bool {
        let taken = self.gate.bodies.take(bytes);
        self.bytes += if taken { bytes } else { 0 };
        taken
    }

    /// Takes over the bytes of a body that has arrived; `false` if it was evicted in the last moment.
    pub(super) fn take_arrived(&mut self, body: Arrival<'_>) -> bool {
        let bytes = body.finish();
        self.bytes += bytes.unwrap_or(0);
        bytes.is_some()
    }

    /// Takes one of the places for requests being answered; `false` if there is none. Called when the body is there: a
    /// sender that dawdles holds a connection, not a place that an honest one needs.
    pub(super) fn enter(&mut self) -> bool {
        self.inside = true;
        self.gate.in_flight.fetch_add(1, Ordering::Relaxed) < self.gate.limits.in_flight
    }

    /// Gives the place back while the request waits for something outside, so that it is free for others.
    pub(super) fn leave(&mut self) {
        if std::mem::take(&mut self.inside) {
            self.gate.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        self.leave();
        self.gate.bodies.give_back(self.bytes);
    }
}
