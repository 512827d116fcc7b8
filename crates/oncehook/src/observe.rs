//! Every metric that oncehook exports, named in this one place. All names start with `oncehook_`.
//!
//! Label values are bounded: sources come from the configuration and reasons from enums, never from the wire. Counters are
//! resolved once per source, so that counting on the hot path is one atomic addition.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::journal::{JournalState, Layer, Verdict};

/// Label: the source.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SourceLabel {
    source: String,
}

/// Labels: the source, and why.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    source: String,
    reason: &'static str,
}

/// Labels: the source, and which layer recognised the duplicate.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LayerLabel {
    source: String,
    layer: &'static str,
}

/// Label: the durability level in force.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DurabilityLabel {
    level: &'static str,
}

/// All metrics of one gateway.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    accepted: Family<SourceLabel, Counter>,
    duplicates: Family<LayerLabel, Counter>,
    conflicts: Family<SourceLabel, Counter>,
    quarantined: Family<SourceLabel, Counter>,
    rejected: Family<ReasonLabel, Counter>,
    /// Answered 503, by reason; the source is `-` where it is not known.
    unavailable: Family<ReasonLabel, Counter>,
    /// From the request's head to the answer, accepted or duplicate.
    pub ack: Latency,
    /// Open connections to the front door.
    pub connections: Gauge,
    /// Requests between their head and their answer.
    pub in_flight: Gauge,
    ready: Gauge,
    durability: Family<DurabilityLabel, Gauge>,
    queue: Gauge,
    wal_pages: Gauge,
    index_lag: Gauge,
}

/// One source's counters, ready to be added to.
#[derive(Debug, Clone)]
pub struct SourceMetrics {
    source: String,
    accepted: Counter,
    duplicates: Counter,
    duplicates_in_memory: Counter,
    conflicts: Counter,
    quarantined: Counter,
    rejected: Family<ReasonLabel, Counter>,
    rejected_total: Arc<AtomicU64>,
    unavailable: Family<ReasonLabel, Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at zero.
    #[must_use]
    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("oncehook"),
            accepted: Family::default(),
            duplicates: Family::default(),
            conflicts: Family::default(),
            quarantined: Family::default(),
            rejected: Family::default(),
            unavailable: Family::default(),
            ack: Latency::default(),
            connections: Gauge::default(),
            in_flight: Gauge::default(),
            ready: Gauge::default(),
            durability: Family::default(),
            queue: Gauge::default(),
            wal_pages: Gauge::default(),
            index_lag: Gauge::default(),
        };
        let registry = &mut metrics.registry;
        registry.register("accepted", "Events stored for the first time", metrics.accepted.clone());
        registry.register("duplicates", "Deliveries of known events", metrics.duplicates.clone());
        registry.register("conflicts", "Other bodies under a known key", metrics.conflicts.clone());
        registry.register("quarantined", "Events held at arrival", metrics.quarantined.clone());
        registry.register("rejected", "Requests refused, by reason", metrics.rejected.clone());
        registry.register("unavailable", "Requests answered 503, by reason", metrics.unavailable.clone());
        registry.register_with_unit(
            "ack",
            "From the request's head to the answer",
            Unit::Seconds,
            metrics.ack.clone(),
        );
        registry.register("connections", "Open connections to the front door", metrics.connections.clone());
        registry.register("in_flight", "Requests being answered", metrics.in_flight.clone());
        registry.register("ready", "1 if events are accepted", metrics.ready.clone());
        registry.register("durability", "1 at the level in force", metrics.durability.clone());
        registry.register("journal_queue", "Appends waiting in memory", metrics.queue.clone());
        registry.register("journal_wal_pages", "Pages in the write-ahead log", metrics.wal_pages.clone());
        registry.register(
            "journal_index_lag",
            "Events not in the search index yet",
            metrics.index_lag.clone(),
        );
        metrics
    }

    /// The counters of a configured source. They exist, at zero, from then on.
    #[must_use]
    pub fn source(&self, source: &str) -> SourceMetrics {
        let label = SourceLabel { source: source.to_owned() };
        let duplicates = |layer: Layer| {
            let label = LayerLabel { source: source.to_owned(), layer: layer.as_str() };
            self.duplicates.get_or_create_owned(&label)
        };
        SourceMetrics {
            source: source.to_owned(),
            accepted: self.accepted.get_or_create_owned(&label),
            duplicates: duplicates(Layer::Journal),
            duplicates_in_memory: duplicates(Layer::Memory),
            conflicts: self.conflicts.get_or_create_owned(&label),
            quarantined: self.quarantined.get_or_create_owned(&label),
            rejected: self.rejected.clone(),
            rejected_total: Arc::default(),
            unavailable: self.unavailable.clone(),
        }
    }

    /// A 503 before the source was known.
    pub fn count_shed(&self, reason: &'static str) {
        self.unavailable.get_or_create(&ReasonLabel { source: "-".to_owned(), reason }).inc();
    }

    /// The text for `/metrics`, with the gauges set to how things are now.
    #[must_use]
    pub fn render(&self, journal: &JournalState, ready: bool) -> String {
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.ready.set(i64::from(ready));
        self.durability.get_or_create(&DurabilityLabel { level: journal.durability.as_str() }).set(1);
        self.queue.set(gauge(journal.queued as u64));
        self.wal_pages.set(gauge(journal.wal_pages));
        self.index_lag.set(gauge(journal.index_lag));
        let mut text = String::new();
        if prometheus_client::encoding::text::encode(&mut text, &self.registry).is_err() {
            // Writing to a string does not fail; say so rather than send half a page.
            text.clear();
            let _ = write!(text, "# encoding failed\n# EOF\n");
        }
        text
    }
}

