//! Effects: the user's statements, each in one transaction with the record that they happened.
//!
//! A batch of a `sql` route is one transaction: its deliveries are locked (the lock is the claim; others pass over what is
//! locked), all statements are sent without waiting in between, and one statement settles them. If one fails the batch is
//! undone and redone one by one, so that a poison event costs only itself. A delivery that failed before always runs
//! alone. A worker that freezes in the middle is ended by the server (`idle_in_transaction_session_timeout`), and its
//! locks with it.
//!
//! Does not: count a collision with another transaction as an attempt. Such a delivery stays due.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use oncehook_verify::UnixMicros;

use super::connection::{EngineError, Session};
use super::front::Fronts;
use super::lines::{self, Came, Peeked};
use super::queue::{self, Due, Locked, Settling, Wanted};
use super::settle::{self, Ended, Held};
use super::turn::{self, One, Turns};
use super::user_sql::{self, OUR_PLANS, Prepared, Trouble};
use crate::delivery::{Failure, Fence, Verdict};
use crate::event::EventId;
use crate::handler::SqlHandler;
use crate::handler::sql::ended_transaction;
use crate::journal::Progress;
use crate::journal::server::user_sql::Surroundings;
use crate::ordering::{Company, Mark, Place};
use crate::route::{Route, Tried};

/// Deliveries that run alone end after this time, so that the worker looks up now and then.
const ALONE_TIME: Duration = Duration::from_secs(2);

/// Runs due deliveries of a `sql` route.
pub(super) async fn sql(
    session: &Session,
    given: Option<i64>,
    fronts: &Fronts,
    route: &Route,
    handler: &SqlHandler,
    limit: usize,
    draw: impl FnMut() -> f64 + Send,
) -> Result<Progress, EngineError> {
    let prepared = match user_sql::prepare(session, handler).await {
        Ok(prepared) => Ok(prepared),
        Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Err(failure),
        Err(Trouble::Collision | Trouble::Ended(_)) => {
            return Err(EngineError::other("a statement could not be prepared now"));
        }
        Err(Trouble::Engine(error)) => return Err(error),
    };
    let progress = Progress::default();
    let mut batch = Batch { session, given, route, handler, prepared, ended: false, draw, progress };
    let mut settling = batch.settling();
    loop {
        begin(session).await?;
        let from = fronts.of(&route.name);
        let Locked { due, count, ahead, now, first } =
            queue::due(session, given, route, limit, settling, Wanted::From(from)).await?;
        let full = count == limit || due.len() < count;
        let unseen = fronts.found(&route.name, from, first, full);
        let left = if route.ordering.is_serial() {
            batch.in_turn(due, now).await?
        } else {
            let (fresh, failed_before): (Vec<Due>, Vec<Due>) =
                due.into_iter().partition(|due| due.attempt == 0);
            let came = if settling == Settling::Ahead && ahead != fresh.len() {
                Together::Undone
            } else {
                batch.together(&fresh, now, settling).await?
            };
            match came {
                Together::Done => batch.alone(ones(&failed_before)).await?,
                Together::Spoilt => {
                    batch.alone(fresh.iter().chain(&failed_before).map(Due::one).collect()).await?
                }
                Together::Undone => {
                    session.run("ROLLBACK").await?;
                    settling = Settling::Afterwards;
                    continue;
                }
            }
        };
        batch.progress.more = full || unseen || left > 0;
        return Ok(batch.progress);
    }
}

async fn begin(session: &Session) -> Result<(), EngineError> {
    session.run(&format!("BEGIN; {OUR_PLANS}")).await
}

fn ones(due: &[Due]) -> Vec<One> {
    due.iter().map(Due::one).collect()
}

/// Parts those that failed before, and others of the same entities, from the rest. They are in the order of their lines.
fn apart(due: Vec<Due>) -> (Vec<Due>, Vec<Due>) {
    let troubled: HashSet<String> =
        due.iter().filter(|due| due.attempt > 0).filter_map(|due| due.event.entity.clone()).collect();
    let (mut alone, company): (Vec<Due>, Vec<Due>) =
        due.into_iter().partition(|due| match &due.event.entity {
            Some(entity) => troubled.contains(entity),
            None => due.attempt > 0,
        });
    alone.sort_by_key(|due| (due.event.version, due.event.id, due.epoch));
    (alone, company)
}

