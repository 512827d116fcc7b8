//! Deliveries in the reference journal: claims, attempts, orders and forgetting, each as plainly as it can be said.
//!
//! Promises: what it answers is what every backend must answer.
//!
//! Does not: decide. What an outcome or an order changes is decided in `decide`, which delivery is eligible in `ordering`.

mod served;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use oncehook_verify::UnixMicros;

use super::{State, Stored};
use crate::delivery::{
    Cause, Claim, DeliveryId, DeliveryState, FailedAttempt, Fence, HandedEvent, RouteName, Settled, Settlement, Verdict,
};
use crate::event::EventId;
use crate::journal::decide::order::{Found, decide};
use crate::journal::decide::outcome::{Held, Outcome, outcome};
use crate::journal::{
    Attempt, AuditEntry, Backlog, ClockMemory, Delivery, Flag, Forgotten, Order, OrderError, Ordered, Pause, Paused,
    Retention, TRUST_CLOCK, Who, look,
};
use crate::ordering::{Candidate, Company, Line, Mark, NO_TIME, PEEK, Place, plan};
use crate::retry::{Chance, later};
use crate::route::Route;

/// One delivery.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) state: DeliveryState,
    /// The latest attempt: the fence. Never goes back.
    attempt: u32,
    /// The delivery's own limit of attempts, where it differs from the route's.
    limit: Option<u32>,
    /// [`NO_TIME`] while it waits until it is eligible.
    run_at: UnixMicros,
    /// Since when it has waited until it is eligible.
    blocked_at: Option<UnixMicros>,
    /// Since when it has waited for a prerequisite.
    parked_at: Option<UnixMicros>,
    /// Set while it is running: until when, and the limit of attempts as the claim said it.
    lease: Option<(UnixMicros, u32)>,
    settled_at: Option<UnixMicros>,
    result: Option<String>,
    error: Option<String>,
    cause: Option<Cause>,
    attempts: Vec<Attempt>,
}

impl Record {
    /// Whether it has a time at which it is due.
    fn has_time(&self) -> bool {
        matches!(self.state, DeliveryState::Ready | DeliveryState::Retrying) && self.run_at != NO_TIME
    }

    /// Whether it waits until one before it lets it go on.
    fn is_blocked(&self) -> bool {
        matches!(self.state, DeliveryState::Ready | DeliveryState::Retrying) && self.run_at == NO_TIME
    }

    fn is_open(&self) -> bool {
        self.state.is_pending() || self.state == DeliveryState::Dead
    }

    /// Whether an attempt holds a lease that has not run out.
    fn is_leased(&self, now: UnixMicros) -> bool {
        self.lease.is_some_and(|(until, _)| until > now)
    }

    fn limit(&self, route: &Route) -> u32 {
        self.limit.unwrap_or(route.retry.max_attempts)
    }

    /// Due now, whatever it waited for.
    fn wake(&mut self, now: UnixMicros) {
        self.state = if self.attempt > 0 { DeliveryState::Retrying } else { DeliveryState::Ready };
        self.run_at = now;
    }

    /// Takes it out of the queue until one before it lets it go on.
    fn block(&mut self, now: UnixMicros) {
        self.run_at = NO_TIME;
        self.blocked_at = self.blocked_at.or(Some(now));
    }

    fn begin_attempt(&mut self, now: UnixMicros) {
        self.attempt += 1;
        let (number, started_at) = (self.attempt, now);
        self.attempts.push(Attempt { number, started_at, finished_at: None, outcome: None, error: None });
    }

