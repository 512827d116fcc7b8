//! The mistake [`Bug::MarkFirst`]: a delivery is settled, committed, and run afterwards. Only in builds with the feature `planted`.

use std::sync::Arc;

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, Result};

use super::{BUDGET_ALONE, Job};
use crate::journal::Progress;
use crate::journal::decide::outcome::Held;
use crate::journal::sqlite::queue::{Due, begin, due};
use crate::planted::{self, Bug};
use crate::retry::Chance;
use crate::route::Route;

/// As [`sql`](super::sql), unless the mistake is chosen.
pub(in crate::journal::sqlite) fn sql(
    connection: &mut Connection,
    route: &Arc<Route>,
    limit: usize,
    now: UnixMicros,
    chance: &mut Chance,
) -> Result<Progress> {
    if !planted::has(Bug::MarkFirst) {
        return super::sql(connection, route, limit, now, chance);
    }
    let (due, _) = due(connection, route, now, limit)?;
    let mut job = Job::new(connection, route, Held::Lock, now, chance)?;
    let mut progress = Progress::default();
    for Due { claim, .. } in due.iter().filter(|due| due.claim.fence.attempt == 1) {
        let transaction = begin(connection)?;
        job.settle(&transaction, claim, Ok(Some("{\"id\":1}".to_owned())), &mut progress)?;
        transaction.commit()?;
        let transaction = begin(connection)?;
        if job.effect(&transaction, claim, BUDGET_ALONE).is_ok() {
            transaction.commit()?;
        }
    }
    Ok(progress)
}
