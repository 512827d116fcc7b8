//! The mistakes of [`crate::planted`] that the embedded journal can make. Only in builds with the feature `planted`.
//!
//! Promises: without a choice at run time each function changes nothing. Does not: exist in a release.

use std::time::Duration;

use rusqlite::Transaction;
use tokio::sync::oneshot;

use super::commands::Work;
use super::ledger::Fact;
use crate::event::NewEvent;
use crate::journal::{PROBE_SOURCE, Receipt};
use crate::planted::{Bug, has};

/// [`Bug::NormalSync`]: what `synchronous` is said to be when commits sync by themselves.
pub(super) fn full_sync() -> (&'static str, i64) {
    if has(Bug::NormalSync) { ("NORMAL", 1) } else { ("FULL", 2) }
}

/// [`Bug::NormalSync`]: whether the log is not synced. Then the last answered event is not written down either: what the mistake
/// loses must be found by those who look for it, not by the next start.
pub(super) fn skips_sync() -> bool {
    has(Bug::NormalSync)
}

/// [`Bug::SelectThenInsert`]: the keys of the batch itself are not seen. The self-test still sees them: it would refuse to start
/// with this mistake, which is another way to notice it.
pub(super) fn staged<'f>(staged: Option<&'f Fact>, source: &str) -> Option<&'f Fact> {
    staged.filter(|_| !has(Bug::SelectThenInsert) || source == PROBE_SOURCE)
}

/// [`Bug::ShortMemory`]: a key is not known any more after a second.
pub(super) fn recalled(known: Option<Fact>, event: &NewEvent) -> Option<Fact> {
    known.filter(|known| !has(Bug::ShortMemory) || event.expires_at.0 - known.expires_at.0 <= 1_000_000)
}

/// [`Bug::EarlyAnswer`]: answers, and waits until the answers have left. The commit comes afterwards.
pub(super) fn answer_early(works: &mut [Work], receipts: &[Receipt]) {
    if !has(Bug::EarlyAnswer) {
        return;
    }
    for (work, receipt) in works.iter_mut().zip(receipts) {
        let answer = std::mem::replace(&mut work.answer, oneshot::channel().0);
        let _ = answer.send(Ok(receipt.clone()));
    }
    std::thread::sleep(Duration::from_millis(5));
}

/// [`Bug::TiedToClient`]: undoes the transaction if a sender has hung up. What is committed then is nothing.
pub(super) fn tie_to_client(transaction: &Transaction<'_>, works: &[Work]) -> rusqlite::Result<()> {
    if has(Bug::TiedToClient) && works.iter().any(|work| work.answer.is_closed()) {
        transaction.execute_batch("ROLLBACK; BEGIN IMMEDIATE")?;
    }
    Ok(())
}
