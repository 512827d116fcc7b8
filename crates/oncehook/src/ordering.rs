//! The order of an entity's events on a route: whose turn it is, what is too old to matter, and what must wait.
//!
//! Pure. A journal asks [`plan`] what to do with the deliveries it found due, while it holds the lock of their entities; it tells
//! what else is in the entity's line, and what is known of the entity ([`Standing`]). All journals ask the same function.
//!
//! - Place in the line: by the provider's version where the event has one, else by arrival. What has no version stands before
//!   what has one. A lower version that comes later is simply next; no delivery waits for a gap to close.
//! - Newer only: strictly older than what took effect means superseded. Equal or unknown goes on. Versions are compared
//!   where both have one, else times.
//! - What is parked stands in no line: what it waits for may well come after it.
//!
//! Does not: decide when something is tried again (`retry`), or which state follows which (`machine`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use oncehook_verify::UnixMicros;

use crate::delivery::{Cause, DeliveryState, Failure, HandedEvent, Verdict};
use crate::event::EventId;
use crate::machine::{Fit, Machine, Misfit};
use crate::retry::{between, later};

/// The due time of a delivery that waits for its turn: none.
pub const NO_TIME: UnixMicros = UnixMicros(i64::MAX);

/// How many due deliveries are looked at to find the eligible ones, or more if more are wanted.
pub const PEEK: usize = 256;

/// What a route asks about the entity of its events.
#[derive(Debug, Clone, Default)]
pub struct Ordering {
    /// Deliveries of an entity run one at a time, in their order.
    pub by_entity: bool,
    /// What a dead delivery means for those behind it.
    pub on_dead: OnDead,
    /// Events older than what took effect are superseded.
    pub newer_only: bool,
    /// Only events that fit the entity's state run.
    pub machine: Option<Arc<Machine>>,
    /// How long a prerequisite is waited for.
    pub parking: Parking,
    /// Where what is known of entities is kept. [`Routes`](crate::route::Routes) sees to it.
    pub memory: Memory,
}

/// Where newest versions and machine states are kept: in the database of the effect, with which they commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Memory {
    /// In the journal.
    #[default]
    Journal,
    /// In the other database that the route's effects are in. The journal sees to it that one delivery of an entity runs at a time;
    /// whether it runs is decided there (`handler::entities`).
    Effect,
}

/// What a dead delivery means for those behind it in an ordered line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDead {
    /// They wait until an operator retries or skips it.
    #[default]
    Block,
    /// They go on.
    Continue,
}

/// How long a delivery waits for a prerequisite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parking {
    /// The longest wait, from the first time it was put off. Then it is dead.
    pub longest: Duration,
    /// The longest time between two looks. The first come sooner.
    pub every: Duration,
}

impl Default for Parking {
    fn default() -> Self {
        Self { longest: Duration::from_secs(24 * 3_600), every: Duration::from_secs(60) }
    }
}

/// The first look at a parked delivery comes after this time, and no two come closer.
const FIRST_LOOK: Duration = Duration::from_secs(1);

impl Parking {
    /// What becomes of a delivery that is put off: parked, and looked at again after about as long as it has waited; or
    /// dead, if that has been too long. `since` is when it was first put off.
    pub fn after_deferral(&self, reason: &str, since: Option<UnixMicros>, now: UnixMicros) -> Verdict {
        let waited = between(since.unwrap_or(now), now);
        if waited >= self.longest {
            let message = format!("it waited for {} too long: {reason}", describe(self.longest));
            let logged = format!("it waited longer than {} for a prerequisite", describe(self.longest));
            return Verdict::Dead(Failure::permanent(Cause::Prerequisite, message).in_log(logged));
        }
        let wait = waited.clamp(FIRST_LOOK, self.every.max(FIRST_LOOK)).min(self.longest - waited);
        Verdict::Parked(later(now, wait), Failure::defer(reason.to_owned()))
    }
}

fn describe(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds > 0 && seconds % 3_600 == 0 => format!("{} h", seconds / 3_600),
        seconds if seconds > 0 && seconds % 60 == 0 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}

