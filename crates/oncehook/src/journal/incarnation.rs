//! Which life of a journal this is: what was committed in one life may be missing in another.
//!
//! A database that was restored from a backup, or failed over to a replica that misses the last commits, looks like the
//! one before and has forgotten events. Whoever remembers receipts (`fastpath`) must not believe them any more, or a copy
//! of a forgotten event would be answered as a duplicate and be lost for good.
//!
//! Promises: two lives of a journal never have the same name, and while it is in doubt which life it is (the connection is
//! lost), there is none. Asking costs one atomic load.
//! Does not: find out by itself. The journal says so ([`Incarnation::doubt`], [`Incarnation::confirm`]); what it looks at
//! stands in its backend.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// A life of a journal as this process counts them. Facts of another era say nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Era(u64);

/// See the module's text.
#[derive(Debug)]
pub struct Incarnation {
    /// The era, or 0 while it is in doubt.
    era: AtomicU64,
    latest: RwLock<Latest>,
}

/// What was confirmed last.
#[derive(Debug)]
struct Latest {
    era: u64,
    name: Option<Arc<str>>,
}

impl Incarnation {
    /// Of a journal that has one life only, and no name that other nodes would know it by.
    pub const fn nameless() -> Self {
        Self { era: AtomicU64::new(1), latest: RwLock::new(Latest { era: 1, name: None }) }
    }

    /// Of a journal whose life is known by a name.
    pub fn named(name: &str) -> Self {
        Self { era: AtomicU64::new(1), latest: RwLock::new(Latest { era: 1, name: Some(name.into()) }) }
    }

    /// The present era; `None` while it is in doubt.
    pub fn era(&self) -> Option<Era> {
        Some(self.era.load(Ordering::Acquire)).filter(|era| *era != 0).map(Era)
    }

    /// The present era and the name that all nodes know it by; `None` while it is in doubt, and for one without a name.
    pub fn name(&self) -> Option<(Era, Arc<str>)> {
        let latest = self.latest.read().unwrap_or_else(PoisonError::into_inner);
        let name = latest.name.clone()?;
        self.era().map(|era| (era, name))
    }

    /// It is not known any more which life it is. Nothing is believed until it is.
    pub fn doubt(&self) {
        let _latest = self.latest.write().unwrap_or_else(PoisonError::into_inner);
        self.era.store(0, Ordering::Release);
    }

    /// It is known again. The same name goes on with the era before the doubt; another one begins an era.
    pub fn confirm(&self, name: &str) {
        let mut latest = self.latest.write().unwrap_or_else(PoisonError::into_inner);
        if latest.name.as_deref() != Some(name) {
            latest.era += 1;
            latest.name = Some(name.into());
        }
        self.era.store(latest.era, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r17_another_name_is_another_era_and_doubt_is_none() {
        let incarnation = Incarnation::named("a");
        let first = incarnation.era().unwrap();
        assert_eq!(incarnation.name(), Some((first, "a".into())));
        incarnation.doubt();
        assert_eq!((incarnation.era(), incarnation.name()), (None, None));
        incarnation.confirm("a");
        assert_eq!(incarnation.era(), Some(first), "it was the same after all");
        incarnation.doubt();
        incarnation.confirm("b");
        let second = incarnation.era().unwrap();
        assert_ne!(second, first);
        incarnation.confirm("a");
        assert!(![first, second].contains(&incarnation.era().unwrap()), "an era never comes back");
        assert_eq!(Incarnation::nameless().name(), None);
        assert!(Incarnation::nameless().era().is_some());
    }
}
