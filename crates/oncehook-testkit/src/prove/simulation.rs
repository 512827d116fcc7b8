//! A deployment in one thread: nodes, senders, a destination and the time are all drawn from a seed.
//!
//! What is simulated is the network, the clock, crashes, freezes and the moments at which a database answers. What is real: the fast
//! path of every node, the reference journal (whose behaviour every other journal is held to by the suite), its fences and leases,
//! and the retry rules.
//!
//! Promises: a seed gives one history, and the hash of it is the same wherever and whenever it is run. Does not: run SQL;
//! [`embedded`](super::embedded) and [`cluster`](super::cluster) do.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::fmt::Write as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Cause, Failure, Fence, HandedEvent, RouteName, Settled, Settlement, Verdict};
use oncehook::event::{NewEvent, NewEvents, SourceName};
use oncehook::fastpath::FastPath;
use oncehook::handler::Handler;
use oncehook::journal::memory::MemoryJournal;
use oncehook::journal::{
    AppendError, BoxFuture, Deliveries as _, EventQuery, Journal, JournalReader as _, JournalState, KnownCopy, Layer,
    Receipt, SelfTestError, Ticket,
};
use oncehook::retry::RetryPolicy;
use oncehook::route::Route;
use oncehook_verify::UnixMicros;
use tokio::sync::oneshot;

use super::audit::Tally;
use crate::journal::{NOW, event};
use crate::random::Random;

const EVENTS: u64 = 25;
const LEASE: Duration = Duration::from_secs(1);
const MILLI: i64 = 1_000;
/// Nothing breaks any more after this.
const STORMY: i64 = 8_000 * MILLI;
/// A history that takes more steps does not come to its end.
const MOST_STEPS: usize = 60_000;

/// What came of a seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Of everything that happened, in order.
    pub hash: String,
    /// How much happened.
    pub steps: usize,
    /// What is wrong.
    pub tally: Tally,
    /// Rare things, counted.
    pub seen: BTreeMap<&'static str, u64>,
}

/// Plays the history of a seed.
#[must_use]
pub fn simulate(seed: u64) -> Outcome {
    let mut world = World::new(seed);
    world.run();
    world.judge()
}

/// Events that are under way, and where to answer.
type Submitted = (NewEvents, oneshot::Sender<Result<Receipt, AppendError>>);

/// The journal as a node reaches it: what it is given waits until the simulation lets it through.
struct Gate {
    journal: Arc<MemoryJournal>,
    waiting: Mutex<Vec<Submitted>>,
}

impl Journal for Gate {
    fn submit(&self, events: NewEvents) -> Result<Ticket, AppendError> {
        let (answer, ticket) = oneshot::channel();
        self.waiting.lock().unwrap().push((events, answer));
        Ok(ticket)
    }

    fn note_duplicates(&self, copies: &[KnownCopy<'_>]) -> bool {
        self.journal.note_duplicates(copies)
    }

    fn state(&self) -> JournalState {
        self.journal.state()
    }

    fn self_test(&self) -> BoxFuture<'_, Result<(), SelfTestError>> {
        self.journal.self_test()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.journal.close()
    }
}

type Append = Pin<Box<dyn Future<Output = Result<oncehook::fastpath::Settled, AppendError>> + Send>>;

struct Node {
    gate: Arc<Gate>,
    path: Arc<FastPath>,
    /// Requests under way: who waits for them, and the append itself.
    requests: Vec<(u64, Append)>,
    up: bool,
    /// Counts its starts: what belongs to an earlier one is void.
    life: u64,
    frozen_until: i64,
    committing: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// A copy of an event reaches a node.
    Arrive {
        event: u64,
        changed: bool,
        node: usize,
    },
    /// The database answers a node's batch.
    Commit {
        node: usize,
        life: u64,
    },
    /// A sender hears something, or that nobody is there.
    Heard {
        event: u64,
        changed: bool,
        id: Option<String>,
    },
    /// A node looks for work.
    Work {
        node: usize,
        life: u64,
    },
    /// A request reaches the destination.
    Apply {
        node: usize,
        life: u64,
        claim: usize,
    },
    /// Its answer reaches the node.
    Settle {
        node: usize,
        life: u64,
        claim: usize,
        applied: bool,
    },
    Crash {
        node: usize,
    },
    Restart {
        node: usize,
    },
    Freeze {
        node: usize,
    },
}