impl Ordering {
    /// Whether no two deliveries of an entity may be under way at once.
    pub fn is_serial(&self) -> bool {
        self.by_entity || self.newer_only || self.machine.is_some()
    }

    /// Whether the journal must remember something of the entity beyond its deliveries.
    pub fn remembers(&self) -> bool {
        self.compares() && self.memory == Memory::Journal
    }

    /// Whether events are compared with what took effect before.
    pub fn compares(&self) -> bool {
        self.newer_only || self.machine.is_some()
    }

    /// The scope under which entities of that route are known. A machine's name outlives a renamed route; the `:` keeps it
    /// apart from every route's name.
    pub fn scope(&self, route: &str) -> String {
        match &self.machine {
            Some(machine) => format!("machine:{}", machine.name),
            None => route.to_owned(),
        }
    }

    /// Whether those behind a delivery that came to this must wait. Those before it need not: a lower version may have come while
    /// it ran, so the journal lets the first of the line look again after every settlement, whatever the verdict.
    fn holds_up(&self, verdict: &Verdict) -> bool {
        let holds = match verdict {
            Verdict::Succeeded(_) | Verdict::Superseded(_) | Verdict::Parked(..) => false,
            Verdict::RetryAt(..) => true,
            Verdict::Dead(_) => self.on_dead == OnDead::Block,
        };
        self.by_entity && holds
    }

    /// Whether deliveries behind one in this state go on.
    pub(crate) fn passes(&self, state: DeliveryState) -> bool {
        state == DeliveryState::Dead && (!self.by_entity || self.on_dead == OnDead::Continue)
    }

    /// What is known of an entity once an event has taken effect.
    pub fn advance(&self, standing: &mut Standing, mark: Mark, kind: Option<&str>) {
        standing.newest = standing.newest.raised_by(mark);
        standing.version += 1;
        if let Some(machine) = &self.machine
            && let Fit::Moves(to) = machine.fit(standing.state_in(machine), kind)
        {
            standing.state = Some(to.to_owned());
        }
    }

    /// What to do with an event of an entity that stands so.
    pub(crate) fn judge(&self, standing: &Standing, mark: Mark, kind: Option<&str>) -> Step {
        if self.newer_only && mark.is_older_than(&standing.newest) {
            return Step::Settle(Verdict::Superseded(format!("a newer event took effect before: {}", standing.newest)));
        }
        let Some(machine) = &self.machine else { return Step::Run(None) };
        let state = standing.state_in(machine);
        let misfit = || format!("`{}` does not fit the state `{state}`", kind.unwrap_or("an event without a type"));
        match (machine.fit(state, kind), machine.misfit) {
            (Fit::Moves(to), _) => Step::Run(Some(to.to_owned())),
            (Fit::Early, Misfit::Park) => Step::Defer(misfit() + " yet"),
            (Fit::Late, Misfit::Park) | (_, Misfit::Supersede) => Step::Settle(Verdict::Superseded(misfit())),
            (_, Misfit::Dead) => {
                let failure = Failure::permanent(Cause::Prerequisite, misfit());
                Step::Settle(Verdict::Dead(failure.in_log("the event does not fit the state of its entity")))
            }
        }
    }
}

/// Which of an entity's versions an event tells about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mark {
    /// The provider's version or sequence.
    pub version: Option<i64>,
    /// When it happened, as the provider says.
    pub at: Option<UnixMicros>,
}

impl Mark {
    /// Strictly older, by version where both have one, else by time. Unknown is never older.
    pub fn is_older_than(&self, other: &Self) -> bool {
        match (self.version, other.version) {
            (Some(mine), Some(theirs)) => mine < theirs,
            _ => matches!((self.at, other.at), (Some(mine), Some(theirs)) if mine < theirs),
        }
    }

    fn raised_by(self, other: Self) -> Self {
        Self { version: self.version.max(other.version), at: self.at.max(other.at) }
    }
}

impl HandedEvent {
    /// Which of its entity's versions it tells about.
    pub(crate) fn mark(&self) -> Mark {
        Mark { version: self.version, at: self.occurred_at }
    }
}

