//! `/api/stats`: counts since the journal was made, and how the journal is doing.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use oncehook::journal::{Layer, SourceCounts};
use serde::Serialize;
use utoipa::ToSchema;

use super::events::read_error;
use super::orders::work_error;
use super::routes::{BacklogJson, backlog_json};
use crate::backlog::left_behind;
use crate::http::admin::Admin;
use crate::http::error::HttpError;
use crate::spool::figures;

/// Counts, all sources together and one by one. Forgetting events does not lower them.
#[derive(Serialize, ToSchema)]
pub(crate) struct StatsJson {
    /// Events stored
    events: u64,
    /// Further deliveries of stored events
    duplicates: u64,
    /// Duplicates since the start of this process, by the layer that recognised them
    duplicates_by_layer: LayersJson,
    /// Deliveries of another body under a known key
    conflicts: u64,
    /// Events held at arrival
    quarantined: u64,
    /// Duplicates among all deliveries of stored events, 0 to 1
    duplicate_rate: f64,
    /// Requests refused since the start of this process
    rejected: u64,
    /// Every configured source, and every source that ever stored an event
    sources: Vec<SourceJson>,
    /// Every configured route, and every route that has left something behind
    routes: Vec<RouteJson>,
    journal: JournalJson,
    /// Why nothing is forgotten, if this node's clock or the database's is in doubt
    #[serde(skip_serializing_if = "Option::is_none")]
    forgetting_stopped: Option<String>,
    /// What waits in the spool of the node that was asked; not among the counts above. Only where it has one
    #[serde(skip_serializing_if = "Option::is_none")]
    spool: Option<SpoolJson>,
}

/// The spool of one node.
#[derive(Serialize, ToSchema)]
pub(crate) struct SpoolJson {
    /// Events that wait for the journal
    events: u64,
    /// What they weigh
    bytes: u64,
    /// For how many seconds the first of them waits
    oldest_seconds: u64,
    /// How much of what it may hold it holds, in per cent
    percent_full: u8,
    /// Events that cannot be drained: damaged, or refused by a journal that is well
    set_aside: u64,
    /// Whether somebody should look
    alarm: bool,
    /// Why its file cannot be used, if it cannot
    failing: Option<String>,
}

/// The spool of this node.
pub(crate) fn spool_json(admin: &Admin) -> Option<SpoolJson> {
    let state = admin.gate.intake()?.spool().state();
    let figures = figures(&state, admin);
    Some(SpoolJson {
        events: figures.events,
        bytes: figures.bytes,
        oldest_seconds: figures.age,
        percent_full: state.percent,
        set_aside: figures.set_aside,
        alarm: figures.alarm,
        failing: state.failing,
    })
}

#[derive(Serialize, ToSchema)]
struct SourceJson {
    source: String,
    events: u64,
    duplicates: u64,
    conflicts: u64,
    quarantined: u64,
    /// Requests refused since the start of this process
    rejected: u64,
}

#[derive(Serialize, ToSchema)]
struct LayersJson {
    /// In this process
    memory: u64,
    /// In Redis
    redis: u64,
    /// In the journal
    journal: u64,
}

#[derive(Serialize, ToSchema)]
struct RouteJson {
    route: String,
    /// Whether it is in the configuration; what waits for a route that is not, waits for ever
    configured: bool,
    #[serde(flatten)]
    backlog: BacklogJson,
}

#[derive(Serialize, ToSchema)]
struct JournalJson {
    kind: &'static str,
    durability: &'static str,
    /// Appends waiting in memory
    queued: usize,
    /// The most that may wait
    queue_limit: usize,
    /// Events that should be in the search index and are not yet
    index_lag: u64,
    /// Pages in the write-ahead log
    wal_pages: u64,
    failing: Option<String>,
}

#[utoipa::path(get, path = "/api/stats", responses((status = 200, description = "Counts since the beginning", body = StatsJson)))]
pub(crate) async fn stats(State(admin): State<Arc<Admin>>) -> Result<Json<StatsJson>, HttpError> {
    let mut counts = admin.reader.stats().await.map_err(read_error)?.sources;
    for name in admin.gate.source_names() {
        if !counts.iter().any(|counts| counts.source == name) {
            counts.push(SourceCounts { source: name.to_owned(), ..SourceCounts::default() });
        }
    }
    counts.sort_by(|a, b| a.source.cmp(&b.source));
    let sources: Vec<SourceJson> = counts
        .into_iter()
        .map(|counts| SourceJson {
            rejected: admin.gate.rejected(&counts.source),
            source: counts.source,
            events: counts.events,
            duplicates: counts.duplicates,
            conflicts: counts.conflicts,
            quarantined: counts.quarantined,
        })
        .collect();
    let sum = |of: fn(&SourceJson) -> u64| sources.iter().map(of).sum::<u64>();
    let (events, duplicates) = (sum(|s| s.events), sum(|s| s.duplicates));
    let routes = routes(&admin).await?;
    let state = admin.journal.state();
    Ok(Json(StatsJson {
        events,
        duplicates,
        duplicates_by_layer: LayersJson {
            memory: admin.gate.duplicates(Layer::Memory),
            redis: admin.gate.duplicates(Layer::Redis),
            journal: admin.gate.duplicates(Layer::Journal),
        },
        conflicts: sum(|s| s.conflicts),
        quarantined: sum(|s| s.quarantined),
        duplicate_rate: duplicates as f64 / (events + duplicates).max(1) as f64,
        rejected: sum(|s| s.rejected),
        sources,
        routes,
        journal: JournalJson {
            kind: state.kind,
            durability: state.durability.as_str(),
            queued: state.queued,
            queue_limit: state.queue_limit,
            index_lag: state.index_lag,
            wal_pages: state.wal_pages,
            failing: state.failing,
        },
        forgetting_stopped: admin.clock_doubt(),
        spool: spool_json(&admin),
    }))
}

async fn routes(admin: &Admin) -> Result<Vec<RouteJson>, HttpError> {
    let backlogs = admin.deliveries.backlog().await.map_err(work_error)?;
    let now = admin.gate.steady();
    let configured = admin.routes.iter().map(|route| RouteJson {
        route: route.name.to_string(),
        configured: true,
        backlog: backlog_json(backlogs.iter().find(|backlog| backlog.route == route.name.as_str()), now),
    });
    let left = left_behind(&admin.routes, &backlogs).map(|backlog| RouteJson {
        route: backlog.route.clone(),
        configured: false,
        backlog: backlog_json(Some(backlog), now),
    });
    Ok(configured.chain(left).collect())
}
