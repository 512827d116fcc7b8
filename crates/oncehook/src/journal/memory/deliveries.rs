//! Deliveries in the reference journal: claims, attempts, orders and forgetting, each as plainly as it can be said.
//!
//! Promises: what it answers is what every backend must answer.

mod orders;
mod served;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use oncehook_verify::UnixMicros;

use super::{State, Stored};
use crate::delivery::{
    Cause, Claim, DeliveryId, DeliveryState, FailedAttempt, Failure, Fence, HandedEvent, RouteName, Settled,
    Settlement, Verdict,
};
use crate::event::EventId;
use crate::journal::{
    Attempt, AuditEntry, Backlog, ClockMemory, Delivery, Forgotten, Order, OrderError, Ordered, Pause, Paused,
    Retention, TRUST_CLOCK, Who, look,
};
use crate::ordering::{Candidate, Company, Line, Mark, NO_TIME, OnDead, PEEK, Place, Step, plan};
use crate::planted::{self, Bug};
use crate::retry::{Chance, RetryPolicy};
use crate::route::Route;

/// One delivery.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) state: DeliveryState,
    /// The latest attempt: the fence. Never goes back.
    attempt: u32,
    /// The delivery's own limit of attempts, where it differs from the route's.
    limit: Option<u32>,
    /// [`NO_TIME`] while it waits for its turn.
    run_at: UnixMicros,
    /// Since when it has waited for its turn.
    blocked_at: Option<UnixMicros>,
    /// Since when it has waited for a prerequisite.
    parked_at: Option<UnixMicros>,
    /// Set while it is running.
    lease: Option<Lease>,
    settled_at: Option<UnixMicros>,
    result: Option<String>,
    error: Option<String>,
    cause: Option<Cause>,
    attempts: Vec<Attempt>,
}

#[derive(Debug)]
struct Lease {
    until: UnixMicros,
    /// The limit of attempts as the claim said it.
    limit: u32,
}

impl Record {
    fn ready(now: UnixMicros) -> Self {
        Self {
            state: DeliveryState::Ready,
            attempt: 0,
            limit: None,
            run_at: now,
            blocked_at: None,
            parked_at: None,
            lease: None,
            settled_at: None,
            result: None,
            error: None,
            cause: None,
            attempts: Vec::new(),
        }
    }

    fn is_waiting(&self) -> bool {
        matches!(self.state, DeliveryState::Ready | DeliveryState::Retrying)
    }

    /// Whether it has a time at which it is due.
    fn has_turn(&self) -> bool {
        self.is_waiting() && !self.is_blocked()
    }

    /// Whether it waits until somebody before it lets it go on.
    fn is_blocked(&self) -> bool {
        self.is_waiting() && self.run_at == NO_TIME
    }

    /// Due now, whatever it waited for.
    fn wake(&mut self, now: UnixMicros) {
        self.state = if self.attempt > 0 { DeliveryState::Retrying } else { DeliveryState::Ready };
        self.run_at = now;
    }

    fn lease(&mut self, retry: &RetryPolicy, until: UnixMicros, now: UnixMicros) -> u32 {
        let limit = self.limit.unwrap_or(retry.max_attempts);
        self.state = DeliveryState::Running;
        self.attempt += 1;
        self.blocked_at = None;
        self.lease = Some(Lease { until, limit });
        self.attempts.push(Attempt {
            number: self.attempt,
            started_at: now,
            finished_at: None,
            outcome: None,
            error: None,
        });
        limit
    }