    fn end_attempt(&mut self, outcome: &str, error: Option<&str>, now: UnixMicros) {
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.finished_at = Some(now);
            attempt.outcome = Some(outcome.to_owned());
            attempt.error = error.map(str::to_owned);
        }
    }

    /// Ends the lease of an attempt that is not held against the delivery.
    fn grant_another(&mut self) {
        self.limit = self.lease.take().map(|(_, limit)| limit.saturating_add(1)).or(self.limit);
    }

    /// Writes what an attempt, or the decision not to make one, came to.
    fn write(&mut self, outcome: &Outcome<'_>, now: UnixMicros) {
        if let Some(end) = outcome.attempt {
            self.end_attempt(end.outcome, end.error, now);
        }
        if !outcome.counts {
            self.grant_another();
        }
        self.lease = None;
        self.state = outcome.state;
        self.run_at = outcome.run_at.unwrap_or(self.run_at);
        self.blocked_at = None;
        self.parked_at = (outcome.state == DeliveryState::Parked).then(|| self.parked_at.unwrap_or(now));
        self.settled_at = outcome.run_at.is_none().then_some(now);
        self.result = outcome.result.map(str::to_owned);
        self.error = outcome.error.map(str::to_owned);
        self.cause = outcome.cause;
    }

    /// Made due by an operator.
    fn revive(&mut self, state: DeliveryState, limit: u32, now: UnixMicros) {
        (self.state, self.run_at, self.limit) = (state, now, Some(limit));
        (self.blocked_at, self.parked_at, self.settled_at, self.cause) = (None, None, None, None);
    }

    /// Given up by an operator.
    fn skip(&mut self, now: UnixMicros) {
        if self.lease.take().is_some() {
            self.end_attempt("lost", None, now);
        }
        if self.run_at == NO_TIME {
            self.run_at = now;
        }
        (self.state, self.settled_at) = (DeliveryState::Skipped, Some(now));
        (self.blocked_at, self.parked_at) = (None, None);
    }

    /// As a reader sees it.
    pub(super) fn summary(&self, route: &RouteName, epoch: u32) -> Delivery {
        Delivery {
            route: route.as_str().to_owned(),
            epoch,
            state: self.state.as_str().to_owned(),
            attempt: self.attempt,
            run_at: if self.run_at == NO_TIME { self.blocked_at.unwrap_or(NO_TIME) } else { self.run_at },
            blocked_at: self.blocked_at,
            parked_at: self.parked_at,
            result: self.result.clone(),
            error: self.error.clone(),
            cause: self.cause.map(|cause| cause.as_str().to_owned()),
            settled_at: self.settled_at,
            attempts: self.attempts.clone(),
        }
    }
}

impl Stored {
    /// Makes a delivery, unless it exists.
    pub(super) fn deliver(&mut self, route: RouteName, epoch: u32, now: UnixMicros) {
        self.deliveries.entry((route, epoch)).or_insert_with(|| Record { run_at: now, ..Record::default() });
    }

    fn mark(&self) -> Mark {
        Mark { version: self.event.version, at: self.event.occurred_at }
    }

    fn place(&self, event: EventId, epoch: u32) -> Place {
        Place { version: self.event.version, event, epoch }
    }

    /// What `before` returned, as a follow-up of that epoch is to see it.
    fn result_of(&self, before: &RouteName, epoch: u32) -> Option<String> {
        let mut latest_first = self.deliveries.range((before.clone(), 0)..=(before.clone(), epoch)).rev();
        let (_, record) = latest_first.find(|(_, record)| record.state == DeliveryState::Succeeded)?;
        record.result.clone()
    }

    fn handed(&self, id: EventId, route: &Route, epoch: u32) -> HandedEvent {
        let event = &self.event;
        HandedEvent {
            id,
            source: event.source.clone(),
            key: event.key.clone(),
            kind: event.kind.clone(),
            entity: event.entity.clone(),
            occurred_at: event.occurred_at,
            received_at: event.received_at,
            headers: event.headers.clone(),
            body: event.body.clone(),
            result: route.after.as_ref().and_then(|before| self.result_of(before, epoch)),
            version: event.version,
            state: None,
            current: None,
        }
    }

    /// Whether nothing more can come of it, whatever an operator orders (short of a forced replay).
    fn is_done(&self) -> bool {
        !self.is_held() && !self.deliveries.values().any(Record::is_open)
    }

    fn may_go(&self, retention: &Retention, now: UnixMicros) -> bool {
        let given_up = |since: UnixMicros| retention.dead.is_some_and(|keep| later(since, keep) <= now);
        let received = self.event.received_at;
        later(received, retention.payload) <= now
            && (!self.is_held() || given_up(received))
            && self.deliveries.values().all(|record| match record.state {
                DeliveryState::Dead => given_up(record.settled_at.unwrap_or(received)),
                state => !state.is_pending(),
            })
    }
}