impl std::fmt::Display for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.version, self.at) {
            (Some(version), _) => write!(f, "version {version}"),
            (None, Some(at)) => f.write_str(&at.to_rfc3339()),
            (None, None) => f.write_str("of unknown age"),
        }
    }
}

/// What is known of an entity.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Standing {
    /// The newest of what took effect.
    pub newest: Mark,
    /// Its state, if it ever left the initial one.
    pub state: Option<String>,
    /// How many effects there were.
    pub version: i64,
}

impl Standing {
    fn state_in<'s>(&'s self, machine: &'s Machine) -> &'s str {
        self.state.as_deref().unwrap_or(&machine.initial)
    }
}

/// A place in an entity's line. The order is that of the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The provider's version.
    pub version: Option<i64>,
    /// The event: ids grow with arrival.
    pub event: EventId,
    /// The delivery's epoch.
    pub epoch: u32,
}

/// A delivery that is due.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The event's entity. Without one there is no line.
    pub entity: Option<String>,
    /// Its place in the entity's line.
    pub place: Place,
    /// Which version it tells about.
    pub mark: Mark,
    /// The event's type.
    pub kind: Option<String>,
    /// Since when it has waited for a prerequisite, if it has.
    pub parked_at: Option<UnixMicros>,
}

/// What a journal knows of an entity while it holds its lock.
#[derive(Debug, Clone, Default)]
pub struct Line {
    /// What has been before.
    pub standing: Standing,
    /// Whether a delivery of it is leased.
    pub running: bool,
    /// The front of the line, in order: deliveries that are ready, retrying, running or dead. At least as many as there are candidates of
    /// the entity, if there are as many.
    pub front: Vec<(Place, DeliveryState)>,
    /// Those of the front that are due now, in journals that several may ask at once. One that is no candidate was accepted a moment ago
    /// or is in other hands: those behind it just ask again.
    pub due: Vec<Place>,
}

/// How many deliveries of an entity may be taken at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Company {
    /// Several, one after the other in one transaction.
    OneTransaction,
    /// One, which is leased.
    Lease,
}

/// What to do with a candidate whose turn it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Run it. With a machine, it leads to this state.
    Run(Option<String>),
    /// Settle it without running it.
    Settle(Verdict),
    /// Put it off, for this reason ([`Parking::after_deferral`]).
    Defer(String),
}

/// What to do with the candidates, by their place in the list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// To be run, in this order, each with the state that a machine gets to by it.
    pub run: Vec<(usize, Option<String>)>,
    /// To be settled without running, in this order.
    pub passed: Vec<(usize, Verdict)>,
    /// Not eligible: to be taken out of the queue until one before them lets them go on.
    pub blocked: Vec<usize>,
}

/// Decides which candidates are eligible. `room` is how many may run. A candidate that the plan does not name stays due.
///
/// A delivery behind one that is due and was not found would be let go on soon, and so stays due. But the one in front may have
/// become due later than all that were looked at, so that no worker ever finds it: where those that stay would be all there is,
/// or fill the view, they are blocked.
///
/// In company, the plan of an entity assumes that those before take effect; if one does not, all are undone.
pub fn plan(
    ordering: &Ordering,
    company: Company,
    room: usize,
    candidates: &[Candidate],
    lines: &HashMap<String, Line>,
    now: UnixMicros,
) -> Plan {
    let mut plan = Plan::default();
    let mut staying = Vec::new();
    let mut groups: HashMap<&str, BTreeMap<Place, usize>> = HashMap::new();
    for (index, candidate) in candidates.iter().enumerate() {
        if let Some(entity) = candidate.entity.as_deref() {
            groups.entry(entity).or_default().insert(candidate.place, index);
        }
    }
    for (index, candidate) in candidates.iter().enumerate() {
        if plan.run.len() >= room {
            break;
        }
        let Some(entity) = candidate.entity.as_deref() else {
            plan.run.push((index, None));
            continue;
        };
        // The whole entity at the first of its candidates.
        let Some(mine) = groups.remove(entity) else { continue };
        let nothing = Line::default();
        let line = lines.get(entity).unwrap_or(&nothing);
        let turn = turns(ordering, line, &mine);
        let mut standing = line.standing.clone();
        let mut busy = false;
        let obstacle = line.front.iter().map(|(place, _)| place).find(|place| !mine.contains_key(place));
        let passing = !line.running && obstacle.is_some_and(|place| line.due.contains(place));
        for (place, index) in &mine {
            let Some(candidate) = candidates.get(*index) else { continue };
            if busy || !turn.contains(place) {
                let aside = if busy || !passing { &mut plan.blocked } else { &mut staying };
                aside.push(*index);
                continue;
            }
            if plan.run.len() >= room {
                continue;
            }
            let kind = candidate.kind.as_deref();
            let step = match ordering.memory {
                Memory::Journal => ordering.judge(&standing, candidate.mark, kind),
                Memory::Effect => Step::Run(None),
            };
            match step {
                Step::Run(state) => {
                    busy = company == Company::Lease;
                    ordering.advance(&mut standing, candidate.mark, kind);
                    plan.run.push((*index, state));
                }
                Step::Settle(verdict) => {
                    busy = ordering.holds_up(&verdict);
                    plan.passed.push((*index, verdict));
                }
                Step::Defer(reason) => {
                    let verdict = ordering.parking.after_deferral(&reason, candidate.parked_at, now);
                    plan.passed.push((*index, verdict));
                }
            }
        }
    }
    if plan.run.is_empty() && plan.passed.is_empty() || staying.len() >= PEEK / 4 {
        plan.blocked.append(&mut staying);
    }
    plan
}

