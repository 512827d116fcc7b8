//! Which deliveries share a transaction, and when what they did there is undone.
//!
//! Promises: a delivery that failed before runs alone, and so do all others of its entity, in the order of their queue. If
//! one of several deliveries of an entity took no effect, those behind it have counted on it, and the transaction is undone.

use std::collections::HashSet;

/// Separates those that run alone from those that share a transaction. `about` returns the attempts so far, and the entity if
/// the route looks at it.
pub(crate) fn apart<T>(due: Vec<T>, about: impl Fn(&T) -> (u32, Option<&str>)) -> (Vec<T>, Vec<T>) {
    let failed = due.iter().map(&about).filter(|(attempt, _)| *attempt > 0);
    let troubled: HashSet<String> = failed.filter_map(|(_, entity)| entity.map(str::to_owned)).collect();
    due.into_iter().partition(|due| match about(due) {
        (_, Some(entity)) => troubled.contains(entity),
        (attempt, None) => attempt > 0,
    })
}

/// Whether a delivery that took no effect has others of its entity behind it. `ran` has the entity of each, if the route
/// looks at it, and whether it took effect.
pub(crate) fn is_counted_on<'e>(ran: impl IntoIterator<Item = (Option<&'e str>, bool)>) -> bool {
    let mut idle = HashSet::new();
    ran.into_iter().filter_map(|(entity, took_effect)| Some((entity?, took_effect))).any(|(entity, took_effect)| {
        let counted = idle.contains(entity);
        if !took_effect {
            idle.insert(entity);
        }
        counted
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_before_runs_alone_with_all_of_its_entity() {
        let due = vec![(0, Some("a")), (1, Some("b")), (0, None), (0, Some("b")), (2, None), (0, Some("a"))];
        let (alone, together) = apart(due, |due| *due);
        assert_eq!(alone, [(1, Some("b")), (0, Some("b")), (2, None)]);
        assert_eq!(together, [(0, Some("a")), (0, None), (0, Some("a"))]);
    }

    #[test]
    fn those_behind_one_that_took_no_effect_count_on_it() {
        for (ran, expected) in [
            (vec![(Some("a"), false), (Some("a"), true)], true),
            (vec![(Some("a"), false), (Some("b"), true), (Some("a"), false)], true),
            (vec![(Some("a"), true), (Some("a"), false)], false),
            (vec![(Some("a"), false), (Some("b"), false)], false),
            (vec![(None, false), (None, true)], false),
            (vec![], false),
        ] {
            assert_eq!(is_counted_on(ran.clone()), expected, "{ran:?}");
        }
    }
}
