//! The mistakes of [`crate::planted`] that a journal on a server can make. Only in builds with the feature `planted`.
//!
//! Promises: the two traits here take the place of [`Appends`] and [`Delivers`] where the shared code imports those as `Steps`.
//! Without a choice at run time they pass each step on to the engine. With one they do a step wrongly, in the way that the choice
//! names. The self-test asks the engine itself: a journal that fails its self-test does not open, which is another way to notice
//! a mistake. [`Bug::NormalSync`] is made where an engine checks a new connection (`postgres::planted`, `mysql::planted`).
//!
//! Does not: exist in a release.

use std::future::Future;
use std::time::Duration;

use oncehook_verify::UnixMicros;

use super::append::{Appends, Stored, known_keys};
use super::deliver::settle::settle;
use super::deliver::steps::{Delivers, Locked, SettleSql, Wanted};
use super::engine::{AppendContext, Candidate, Session as _};
use super::lane::Request;
use crate::delivery::{Settlement, Verdict};
use crate::journal::decide::outcome::Held;
use crate::journal::sql::Result;
use crate::planted::{Bug, has};
use crate::route::Route;

/// How long a mistake waits between two steps that should be one, so that another node or a kill can come in between.
const BETWEEN: Duration = Duration::from_millis(20);

/// How long [`Bug::ShortMemory`] remembers a key, in microseconds.
const MEMORY: i64 = 1_000_000;

/// `$1`: source, `$2`: key, `$3`: time. Forgets the key if it was first seen before then.
const FORGET_KEY: &str = "DELETE FROM oncehook.keys
    WHERE oncehook.keys.source = $1 AND oncehook.keys.key = $2 AND oncehook.keys.first_seen < $3";

/// The steps of an append, with mistakes.
pub(super) trait MistakenAppends: Appends {
    fn append(
        &self,
        session: &mut Self::Session,
        memory: &mut Self::LaneMemory,
        context: AppendContext,
        candidates: &[Candidate<'_>],
    ) -> impl Future<Output = Result<Stored>> + Send {
        async move {
            if has(Bug::ShortMemory) {
                forget_keys::<Self>(session, context.about_now - MEMORY, candidates).await?;
            }
            if has(Bug::SelectThenInsert) {
                let known = known_keys::<Self>(session, candidates.iter().map(Candidate::key)).await?;
                session.commit().await?;
                tokio::time::sleep(BETWEEN).await;
                let unknown = candidates.iter().enumerate().filter(|(place, _)| !known.contains_key(place));
                let unknown: Vec<Candidate<'_>> = unknown.map(|(_, candidate)| *candidate).collect();
                forget_keys::<Self>(session, i64::MAX, &unknown).await?;
            }
            if has(Bug::EarlyAnswer) || has(Bug::TiedToClient) {
                // What was answered early is committed now, when the answers have left. What comes is committed by `commit`, and not by the
                // engine, which has to take the way that leaves a transaction sound.
                if has(Bug::EarlyAnswer) {
                    tokio::time::sleep(BETWEEN).await;
                }
                session.commit().await?;
                session.begin(context.given).await?;
                *memory = Self::careful();
            }
            Appends::append(self, session, memory, context, candidates).await
        }
    }

    fn commit(session: &mut Self::Session, batch: &[Request]) -> impl Future<Output = Result<()>> + Send {
        let is_left = has(Bug::TiedToClient) && batch.iter().any(|request| request.answer.is_closed());
        async move {
            match (has(Bug::EarlyAnswer), has(Bug::TiedToClient)) {
                (true, _) => Ok(()),
                (_, true) if is_left => session.rollback().await,
                (_, true) => session.commit().await,
                _ => <Self as Appends>::commit(session, batch).await,
            }
        }
    }
}

impl<E: Appends> MistakenAppends for E {}

/// [`Bug::ShortMemory`] and [`Bug::SelectThenInsert`]: forgets keys in a transaction before that of the append.
async fn forget_keys<E: Appends>(session: &mut E::Session, before: i64, candidates: &[Candidate<'_>]) -> Result<()> {
    for (source, key) in candidates.iter().map(Candidate::key) {
        session.change(FORGET_KEY, &[source.into(), key.into(), before.into()]).await?;
    }
    session.commit().await
}

/// The steps of the way out, with mistakes.
pub(super) trait MistakenDelivers: Delivers {
    /// [`Bug::NoFence`]: the texts that settle leased attempts have no fence.
    fn settle_sql() -> SettleSql {
        match <Self as Delivers>::settle_sql() {
            settle if !has(Bug::NoFence) => settle,
            SettleSql::AtOnce { leased, locked, succeeded, wake_parked } => {
                SettleSql::AtOnce { leased: unfenced(leased), locked, succeeded, wake_parked }
            }
            SettleSql::InSteps { live, leased, locked, follow } => {
                SettleSql::InSteps { live: unfenced(live), leased: leased.map(unfenced), locked, follow }
            }
        }
    }

    fn settles_ahead(prepared: &Self::Prepared) -> bool {
        has(Bug::MarkFirst) || <Self as Delivers>::settles_ahead(prepared)
    }

    /// [`Bug::MarkFirst`]: what may be settled ahead is, and the transaction in which it is settled ends before it runs.
    fn lock_due(
        &self,
        session: &mut Self::Session,
        now: i64,
        route: &Route,
        wanted: Wanted<'_>,
    ) -> impl Future<Output = Result<Locked>> + Send {
        async move {
            let limit = match wanted {
                Wanted::Batch { limit, settle_ahead: true } if has(Bug::MarkFirst) => limit,
                _ => return Delivers::lock_due(self, session, now, route, wanted).await,
            };
            let wanted = Wanted::Batch { limit, settle_ahead: false };
            let mut locked = Delivers::lock_due(self, session, now, route, wanted).await?;
            let never_failed = locked.due.iter().filter(|due| due.attempt == 0).map(|due| due.fence(route));
            let succeeded = |fence| Settlement { fence, verdict: Verdict::Succeeded(None), followups: Vec::new() };
            let marked: Vec<Settlement> = never_failed.map(succeeded).collect();
            settle::<Self>(session, Some(now), UnixMicros(now), Held::Lock, &marked).await?;
            session.commit().await?;
            Self::begin_batch(session, None).await?;
            locked.settled_ahead = marked.len();
            Ok(locked)
        }
    }
}

impl<E: Delivers> MistakenDelivers for E {}

/// The text without what a leased delivery must be. Kept for ever, which a process that is there to be wrong can afford.
fn unfenced(sql: &str) -> &'static str {
    let plain = sql.replace("(d.state || '')", "d.state");
    plain.replace("d.attempt = t.attempt AND d.state = 'running'", "1 = 1").leak()
}
