//! A database of the user's that is not the journal's, and in which effects happen once: see [`Guarded`].
//!
//! The guards stand there in tables of their own, made at the first use. `batch` runs the statements of claims in the
//! transaction of their guards, `guard` writes and reads guards and what is known of entities.
//!
//! Promises: a guard and the effect it stands for commit together; the guard is asked before the statements run, so
//! it does not matter what those would make of a second run (a unique key, a missing table). What goes wrong with the
//! guards themselves is [`Applied::Unreached`]: no delivery is to blame for it. Guards that were seen once and are
//! gone are an error, and so is a table of another shape; neither is made anew.
//!
//! Does not: settle anything. And it does not notice if the rows of the guards are deleted: what was applied and not
//! settled at that moment would run again.

mod batch;
mod guard;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::OpenError;
use super::engine::{Purpose, Session};
use super::error::{EngineError, EngineResult};
use super::pool::{Lent, Pool};
use super::rehearse;
use super::user_sql::{Trouble, UserSql};
use super::value::Row;
use crate::delivery::{Claim, DeliveryId, Fence};
use crate::handler::SqlHandler;
use crate::handler::elsewhere::{Answer, Applied, Guarded, Round, Task, Voided};

/// Connections to one such database, for all routes.
const CONNECTIONS: usize = 8;

/// How long a statement of a `sql` handler may take: as long as in the journal's own database.
const HANDLER_TIME: Duration = Duration::from_secs(10);

/// What an engine must be able to do to guard effects.
pub(in crate::journal) trait Guards: UserSql {
    const GUARD: GuardSql;

    /// Creates those of our tables that do not exist. Several gateways may do so at once. Its own transactions.
    fn make_tables(session: &mut Self::Session) -> impl Future<Output = EngineResult> + Send;

    /// Whose fault it is that a COMMIT was refused. Where constraints are not deferred, the user's statements cannot
    /// cause it.
    fn commit_trouble(error: EngineError) -> Trouble {
        Trouble::ours(error)
    }
}

/// The texts of the statements about guards. Their parameters are numbered as in [`value`](super::value). A table of
/// deliveries has the columns event, route, epoch; one of attempts has the attempt too.
pub(in crate::journal) struct GuardSql {
    /// Begins a transaction, if the session is not always in one.
    pub(in crate::journal) begin: Option<&'static str>,
    pub(in crate::journal) guards: Shape,
    pub(in crate::journal) entities: Shape,
    /// `$1`: name of a table. Returns what the catalogue says about it, line by line; nothing if there is no such
    /// table.
    pub(in crate::journal) shape: &'static str,
    pub(in crate::journal) write: Write,
    /// `$1`: deliveries. Returns event, route, epoch, attempt, void, result of those that have a guard.
    pub(in crate::journal) look: &'static str,
    /// `$1`: deliveries. Makes their guards void.
    pub(in crate::journal) give_up: &'static str,
    /// `$1`: event, route, epoch, result.
    pub(in crate::journal) keep_results: &'static str,
    /// In PostgreSQL's numbers. `$1`: event, `$2`: route, `$3`: epoch that the guards are behind; `$4`: age in
    /// microseconds; `$5`: journal; `$6`: limit; `$7`: the time by this node's clock. Returns event, route, epoch.
    pub(in crate::journal) aged: &'static str,
    /// `$1`: deliveries.
    pub(in crate::journal) forget: &'static str,
    /// `$1`: names; then journal, scope. Writes those that are not known yet.
    pub(in crate::journal) add_entities: &'static str,
    /// `$1`: names; then journal, scope. Locks them, and returns entity, newest, last_at, state, version.
    pub(in crate::journal) lock_entities: &'static str,
    /// `$1`: entity, version, newest, last_at, state; then journal, scope.
    pub(in crate::journal) keep_entities: &'static str,
}

/// A table of ours, and what the catalogue must say about it.
pub(in crate::journal) struct Shape {
    pub(in crate::journal) name: &'static str,
    /// Separated by semicolons.
    pub(in crate::journal) lines: &'static str,
}

/// How guards are written. An attempt writes its guard if there is none, or a void one of an earlier attempt.
pub(in crate::journal) enum Write {
    /// One statement does it. `$1`: attempts; then journal, void. Returns event, route, epoch of the guards that it
    /// wrote.
    AtOnce(&'static str),
    /// The existing guards are looked at, and locked, before: the statements cannot tell which guards they wrote.
    AfterLook {
        /// `$1`: attempts that have no guard, `$2`: journal, `$3`: void.
        insert: &'static str,
        /// `$1`: attempts that replace a void guard, `$2`: journal, `$3`: void.
        replace: &'static str,
        /// The error code of an insert that meets a guard: another transaction wrote it since we looked.
        met: &'static str,
    },
}

/// A database of the user's.
#[expect(private_bounds, reason = "engines are this crate's own; users name the databases by their aliases")]
pub struct ExternalDatabase<E: Guards> {
    pool: Pool<E>,
    shown: String,
    /// Whether the guards were found sound since the last trouble.
    sound: AtomicBool,
    /// Whether they were ever there. Then they are not made anew: what they knew would be lost without notice.
    seen: AtomicBool,
}

#[expect(private_bounds, reason = "engines are this crate's own")]
impl<E: Guards> ExternalDatabase<E> {
    /// Reads the URL. Connects at the first use only, so that the gateway starts while the database is down.
    pub fn new(url: &str) -> Result<Self, OpenError> {
        let engine = Arc::new(E::new(url, HANDLER_TIME)?);
        let shown = engine.shown();
        let pool = Pool::new(engine, Purpose::Work, CONNECTIONS);
        Ok(Self { pool, shown, sound: AtomicBool::new(false), seen: AtomicBool::new(false) })
    }

