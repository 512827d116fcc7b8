//! Random histories of work: every journal must answer workers and operators exactly as the reference does.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Claim, Fence, Settlement, Verdict};
use oncehook::event::{EventId, NewEvent};
use oncehook::journal::memory::MemoryJournal;
use oncehook::journal::{EventQuery, Forgotten, OrderError, Ordered, Retention};
use oncehook::retry::RetryPolicy;
use oncehook::route::Route;
use oncehook_verify::Quarantine;

use super::*;
use crate::journal::append;
use crate::random::Random;

/// Plays a history of appends, claims, settlements, lost leases, orders and forgetting against a journal and the
/// reference, and compares every answer, and every event's story now and then. The journal is empty and runs on `clock`,
/// which is a manual one. Panics with the seed in its text at the first difference.
pub async fn compare_deliveries<J: WholeJournal>(journal: &J, clock: &Clock, seed: u64, steps: usize) {
    let mut history = History {
        seed,
        random: Random::new(seed),
        clock: clock.clone(),
        reference: MemoryJournal::with_clock(clock.clone()),
        subject: journal,
        ids: HashMap::new(),
        events: Vec::new(),
        fences: Vec::new(),
        seen: HashMap::new(),
    };
    for step in 0..steps {
        history.step().await;
        if step % 50 == 0 {
            history.compare_stories().await;
        }
    }
    history.compare_stories().await;
    // A history in which nothing happened compares nothing.
    for what in ["succeeded", "dead", "lost", "ordered", "refused", "events forgotten", "keys forgotten"] {
        assert!(steps < 1_000 || history.seen.contains_key(what), "seed {seed}: nothing was ever {what}");
    }
}

struct History<'a, J> {
    seed: u64,
    random: Random,
    clock: Clock,
    reference: MemoryJournal,
    subject: &'a J,
    /// The reference's id of an event, and the subject's.
    ids: HashMap<EventId, EventId>,
    /// The reference's ids, oldest first; forgotten ones too.
    events: Vec<EventId>,
    /// Every fence that was ever handed out, with the reference's ids.
    fences: Vec<Fence>,
    /// What happened how often.
    seen: HashMap<&'static str, usize>,
}

/// The routes of a history. No back-off, because the two journals draw different chances.
fn routes() -> [Arc<Route>; 3] {
    let retry = RetryPolicy { max_attempts: 3, base: Duration::ZERO, cap: Duration::ZERO };
    [route("orders"), route("log"), route_after("mail", "orders")]
        .map(|route| Arc::new(Route { retry, ..Route::clone(&route) }))
}

