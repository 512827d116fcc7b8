//! The front door's state: the sources, the journal behind them, and whether it is open.

use std::collections::{BTreeMap, HashMap};
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
use oncehook_verify::{Ack, Handshakes, Identifier, Integrity, UnixMicros, Verifier};

use super::keys::{KeyRing, WebFetcher};
use super::rate::Limiter;
use super::rejections::Rejections;
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
    /// Keys that providers publish.
    pub(super) keys: KeyRing,
    /// Callers who wait for a result.
    pub(crate) waiting: Waiting,
    open: AtomicBool,
    in_flight: AtomicUsize,
    bytes: AtomicUsize,
}

/// A source at work.
pub(super) struct Source {
    pub(super) name: SourceName,
    pub(super) verifier: Verifier,
    pub(super) identifier: Identifier,
    pub(super) handshakes: Handshakes,
    /// The provider's own answer, if it insists on one.
    pub(super) ack: Option<Ack>,
    pub(super) allow_ips: Vec<IpNet>,
    pub(super) on_outage: OnOutage,
    pub(super) limiter: Limiter,
    /// What the source knows beside its secrets.
    pub(super) params: BTreeMap<String, String>,
    /// Where a handed-over secret waits, if the source takes one.
    pub(super) handover: Option<PathBuf>,
    /// Headers that carry the secret itself and must not be stored.
    pub(super) secret_headers: Vec<HeaderName>,
    /// Whose result the answer carries, if it waits for one.
    pub(super) wait: Option<WaitConfig>,
    /// Whether it is an endpoint that becomes idempotent, rather than a door for webhooks.
    pub(super) endpoint: bool,
    pub(super) metrics: SourceMetrics,
}

impl Gate {
    /// A gate in front of a journal. It is closed until [`set_open`](Self::set_open).
    #[must_use]
    pub fn new(config: Config, journal: Arc<dyn Journal>, clock: Clock, metrics: Arc<Metrics>) -> Self {
        let mut sources = HashMap::new();
        for source in config.sources {
            let running = Source {
                metrics: metrics.source(source.name.as_str()),
                name: source.name.clone(),
                verifier: source.verifier,
                identifier: source.identifier,
                handshakes: source.handshakes,
                ack: (source.ack != Ack::default()).then_some(source.ack),
                allow_ips: source.allow_ips,
                on_outage: source.on_outage,
                limiter: Limiter::new(source.rate_limits, Instant::now()),
                params: source.settings.params,
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
            keys: KeyRing::new(Arc::new(WebFetcher::default())),
            open: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
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
        self.sources.get(source).map_or(0, |source| source.metrics.rejected_total())
    }

    /// Writes the log lines about refused requests. Called about once a second.
    pub fn log_rejections(&self) {
        self.rejections.log();
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
    /// Takes bytes from the common budget; `false` if it is used up.
    pub(super) fn take_bytes(&mut self, bytes: usize) -> bool {
        let before = self.gate.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        before + bytes <= self.gate.limits.in_flight_bytes
    }

    /// Takes one of the places for requests being answered; `false` if there is none. Called when the body is there: a
    /// sender that dawdles holds a connection, not a place that an honest one needs.
    pub(super) fn enter(&mut self) -> bool {
        self.inside = true;
        self.gate.in_flight.fetch_add(1, Ordering::Relaxed) < self.gate.limits.in_flight
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        if self.inside {
            self.gate.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
        self.gate.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
