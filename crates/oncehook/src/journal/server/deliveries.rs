//! The server journal for workers and operators: what [`Deliveries`] asks for, each call where it is done.

use std::sync::Arc;
use std::time::Duration;

use oncehook_verify::UnixMicros;
use tokio::sync::watch;

use super::deliver::steps::Delivers;
use super::engine::Session as _;
use super::read::Reads;
use super::work::work;
use super::{ServerJournal, operate};
use crate::delivery::{Claim, DeliveryId, Fence, RouteName, Settled, Settlement};
use crate::journal::sql;
use crate::journal::{
    Backlog, BoxFuture, Deliveries, Forgotten, Order, OrderError, Ordered, Pausable, Pause, Paused, Progress,
    Retention, Who, WorkError,
};
use crate::route::Route;

impl<E: Delivers + Reads> Deliveries for ServerJournal<E> {
    fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    fn apply(&self, route: Arc<Route>, limit: usize) -> BoxFuture<'_, Result<Progress, WorkError>> {
        Box::pin(async move { self.apply_due(&route, limit).await })
    }

    fn claim(&self, route: Arc<Route>, limit: usize, lease: Duration) -> BoxFuture<'_, Result<Vec<Claim>, WorkError>> {
        Box::pin(async move { self.claim_due(&route, limit, lease).await })
    }

    fn call(&self, route: Arc<Route>, claims: Vec<Claim>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        Box::pin(async move { self.call_all(&route, &claims).await })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Settled>, WorkError>> {
        Box::pin(async move { self.settle_all(&settlements).await })
    }

    fn renew(&self, fences: Vec<Fence>, lease: Duration) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move { self.renew_leases(&fences, lease).await })
    }

    fn give_back(&self, fences: Vec<Fence>) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move { self.give_leases_back(&fences).await })
    }

    fn reclaim(&self, route: Arc<Route>) -> BoxFuture<'_, Result<usize, WorkError>> {
        Box::pin(async move { self.reclaim_leases(&route).await })
    }

    fn next_due(&self, route: RouteName) -> BoxFuture<'_, Result<Option<UnixMicros>, WorkError>> {
        Box::pin(async move { self.next_due_of(&route).await })
    }

    fn backlog(&self) -> BoxFuture<'_, Result<Vec<Backlog>, WorkError>> {
        Box::pin(async {
            let backlog = self.read_backlog().await;
            backlog.map_err(|error| WorkError::Unavailable(error.to_string()))
        })
    }

    fn order(&self, order: Order) -> BoxFuture<'_, Result<Ordered, OrderError>> {
        Box::pin(async move { operate::order(self, &order).await })
    }

    fn set_paused(&self, pause: Pause, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let given = self.shared.given_time();
            work!(self, |session| sql::operate::set_paused(&mut *session, given, &pause, &who))?;
            self.shared.changed();
            Ok(())
        })
    }

    fn paused(&self) -> BoxFuture<'_, Result<Vec<Pausable>, WorkError>> {
        Box::pin(async move { work!(self, |session| sql::operate::paused(&mut *session)) })
    }

    fn pauses(&self) -> BoxFuture<'_, Result<Vec<Paused>, WorkError>> {
        Box::pin(async move { work!(self, |session| sql::operate::pauses(&mut *session)) })
    }

    fn forget(&self, retention: Retention) -> BoxFuture<'_, Result<Forgotten, WorkError>> {
        Box::pin(async move { operate::forget(self, &retention).await })
    }

    fn trust_clock(&self, who: Who) -> BoxFuture<'_, Result<(), WorkError>> {
        Box::pin(async move {
            let (given, wall) = (self.shared.given_time(), self.shared.clock.now().0);
            work!(self, |session| sql::forget::trust_clock(&mut *session, given, wall, &who))
        })
    }

    fn mark(&self) -> BoxFuture<'_, Result<i64, WorkError>> {
        Box::pin(self.created_at())
    }

    fn unsettled(&self, deliveries: Vec<DeliveryId>) -> BoxFuture<'_, Result<Vec<DeliveryId>, WorkError>> {
        Box::pin(async move { self.unsettled_of(&deliveries).await })
    }
}