impl<J: WholeJournal> History<'_, J> {
    async fn step(&mut self) {
        match self.random.below(30) {
            0..5 => self.append().await,
            5..10 => self.claim().await,
            10..16 => self.settle().await,
            16 => self.renew().await,
            17 => self.give_back().await,
            18..20 => self.reclaim().await,
            20..23 => {
                let passed = self.pick_seconds(12);
                self.clock.set(UnixMicros(self.clock.now().0 + passed));
            }
            23..27 => self.order().await,
            27 => self.pause().await,
            28 => self.forget().await,
            _ => self.look().await,
        }
    }

    fn saw(&mut self, what: &'static str, times: usize) {
        if times > 0 {
            *self.seen.entry(what).or_default() += times;
        }
    }

    /// The subject's fence.
    fn theirs(&self, fence: &Fence) -> Fence {
        let mut fence = fence.clone();
        fence.delivery.event = self.ids[&fence.delivery.event];
        fence
    }

    fn pick_names(&mut self, names: &[&str]) -> Vec<RouteName> {
        names.iter().filter(|_| self.random.below(3) > 0).map(|name| named(name)).collect()
    }

    fn pick_route(&mut self) -> Arc<Route> {
        Arc::clone(self.random.pick(&routes()))
    }

    /// Some fences, mostly of late.
    fn pick_fences(&mut self) -> Vec<Fence> {
        let count = self.random.below(4);
        let recent = self.fences.len().saturating_sub(if self.random.below(4) == 0 { 100 } else { 8 });
        let choice = &self.fences[recent..];
        if choice.is_empty() {
            return Vec::new();
        }
        (0..count).map(|_| self.random.pick(choice).clone()).collect()
    }

    /// Whole seconds, in microseconds: so times meet, and what holds at the very moment is compared too.
    fn pick_seconds(&mut self, below: u64) -> i64 {
        self.random.below(below).cast_signed() * 1_000_000
    }

    fn pick_duration(&mut self, below_seconds: u64) -> Duration {
        Duration::from_secs(self.random.below(below_seconds))
    }

    async fn append(&mut self) {
        let now = self.clock.now();
        let events: Vec<NewEvent> = (0..=self.random.below(3))
            .map(|_| {
                let key = format!("evt_{}", self.random.below(60));
                let body = format!("body {}", self.random.below(8) / 7);
                NewEvent {
                    received_at: now,
                    expires_at: UnixMicros(now.0 + 60_000_000),
                    quarantine: (self.random.below(15) == 0).then_some(Quarantine::AmbiguousJson),
                    routes: self.pick_names(&["orders", "log"]).into_iter().collect(),
                    ..event(&key, &body)
                }
            })
            .collect();
        let expected = append(&self.reference, events.clone()).await;
        let found = append(self.subject, events).await;
        assert_eq!(expected.len(), found.len(), "seed {}", self.seed);
        for (expected, found) in expected.iter().zip(&found) {
            assert_eq!(expected.verdict, found.verdict, "seed {}", self.seed);
            let known = self.ids.get(&expected.id).copied();
            assert_eq!(known.unwrap_or(found.id), found.id, "seed {}", self.seed);
            if known.is_none() {
                self.ids.insert(expected.id, found.id);
                self.events.push(expected.id);
            }
        }
    }

    async fn claim(&mut self) {
        let (route, limit) = (self.pick_route(), 1 + self.random.below(5) as usize);
        let lease = self.pick_duration(20);
        let expected = self.reference.claim(Arc::clone(&route), limit, lease).await.unwrap();
        let found = self.subject.claim(route, limit, lease).await.unwrap();
        // The ids differ, and nothing else may.
        let ours = |claim: &Claim| {
            let mut claim = claim.clone();
            claim.fence = self.theirs(&claim.fence);
            claim.event.id = self.ids[&claim.event.id];
            claim
        };
        let expected_there: Vec<_> = expected.iter().map(ours).collect();
        assert_eq!(format!("{expected_there:#?}"), format!("{found:#?}"), "seed {}", self.seed);
        self.saw("follow-ups with a result", found.iter().filter(|claim| claim.event.result.is_some()).count());
        self.fences.extend(expected.into_iter().map(|claim| claim.fence));
    }

    async fn settle(&mut self) {
        let now = self.clock.now();
        let mut expected = Vec::new();
        for fence in self.pick_fences() {
            let number = self.random.below(1_000);
            let later = UnixMicros(now.0 + self.pick_seconds(9));
            let verdict = match self.random.below(5) {
                0 => Verdict::RetryAt(later, failed(format!("busy {number}"))),
                1 => dead(format!("broken {number}")),
                2 => Verdict::Succeeded(None),
                _ => Verdict::Succeeded(Some(number.to_string())),
            };
            let followups = match fence.delivery.route.as_str() {
                "orders" => vec![named("mail")],
                _ => Vec::new(),
            };
            expected.push(Settlement { fence, verdict, followups });
        }
        let found = expected.iter().map(|ours| Settlement { fence: self.theirs(&ours.fence), ..ours.clone() });
        let found = self.subject.settle(found.collect()).await.unwrap();
        let verdicts: Vec<_> = expected.iter().map(|settlement| settlement.verdict.clone()).collect();
        let expected = self.reference.settle(expected).await.unwrap();
        assert_eq!(expected, found, "seed {}", self.seed);
        for (settled, verdict) in found.iter().zip(verdicts) {
            let what = match (settled, verdict) {
                (Settled::Lost, _) => "lost",
                (Settled::Done, Verdict::Succeeded(_)) => "succeeded",
                (Settled::Done, Verdict::RetryAt(..)) => "failed",
                (Settled::Done, Verdict::Dead(_)) => "dead",
                (Settled::Done, Verdict::Parked(..)) => "parked",
                (Settled::Done, Verdict::Superseded(_)) => "superseded",
            };
            self.saw(what, 1);
        }
    }

    async fn renew(&mut self) {
        let (fences, lease) = (self.pick_fences(), self.pick_duration(20));
        let theirs = fences.iter().map(|fence| self.theirs(fence)).collect();
        self.reference.renew(fences, lease).await.unwrap();
        self.subject.renew(theirs, lease).await.unwrap();
    }

    async fn give_back(&mut self) {
        let fences = self.pick_fences();
        let theirs = fences.iter().map(|fence| self.theirs(fence)).collect();
        self.reference.give_back(fences).await.unwrap();
        self.subject.give_back(theirs).await.unwrap();
    }

    async fn reclaim(&mut self) {
        let route = self.pick_route();
        let expected = self.reference.reclaim(Arc::clone(&route)).await.unwrap();
        assert_eq!(expected, self.subject.reclaim(route).await.unwrap(), "seed {}", self.seed);
        self.saw("reclaimed", expected);
    }

    async fn order(&mut self) {
        let recent = self.events.len().saturating_sub(20);
        if self.events.is_empty() {
            return;
        }
        let event = *self.random.pick(&self.events[recent..]);
        let story = self.reference.show(event).await.unwrap();
        let epochs = story.iter().flat_map(|story| story.event.deliveries.iter().map(|found| found.epoch));
        let latest = epochs.max().unwrap_or(0);
        let epoch = if self.random.below(4) > 0 { latest + 1 } else { self.random.below(4) as u32 };
        let verbs = [Verb::Retry, Verb::Replay, Verb::ForceReplay { epoch }, Verb::Skip, Verb::Release];
        let expected = Order {
            event,
            verb: *self.random.pick(&verbs),
            route: match self.random.below(4) {
                0 => Some(self.pick_route().name.clone()),
                _ => None,
            },
            who: Who {
                name: "ada".to_owned(),
                reason: (self.random.below(5) > 0).then(|| format!("incident {}", self.random.below(9))),
            },
            wanting: self.pick_names(&["orders", "log"]),
            attempts: 1 + self.random.below(3) as u32,
        };
        let found = Order { event: self.ids[&event], ..expected.clone() };
        let told = format!("seed {}: {expected:?}", self.seed);
        let expected = self.reference.order(expected).await;
        let found = self.subject.order(found).await;
        assert!(same_answer(&expected, &found), "{told}: {expected:?} and {found:?}");
        self.saw(if expected.is_ok() { "ordered" } else { "refused" }, 1);
    }

    async fn pause(&mut self) {
        let what = match self.random.below(2) {
            0 => Pausable::Source(self.random.pick(&["shop", "bank"]).to_string()),
            _ => Pausable::Route(self.random.pick(&["orders", "log"]).to_string()),
        };
        let pause = Pause { what, paused: self.random.below(2) == 0 };
        let who = Who { name: "ada".to_owned(), reason: None };
        self.reference.set_paused(pause.clone(), who.clone()).await.unwrap();
        self.subject.set_paused(pause, who).await.unwrap();
    }

    async fn forget(&mut self) {
        let retention = Retention {
            payload: Duration::from_secs(45),
            dead: (self.random.below(3) > 0).then_some(Duration::from_secs(60)),
            audit: Duration::from_secs(90),
            batch: 1 + self.random.below(20) as usize,
        };
        let expected = forget_all(&self.reference, retention).await;
        let found = forget_all(self.subject, retention).await;
        assert_eq!(expected, found, "seed {}", self.seed);
        self.saw("events forgotten", found.events);
        self.saw("keys forgotten", found.keys);
    }

    async fn look(&mut self) {
        let (reference, subject, seed) = (&self.reference, self.subject, self.seed);
        assert_eq!(reference.backlog().await.unwrap(), subject.backlog().await.unwrap(), "seed {seed}");
        assert_eq!(reference.paused().await.unwrap(), subject.paused().await.unwrap(), "seed {seed}");
        for route in routes() {
            let expected = reference.next_due(route.name.clone()).await.unwrap();
            assert_eq!(expected, subject.next_due(route.name.clone()).await.unwrap(), "seed {seed}");
        }
    }

    async fn compare_stories(&self) {
        let (reference, subject, seed) = (&self.reference, self.subject, self.seed);
        let query = EventQuery { limit: 1_000_000, ..Default::default() };
        let expected = reference.list(query.clone()).await.unwrap().events;
        let found = subject.list(query).await.unwrap().events;
        assert_eq!(expected.len(), found.len(), "seed {seed}");
        for (expected, mut found) in expected.into_iter().zip(found) {
            assert_eq!(self.ids[&expected.id], found.id, "seed {seed}: order");
            let mut wanted = reference.show(expected.id).await.unwrap().unwrap();
            let mut story = subject.show(found.id).await.unwrap().unwrap();
            wanted.conflicts.sort_by_key(|conflict| conflict.digest);
            story.conflicts.sort_by_key(|conflict| conflict.digest);
            found.id = expected.id;
            story.event.id = expected.id;
            assert_eq!(expected, found, "seed {seed}");
            assert_eq!(wanted, story, "seed {seed}");
        }
        for event in &self.events {
            let (expected, found) = (reference.body(*event).await, subject.body(self.ids[event]).await);
            assert_eq!(expected.unwrap(), found.unwrap(), "seed {seed}");
        }
        assert_eq!(reference.stats().await.unwrap(), subject.stats().await.unwrap(), "seed {seed}");
    }
}

/// Refusals may use other words.
fn same_answer(expected: &Result<Ordered, OrderError>, found: &Result<Ordered, OrderError>) -> bool {
    match (expected, found) {
        (Err(OrderError::Unfit(_)), Err(OrderError::Unfit(_))) => true,
        _ => expected == found,
    }
}

async fn forget_all(journal: &impl Deliveries, retention: Retention) -> Forgotten {
    let mut sum = Forgotten::default();
    for _ in 0..10_000 {
        let step = journal.forget(retention).await.unwrap();
        sum.events += step.events;
        sum.keys += step.keys;
        sum.audit += step.audit;
        if !step.more {
            return sum;
        }
    }
    panic!("there is always more to forget");
}
