//! Orders for many events at once: found by a filter, given one by one, paced so that live traffic does not notice.
//!
//! Promises: one replay runs at a time; each of its orders is the same as one given by hand, with the same audit; giving
//! the whole replay again does nothing twice. Events that arrive after it began are not part of it. A forced one tells of
//! every event that it did not run again. However a replay ends, the next one may begin.
//!
//! Does not: survive the process. A replay that was interrupted is simply given again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncehook::delivery::RouteName;
use oncehook::event::EventId;
use oncehook::journal::{
    Deliveries, EventPage, EventQuery, EventSummary, JournalReader, Order, OrderError, ReadError, Verb, Who,
};
use oncehook::route::Routes;
use oncehook_verify::UnixMicros;
use serde::Serialize;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use utoipa::ToSchema;

use crate::http::listener::ended;
use crate::order::order;

/// Events that are looked up together.
const PAGE: usize = 200;

/// Orders under way at once: while the journal carries one out, the next ones are waiting at its door.
const AT_ONCE: usize = 16;

/// How often an order or a page is asked for while the journal does not answer, and how long to wait in between.
const TRIES: u32 = 5;
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Errors that are told one by one, and ids that a survey lists.
const TOLD: usize = 10;

/// Replays that can still be asked about.
const REMEMBERED: usize = 16;

/// A survey stops after this many events or this much time, and says so.
const SURVEY_EVENTS: u64 = 100_000;
const SURVEY_TIME: Duration = Duration::from_secs(15);

/// What a replay works with.
#[derive(Clone)]
pub(crate) struct Desk {
    pub(crate) reader: Arc<dyn JournalReader>,
    pub(crate) deliveries: Arc<dyn Deliveries>,
    pub(crate) routes: Routes,
}

/// What is to be done.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) query: EventQuery,
    pub(crate) verb: Verb,
    pub(crate) route: Option<RouteName>,
    pub(crate) who: Who,
    /// Events per second.
    pub(crate) rate: u32,
}

/// What a filter finds.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct Survey {
    /// Events that match
    pub(crate) matched: u64,
    /// Whether all were counted; there may be more otherwise
    pub(crate) complete: bool,
    /// How many in each status
    pub(crate) statuses: BTreeMap<&'static str, u64>,
    /// The newest of them
    pub(crate) events: Vec<String>,
    /// Only events received before this were counted. As `until` of the filter it leaves out what has come since
    pub(crate) until: String,
}

/// Where a replay stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Stage {
    Running,
    Done,
    Cancelled,
    /// It broke off, because the journal did not answer or by a fault of ours; give the replay again
    Failed,
}

/// How far a replay has come.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Progress {
    pub(crate) replay: String,
    pub(crate) state: Stage,
    /// Events found so far
    pub(crate) matched: u64,
    /// Orders given
    pub(crate) done: u64,
    /// Orders that changed something; the others found everything as it should be
    pub(crate) changed: u64,
    /// Orders that could not be carried out
    pub(crate) failed: u64,
    /// The first few of these
    pub(crate) errors: Vec<Trouble>,
}

/// An order that could not be carried out.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct Trouble {
    pub(crate) event: Option<String>,
    pub(crate) error: String,
}

/// The replays of this process.
#[derive(Default)]
pub(crate) struct Replays {
    jobs: Mutex<VecDeque<Arc<Job>>>,
}

/// One replay.
pub(crate) struct Job {
    progress: Mutex<Progress>,
    cancel: watch::Sender<bool>,
}