enum Together {
    /// All were settled, and the transaction is committed.
    Done,
    /// One of them failed. The transaction is undone, nothing was settled.
    Spoilt,
    /// They were settled ahead, and not as they should have been. The transaction is to be undone.
    Undone,
}

struct Batch<'b, D> {
    session: &'b Session,
    given: Option<i64>,
    route: &'b Route,
    handler: &'b SqlHandler,
    /// The user's statements, or why they cannot even be prepared.
    prepared: Result<Prepared, Failure>,
    /// They have ended a transaction. What ran in it is settled, however long that takes: it must not run again.
    ended: bool,
    draw: D,
    progress: Progress,
}

/// What a delivery came to, before it is settled.
type Outcome = Result<Option<String>, Failure>;

impl<D: FnMut() -> f64 + Send> Batch<'_, D> {
    /// Statements that can only succeed without a result, or fail, are settled ahead: it spares a look at each row.
    fn settling(&self) -> Settling {
        let plain = !self.route.ordering.is_serial() && self.route.followups.is_empty();
        if plain
            && !self.handler.has_requirement()
            && self.prepared.as_ref().is_ok_and(Prepared::tells_nothing)
        {
            Settling::Ahead
        } else {
            Settling::Afterwards
        }
    }

    /// Those whose turn it is, in the transaction that was begun. Returns how many were left for the next time.
    async fn in_turn(&mut self, due: Vec<Due>, now: UnixMicros) -> Result<usize, EngineError> {
        let (alone, company) = apart(due);
        let (run, passed) = self.turns(company, usize::MAX, now).await?;
        match self.together(&run, now, Settling::Afterwards).await? {
            Together::Done => {
                self.add(passed);
                self.alone(ones(&alone)).await
            }
            // What was settled without running is undone too, and comes again.
            Together::Spoilt | Together::Undone => {
                let left = self.alone(run.iter().chain(&alone).map(Due::one).collect()).await?;
                Ok(left + 1)
            }
        }
    }

    /// Those of these whose turn it is, in their order; and what became of those that do not run.
    async fn turns(
        &self,
        due: Vec<Due>,
        room: usize,
        now: UnixMicros,
    ) -> Result<(Vec<Due>, Progress), EngineError> {
        let peeked: Vec<Peeked> = due.iter().map(Due::peeked).collect();
        let company = Company::OneTransaction;
        let Turns { run, passed } =
            turn::take(self.session, self.given, self.route, company, room, &peeked, now).await?;
        let mut due: HashMap<(EventId, u32), Due> =
            due.into_iter().map(|due| ((due.event.id, due.epoch), due)).collect();
        let mut running = Vec::with_capacity(run.len());
        for (Place { event, epoch, .. }, state) in run {
            if let Some(mut due) = due.remove(&(event, epoch)) {
                due.event.state = state;
                running.push(due);
            }
        }
        Ok((running, passed))
    }

    /// Whether a delivery that did not take effect has others of its entity behind it, which count on it.
    fn is_counted_on(&self, due: &[Due], outcomes: &[Outcome]) -> bool {
        self.route.ordering.is_serial()
            && due.iter().zip(outcomes).enumerate().any(|(place, (delivery, outcome))| {
                let behind = due.iter().skip(place + 1);
                let entity = delivery.event.entity.as_ref();
                outcome.is_err()
                    && entity.is_some()
                    && behind.map(|due| due.event.entity.as_ref()).any(|other| other == entity)
            })
    }

    /// Ends the transaction that was begun: all in it, or none.
    async fn together(
        &mut self,
        due: &[Due],
        now: UnixMicros,
        settling: Settling,
    ) -> Result<Together, EngineError> {
        if due.is_empty() {
            self.session.run("COMMIT").await?;
            return Ok(Together::Done);
        }
        let Ok(prepared) = &self.prepared else {
            self.session.run("ROLLBACK").await?;
            return Ok(Together::Spoilt);
        };
        // What fails before it reaches the database spoils nothing.
        let mut outcomes: Vec<Option<Outcome>> = Vec::with_capacity(due.len());
        let mut bound = Vec::with_capacity(due.len());
        for delivery in due {
            match self.bind(prepared, delivery) {
                Ok(parameters) => {
                    bound.push(parameters);
                    outcomes.push(None);
                }
                Err(failure) => outcomes.push(Some(Err(failure))),
            }
        }
        self.crash_point();
        let ran = match user_sql::run(
            self.session,
            self.handler,
            prepared,
            &bound,
            user_sql::settings(Surroundings::Batch),
            None,
        )
        .await
        {
            Ok(ran) => ran,
            Err(Trouble::Engine(error)) => return Err(error),
            Err(Trouble::Ended(_)) => {
                self.have_ended().await?;
                return Ok(Together::Spoilt);
            }
            Err(Trouble::Failed(_) | Trouble::Deferred(_) | Trouble::Collision) => {
                self.session.run("ROLLBACK").await?;
                return Ok(Together::Spoilt);
            }
        };
        let mut ran = ran.into_iter();
        let complete = outcomes.into_iter().map(|early| early.or_else(|| ran.next()).unwrap_or(Ok(None)));
        let complete: Vec<Outcome> = complete.collect();
        if self.is_counted_on(due, &complete) {
            self.session.run("ROLLBACK").await?;
            return Ok(Together::Spoilt);
        }
        crate::crash::point("after_effect");
        let progress = match settling {
            Settling::Ahead if complete.iter().all(|outcome| matches!(outcome, Ok(None))) => {
                let entities: Vec<&str> = due.iter().filter_map(|due| due.event.entity.as_deref()).collect();
                let woken = lines::wake_parked(self.session, self.given, &entities).await?;
                Progress { succeeded: due.len(), woken, ..Progress::default() }
            }
            Settling::Ahead => return Ok(Together::Undone),
            Settling::Afterwards => self.settle(due.iter().zip(complete).collect(), now).await?,
        };
        self.session.run("COMMIT").await?;
        self.add(progress);
        Ok(Together::Done)
    }

    /// The statements have ended the transaction: nothing of them runs any more, and what ran is settled as failed for good.
    async fn have_ended(&mut self) -> Result<(), EngineError> {
        (self.ended, self.prepared) = (true, Err(ended_transaction()));
        self.session.run("ROLLBACK").await
    }

    /// Each in its own transaction. Returns how many were left for the next time.
    async fn alone(&mut self, due: Vec<One>) -> Result<usize, EngineError> {
        let started = Instant::now();
        let mut left = 0;
        for delivery in due {
            if started.elapsed() >= ALONE_TIME && !self.ended || !self.one(delivery).await? {
                left += 1;
            }
        }
        Ok(left)
    }

    /// One delivery. `false`: another transaction was in the way, and it stays due.
    async fn one(&mut self, delivery: One) -> Result<bool, EngineError> {
        begin(self.session).await?;
        let Locked { mut due, now, .. } =
            queue::due(self.session, self.given, self.route, 1, Settling::Afterwards, Wanted::Only(delivery))
                .await?;
        if self.route.ordering.is_serial() {
            let (run, passed) = self.turns(due, 1, now).await?;
            self.add(passed);
            due = run;
        }
        let Some(delivery) = due.first() else {
            // Somebody else has it, or had it; or it is not its turn, or settled already.
            self.session.run("COMMIT").await?;
            return Ok(true);
        };
        let outcome = match self.effect(delivery).await {
            Ok(outcome) => outcome,
            Err(Trouble::Failed(failure) | Trouble::Deferred(failure)) => Err(failure),
            Err(Trouble::Collision) => {
                self.session.run("ROLLBACK").await?;
                return Ok(false);
            }
            Err(Trouble::Ended(_)) => {
                self.have_ended().await?;
                return Box::pin(self.one(delivery.one())).await;
            }
            Err(Trouble::Engine(error)) => return Err(error),
        };
        let progress = self.settle(vec![(delivery, outcome)], now).await?;
        self.session.run("COMMIT").await?;
        self.add(progress);
        Ok(true)
    }

    /// The user's statements for one delivery; if they fail, what they did is undone and the transaction goes on. If their tables
    /// have changed since they were prepared, they are prepared anew and run once more.
    async fn effect(&mut self, delivery: &Due) -> Result<Outcome, Trouble> {
        let prepared = self.prepared.as_ref().map_err(|failure| Trouble::Failed(failure.clone()))?;
        self.crash_point();
        let failure = match self.statements(prepared, delivery).await {
            Err(Trouble::Failed(failure)) => failure,
            other => return other,
        };
        match user_sql::renewed(self.session, self.handler, prepared, &failure).await {
            Some(renewed) => {
                let ran = self.statements(&renewed, delivery).await;
                self.prepared = Ok(renewed);
                ran
            }
            None => Err(Trouble::Failed(failure)),
        }
    }

    async fn statements(&self, prepared: &Prepared, delivery: &Due) -> Result<Outcome, Trouble> {
        let bound = [self.bind(prepared, delivery).map_err(Trouble::Failed)?];
        let about = Some(&delivery.event);
        let ran = user_sql::run(
            self.session,
            self.handler,
            prepared,
            &bound,
            user_sql::settings(Surroundings::Batch),
            about,
        )
        .await?;
        crate::crash::point("after_effect");
        Ok(ran.into_iter().next().unwrap_or(Ok(None)))
    }

    fn bind(&self, prepared: &Prepared, delivery: &Due) -> Result<user_sql::Bound, Failure> {
        let values = self.handler.values(&delivery.event)?;
        user_sql::bind(self.handler, prepared, &values)
    }

    fn crash_point(&self) {
        crate::crash::point(if self.route.after.is_some() { "in_follow_up" } else { "in_handler" });
    }

    async fn settle(
        &mut self,
        outcomes: Vec<(&Due, Outcome)>,
        now: UnixMicros,
    ) -> Result<Progress, EngineError> {
        let mut progress = Progress::default();
        let mut settlements = Vec::with_capacity(outcomes.len());
        let mut handed = Vec::with_capacity(outcomes.len());
        for (delivery, outcome) in outcomes {
            handed.push(&delivery.event);
            let fence = Fence { delivery: delivery.id(self.route), attempt: delivery.attempt + 1 };
            let verdict = match outcome {
                Ok(result) => Verdict::Succeeded(result),
                Err(failure) => {
                    let Due { attempt_limit: limit, parked_at, .. } = *delivery;
                    let tried = Tried { attempt: fence.attempt, limit, parked_at };
                    self.route.after_failure(failure, tried, now, (self.draw)())
                }
            };
            progress.count(delivery.event.id, fence.attempt, delivery.attempt_limit, &verdict, now);
            settlements.push((fence, verdict));
        }
        let followups = &self.route.followups;
        let ended: Vec<_> =
            settlements.iter().map(|(fence, verdict)| Ended { fence, verdict, followups }).collect();
        let settled = settle::settle(self.session, self.given, now, Held::Lock, &ended).await?;
        if settled.len() != ended.len() {
            // The rows are locked since they were read. If they are not as they were, nothing here can be trusted, and
            // the transaction is undone with its connection.
            return Err(EngineError::other("a delivery changed although it was locked"));
        }
        let came: Vec<Came<'_>> = handed
            .iter()
            .zip(&settlements)
            .filter_map(|(event, (_, verdict))| {
                let mark = Mark { version: event.version, at: event.occurred_at };
                Some(Came { entity: event.entity.as_deref()?, mark, kind: event.kind.as_deref(), verdict })
            })
            .collect();
        if self.route.ordering.is_serial() {
            lines::after(self.session, self.given, self.route, &came).await?;
        }
        let succeeded = came.iter().filter(|came| matches!(came.verdict, Verdict::Succeeded(_)));
        let entities: Vec<&str> = succeeded.map(|came| came.entity).collect();
        progress.woken = lines::wake_parked(self.session, self.given, &entities).await?;
        Ok(progress)
    }

    fn add(&mut self, progress: Progress) {
        self.progress.add(progress);
    }
}
