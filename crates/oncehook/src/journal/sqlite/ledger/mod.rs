//! The ledger: the memory of keys, at the cost of sequential writes.
//!
//! A row in `oncehook_keys` for every accept would dirty a page of its own when keys are random. But the event's row already
//! is the durable record of its key. So an accept writes only that, and the key is held in memory until a whole
//! generation of them is merged into the table in the table's order, many keys to a page.
//!
//! Where a key can be, in the order of asking: among those of the batch that is being stored (`staged`), in the current
//! generation, in the frozen one that is being merged, in the table. The filter says of most fresh keys that the
//! table surely does not have them.
//!
//! Why this is safe:
//!
//! - One thread of one process decides (the lock file keeps others away), so between asking and storing nothing changes.
//! - Memory is exact, and holds only what is committed: a batch's keys are staged, and published after its COMMIT.
//! - `ledger_to` is the last event whose key, with all before it, is in the table. It moves in the transaction that merges
//!   the last key of a generation. At the start, and after any failure, the events behind it are read back into memory.
//!   So at every moment, whatever crash came before, table and memory together know the key of every stored event.
//! - The first key of every batch is looked up in the table whatever memory and filter say. An answer that contradicts
//!   them, a changed schema, or a key of another event met while merging stops the journal.
//!
//! Does not: forget keys. Code that deletes events must ask [`merged_to`] first.

mod filter;
mod generation;
mod merge;
mod tail;
#[cfg(test)]
mod tests;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use oncehook_verify::EventKey;
use rusqlite::{Connection, TransactionBehavior};

use super::OpenError;
use super::reader::Readers;
use crate::event::{EventId, NewEvent};
pub(super) use filter::Filter;
use generation::{Entry, Generation};
pub(super) use generation::{Fact, KeyHasher};
pub(super) use merge::merged_to;
use merge::{Merge, find_in_table};
use tail::Loading;
pub(super) use tail::load;

/// A generation is full with this many keys, unless the options say otherwise …
pub(super) const GENERATION: usize = 196_608;

/// … or when it weighs this much. At most two generations are in memory, and what one batch adds.
const GENERATION_BYTES: usize = 32 << 20;

/// A generation is merged after this time though it is not full, so that old events can be forgotten.
const GENERATION_AGE: Duration = Duration::from_secs(600);

/// A batch takes this many keys along for each of its events. More than one, so that a merge ends before the next begins.
const MERGED_PER_EVENT: usize = 2;

/// … and at least this many.
const MERGED_AT_LEAST: usize = 64;

/// Keys merged in one transaction when no command waits.
pub(super) const MERGED_ALONE: usize = 4_096;

/// The keys of committed events that may not be in the table yet. The writer changes it; readers look.
#[derive(Default)]
pub(super) struct Recent {
    hasher: KeyHasher,
    current: Generation,
    frozen: Option<Arc<Generation>>,
}

impl Recent {
    fn find(&self, hash: u64, source: &str, key: &[u8]) -> Option<&Fact> {
        let frozen = || self.frozen.as_ref()?.find(hash, source, key);
        self.current.find(hash, source, key).or_else(frozen)
    }

    /// The events that hold a key in any source. To be asked *before* the table is read: keys move from here to there.
    pub(super) fn events_of(&self, key: &EventKey) -> Vec<EventId> {
        let sources = self.current.sources.iter().chain(self.frozen.iter().flat_map(|frozen| &frozen.sources));
        let mut events: Vec<EventId> = sources
            .filter_map(|source| {
                let hash = self.hasher.hash(source.as_str(), key.as_bytes());
                self.find(hash, source.as_str(), key.as_bytes())
            })
            .map(|fact| fact.event)
            .collect();
        events.sort_unstable();
        events.dedup();
        events
    }
}

pub(super) struct Ledger {
    /// Keys in a full generation.
    full_at: usize,
    hasher: KeyHasher,
    recent: Arc<RwLock<Recent>>,
    staged: Generation,
    merge: Option<Merge>,
    /// When the current generation began.
    since: Instant,
    filter: Filter,
    /// Whether the filter knows every key in the table. Until then each key is looked up.
    filter_is_whole: bool,
    loading: Option<Loading>,
    /// The next key is looked up in the table in any case.
    spot_check: bool,
}

impl Ledger {
    /// A ledger that knows nothing yet: [`rebuild`](Self::rebuild) comes next.
    pub(super) fn new(full_at: usize, recent: Arc<RwLock<Recent>>) -> Self {
        let hasher = recent.read().unwrap_or_else(PoisonError::into_inner).hasher.clone();
        Self {
            full_at: full_at.max(1),
            hasher,
            recent,
            staged: Generation::default(),
            merge: None,
            since: Instant::now(),
            filter: Filter::default(),
            filter_is_whole: false,
            loading: None,
            spot_check: true,
        }
    }