impl Replays {
    /// Starts one, unless one is running: then its id is the error.
    pub(crate) fn start(&self, id: String, desk: Desk, plan: Plan) -> Result<Arc<Job>, String> {
        let mut jobs = self.lock();
        if let Some(running) = jobs.iter().find(|job| job.progress().state == Stage::Running) {
            return Err(running.progress().replay);
        }
        let job = Arc::new(Job::new(id));
        jobs.push_back(Arc::clone(&job));
        if jobs.len() > REMEMBERED {
            jobs.pop_front();
        }
        tokio::spawn(run(Arc::clone(&job), desk, plan));
        Ok(job)
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Job>> {
        self.lock().iter().find(|job| job.progress().replay == id).cloned()
    }

    /// Stops whatever runs. Orders that were given stay given.
    pub(crate) fn cancel_all(&self) {
        self.lock().iter().for_each(|job| job.cancel());
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Job {
    fn new(replay: String) -> Self {
        let progress =
            Progress { replay, state: Stage::Running, matched: 0, done: 0, changed: 0, failed: 0, errors: Vec::new() };
        Self { progress: Mutex::new(progress), cancel: watch::Sender::new(false) }
    }

    pub(crate) fn progress(&self) -> Progress {
        self.lock().clone()
    }

    /// Asks it to stop. It does after the orders that are under way.
    pub(crate) fn cancel(&self) {
        let _before = self.cancel.send_replace(true);
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an order that was given. An error if there is no point in going on.
    fn note(&self, ended: Result<Given, JoinError>) -> Result<(), NoAnswer> {
        let mut progress = self.lock();
        progress.done += 1;
        let given = match ended {
            Ok(given) => given,
            // A panic has been reported by its task; the order is one that failed.
            Err(error) => {
                progress.fail(None, error.to_string());
                return Err(NoAnswer);
            }
        };
        match given.outcome {
            Outcome::Changed => progress.changed += 1,
            Outcome::Unchanged => {}
            Outcome::Failed(error) => progress.fail(Some(given.event), error),
            Outcome::NoAnswer(error) => {
                progress.fail(Some(given.event), error);
                return Err(NoAnswer);
            }
        }
        Ok(())
    }
}

/// Sees to it that a replay ends, even if its task panics: nobody could start another one otherwise.
struct Ending(Arc<Job>);

impl Drop for Ending {
    fn drop(&mut self) {
        let mut progress = self.0.lock();
        if progress.state == Stage::Running {
            progress.state = Stage::Failed;
            progress.fail(None, "the replay broke off by a fault of the gateway; its log tells more".to_owned());
        }
    }
}

impl Progress {
    fn fail(&mut self, event: Option<EventId>, error: String) {
        self.failed += 1;
        if self.errors.len() < TOLD {
            self.errors.push(Trouble { event: event.map(|event| event.to_string()), error });
        }
    }
}

/// The journal does not answer, so there is no point in going on.
struct NoAnswer;

/// An order that was given.
struct Given {
    event: EventId,
    outcome: Outcome,
}

enum Outcome {
    Changed,
    Unchanged,
    Failed(String),
    NoAnswer(String),
}

/// Counts what a filter finds among the events received before now, without touching it.
pub(crate) async fn survey(
    reader: &dyn JournalReader,
    query: &EventQuery,
    now: UnixMicros,
) -> Result<Survey, ReadError> {
    let until = query.until.map_or(now, |until| until.min(now));
    let mut survey = Survey { until: until.to_rfc3339(), ..Survey::default() };
    let mut query = EventQuery { limit: 1_000, until: Some(until), ..query.clone() };
    let started = Instant::now();
    loop {
        let page = reader.list(query.clone()).await?;
        for event in &page.events {
            survey.matched += 1;
            *survey.statuses.entry(event.status.as_str()).or_default() += 1;
            if survey.events.len() < TOLD {
                survey.events.push(event.id.to_string());
            }
        }
        query.after = page.next;
        if page.next.is_none() {
            survey.complete = true;
            return Ok(survey);
        }
        if survey.matched >= SURVEY_EVENTS || started.elapsed() > SURVEY_TIME {
            return Ok(survey);
        }
    }
}

async fn run(job: Arc<Job>, desk: Desk, plan: Plan) {
    let _ending = Ending(Arc::clone(&job));
    let (verb, who) = (plan.verb.as_str(), plan.who.name.clone());
    let id = job.progress().replay;
    tracing::info!(replay = id, verb, who, rate = plan.rate, "a replay begins");
    let state = carry_out(&job, &desk, plan).await;
    job.lock().state = state;
    let Progress { done, changed, failed, .. } = job.progress();
    tracing::info!(replay = id, ?state, done, changed, failed, "a replay ended");
}

/// Goes through the pages, newest event first. What the orders change does not move the pages: each begins after the last
/// event of the one before.
async fn carry_out(job: &Job, desk: &Desk, plan: Plan) -> Stage {
    let mut cancelled = job.cancel.subscribe();
    let mut pace = Pace::new(plan.rate, Instant::now());
    let mut orders = JoinSet::new();
    let mut query = EventQuery { limit: PAGE, ..plan.query.clone() };
    loop {
        let page = match find(desk, &query).await {
            Ok(page) => page,
            Err(error) => {
                job.lock().fail(None, error.to_string());
                return settle(job, &mut orders, Stage::Failed).await;
            }
        };
        job.lock().matched += page.events.len() as u64;
        for event in page.events {
            if let Err(stage) = turn(job, &mut orders, &mut pace, &mut cancelled).await {
                return settle(job, &mut orders, stage).await;
            }
            orders.spawn(give(desk.clone(), plan.clone(), event));
        }
        if page.next.is_none() {
            return settle(job, &mut orders, Stage::Done).await;
        }
        query.after = page.next;
    }
}

/// Waits until the next order may be given, and notes those that end meanwhile.
async fn turn(
    job: &Job,
    orders: &mut JoinSet<Given>,
    pace: &mut Pace,
    cancelled: &mut watch::Receiver<bool>,
) -> Result<(), Stage> {
    loop {
        tokio::select! {
            biased;
            () = ended(cancelled) => return Err(Stage::Cancelled),
            Some(ended) = orders.join_next() => job.note(ended).map_err(|NoAnswer| Stage::Failed)?,
            () = pace.next(), if orders.len() < AT_ONCE => return Ok(()),
        }
    }
}

/// Waits for the orders that are under way.
async fn settle(job: &Job, orders: &mut JoinSet<Given>, mut stage: Stage) -> Stage {
    while let Some(ended) = orders.join_next().await {
        if job.note(ended).is_err() {
            stage = Stage::Failed;
        }
    }
    stage
}

async fn give(desk: Desk, plan: Plan, event: EventSummary) -> Given {
    let outcome = match order(&desk.routes, &event, plan.verb, plan.route, plan.who) {
        Ok(order) => insist(&desk, order).await,
        Err(error) => Outcome::Failed(error.to_string()),
    };
    Given { event: event.id, outcome }
}

/// Gives an order until the journal has answered. All branching about its answers is here.
async fn insist(desk: &Desk, order: Order) -> Outcome {
    let mut tries = 1;
    loop {
        match desk.deliveries.order(order.clone()).await {
            Ok(ordered) if ordered.routes.is_empty() => return Outcome::Unchanged,
            Ok(_) => return Outcome::Changed,
            // Forgotten meanwhile.
            Err(OrderError::NoEvent) => return Outcome::Unchanged,
            // Nothing to do for it; but who wants effects again must hear where there are none.
            Err(OrderError::Unfit(reason)) => {
                let forced = matches!(order.verb, Verb::ForceReplay { .. });
                return if forced { Outcome::Failed(reason) } else { Outcome::Unchanged };
            }
            Err(OrderError::Epoch { next }) => match is_done(desk, &order).await {
                Ok(true) => return Outcome::Unchanged,
                Ok(false) => return Outcome::Failed(format!("the next epoch is {next}")),
                Err(error) => return Outcome::Failed(error.to_string()),
            },
            Err(OrderError::Work(error)) if tries == TRIES => return Outcome::NoAnswer(error.to_string()),
            Err(OrderError::Work(_)) => {
                tries += 1;
                tokio::time::sleep(TRY_AGAIN).await;
            }
        }
    }
}

/// Whether every route that a forced replay is for has its epoch: then somebody has given the same order before. An epoch
/// that was used for another route says nothing.
async fn is_done(desk: &Desk, order: &Order) -> Result<bool, ReadError> {
    let Verb::ForceReplay { epoch } = order.verb else { return Ok(false) };
    let Some(detail) = desk.reader.show(order.event).await? else { return Ok(false) };
    let has = |route: &RouteName| {
        let mut deliveries = detail.event.deliveries.iter();
        deliveries.any(|delivery| delivery.route == route.as_str() && delivery.epoch == epoch)
    };
    let routes = order.route.as_ref().map_or(order.wanting.as_slice(), std::slice::from_ref);
    Ok(!routes.is_empty() && routes.iter().all(has))
}

async fn find(desk: &Desk, query: &EventQuery) -> Result<EventPage, ReadError> {
    let mut tries = 1;
    loop {
        match desk.reader.list(query.clone()).await {
            Err(ReadError::Engine(_)) if tries < TRIES => {
                tries += 1;
                tokio::time::sleep(TRY_AGAIN).await;
            }
            answer => return answer,
        }
    }
}

/// Lets so many through per second, with short bursts after a wait, so that a coarse timer does not slow it down.
struct Pace {
    rate: f64,
    allowance: f64,
    at: Instant,
}

impl Pace {
    fn new(rate: u32, now: Instant) -> Self {
        Self { rate: f64::from(rate.max(1)), allowance: 1.0, at: now }
    }

    async fn next(&mut self) {
        while let Some(wait) = self.wait(Instant::now()) {
            tokio::time::sleep(wait).await;
        }
    }

    /// Nothing if the next one may go now; otherwise how long to wait.
    fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.allowance += now.duration_since(self.at).as_secs_f64() * self.rate;
        self.allowance = self.allowance.min((self.rate / 20.0).max(1.0));
        self.at = now;
        if self.allowance < 1.0 {
            return Some(Duration::from_secs_f64((1.0 - self.allowance) / self.rate));
        }
        self.allowance -= 1.0;
        None
    }
}

#[cfg(test)]
mod tests {
    use oncehook::journal::memory::MemoryJournal;
    use oncehook::journal::{BoxFuture, EventDetail, Stats, StoredBody};

    use super::*;

    /// Lets some through with a timer that is as coarse as a real one, and says how long that took.
    fn pass(pace: &mut Pace, now: &mut Instant, count: u32) -> f64 {
        let started = *now;
        for _ in 0..count {
            while let Some(wait) = pace.wait(*now) {
                *now += wait.max(Duration::from_millis(1));
            }
        }
        now.duration_since(started).as_secs_f64()
    }

    /// A reader with a fault.
    struct Faulty;

    impl JournalReader for Faulty {
        fn list(&self, _: EventQuery) -> BoxFuture<'_, Result<EventPage, ReadError>> {
            Box::pin(async { panic!("a fault of ours") })
        }

        fn show(&self, _: EventId) -> BoxFuture<'_, Result<Option<EventDetail>, ReadError>> {
            Box::pin(async { panic!("a fault of ours") })
        }

        fn body(&self, _: EventId) -> BoxFuture<'_, Result<Option<StoredBody>, ReadError>> {
            Box::pin(async { panic!("a fault of ours") })
        }

        fn stats(&self) -> BoxFuture<'_, Result<Stats, ReadError>> {
            Box::pin(async { panic!("a fault of ours") })
        }
    }

    #[tokio::test]
    async fn a_replay_that_panics_has_failed_and_makes_room_for_the_next() {
        let journal = Arc::new(MemoryJournal::new());
        let desk = |reader: Arc<dyn JournalReader>| Desk {
            reader,
            deliveries: Arc::clone(&journal) as Arc<dyn Deliveries>,
            routes: Routes::default(),
        };
        let plan = || Plan {
            query: EventQuery::default(),
            verb: Verb::Replay,
            route: None,
            who: Who { name: "ada".to_owned(), reason: None },
            rate: 1,
        };
        let ended = async |job: &Job| {
            while job.progress().state == Stage::Running {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            job.progress()
        };
        let replays = Replays::default();
        let job = replays.start("one".to_owned(), desk(Arc::new(Faulty)), plan()).unwrap_or_else(|_| panic!());
        let waiting = tokio::time::timeout(Duration::from_secs(10), ended(&job));
        let progress = waiting.await.expect("it would run for ever");
        assert_eq!((progress.state, progress.failed), (Stage::Failed, 1));
        assert!(progress.errors[0].error.contains("fault of the gateway"), "{progress:?}");
        let next = replays.start("two".to_owned(), desk(Arc::clone(&journal) as _), plan());
        let next = next.unwrap_or_else(|running| panic!("{running} is in the way"));
        assert_eq!(ended(&next).await.state, Stage::Done);
    }

    #[test]
    fn the_pace_is_kept() {
        for rate in [1, 7, 200, 10_000] {
            let mut now = Instant::now();
            let mut pace = Pace::new(rate, now);
            let seconds = pass(&mut pace, &mut now, rate * 3);
            assert!((1.9..=3.1).contains(&seconds), "{} at {rate} per second took {seconds}", rate * 3);
        }
    }

    #[test]
    fn time_that_was_lost_is_not_made_up_for_in_a_rush() {
        let mut now = Instant::now();
        let mut pace = Pace::new(100, now);
        now += Duration::from_secs(60);
        let seconds = pass(&mut pace, &mut now, 100);
        assert!(seconds > 0.9, "{seconds}");
    }
}