impl State {
    fn records(&self) -> impl Iterator<Item = (DeliveryId, &Record)> {
        self.events.iter().flat_map(|(event, stored)| {
            stored.deliveries.iter().map(|((route, epoch), record)| {
                (DeliveryId { event: *event, route: route.clone(), epoch: *epoch }, record)
            })
        })
    }

    /// Deliveries of a route that are as wanted.
    fn of_route(&self, route: &RouteName, wanted: impl Fn(&Record) -> bool) -> Vec<(DeliveryId, &Record)> {
        self.records().filter(|(id, record)| id.route == *route && wanted(record)).collect()
    }

    fn record(&mut self, delivery: &DeliveryId) -> Option<&mut Record> {
        let stored = self.events.get_mut(&delivery.event)?;
        stored.deliveries.get_mut(&(delivery.route.clone(), delivery.epoch))
    }

    /// The delivery whose latest, running attempt this is.
    fn running(&mut self, fence: &Fence) -> Option<&mut Record> {
        self.record(&fence.delivery).filter(|record| is_latest(record, fence))
    }

    fn claim(&mut self, route: &Arc<Route>, limit: usize, lease: Duration, now: UnixMicros) -> Vec<Claim> {
        let mut due = self.of_route(&route.name, |record| record.has_time() && record.run_at <= now);
        due.sort_by_key(|(id, record)| (record.run_at, id.event, id.epoch));
        let serial = route.ordering.is_serial();
        due.truncate(if serial { limit.max(PEEK) } else { limit });
        let due: Vec<DeliveryId> = due.into_iter().map(|(id, _)| id).collect();
        let eligible = if serial {
            self.lines.insert(route.name.clone(), Arc::clone(route));
            self.eligible(route, limit, &due, now)
        } else {
            due.into_iter().map(|id| (id, None)).collect()
        };
        let claims = eligible.into_iter().filter_map(|(id, state)| {
            let event = self.events.get(&id.event)?.handed(id.event, route, id.epoch);
            let record = self.record(&id)?;
            let attempt_limit = record.limit(route);
            record.begin_attempt(now);
            record.lease = Some((later(now, lease), attempt_limit));
            (record.state, record.blocked_at) = (DeliveryState::Running, None);
            let (fence, parked_at) = (Fence { delivery: id, attempt: record.attempt }, record.parked_at);
            Some(Claim { fence, attempt_limit, parked_at, event: HandedEvent { state, ..event } })
        });
        claims.collect()
    }

    /// Of what is due, those that are eligible. The others are blocked, or settled without running.
    fn eligible(
        &mut self,
        route: &Route,
        room: usize,
        due: &[DeliveryId],
        now: UnixMicros,
    ) -> Vec<(DeliveryId, Option<String>)> {
        let candidate = |id: &DeliveryId| {
            let stored = self.events.get(&id.event)?;
            Some(Candidate {
                entity: stored.event.entity.clone(),
                place: stored.place(id.event, id.epoch),
                mark: stored.mark(),
                kind: stored.event.kind.clone(),
                parked_at: stored.deliveries.get(&(id.route.clone(), id.epoch))?.parked_at,
            })
        };
        let candidates: Vec<Candidate> = due.iter().filter_map(candidate).collect();
        let entities = candidates.iter().filter_map(|candidate| candidate.entity.as_ref());
        let queues = entities.map(|entity| (entity.clone(), self.entity_queue(route, entity))).collect();
        let plan = plan(&route.ordering, Company::Lease, room, &candidates, &queues, now);
        for id in plan.blocked.into_iter().filter_map(|index| due.get(index)) {
            self.record(id).into_iter().for_each(|record| record.block(now));
        }
        for (index, verdict) in plan.passed {
            let Some(id) = due.get(index) else { continue };
            if let Some(record) = self.record(id) {
                let outcome = outcome(Held::Lock, &verdict, &[]);
                if outcome.counts {
                    record.begin_attempt(now);
                }
                record.write(&outcome, now);
                let limit = record.limit(route);
                route.report(FailedAttempt::of(id.event, record.attempt, limit, &verdict, now).as_slice());
            }
            self.after(id, &verdict, &[], now);
        }
        plan.run.into_iter().filter_map(|(index, state)| Some((due.get(index)?.clone(), state))).collect()
    }