    /// A connection to a database whose guards are there and as they should be.
    async fn ready(&self) -> EngineResult<Lent<'_, E>> {
        let mut session = self.pool.take().await?;
        if !self.sound.load(Ordering::Acquire) {
            self.prepare(&mut session).await?;
        }
        Ok(session)
    }

    async fn prepare(&self, session: &mut E::Session) -> EngineResult {
        let mut found = shapes::<E>(session).await?;
        if let Some((table, _)) = found.iter().find(|(_, lines)| lines.is_empty()) {
            if self.seen.load(Ordering::Acquire) {
                return Err(EngineError::other(format!(
                    "{} is gone, and with it the memory of what was applied; put it back, or restart the \
                     gateway to begin with an empty one",
                    table.name
                )));
            }
            E::make_tables(session).await?;
            tracing::info!(database = self.shown, "made the guards of effects: {}", E::GUARD.guards.name);
            found = shapes::<E>(session).await?;
        }
        self.seen.store(true, Ordering::Release);
        found.iter().try_for_each(|(table, lines)| check_shape(table, lines))?;
        self.sound.store(true, Ordering::Release);
        Ok(())
    }

    /// The guards are looked at anew before they are used again.
    fn doubt(&self, error: &EngineError) -> String {
        self.sound.store(false, Ordering::Release);
        format!("{}: {}", self.shown, error.message)
    }

    fn answer<'a, T: 'a>(
        &'a self,
        work: impl Future<Output = EngineResult<T>> + Send + 'a,
    ) -> Answer<'a, Result<T, String>> {
        Box::pin(async move { work.await.map_err(|error| self.doubt(&error)) })
    }
}

/// Our tables, each with what the catalogue says about it.
async fn shapes<E: Guards>(session: &mut E::Session) -> EngineResult<Vec<(Shape, Vec<String>)>> {
    let mut shapes = Vec::new();
    for table in [E::GUARD.guards, E::GUARD.entities] {
        let rows = session.rows(E::GUARD.shape, &[table.name.into()]).await?;
        let lines: EngineResult<Vec<String>> = rows.iter().map(|row| row.text(0)).collect();
        shapes.push((table, lines?));
    }
    session.commit_single().await?;
    Ok(shapes)
}

fn check_shape(table: &Shape, found: &[String]) -> EngineResult {
    let ours: Vec<&str> = table.lines.split("; ").collect();
    let missing = ours.iter().find(|line| !found.iter().any(|found| found == *line));
    let foreign = found.iter().find(|found| !ours.contains(&found.as_str()));
    let what = match (missing, foreign) {
        (Some(line), _) => format!("this is missing, or changed: {line}"),
        (None, Some(line)) => format!("this is not ours: {line}"),
        (None, None) => return Ok(()),
    };
    Err(EngineError::other(format!("{} has another shape than this version uses; {what}", table.name)))
}

impl<E: Guards> Guarded for ExternalDatabase<E> {
    fn shown(&self) -> &str {
        &self.shown
    }

    fn apply<'a>(&'a self, task: Task<'a>, claims: &'a [Claim]) -> Answer<'a, Vec<Applied>> {
        Box::pin(async move {
            let mut outcomes: Vec<Option<Applied>> = claims.iter().map(|_| None).collect();
            let rest = match batch::apply(self, task, claims, &mut outcomes).await {
                Ok(()) => Applied::Collided,
                Err(error) if error.is_collision() => Applied::Collided,
                // The outcomes that were known before the error stay.
                Err(error) => Applied::Unreached(self.doubt(&error)),
            };
            outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|| rest.clone())).collect()
        })
    }

    fn void<'a>(&'a self, journal: i64, fences: &'a [Fence]) -> Answer<'a, Result<Vec<Voided>, String>> {
        self.answer(async move {
            let mut session = self.ready().await?;
            guard::begin::<E>(&mut session).await?;
            let fences: Vec<&Fence> = fences.iter().collect();
            let standing = guard::write::<E>(&mut session, journal, true, &fences).await?;
            session.commit().await?;
            session.keep();
            let voided = standing.into_iter().map(|standing| match standing {
                Some(guard) if !guard.void => Voided::TookEffect(guard.result),
                _ => Voided::Done,
            });
            Ok(voided.collect())
        })
    }

    fn aged<'a>(&'a self, round: &'a Round) -> Answer<'a, Result<Vec<DeliveryId>, String>> {
        self.answer(async move {
            let mut session = self.ready().await?;
            let aged = guard::aged::<E>(&mut session, round).await?;
            session.commit_single().await?;
            session.keep();
            Ok(aged)
        })
    }

    fn forget<'a>(&'a self, deliveries: &'a [DeliveryId]) -> Answer<'a, Result<(), String>> {
        self.answer(async move {
            let mut session = self.ready().await?;
            guard::change_all::<E>(&mut session, E::GUARD.forget, deliveries).await?;
            session.commit_single().await?;
            session.keep();
            Ok(())
        })
    }

    fn rehearse<'a>(&'a self, statements: &'a SqlHandler) -> Answer<'a, Result<Vec<(usize, String)>, String>> {
        self.answer(async move {
            let mut session = self.pool.take().await?;
            let misfits = rehearse::rehearse::<E>(&mut session, statements).await?;
            session.keep();
            Ok(misfits.into_iter().map(|misfit| (misfit.statement, misfit.reason)).collect())
        })
    }
}
