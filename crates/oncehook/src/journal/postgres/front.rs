//! Where the queue of a route begins, as far as this node knows.
//!
//! A row that was settled leaves its old entry in the queue's index behind, until the server has swept it. A search from the very
//! beginning walks over all that was settled since; a backlog of half a million would cost the square of its size. So a search begins
//! where the last one found something.
//!
//! Promises: deliveries before that time are not forgotten. One can appear there: a transaction commits late, or lets go what it
//! had locked. It is found when a search finds less than it could have, and once in a second in any case.
//!
//! Does not: share this with other nodes. Each searches for itself.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::delivery::RouteName;

/// Where everything begins.
const BEGINNING: i64 = i64::MIN;

/// How long no search begins at the beginning.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Fronts(Mutex<HashMap<RouteName, Front>>);

#[derive(Debug)]
struct Front {
    /// The due time from which on is searched.
    run_at: i64,
    /// When a search began at the beginning.
    looked: Instant,
}

impl Fronts {
    /// The due time from which on to search.
    pub(super) fn of(&self, route: &RouteName) -> i64 {
        let known = self.known();
        known.get(route).filter(|front| front.looked.elapsed() < LOOK_AGAIN).map_or(BEGINNING, |front| front.run_at)
    }

    /// A search that began at `from` has found something that was due at `first`, and as much as it wanted, or not. Returns whether
    /// there may be something that it did not see.
    pub(super) fn found(&self, route: &RouteName, from: i64, first: Option<i64>, full: bool) -> bool {
        let mut known = self.known();
        match first.filter(|_| full) {
            None => {
                known.remove(route);
                from > BEGINNING
            }
            Some(run_at) if from == BEGINNING => {
                known.insert(route.clone(), Front { run_at, looked: Instant::now() });
                false
            }
            Some(run_at) => {
                if let Some(front) = known.get_mut(route) {
                    front.run_at = front.run_at.max(run_at);
                }
                false
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<RouteName, Front>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