    /// What a journal knows of an entity.
    fn entity_queue(&self, route: &Route, entity: &str) -> Line {
        let open = self.of_entity(&route.name, entity);
        let queued = open.iter().filter(|(_, record)| record.is_open() && record.state != DeliveryState::Parked);
        let front: Vec<(Place, DeliveryState)> = queued.map(|(place, record)| (*place, record.state)).collect();
        let running = front.iter().any(|(_, state)| *state == DeliveryState::Running);
        let scope = route.ordering.scope(route.name.as_str());
        let standing = self.entities.get(&(scope, entity.to_owned())).cloned().unwrap_or_default();
        Line { standing, running, front, due: Vec::new() }
    }

    /// Deliveries of an entity on a route, in the order of its queue.
    fn of_entity(&self, route: &RouteName, entity: &str) -> BTreeMap<Place, &Record> {
        let stored = self.events.iter().filter(|(_, stored)| stored.event.entity.as_deref() == Some(entity));
        let records = stored.flat_map(|(event, stored)| {
            let of_route = stored.deliveries.iter().filter(|((name, _), _)| name == route);
            of_route.map(|((_, epoch), record)| (stored.place(*event, *epoch), record))
        });
        records.collect()
    }

    /// Puts the first blocked deliveries of an entity back into the queue, at most `count`. If one is not eligible after all, it
    /// is blocked again.
    fn let_go_on(&mut self, route: &RouteName, entity: &str, count: usize, now: UnixMicros) {
        let blocked = self.of_entity(route, entity).into_iter().filter(|(_, record)| record.is_blocked());
        let first: Vec<Place> = blocked.map(|(place, _)| place).take(count).collect();
        for Place { event, epoch, .. } in first {
            let id = DeliveryId { event, route: route.clone(), epoch };
            self.record(&id).into_iter().for_each(|record| record.run_at = now);
        }
    }

    fn settle(&mut self, settlement: &Settlement, now: UnixMicros) -> Settled {
        let Settlement { fence, verdict, followups } = settlement;
        let Some(record) = self.running(fence) else { return Settled::Lost };
        let outcome = outcome(Held::Lease, verdict, followups);
        record.write(&outcome, now);
        self.after(&fence.delivery, verdict, outcome.followups, now);
        Settled::Done
    }

    /// What follows for others from what a delivery came to.
    fn after(&mut self, delivery: &DeliveryId, verdict: &Verdict, followups: &[RouteName], now: UnixMicros) {
        let DeliveryId { event, route, epoch } = delivery;
        let Some(stored) = self.events.get_mut(event) else { return };
        followups.iter().for_each(|route| stored.deliver(route.clone(), *epoch, now));
        let (mark, kind) = (stored.mark(), stored.event.kind.clone());
        let Some(entity) = stored.event.entity.clone() else { return };
        let succeeded = matches!(verdict, Verdict::Succeeded(_));
        if let Some(rules) = self.lines.get(route) {
            let ordering = &rules.ordering;
            if succeeded && ordering.remembers() {
                let scope = ordering.scope(route.as_str());
                let standing = self.entities.entry((scope, entity.clone())).or_default();
                ordering.advance(standing, mark, kind.as_deref());
            }
            self.let_go_on(route, &entity, rules.let_go_on(verdict), now);
        }
        if succeeded {
            // Deliveries that wait for a prerequisite look again.
            let same_entity = self.events.values_mut().filter(|stored| stored.event.entity.as_ref() == Some(&entity));
            let records = same_entity.flat_map(|stored| stored.deliveries.values_mut());
            records.filter(|record| record.state == DeliveryState::Parked).for_each(|record| record.wake(now));
        }
    }