impl SourceMetrics {
    /// Counts what was decided, and by whom.
    pub fn count(&self, verdict: Verdict, layer: Layer) {
        match verdict {
            Verdict::New => self.accepted.inc(),
            Verdict::Quarantined => {
                self.accepted.inc();
                self.quarantined.inc()
            }
            Verdict::Duplicate => match layer {
                Layer::Journal => self.duplicates.inc(),
                Layer::Memory => self.duplicates_in_memory.inc(),
            },
            Verdict::Conflict => self.conflicts.inc(),
        };
    }

    /// Counts a request that was refused.
    pub fn count_rejected(&self, reason: &'static str) {
        self.rejected_total.fetch_add(1, Ordering::Relaxed);
        self.rejected.get_or_create(&ReasonLabel { source: self.source.clone(), reason }).inc();
    }

    /// Counts a 503.
    pub fn count_unavailable(&self, reason: &'static str) {
        self.unavailable.get_or_create(&ReasonLabel { source: self.source.clone(), reason }).inc();
    }

    /// Requests refused since the start, all reasons together.
    #[must_use]
    pub fn rejected_total(&self) -> u64 {
        self.rejected_total.load(Ordering::Relaxed)
    }
}

/// A histogram of durations: fixed bounds, one atomic addition per observation. (The client library's own takes a lock.)
#[derive(Debug, Clone, Default)]
pub struct Latency(Arc<LatencyCells>);

/// Upper bounds in microseconds. R3 asks for 200 ms and aims for 10 ms, so these are exact bounds.
const BOUNDS_MICROS: [u64; 14] = [
    250, 500, 1_000, 2_000, 5_000, 10_000, 25_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 5_000_000,
    30_000_000,
];

#[derive(Debug, Default)]
struct LatencyCells {
    counts: [AtomicU64; BOUNDS_MICROS.len() + 1],
    sum_micros: AtomicU64,
}

impl Latency {
    /// Adds one observation.
    pub fn observe(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_MICROS.partition_point(|bound| *bound < micros);
        if let Some(count) = self.0.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.0.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }
}

impl EncodeMetric for Latency {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let seconds = |micros: u64| micros as f64 / 1e6;
        let mut buckets = Vec::with_capacity(BOUNDS_MICROS.len() + 1);
        let mut total = 0;
        for (index, count) in self.0.counts.iter().enumerate() {
            let count = count.load(Ordering::Relaxed);
            total += count;
            buckets.push((BOUNDS_MICROS.get(index).map_or(f64::INFINITY, |bound| seconds(*bound)), count));
        }
        let sum = seconds(self.0.sum_micros.load(Ordering::Relaxed));
        encoder.encode_histogram::<prometheus_client::encoding::NoLabelSet>(sum, total, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}
