//! What an operator's order does to the deliveries of one event.
//!
//! Promises: an order that cannot be carried out changes nothing.

use std::collections::BTreeSet;

use oncehook_verify::UnixMicros;

use super::Record;
use crate::delivery::{DeliveryState, RouteName};
use crate::journal::memory::Stored;
use crate::journal::{Flag, Order, OrderError, Verb};

impl Stored {
    fn retry(&mut self, order: &Order, now: UnixMicros) -> BTreeSet<RouteName> {
        let mut changed = BTreeSet::new();
        for ((route, _), record) in &mut self.deliveries {
            let failed = matches!(record.state, DeliveryState::Dead | DeliveryState::Retrying | DeliveryState::Parked);
            if failed && order.is_for(route) {
                let tried = record.attempt > 0;
                record.wait(if tried { DeliveryState::Retrying } else { DeliveryState::Ready }, now);
                record.parked_at = None;
                record.limit = Some(record.attempt.saturating_add(order.attempts));
                changed.insert(route.clone());
            }
        }
        changed
    }

    /// First deliveries for routes that never had one.
    fn offer(&mut self, order: &Order, now: UnixMicros) -> BTreeSet<RouteName> {
        let mut made = BTreeSet::new();
        for route in order.wanting.iter().filter(|route| order.is_for(route)) {
            if !self.deliveries.keys().any(|(known, _)| known == route) {
                self.deliver(route.clone(), 0, now);
                made.insert(route.clone());
            }
        }
        made
    }

    fn force(&mut self, order: &Order, epoch: u32, now: UnixMicros) -> Result<BTreeSet<RouteName>, OrderError> {
        if !order.who.has_reason() {
            return Err(OrderError::Unfit("a forced replay needs a reason".to_owned()));
        }
        let next = self.latest_epoch().saturating_add(1);
        if epoch != next {
            return Err(OrderError::Epoch { next });
        }
        let routes: BTreeSet<RouteName> = match &order.route {
            Some(route) => BTreeSet::from([route.clone()]),
            None => order.wanting.iter().cloned().collect(),
        };
        if routes.is_empty() {
            return Err(OrderError::Unfit("nothing to replay: no route wants the event".to_owned()));
        }
        for route in &routes {
            self.deliver(route.clone(), epoch, now);
        }
        Ok(routes)
    }

    fn skip(&mut self, order: &Order, now: UnixMicros) -> Result<BTreeSet<RouteName>, OrderError> {
        let given_up = |state: DeliveryState| state.is_pending() || state == DeliveryState::Dead;
        let chosen =
            self.deliveries.iter_mut().filter(|((route, _), record)| order.is_for(route) && given_up(record.state));
        let chosen: Vec<_> = chosen.collect();
        // One whose lease has run out is nobody's any more.
        let held = |record: &Record| record.lease.as_ref().is_some_and(|lease| lease.until > now);
        if chosen.iter().any(|(_, record)| held(record)) {
            return Err(OrderError::Unfit("a delivery is running: try again when its attempt is over".to_owned()));
        }
        if chosen.is_empty() {
            return Err(OrderError::Unfit("nothing to skip: no delivery is pending or dead".to_owned()));
        }
        let mut skipped = BTreeSet::new();
        for ((route, _), record) in chosen {
            if record.lease.is_some() {
                record.end_attempt("lost", None, now);
            }
            record.finish(DeliveryState::Skipped, now);
            skipped.insert(route.clone());
        }
        Ok(skipped)
    }

    /// Branches by verb; what each means is told at [`Verb`].
    pub(super) fn order(&mut self, order: &Order, now: UnixMicros) -> Result<BTreeSet<RouteName>, OrderError> {
        let unfit = |why: &str| Err(OrderError::Unfit(why.to_owned()));
        match order.verb {
            Verb::Retry | Verb::Replay | Verb::ForceReplay { .. } if self.is_held() => {
                unfit("the event is held: release it first")
            }
            Verb::Retry => {
                let changed = self.retry(order, now);
                if changed.is_empty() {
                    return unfit("nothing to retry: no delivery is dead or waits for another attempt");
                }
                Ok(changed)
            }
            Verb::Replay => {
                let mut changed = self.retry(order, now);
                changed.extend(self.offer(order, now));
                Ok(changed)
            }
            Verb::ForceReplay { epoch } => self.force(order, epoch, now),
            Verb::Skip => self.skip(order, now),
            Verb::Release if !self.is_held() => unfit("the event is not held"),
            Verb::Release => {
                self.flags.retain(|flag| *flag != Flag::Quarantined);
                Ok(self.offer(order, now))
            }
        }
    }
}