    fn give_back(&mut self, fence: &Fence, now: UnixMicros) {
        let Some(record) = self.running(fence) else { return };
        record.end_attempt("given_back", None, now);
        record.grant_another();
        let failed_before = record.error.is_some();
        record.state = if failed_before { DeliveryState::Retrying } else { DeliveryState::Ready };
        record.run_at = now;
    }

    fn reclaim(&mut self, route: &Arc<Route>, now: UnixMicros, chance: &mut Chance) -> usize {
        self.look_again(route, now);
        let expired = self.of_route(&route.name, |record| record.lease.is_some() && !record.is_leased(now));
        let expired: Vec<DeliveryId> = expired.into_iter().map(|(id, _)| id).collect();
        for id in &expired {
            let Some(record) = self.record(id) else { continue };
            let (attempt, limit) = (record.attempt, record.limit(route));
            let verdict = route.after_lost_lease(attempt, limit, now, chance.draw());
            record.write(&outcome(Held::LostLease, &verdict, &[]), now);
            route.report(FailedAttempt::of(id.event, attempt, limit, &verdict, now).as_slice());
            self.after(id, &verdict, &[], now);
        }
        expired.len()
    }

    /// What waits for something gets another look: parked deliveries whose time has come, and the first of every entity queue, in
    /// case that the one before it is gone in another way than by being settled.
    fn look_again(&mut self, route: &Route, now: UnixMicros) {
        let serial = route.ordering.is_serial();
        for ((name, _), record) in self.events.values_mut().flat_map(|stored| &mut stored.deliveries) {
            let is_time = record.state == DeliveryState::Parked && record.run_at <= now;
            if *name == route.name && (is_time || (record.is_blocked() && !serial)) {
                record.wake(now);
            }
        }
        let blocked = self.of_route(&route.name, Record::is_blocked).into_iter();
        let entities: BTreeSet<String> =
            blocked.filter_map(|(id, _)| self.events.get(&id.event)?.event.entity.clone()).collect();
        for entity in entities.into_iter().filter(|entity| self.is_stranded(route, entity)).collect::<Vec<_>>() {
            self.let_go_on(&route.name, &entity, 1, now);
        }
    }

    /// Whether all in the queue of an entity are blocked, and none is eligible.
    fn is_stranded(&self, route: &Route, entity: &str) -> bool {
        let queue = self.entity_queue(route, entity);
        let first = queue.front.iter().find(|(_, state)| !route.ordering.passes(*state));
        let records = self.of_entity(&route.name, entity);
        let blocked = first.and_then(|(place, _)| records.get(place)).is_some_and(|record| record.is_blocked());
        blocked && !queue.running
    }

    fn backlog(&self) -> Vec<Backlog> {
        let mut routes = BTreeMap::new();
        for (DeliveryId { route, .. }, record) in self.records() {
            let none = Backlog::none(route.as_str().to_owned());
            let backlog = routes.entry(route).or_insert(none);
            match record.state {
                DeliveryState::Running => backlog.running += 1,
                DeliveryState::Dead => backlog.dead += 1,
                state if state.is_pending() => backlog.waiting += 1,
                _ => {}
            }
            let earliest = |one: Option<UnixMicros>, other| [one, other].into_iter().flatten().min();
            if record.is_blocked() {
                backlog.blocked += 1;
                backlog.blocked_since = earliest(backlog.blocked_since, record.blocked_at);
            }
            if record.has_time() {
                backlog.oldest = earliest(backlog.oldest, Some(record.run_at));
            }
        }
        let busy = |backlog: &Backlog| backlog.waiting + backlog.running + backlog.dead > 0;
        routes.into_values().filter(busy).collect()
    }