/// The candidates that nothing stands before.
fn turns(ordering: &Ordering, line: &Line, mine: &BTreeMap<Place, usize>) -> BTreeSet<Place> {
    if line.running {
        return BTreeSet::new();
    }
    if !ordering.by_entity {
        return mine.keys().copied().collect();
    }
    let ahead = line.front.iter().filter(|(_, state)| !ordering.passes(*state)).map(|(place, _)| *place);
    ahead.take_while(|place| mine.contains_key(place)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(event: u8) -> Place {
        Place { version: None, event: EventId::from_bytes([event; 16]), epoch: 0 }
    }

    fn candidate(event: u8) -> Candidate {
        let (mark, entity) = (Mark::default(), Some("po_1".to_owned()));
        Candidate { entity, place: place(event), mark, kind: None, parked_at: None }
    }

    /// What is done with this many events from 2 on where 1 stands before them, which is no candidate; and with one that has no
    /// entity.
    fn behind_another(events: u8, due: Vec<Place>, running: bool, single: bool) -> Plan {
        let ordering = Ordering { by_entity: true, ..Ordering::default() };
        let front = (1..events + 2).map(|event| (place(event), DeliveryState::Ready)).collect();
        let line = Line { front, due, running, ..Line::default() };
        let lines = HashMap::from([("po_1".to_owned(), line)]);
        let mut candidates: Vec<Candidate> = (2..events + 2).map(candidate).collect();
        candidates.extend(single.then(|| Candidate { entity: None, ..candidate(255) }));
        plan(&ordering, Company::OneTransaction, usize::MAX, &candidates, &lines, UnixMicros(0))
    }

    #[test]
    fn r13_whoever_stands_behind_one_that_waits_is_blocked() {
        let blocked = Plan { blocked: vec![0, 1], ..Plan::default() };
        assert_eq!(behind_another(2, Vec::new(), false, false), blocked);
        assert_eq!(behind_another(2, vec![place(1)], true, false), blocked);
    }

    #[test]
    fn r13_whoever_stands_behind_one_that_is_due_asks_again() {
        let plan = behind_another(2, vec![place(1), place(2)], false, true);
        assert_eq!(plan, Plan { run: vec![(2, None)], ..Plan::default() });
    }

    #[test]
    fn r13_whoever_stands_behind_one_that_is_due_steps_aside_before_nothing_else_is_seen() {
        let due = || vec![place(1), place(2)];
        assert_eq!(behind_another(2, due(), false, false).blocked, [0, 1], "no other is there");
        assert_eq!(behind_another(63, due(), false, true).blocked, [0; 0]);
        assert_eq!(behind_another(64, due(), false, true).blocked.len(), 64, "they fill the view");
    }
}