    fn recent(&self) -> RwLockReadGuard<'_, Recent> {
        self.recent.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the events behind the watermark. What fills whole generations is merged at once.
    pub(super) fn rebuild(&mut self, connection: &mut Connection) -> Result<(), OpenError> {
        self.forget();
        self.filter_is_whole |= tail::table_is_empty(connection)?;
        let mut after = merged_to(connection)?;
        tail::refuse_contradiction(connection, after)?;
        while let Some(last) = self.read_back(connection, after)? {
            after = last;
            while self.merge.is_some() {
                self.merge_alone(connection, MERGED_ALONE)?;
            }
        }
        Ok(())
    }

    /// Takes the keys of the next events after one back into memory. Returns the last of these events.
    pub(super) fn read_back(&mut self, connection: &Connection, after: i64) -> rusqlite::Result<Option<i64>> {
        let mut statement = connection.prepare_cached(tail::EVENTS)?;
        let mut rows = statement.query([after, tail::PAGE])?;
        let mut last = None;
        while let Some(row) = rows.next()? {
            let entry = tail::entry(row, &self.hasher)?;
            last = Some(entry.fact.event.sequence());
            let mut recent = self.recent.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = recent.find(entry.hash, entry.source.as_str(), entry.key.as_bytes()) {
                return Err(same_key(known.event, entry.fact.event));
            }
            recent.current.insert(entry);
            drop(recent);
            self.freeze_if_due();
        }
        Ok(last)
    }

    /// Memory as of no event at all. The filter stays: the table has lost no key.
    fn forget(&mut self) {
        let mut recent = self.recent.write().unwrap_or_else(PoisonError::into_inner);
        recent.current = Generation::with_capacity(self.full_at.min(GENERATION));
        recent.frozen = None;
        drop(recent);
        self.staged.clear();
        self.merge = None;
        self.since = Instant::now();
    }

    /// A transaction begins: what the last one left unfinished came to nothing.
    pub(super) fn begin(&mut self) {
        self.staged.clear();
        self.spot_check = true;
        if let Some(merge) = &mut self.merge {
            merge.rolled_back();
        }
    }

    /// Where the event's key hashes to; for [`recall`](Self::recall) and [`stage`](Self::stage).
    pub(super) fn hash(&self, event: &NewEvent) -> u64 {
        self.hasher.hash(event.source.as_str(), event.key.as_bytes())
    }

    /// Is the key known? Asked inside the transaction that stores the event if it is not.
    pub(super) fn recall(
        &mut self,
        connection: &Connection,
        hash: u64,
        event: &NewEvent,
    ) -> rusqlite::Result<Option<Fact>> {
        let (source, key) = (event.source.as_str(), event.key.as_bytes());
        let staged = self.staged.find(hash, source, key);
        #[cfg(feature = "planted")]
        let staged = super::planted::staged(staged, source);
        let remembered = staged.copied().or_else(|| self.recent().find(hash, source, key).copied());
        let surely_not = self.filter_is_whole && !self.filter.may_contain(hash);
        let spot_check = std::mem::take(&mut self.spot_check);
        if !spot_check && (remembered.is_some() || surely_not) {
            return Ok(remembered);
        }
        let tabled = find_in_table(connection, source, key)?;
        match (remembered, tabled) {
            (Some(remembered), Some(tabled)) if remembered != tabled => Err(same_key(remembered.event, tabled.event)),
            (None, Some(tabled)) if surely_not => {
                Err(broken(format!("the filter does not know the key of {}", tabled.event)))
            }
            (remembered, tabled) => Ok(remembered.or(tabled)),
        }
    }

    /// The event was new and its row has been inserted. Counts from [`committed`](Self::committed) on; until then for
    /// this batch only.
    pub(super) fn stage(&mut self, hash: u64, event: &NewEvent, id: EventId) {
        let fact = Fact {
            event: id,
            digest: event.digest,
            first_seen: event.received_at,
            expires_at: event.remembered_until(id),
        };
        self.staged.insert(Entry { hash, source: event.source.clone(), key: event.key.clone(), fact });
    }