    fn order(&mut self, order: &Order, now: UnixMicros) -> Result<Ordered, OrderError> {
        let stored = self.events.get_mut(&order.event).ok_or(OrderError::NoEvent)?;
        let found = stored.deliveries.iter().map(|((route, epoch), record)| Found {
            route: route.clone(),
            epoch: *epoch,
            state: record.state,
            attempt: record.attempt,
            leased: record.is_leased(now),
        });
        let found: Vec<Found> = found.collect();
        let changes = decide(order, Some(stored.is_held()), &found)?;
        for ((route, epoch), record) in &mut stored.deliveries {
            if let Some(revived) = changes.revive.iter().find(|one| (one.route, one.epoch) == (route, *epoch)) {
                record.revive(revived.state, revived.limit, now);
            }
            if changes.skip.iter().any(|one| (&one.route, one.epoch) == (route, *epoch)) {
                record.skip(now);
            }
        }
        changes.make.iter().for_each(|(route, epoch)| stored.deliver((*route).clone(), *epoch, now));
        if changes.release {
            stored.flags.retain(|flag| *flag != Flag::Quarantined);
        }
        if let Some(entity) = stored.event.entity.clone() {
            changes.ordered.routes.iter().for_each(|route| self.let_go_on(route, &entity, 1, now));
        }
        if changes.audit.is_some() {
            self.write_down(&order.event.to_string(), order.verb.as_str(), &order.who, changes.audit, now);
        }
        Ok(changes.ordered)
    }

    /// One entry of the audit.
    fn write_down(&mut self, subject: &str, action: &str, who: &Who, detail: Option<String>, now: UnixMicros) {
        let Who { name, reason } = who.clone();
        let entry = AuditEntry { at: now, who: name, action: action.to_owned(), reason, detail };
        self.audit.push((subject.to_owned(), entry));
    }

    fn set_paused(&mut self, pause: Pause, who: Who, now: UnixMicros) {
        let known = self.pauses.iter().any(|paused| paused.what == pause.what);
        if known == pause.paused {
            return;
        }
        let (kind, name) = pause.what.parts();
        self.write_down(&format!("{kind} {name}"), pause.as_str(), &who, None, now);
        if pause.paused {
            let Who { name, reason } = who;
            self.pauses.push(Paused { what: pause.what, since: now, who: Some(name), reason });
            self.pauses.sort_by(|one, other| one.what.parts().cmp(&other.what.parts()));
        } else {
            self.pauses.retain(|paused| paused.what != pause.what);
        }
    }

    fn forget(&mut self, retention: &Retention, now: UnixMicros) -> Forgotten {
        let newest = self.events.values().next_back().map(|stored| stored.event.received_at);
        let (memory, stopped) = look(self.clock, newest, now);
        self.clock = Some(memory);
        if stopped.is_some() {
            return Forgotten { stopped, ..Forgotten::default() };
        }
        let batch = retention.batch;
        let old = self.events.iter().filter(|(_, stored)| stored.may_go(retention, now));
        let events: Vec<_> = old.map(|(id, _)| *id).take(batch).collect();
        for id in &events {
            self.events.remove(id);
        }

        let done = |event: &EventId| self.events.get(event).is_none_or(Stored::is_done);
        let over = self.keys.iter().filter(|(_, known)| known.expires_at <= now && done(&known.event));
        let keys: Vec<_> = over.map(|(key, _)| key.clone()).take(batch).collect();
        for key in &keys {
            self.keys.remove(key);
        }

        // The audit grows in the order of time.
        let stale = self.audit.iter().take_while(|(_, entry)| later(entry.at, retention.audit) <= now);
        let audit = stale.take(batch).count();
        self.audit.drain(..audit);

        // A full batch may have left something.
        let more = events.len() == batch || keys.len() == batch || audit == batch;
        Forgotten { events: events.len(), keys: keys.len(), audit, more, stopped: None }
    }

    fn trust_clock(&mut self, who: &Who, now: UnixMicros) {
        let (action, subject) = TRUST_CLOCK;
        self.write_down(subject, action, who, None, now);
        self.clock = Some(ClockMemory::believing(now));
    }
}

/// The fence: whether this attempt is the latest of its delivery, and runs.
#[cfg(not(feature = "planted"))]
fn is_latest(record: &Record, fence: &Fence) -> bool {
    record.state == DeliveryState::Running && record.attempt == fence.attempt
}

/// With the mistake [`NoFence`](crate::planted::Bug::NoFence), any attempt settles.
#[cfg(feature = "planted")]
fn is_latest(record: &Record, fence: &Fence) -> bool {
    let unfenced = crate::planted::has(crate::planted::Bug::NoFence);
    unfenced || record.state == DeliveryState::Running && record.attempt == fence.attempt
}