    /// Ends the running attempt; the caller says what becomes of the delivery.
    fn end_attempt(&mut self, outcome: &str, error: Option<&Failure>, now: UnixMicros) -> Option<Lease> {
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.finished_at = Some(now);
            attempt.outcome = Some(outcome.to_owned());
            attempt.error = error.map(|failure| failure.message.clone());
        }
        self.lease.take()
    }

    fn wait(&mut self, state: DeliveryState, run_at: UnixMicros) {
        self.state = state;
        self.run_at = run_at;
        self.blocked_at = None;
        self.settled_at = None;
        self.cause = None;
    }

    fn finish(&mut self, state: DeliveryState, now: UnixMicros) {
        if self.run_at == NO_TIME {
            self.run_at = now;
        }
        self.state = state;
        self.blocked_at = None;
        self.parked_at = None;
        self.settled_at = Some(now);
    }

    fn die(&mut self, failure: Failure, now: UnixMicros) {
        self.finish(DeliveryState::Dead, now);
        self.cause = Some(failure.cause);
        self.error = Some(failure.message);
    }

    /// What an attempt, or the decision not to make one, came to.
    fn conclude(&mut self, verdict: Verdict, now: UnixMicros) {
        match verdict {
            Verdict::Succeeded(result) => {
                self.finish(DeliveryState::Succeeded, now);
                self.result = result;
                self.error = None;
            }
            Verdict::RetryAt(run_at, failure) => {
                self.wait(DeliveryState::Retrying, run_at);
                self.parked_at = None;
                self.error = Some(failure.message);
            }
            Verdict::Dead(failure) => self.die(failure, now),
            Verdict::Parked(until, failure) => {
                self.wait(DeliveryState::Parked, until);
                self.parked_at = self.parked_at.or(Some(now));
                self.error = Some(failure.message);
            }
            Verdict::Superseded(why) => {
                self.finish(DeliveryState::Superseded, now);
                self.error = Some(why);
            }
        }
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
        self.deliveries.entry((route, epoch)).or_insert_with(|| Record::ready(now));
    }

    fn latest_epoch(&self) -> u32 {
        self.deliveries.keys().map(|(_, epoch)| *epoch).max().unwrap_or(0)
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

    /// Whether nothing more can come of it, whoever orders what (short of a forced replay).
    fn is_done(&self) -> bool {
        let done = |record: &Record| !record.state.is_pending() && record.state != DeliveryState::Dead;
        !self.is_held() && self.deliveries.values().all(done)
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
    fn records(&self) -> impl Iterator<Item = (EventId, &RouteName, u32, &Record)> {
        self.events.iter().flat_map(|(event, stored)| {
            stored.deliveries.iter().map(|((route, epoch), record)| (*event, route, *epoch, record))
        })
    }

    fn record(&mut self, delivery: &DeliveryId) -> Option<&mut Record> {
        let stored = self.events.get_mut(&delivery.event)?;
        stored.deliveries.get_mut(&(delivery.route.clone(), delivery.epoch))
    }

    /// The delivery whose latest, running attempt this is.
    fn running(&mut self, fence: &Fence) -> Option<&mut Record> {
        let live = |record: &&mut Record| {
            record.state == DeliveryState::Running && record.attempt == fence.attempt || planted::has(Bug::NoFence)
        };
        self.record(&fence.delivery).filter(live)
    }

    fn claim(&mut self, route: &Arc<Route>, limit: usize, lease: Duration, now: UnixMicros) -> Vec<Claim> {
        let due = self
            .records()
            .filter(|(_, name, _, record)| **name == route.name && record.has_turn() && record.run_at <= now);
        let mut due: Vec<_> = due.map(|(event, _, epoch, record)| (record.run_at, event, epoch)).collect();
        due.sort_unstable();
        let serial = route.ordering.is_serial();
        due.truncate(if serial { limit.max(PEEK) } else { limit });
        let due: Vec<_> = due.into_iter().map(|(_, event, epoch)| (event, epoch)).collect();
        let taken: Vec<(EventId, u32, Option<String>)> = if serial {
            self.lines.insert(route.name.clone(), Arc::clone(route));
            self.take_turns(route, limit, &due, now)
        } else {
            due.into_iter().map(|(event, epoch)| (event, epoch, None)).collect()
        };
        let until = later(now, lease);
        let claims = taken.into_iter().filter_map(|(event, epoch, leads_to)| {
            let stored = self.events.get_mut(&event)?;
            let mut handed = stored.handed(event, route, epoch);
            handed.state = leads_to;
            let record = stored.deliveries.get_mut(&(route.name.clone(), epoch))?;
            let attempt_limit = record.lease(&route.retry, until, now);
            let delivery = DeliveryId { event, route: route.name.clone(), epoch };
            let fence = Fence { delivery, attempt: record.attempt };
            Some(Claim { fence, attempt_limit, parked_at: record.parked_at, event: handed })
        });
        claims.collect()
    }

    /// Of what is due, those whose turn it is. The others are blocked, or settled without running.
    fn take_turns(
        &mut self,
        route: &Route,
        room: usize,
        due: &[(EventId, u32)],
        now: UnixMicros,
    ) -> Vec<(EventId, u32, Option<String>)> {
        let candidates: Vec<Candidate> = due
            .iter()
            .filter_map(|(event, epoch)| {
                let new = &self.events.get(event)?.event;
                Some(Candidate {
                    entity: new.entity.clone(),
                    place: Place { version: new.version, event: *event, epoch: *epoch },
                    mark: Mark { version: new.version, at: new.occurred_at },
                    kind: new.kind.clone(),
                })
            })
            .collect();
        let entities: BTreeSet<&String> = candidates.iter().filter_map(|one| one.entity.as_ref()).collect();
        let lines: HashMap<String, Line> =
            entities.into_iter().map(|entity| (entity.clone(), self.line(route, entity))).collect();
        let plan = plan(&route.ordering, Company::Lease, room, &candidates, &lines);
        for index in plan.blocked {
            let blocked = candidates.get(index).and_then(|one| self.of(route, one.place));
            if let Some(record) = blocked {
                record.run_at = NO_TIME;
                record.blocked_at = record.blocked_at.or(Some(now));
            }
        }
        let mut taken = Vec::new();
        for (index, step) in plan.steps {
            let Some(candidate) = candidates.get(index) else { continue };
            let parked_at = self.of(route, candidate.place).and_then(|record| record.parked_at);
            let verdict = match step {
                Step::Run(leads_to) => {
                    taken.push((candidate.place.event, candidate.place.epoch, leads_to));
                    continue;
                }
                Step::Settle(verdict) => verdict,
                Step::Defer(reason) => route.ordering.parking.after_deferral(&reason, parked_at, now),
            };
            if let Some(record) = self.of(route, candidate.place) {
                let limit = record.limit.unwrap_or(route.retry.max_attempts);
                let (event, attempt) = (candidate.place.event, record.attempt + 1);
                route.report(FailedAttempt::of(event, attempt, limit, &verdict, now).as_slice());
                record.conclude(verdict, now);
            }
            if let Some(entity) = &candidate.entity {
                self.let_go_on(&route.name, entity, 1, now);
            }
        }
        taken
    }

    fn of(&mut self, route: &Route, place: Place) -> Option<&mut Record> {
        let stored = self.events.get_mut(&place.event)?;
        stored.deliveries.get_mut(&(route.name.clone(), place.epoch))
    }

    /// What stands in the line of an entity.
    fn line(&self, route: &Route, entity: &str) -> Line {
        let mut front: Vec<(Place, DeliveryState)> = self
            .in_line(&route.name, entity)
            .filter(|(_, record)| !matches!(record.state, DeliveryState::Parked))
            .filter(|(_, record)| record.state.is_pending() || record.state == DeliveryState::Dead)
            .map(|(place, record)| (place, record.state))
            .collect();
        front.sort_unstable_by_key(|(place, _)| *place);
        let running = front.iter().any(|(_, state)| *state == DeliveryState::Running);
        let scope = route.ordering.scope(route.name.as_str());
        let standing = self.entities.get(&(scope, entity.to_owned())).cloned().unwrap_or_default();
        Line { standing, running, front, due: Vec::new() }
    }

    fn in_line<'s>(&'s self, route: &'s RouteName, entity: &'s str) -> impl Iterator<Item = (Place, &'s Record)> {
        let of_entity = self.events.iter().filter(move |(_, stored)| stored.event.entity.as_deref() == Some(entity));
        of_entity.flat_map(move |(event, stored)| {
            let of_route = stored.deliveries.iter().filter(move |((name, _), _)| name == route);
            of_route.map(move |((_, epoch), record)| {
                (Place { version: stored.event.version, event: *event, epoch: *epoch }, record)
            })
        })
    }

    /// Puts the first of those that wait for their turn back into the queue, at most so many. If it is not their turn after
    /// all, they will be taken out again.
    fn let_go_on(&mut self, route: &RouteName, entity: &str, count: usize, now: UnixMicros) {
        let blocked = self.in_line(route, entity).filter(|(_, record)| record.is_blocked());
        let blocked: BTreeSet<Place> = blocked.map(|(place, _)| place).collect();
        for Place { event, epoch, .. } in blocked.into_iter().take(count) {
            let id = DeliveryId { event, route: route.clone(), epoch };
            if let Some(record) = self.record(&id) {
                record.run_at = now;
            }
        }
    }

    /// Something of the entity took effect: whatever waits for a prerequisite looks again.
    fn wake_parked(&mut self, entity: &str, now: UnixMicros) {
        let of_entity = self.events.values_mut().filter(|stored| stored.event.entity.as_deref() == Some(entity));
        let parked = of_entity
            .flat_map(|stored| stored.deliveries.values_mut())
            .filter(|record| record.state == DeliveryState::Parked);
        parked.for_each(|record| record.wake(now));
    }

    fn settle(&mut self, settlement: Settlement, now: UnixMicros) -> Settled {
        let Settlement { fence, verdict, followups } = settlement;
        let Some(record) = self.running(&fence) else { return Settled::Lost };
        let (outcome, failure) = match &verdict {
            Verdict::Succeeded(_) => ("succeeded", None),
            Verdict::RetryAt(_, failure) | Verdict::Dead(failure) => ("failed", Some(failure)),
            Verdict::Parked(_, failure) => ("given_back", Some(failure)),
            Verdict::Superseded(_) => ("given_back", None),
        };
        let lease = record.end_attempt(outcome, failure, now);
        if let (false, Some(lease)) = (verdict.is_attempt(), lease) {
            record.limit = Some(lease.limit.saturating_add(1));
        }
        record.conclude(verdict.clone(), now);
        self.after(&fence.delivery, &verdict, followups, now);
        Settled::Done
    }

    /// What follows from an attempt's end, for others.
    fn after(&mut self, delivery: &DeliveryId, verdict: &Verdict, followups: Vec<RouteName>, now: UnixMicros) {
        let DeliveryId { event, route, epoch } = delivery;
        let Some(stored) = self.events.get_mut(event) else { return };
        let succeeded = matches!(verdict, Verdict::Succeeded(_));
        if succeeded {
            followups.into_iter().for_each(|route| stored.deliver(route, *epoch, now));
        }
        let mark = Mark { version: stored.event.version, at: stored.event.occurred_at };
        let kind = stored.event.kind.clone();
        let Some(entity) = stored.event.entity.clone() else { return };
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
            self.wake_parked(&entity, now);
        }
    }

    fn give_back(&mut self, fence: &Fence, now: UnixMicros) {
        let Some(record) = self.running(fence) else { return };
        if let Some(lease) = record.end_attempt("given_back", None, now) {
            record.limit = Some(lease.limit.saturating_add(1));
        }
        let failed_before = record.error.is_some();
        record.wait(if failed_before { DeliveryState::Retrying } else { DeliveryState::Ready }, now);
    }

    fn reclaim(&mut self, route: &Arc<Route>, now: UnixMicros, chance: &mut Chance) -> usize {
        self.look_again(route, now);
        let expired: Vec<(EventId, u32)> = self
            .records()
            .filter(|(_, name, _, record)| {
                **name == route.name && record.lease.as_ref().is_some_and(|lease| lease.until <= now)
            })
            .map(|(event, _, epoch, _)| (event, epoch))
            .collect();
        for (event, epoch) in &expired {
            let delivery = DeliveryId { event: *event, route: route.name.clone(), epoch: *epoch };
            let Some(record) = self.record(&delivery) else { continue };
            let failure = Failure::never_ended();
            let limit = record.limit.unwrap_or(route.retry.max_attempts);
            record.end_attempt("lost", Some(&failure), now);
            let verdict = route.after_lost_lease(record.attempt, limit, now, chance.draw());
            route.report(FailedAttempt::of(*event, record.attempt, limit, &verdict, now).as_slice());
            record.conclude(verdict.clone(), now);
            self.after(&delivery, &verdict, Vec::new(), now);
        }
        expired.len()
    }

    /// What waits for something gets another look: parked ones whose time has come, and the first of every line, in case that
    /// whoever stood before it is gone in another way than by being settled.
    fn look_again(&mut self, route: &Arc<Route>, now: UnixMicros) {
        let of_route = self.events.values_mut().flat_map(|stored| &mut stored.deliveries);
        for ((name, _), record) in of_route {
            if *name != route.name {
                continue;
            }
            let is_time = record.state == DeliveryState::Parked && record.run_at <= now;
            if is_time || (record.is_blocked() && !route.ordering.is_serial()) {
                record.wake(now);
            }
        }
        let blocked = self.records().filter(|(_, name, _, record)| **name == route.name && record.is_blocked());
        let blocked: BTreeSet<EventId> = blocked.map(|(event, ..)| event).collect();
        let entities: BTreeSet<String> =
            blocked.iter().filter_map(|event| self.events.get(event)?.event.entity.clone()).collect();
        for entity in entities {
            if self.is_stranded(route, &entity) {
                self.let_go_on(&route.name, &entity, 1, now);
            }
        }
    }

    /// Whether everybody in the line waits for his turn, and nobody has it.
    fn is_stranded(&self, route: &Route, entity: &str) -> bool {
        let line = self.line(route, entity);
        let passes = |state: DeliveryState| {
            state == DeliveryState::Dead && (!route.ordering.by_entity || route.ordering.on_dead == OnDead::Continue)
        };
        let blocked: BTreeSet<Place> = self
            .in_line(&route.name, entity)
            .filter(|(_, record)| record.is_blocked())
            .map(|(place, _)| place)
            .collect();
        !line.running
            && line.front.iter().find(|(_, state)| !passes(*state)).is_some_and(|(place, _)| blocked.contains(place))
    }

    fn backlog(&self) -> Vec<Backlog> {
        let mut routes = std::collections::BTreeMap::new();
        for (_, route, _, record) in self.records() {
            let backlog = routes.entry(route).or_insert_with(|| Backlog::none(route.as_str().to_owned()));
            if record.is_blocked() {
                backlog.blocked += 1;
                backlog.blocked_since = [backlog.blocked_since, record.blocked_at].into_iter().flatten().min();
            }
            match record.state {
                DeliveryState::Running => backlog.running += 1,
                DeliveryState::Dead => backlog.dead += 1,
                state if state.is_pending() => backlog.waiting += 1,
                _ => {}
            }
            if record.has_turn() {
                backlog.oldest = Some(backlog.oldest.map_or(record.run_at, |oldest| oldest.min(record.run_at)));
            }
        }
        let busy = |backlog: &Backlog| backlog.waiting + backlog.running + backlog.dead > 0;
        routes.into_values().filter(busy).collect()
    }

    fn order(&mut self, order: &Order, now: UnixMicros) -> Result<Ordered, OrderError> {
        let stored = self.events.get_mut(&order.event).ok_or(OrderError::NoEvent)?;
        let routes: Vec<RouteName> = stored.order(order, now)?.into_iter().collect();
        let ordered = Ordered { routes: routes.clone(), epoch: stored.latest_epoch() };
        if let Some(entity) = stored.event.entity.clone() {
            routes.iter().for_each(|route| self.let_go_on(route, &entity, 1, now));
        }
        if !ordered.changed_anything(order.verb) {
            return Ok(ordered);
        }
        let entry = AuditEntry {
            at: now,
            who: order.who.name.clone(),
            action: order.verb.as_str().to_owned(),
            reason: order.who.reason.clone(),
            detail: Some(ordered.to_json()),
        };
        self.audit.push((order.event.to_string(), entry));
        Ok(ordered)
    }

    fn set_paused(&mut self, pause: Pause, who: Who, now: UnixMicros) {
        let known = self.pauses.iter().any(|paused| paused.what == pause.what);
        if known == pause.paused {
            return;
        }
        let (kind, name) = pause.what.parts();
        let entry = AuditEntry {
            at: now,
            who: who.name.clone(),
            action: pause.as_str().to_owned(),
            reason: who.reason.clone(),
            detail: None,
        };
        self.audit.push((format!("{kind} {name}"), entry));
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

    fn trust_clock(&mut self, who: Who, now: UnixMicros) {
        let (action, subject) = TRUST_CLOCK;
        let (who, reason) = (who.name, who.reason);
        let entry = AuditEntry { at: now, who, action: action.to_owned(), reason, detail: None };
        self.audit.push((subject.to_owned(), entry));
        self.clock = Some(ClockMemory::believing(now));
    }
}

/// A time and a while after it.
fn later(at: UnixMicros, wait: Duration) -> UnixMicros {
    UnixMicros(at.0.saturating_add(i64::try_from(wait.as_micros()).unwrap_or(i64::MAX)))
}