    /// Takes some keys of the frozen generation along in the transaction of a batch.
    pub(super) fn merge_along(&mut self, connection: &Connection, events: usize) -> rusqlite::Result<()> {
        let full = self.is_full();
        let Some(merge) = &mut self.merge else { return Ok(()) };
        // The next generation waits for this one: memory is bounded, so the rest goes at once.
        let most = if full { usize::MAX } else { (events * MERGED_PER_EVENT).max(MERGED_AT_LEAST) };
        if full || merge.is_ready() {
            merge.advance(connection, &mut self.filter, most)?;
        }
        Ok(())
    }

    /// Merges within a transaction of the caller's, and takes it for committed. The self-test's way to the table.
    pub(super) fn merge_now(&mut self, connection: &Connection, most: usize) -> rusqlite::Result<()> {
        let Some(merge) = &mut self.merge else { return Err(broken("nothing is being merged".to_owned())) };
        merge.advance(connection, &mut self.filter, most)?;
        self.committed();
        Ok(())
    }

    /// Merges in a transaction of its own. Returns whether there is more to do.
    pub(super) fn merge_alone(&mut self, connection: &mut Connection, most: usize) -> rusqlite::Result<bool> {
        self.begin();
        let Some(merge) = &mut self.merge else { return Ok(false) };
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        merge.advance(&transaction, &mut self.filter, most)?;
        transaction.commit()?;
        self.committed();
        Ok(self.merge.is_some())
    }

    /// The transaction has committed: its keys are known from now on.
    pub(super) fn committed(&mut self) {
        let merged = self.merge.as_mut().is_some_and(Merge::committed);
        if merged || !self.staged.entries.is_empty() {
            let mut recent = self.recent.write().unwrap_or_else(PoisonError::into_inner);
            recent.current.absorb(&mut self.staged);
            if merged {
                recent.frozen = None;
                self.merge = None;
            }
        }
        self.freeze_if_due();
    }

    /// Whether a merge is under way and can go on without waiting.
    pub(super) fn is_merging(&self) -> bool {
        self.merge.as_ref().is_some_and(Merge::is_ready)
    }

    /// Begins to merge the current generation if it is full or old, and no other is being merged.
    pub(super) fn freeze_if_due(&mut self) {
        if self.since.elapsed() >= GENERATION_AGE || self.is_full() {
            self.freeze();
        }
    }

    fn is_full(&self) -> bool {
        let current = &self.recent().current;
        current.entries.len() >= self.full_at || current.bytes >= GENERATION_BYTES
    }

    /// Begins to merge the current generation, unless it is empty or another is being merged.
    pub(super) fn freeze(&mut self) {
        if self.merge.is_some() {
            return;
        }
        let mut recent = self.recent.write().unwrap_or_else(PoisonError::into_inner);
        if recent.current.entries.is_empty() {
            return;
        }
        let next = Generation::with_capacity(self.full_at.min(GENERATION));
        let frozen = Arc::new(std::mem::replace(&mut recent.current, next));
        recent.frozen = Some(Arc::clone(&frozen));
        drop(recent);
        self.merge = Some(Merge::new(frozen));
        self.since = Instant::now();
    }

    /// Begins to load the filter beside the writer, if it is not there and not on its way.
    ///
    /// It ends up whole: a key that came into the table before the walk passed its place is met by the walk, and one that
    /// came later was merged by this process, which puts it into the filter itself.
    pub(super) fn load_filter(&mut self, readers: &Arc<Readers>) {
        if self.filter_is_whole || self.loading.is_some() {
            return;
        }
        let (readers, hasher) = (Arc::clone(readers), self.hasher.clone());
        let loading =
            std::thread::Builder::new().name("journal-filter".to_owned()).spawn(move || readers.load_filter(&hasher));
        // Without a thread there is no filter, and every key is looked up.
        self.loading = loading.ok();
    }

    /// Takes the filter into use once it is loaded.
    pub(super) fn adopt_filter(&mut self) {
        if self.loading.as_ref().is_some_and(|loading| loading.is_finished()) {
            self.await_filter();
        }
    }

    /// Waits for the thread that loads the filter. It has been asked to end, or is about to.
    pub(super) fn await_filter(&mut self) {
        let Some(loading) = self.loading.take() else { return };
        if let Ok(Some(loaded)) = loading.join() {
            self.filter.adopt(loaded);
            self.filter_is_whole = true;
        }
    }
}

fn same_key(one: EventId, other: EventId) -> rusqlite::Error {
    broken(format!("{one} and {other} hold the same key"))
}

/// The ledger contradicts itself. It travels in SQLite's error type, as one that no row and no lock is to blame for: the
/// journal stops storing, and reading the tail back says the same again until an operator has looked.
fn broken(what: String) -> rusqlite::Error {
    rusqlite::Error::ToSqlConversionFailure(format!("the ledger of keys contradicts itself: {what}").into())
}
