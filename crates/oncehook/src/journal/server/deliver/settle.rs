//! Settling attempts: what an engine writes, and what is checked of it.

use std::collections::HashSet;

use super::steps::{Delivers, Ended, Held, SettleTime};
use crate::delivery::{Fence, Verdict};
use crate::journal::server::engine::Session;
use crate::journal::server::error::EngineError;
use crate::journal::server::value::Param;

/// Settles attempts. Returns the fences that were the latest; of the others nothing was written.
pub(super) async fn settle<E: Delivers>(
    session: &mut E::Session,
    time: SettleTime,
    held: Held,
    ended: &[Ended<'_>],
) -> Result<HashSet<Fence>, EngineError> {
    if ended.is_empty() {
        return Ok(HashSet::new());
    }
    let done = E::settle(session, time, held, ended).await?;
    let parked: Vec<&Fence> = ended
        .iter()
        .filter(|ended| matches!(ended.verdict, Verdict::Parked(..)) && done.contains(ended.fence))
        .map(|ended| ended.fence)
        .collect();
    if !parked.is_empty() {
        session.change(E::DELIVER.name_parked, &[Param::fences(parked)]).await?;
    }
    Ok(done)
}

/// Settles attempts that ran under a lock. The rows are locked since they were read: if they are not as they were, nothing that
/// the transaction read can be trusted.
pub(super) async fn settle_locked<E: Delivers>(
    session: &mut E::Session,
    time: SettleTime,
    ended: &[Ended<'_>],
) -> Result<(), EngineError> {
    let done = settle::<E>(session, time, Held::Lock, ended).await?;
    if done.len() == ended.len() { Ok(()) } else { Err(EngineError::changed_under_lock()) }
}