struct World {
    random: Random,
    clock: Clock,
    now: i64,
    order: u64,
    due: BinaryHeap<Reverse<(i64, u64, Step)>>,
    journal: Arc<MemoryJournal>,
    route: Arc<Route>,
    /// The same route for taking leases away: the journal draws that back-off from chances of its own, so there is none.
    reclaimed: Arc<Route>,
    nodes: Vec<Node>,
    claims: Vec<(Fence, u32, String)>,
    /// The destination: the event that each idempotency key was applied for.
    applied: BTreeMap<String, String>,
    /// How often each delivery was settled as a success.
    settled: HashMap<String, u64>,
    promised: BTreeMap<u64, String>,
    trace: String,
    steps: usize,
    tally: Tally,
    seen: BTreeMap<&'static str, u64>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let clock = Clock::manual(NOW);
        let journal = Arc::new(MemoryJournal::with_clock(clock.clone()));
        let never = |_: &rusqlite::Connection, _: &HandedEvent| panic!("the simulation has its own destination");
        let source = SourceName::new("shop").unwrap();
        let policy = RetryPolicy { max_attempts: 10_000, base: Duration::from_millis(50), cap: Duration::from_secs(1) };
        let route = Route::new(RouteName::new("orders").unwrap(), source, Handler::Function(Arc::new(never)));
        let at_once = RetryPolicy { base: Duration::ZERO, cap: Duration::ZERO, ..policy };
        let reclaimed = Arc::new(Route { retry: at_once, ..route.clone() });
        let route = Arc::new(Route { retry: policy, ..route });
        let count = 2 + random.below(2) as usize;
        let node = || Node {
            gate: Arc::new(Gate { journal: Arc::clone(&journal), waiting: Mutex::default() }),
            path: Arc::new(FastPath::default()),
            requests: Vec::new(),
            up: true,
            life: 0,
            frozen_until: 0,
            committing: false,
        };
        let nodes = (0..count).map(|_| node()).collect();
        let mut world = Self {
            random,
            clock,
            now: 0,
            order: 0,
            due: BinaryHeap::new(),
            journal,
            route,
            reclaimed,
            nodes,
            claims: Vec::new(),
            applied: BTreeMap::new(),
            settled: HashMap::new(),
            promised: BTreeMap::new(),
            trace: String::new(),
            steps: 0,
            tally: Tally::default(),
            seen: BTreeMap::new(),
        };
        world.plan();
        world
    }

    /// Everything that comes from outside.
    fn plan(&mut self) {
        let nodes = self.nodes.len() as u64;
        for event in 0..EVENTS {
            let first = self.random.below(4_000) as i64 * MILLI;
            // Copies race with the first, or come much later.
            let copies = if self.random.below(2) == 0 { 0 } else { 1 + self.random.below(4) };
            for copy in 0..=copies {
                let late = if self.random.below(2) == 0 { self.random.below(3) } else { self.random.below(3_000) };
                let node = self.random.below(nodes) as usize;
                let changed = copy > 0 && self.random.below(10) == 0;
                let at = if copy == 0 { first } else { first + late as i64 * MILLI };
                self.at(at, Step::Arrive { event, changed, node });
            }
        }
        for node in 0..self.nodes.len() {
            self.at(0, Step::Work { node, life: 0 });
            for _ in 0..self.random.below(4) {
                let at = self.random.below(STORMY as u64) as i64;
                let step = if self.random.below(2) == 0 { Step::Crash { node } } else { Step::Freeze { node } };
                self.at(at, step);
            }
        }
    }

    fn at(&mut self, time: i64, step: Step) {
        self.order += 1;
        self.due.push(Reverse((time, self.order, step)));
    }

    fn soon(&mut self, millis: u64, step: Step) {
        let at = self.now + 1 + self.random.below(millis * MILLI as u64) as i64;
        self.at(at, step);
    }

    fn see(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// One step after the other, until all is done.
    fn run(&mut self) {
        while let Some(Reverse((time, _, step))) = self.due.pop() {
            if self.is_over() || self.steps > MOST_STEPS {
                return;
            }
            self.now = self.now.max(time);
            self.clock.set(UnixMicros(NOW.0 + self.now));
            if let Some(thaw) = self.frozen(&step) {
                self.at(thaw, step);
                continue;
            }
            self.steps += 1;
            let _ = writeln!(self.trace, "{} {step:?}", self.now);
            self.step(step);
        }
    }

    /// Until when a step has to wait for its node.
    fn frozen(&self, step: &Step) -> Option<i64> {
        let node = match step {
            Step::Arrive { node, .. }
            | Step::Commit { node, .. }
            | Step::Work { node, .. }
            | Step::Settle { node, .. } => *node,
            _ => return None,
        };
        let until = self.nodes[node].frozen_until;
        (until > self.now).then_some(until)
    }

    fn is_over(&self) -> bool {
        self.now > STORMY && self.promised.len() as u64 == EVENTS && {
            let backlog = now(self.journal.backlog()).unwrap();
            backlog.iter().all(|route| route.waiting + route.running == 0)
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Arrive { event, changed, node } => self.arrive(event, changed, node),
            Step::Commit { node, life } => self.commit(node, life),
            Step::Heard { event, changed, id } => self.heard(event, changed, id),
            Step::Work { node, life } => self.work(node, life),
            Step::Apply { node, life, claim } => self.apply(node, life, claim),
            Step::Settle { node, life, claim, applied } => self.settle(node, life, claim, applied),
            Step::Crash { node } => self.crash(node),
            Step::Restart { node } => self.restart(node),
            Step::Freeze { node } => {
                self.see("freezes");
                let time = 300 + self.random.below(2_500) as i64;
                self.nodes[node].frozen_until = self.now + time * MILLI;
            }
        }
    }

    fn arrive(&mut self, number: u64, changed: bool, node: usize) {
        if !self.nodes[node].up {
            self.see("refused connections");
            return self.soon(20, Step::Heard { event: number, changed, id: None });
        }
        let body = if changed { "another body" } else { "body" };
        let at = UnixMicros(NOW.0 + self.now);
        let new = NewEvent {
            received_at: at,
            expires_at: UnixMicros(at.0 + 86_400_000_000),
            routes: [self.route.name.clone()].into_iter().collect(),
            ..event(&format!("evt_{number}"), body)
        };
        let (path, gate) = (Arc::clone(&self.nodes[node].path), Arc::clone(&self.nodes[node].gate));
        let append: Append = Box::pin(async move { path.append(&*gate, [new].into_iter().collect()).await });
        let tag = number * 2 + u64::from(changed);
        self.nodes[node].requests.push((tag, append));
        self.poll(node);
    }

    /// Lets the requests of a node go on as far as they can.
    fn poll(&mut self, node: usize) {
        let mut context = Context::from_waker(Waker::noop());
        loop {
            let mut done = Vec::new();
            self.nodes[node].requests.retain_mut(|(tag, append)| match append.as_mut().poll(&mut context) {
                Poll::Ready(outcome) => {
                    done.push((*tag, outcome));
                    false
                }
                Poll::Pending => true,
            });
            let progress = !done.is_empty();
            for (tag, outcome) in done {
                let (event, changed) = (tag / 2, tag % 2 == 1);
                let appended = outcome.ok().and_then(|settled| {
                    if settled.layer == Layer::Memory {
                        *self.seen.entry("answered by the fast path").or_default() += 1;
                    }
                    settled.receipt.first().copied()
                });
                let id = appended.map(|appended| format!("{} {}", appended.verdict.as_str(), appended.id));
                let lost = self.random.below(10) == 0;
                if lost {
                    self.see("answers lost");
                }
                self.soon(30, Step::Heard { event, changed, id: id.filter(|_| !lost) });
            }
            if !progress {
                break;
            }
        }
        let waits = !self.nodes[node].gate.waiting.lock().unwrap().is_empty();
        if waits && !self.nodes[node].committing {
            self.nodes[node].committing = true;
            let life = self.nodes[node].life;
            self.soon(15, Step::Commit { node, life });
        }
    }

    /// The database does what it was asked, or not, and says so, or not.
    fn commit(&mut self, node: usize, life: u64) {
        if self.nodes[node].life != life {
            return;
        }
        self.nodes[node].committing = false;
        let batch = std::mem::take(&mut *self.nodes[node].gate.waiting.lock().unwrap());
        let fate = self.random.below(20);
        for (events, answer) in batch {
            let unavailable = || Err(AppendError::Unavailable("the database is gone".to_owned()));
            // Whoever asked may be gone.
            let _ = match fate {
                0 => {
                    self.see("commits that failed");
                    answer.send(unavailable())
                }
                1 => {
                    self.see("commits of unknown outcome");
                    self.store(events);
                    answer.send(unavailable())
                }
                _ => {
                    let receipt = self.store(events);
                    answer.send(Ok(receipt))
                }
            };
        }
        self.poll(node);
    }

    fn store(&self, events: NewEvents) -> Receipt {
        now(self.journal.submit(events).unwrap()).unwrap().unwrap()
    }

    fn heard(&mut self, event: u64, changed: bool, id: Option<String>) {
        let _ = writeln!(self.trace, "  {id:?}");
        match id.as_deref().and_then(|id| id.split_once(' ')) {
            Some((word, id)) => {
                if word == "conflict" {
                    self.see("conflicts");
                }
                let first = self.promised.entry(event).or_insert_with(|| id.to_owned());
                if first != id {
                    self.tally.lost += 1;
                    self.tally.odd.push(format!("evt_{event} was promised as two events"));
                }
            }
            None if self.promised.contains_key(&event) => {}
            None => {
                let node = self.random.below(self.nodes.len() as u64) as usize;
                self.soon(400, Step::Arrive { event, changed, node });
            }
        }
    }

    fn work(&mut self, node: usize, life: u64) {
        if !self.nodes[node].up || self.nodes[node].life != life {
            return;
        }
        let reclaimed = now(self.journal.reclaim(Arc::clone(&self.reclaimed))).unwrap();
        *self.seen.entry("leases that ran out").or_default() += reclaimed as u64;
        let claims = now(self.journal.claim(Arc::clone(&self.route), 4, LEASE)).unwrap();
        for claim in claims {
            let key = String::from_utf8_lossy(claim.event.key.as_bytes()).into_owned();
            self.claims.push((claim.fence, claim.attempt_limit, key));
            let claim = self.claims.len() - 1;
            self.soon(200, Step::Apply { node, life, claim });
        }
        self.soon(100, Step::Work { node, life });
    }

    /// The destination applies each idempotency key once, and may be down, or its answer may be lost or late.
    fn apply(&mut self, node: usize, life: u64, claim: usize) {
        let (fence, _, key) = self.claims[claim].clone();
        let applied = self.random.below(8) != 0;
        if applied {
            let fresh = self.applied.insert(fence.delivery.idempotency_key(), key).is_none();
            if !fresh {
                self.see("requests that the destination knew");
            }
        }
        let late = if self.random.below(6) == 0 { 2_500 } else { 150 };
        if self.random.below(10) != 0 {
            self.soon(late, Step::Settle { node, life, claim, applied });
        } else {
            self.see("answers of the destination lost");
        }
    }

    fn settle(&mut self, node: usize, life: u64, claim: usize, applied: bool) {
        if !self.nodes[node].up || self.nodes[node].life != life {
            return;
        }
        let (fence, limit, _) = self.claims[claim].clone();
        let chance = self.random.below(1_000) as f64 / 1_000.0;
        let verdict = if applied {
            Verdict::Succeeded(None)
        } else {
            let failure = Failure::retry(Cause::Destination, "it is down");
            let time = UnixMicros(NOW.0 + self.now);
            self.route.retry.after_failure(failure, fence.attempt, limit, time, chance)
        };
        let delivery = fence.delivery.idempotency_key();
        let settlement = Settlement { fence, verdict, followups: Vec::new() };
        let settled = now(self.journal.settle(vec![settlement])).unwrap();
        let _ = writeln!(self.trace, "  {settled:?}");
        match settled.as_slice() {
            [Settled::Done] if applied => *self.settled.entry(delivery).or_default() += 1,
            [Settled::Done] => {
                // What took effect and was settled is never opened again.
                if self.settled.contains_key(&delivery) {
                    self.tally.doubled += 1;
                }
            }
            _ => self.see("zombies turned away"),
        }
    }

    /// The node is gone with all it had in memory. What it had handed to the database may be stored or not.
    fn crash(&mut self, node: usize) {
        if !self.nodes[node].up || self.nodes[node].frozen_until > self.now {
            return;
        }
        self.see("crashes");
        let handed_over = std::mem::take(&mut *self.nodes[node].gate.waiting.lock().unwrap());
        for (events, _) in handed_over {
            if self.random.below(2) == 0 {
                self.see("stored by a node that was gone by then");
                self.store(events);
            }
        }
        let dead = &mut self.nodes[node];
        let orphans: Vec<u64> = dead.requests.drain(..).map(|(tag, _)| tag).collect();
        (dead.up, dead.committing) = (false, false);
        dead.life += 1;
        for tag in orphans {
            self.soon(50, Step::Heard { event: tag / 2, changed: tag % 2 == 1, id: None });
        }
        self.soon(1_000, Step::Restart { node });
    }

    fn restart(&mut self, node: usize) {
        let journal = Arc::clone(&self.journal);
        let fresh = &mut self.nodes[node];
        fresh.gate = Arc::new(Gate { journal, waiting: Mutex::default() });
        fresh.path = Arc::new(FastPath::default());
        fresh.up = true;
        let life = fresh.life;
        self.soon(5, Step::Work { node, life });
    }

    /// Promises against facts.
    fn judge(mut self) -> Outcome {
        if !self.is_over() {
            self.tally.odd.push(format!("it does not come to its end: {} steps", self.steps));
        }
        let query = EventQuery { limit: 1_000_000, ..EventQuery::default() };
        let stored = now(self.journal.list(query)).unwrap().events;
        let ids: BTreeMap<String, String> = stored
            .iter()
            .map(|event| (String::from_utf8_lossy(event.key.as_bytes()).into_owned(), event.id.to_string()))
            .collect();
        self.tally.acked = self.promised.len() as u64;
        self.tally.stored = stored.len() as u64;
        if ids.len() != stored.len() {
            self.tally.doubled += (stored.len() - ids.len()) as u64;
        }
        for (event, id) in &self.promised {
            if ids.get(&format!("evt_{event}")) != Some(id) {
                self.tally.lost += 1;
            }
        }
        let mut effects: BTreeMap<&str, u64> = BTreeMap::new();
        for key in self.applied.values() {
            *effects.entry(key).or_default() += 1;
        }
        for key in ids.keys() {
            match effects.get(key.as_str()) {
                Some(1) => {}
                Some(count) => self.tally.doubled += count - 1,
                None => self.tally.lost += 1,
            }
        }
        self.tally.doubled += self.settled.values().map(|count| count - 1).sum::<u64>();
        let digest = oncehook_verify::digest(self.trace.as_bytes());
        Outcome { hash: hex::encode(&digest[..8]), steps: self.steps, tally: self.tally, seen: self.seen }
    }
}

/// The reference journal never lets anybody wait.
fn now<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the journal in memory answers at once"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r47_simulated_deployments_keep_their_promises_and_repeat_themselves() {
        let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
        for seed in 0..100 {
            let outcome = simulate(seed);
            assert!(outcome.tally.is_clean() && outcome.tally.acked == EVENTS, "seed {seed}: {outcome:?}");
            if seed % 10 == 0 {
                assert_eq!(simulate(seed), outcome, "seed {seed} gives another history the second time");
            }
            for (what, count) in outcome.seen {
                *seen.entry(what).or_default() += count;
            }
        }
        assert_ne!(simulate(1).hash, simulate(2).hash);
        for rare in [
            "zombies turned away",
            "commits of unknown outcome",
            "conflicts",
            "answered by the fast path",
            "leases that ran out",
        ] {
            assert!(seen.get(rare).copied().unwrap_or(0) > 0, "{rare}: {seen:?}");
        }
    }
}
