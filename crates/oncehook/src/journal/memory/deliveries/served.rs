//! The reference journal as others see it: every call is one turn under its lock.
//!
//! Does not: run `sql` and `function` handlers; there is no database whose transaction they could be part of.

use std::sync::Arc;
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::watch;

use super::Record;
use crate::delivery::{Claim, DeliveryId, Fence, RouteName, Settled, Settlement};
use crate::journal::memory::{MemoryJournal, State};
use crate::journal::{
    Backlog, BoxFuture, Deliveries, Forgotten, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress,
    Retention, Who, WorkError,
};
use crate::retry::{Chance, later};
use crate::route::Route;

impl MemoryJournal {
    fn change<'a, T: 'a>(
        &'a self,
        change: impl FnOnce(&mut State, UnixMicros) -> T + Send + 'a,
    ) -> BoxFuture<'a, Result<T, WorkError>> {
        Box::pin(async move {
            let mut state = self.lock();
            if state.closed {
                return Err(WorkError::Unavailable("it is closed".to_owned()));
            }
            Ok(change(&mut state, self.clock.steady()))
        })
    }
}

impl Deliveries for MemoryJournal {
    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn apply(&self, route: Arc<Route>, _limit: usize) -> BoxFuture<'_, Result<Progress, WorkError>> {
        Box::pin(async move { Err(unsupported(&route)) })
    }

    fn claim(&self, route: Arc<Route>, limit: usize, lease: Duration) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>> {
        self.change(move |state, now| state.claim(&route, limit, lease, now))
    }

    fn call(&self, route: Arc<Route>, _claims: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        Box::pin(async move { Err(unsupported(&route)) })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        self.change(move |state, now| {
            self.wake();
            settlements.iter().map(|settlement| state.settle(settlement, now)).collect()
        })
    }

    fn renew(&self, fences: Vec<Fence>, lease: Duration) -> BoxFuture<'_, Result<(), WorkError>> {
        self.change(move |state, now| {
            for fence in fences {
                if let Some((until, _)) = state.running(&fence).and_then(|record| record.lease.as_mut()) {
                    *until = later(now, lease);
                }
            }
        })
    }

    fn give_back(&self, fences: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>> {
        self.change(move |state, now| {
            self.wake();
            fences.iter().for_each(|fence| state.give_back(fence, now));
        })
    }

    fn reclaim(&self, route: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>> {
        self.change(move |state, now| {
            let reclaimed = state.reclaim(&route, now, &mut Chance::random());
            if reclaimed > 0 {
                self.wake();
            }
            reclaimed
        })
    }

    fn next_due(&self, route: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>> {
        self.look(move |state| {
            let waiting = state.of_route(&route, Record::has_time).into_iter();
            waiting.map(|(_, record)| record.run_at).min()
        })
    }

    fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>> {
        self.look(State::backlog)
    }

    fn unsettled(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<DeliveryId>, WorkError>> {
        self.look(move |state| {
            let open = |id: &DeliveryId| state.records().any(|(known, record)| known == *id && record.is_open());
            deliveries.into_iter().filter(open).collect()
        })
    }

    fn order(&self, order: Order) -> BoxFuture<'_, Result<Ordered, OrderError>> {
        Box::pin(async move {
            self.change(|state, now| {
                self.wake();
                state.order(&order, now)
            })
            .await?
        })
    }

    fn set_paused(&self, pause: Pause, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        self.change(move |state, now| {
            self.wake();
            state.set_paused(pause, who, now);
        })
    }

    fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>> {
        self.look(|state| state.pauses.iter().map(|paused| paused.what.clone()).collect())
    }

    fn pauses(&self) -> BoxFuture<'_, Result<Vec<Paused>, WorkError>> {
        self.look(|state| state.pauses.clone())
    }

    fn forget(&self, retention: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>> {
        self.change(move |state, now| state.forget(&retention, now.min(self.clock.now())))
    }

    fn trust_clock(&self, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        self.change(move |state, now| state.trust_clock(&who, now.min(self.clock.now())))
    }
}

fn unsupported(route: &Route) -> WorkError {
    WorkError::Unsupported(format!(
        "route `{}`: a {} handler needs a journal with a database",
        route.name,
        route.handler.kind()
    ))
}
