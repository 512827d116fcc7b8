//! Statements of the user's as functions of the session, so that one statement runs them for many deliveries.
//!
//! Sent by itself, a small statement costs the server as much for the answer as for the work. Here each becomes a function
//! (`pg_temp`, gone with the session), and one statement calls them for every delivery.
//!
//! Promises: the text is the user's, the parameters are its own `$1`, `$2`, …; deliveries keep their order, every statement runs by
//! itself and sees what those before it did, and is planned by the rules for prepared statements, as if all were sent one by one.
//!
//! Does not: wrap statements that return rows, or that take no value. Does not insist either: where the server lets us make no
//! function (no right to temporary objects, no `plpgsql`, a trigger on such commands), there is none. Does not say whose error it
//! was; the caller runs them one by one then.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio_postgres::Statement;
use tokio_postgres::types::{ToSql, Type};

use super::connection::{EngineError, Session, in_time};

/// Parts the user's text from what is around it.
const QUOTE: &str = "$oncehook_effect$";

/// A statement that runs several of the user's for each element of its arrays of text.
#[derive(Debug)]
pub(super) struct Wrapped {
    statement: Statement,
    /// How long a delivery took lately, in microseconds. Not known at first.
    pace: AtomicU64,
}

/// What stands for `statements`, given with their prepared forms. Outside of a transaction: an error here must not end one.
pub(super) async fn wrap(
    session: &Session,
    statements: &[(&str, &Statement)],
) -> Result<Option<Arc<Wrapped>>, EngineError> {
    let unfit = |(text, prepared): &(&str, &Statement)| !prepared.columns().is_empty() || text.contains(QUOTE);
    if statements.iter().any(unfit) || statements.iter().all(|(_, prepared)| prepared.params().is_empty()) {
        return Ok(None);
    }
    let texts = statements.iter().map(|(text, _)| *text).collect::<Vec<_>>().join(";");
    let known = session.wrapped().get(&texts).cloned();
    if let Some(known) = known {
        return Ok(known);
    }
    let first = session.wrapped().len();
    let made = make(session, first, statements).await;
    // What the server refuses once it would refuse every time.
    let made = match made {
        Ok(statement) => Some(Arc::new(Wrapped { statement, pace: AtomicU64::new(u64::MAX) })),
        Err(error) if error.blames_the_statement() => None,
        Err(error) => return Err(error),
    };
    session.wrapped().insert(texts, made.clone());
    Ok(made)
}

async fn make(session: &Session, set: usize, statements: &[(&str, &Statement)]) -> Result<Statement, EngineError> {
    let (mut calls, mut arrays) = (Vec::new(), Vec::new());
    for (place, (text, prepared)) in statements.iter().enumerate() {
        let name = format!("pg_temp.oncehook_effect_{set}_{place}");
        let types: Vec<String> = prepared.params().iter().map(named).collect();
        // The only other name that the text could meet is plpgsql's `found`, and a column goes before.
        let body = format!("#variable_conflict use_column\nBEGIN {text}\n; END");
        let function = format!(
            "CREATE OR REPLACE FUNCTION {name}({}) RETURNS void LANGUAGE plpgsql AS {QUOTE}{body}{QUOTE}",
            types.join(", ")
        );
        session.run(&function).await?;
        let values: Vec<String> = types
            .iter()
            .map(|kind| {
                arrays.push(format!("${}::text[]", arrays.len() + 1));
                format!("t.p{}::{kind}", arrays.len())
            })
            .collect();
        calls.push(format!("{name}({})", values.join(", ")));
    }
    let columns: Vec<String> = (1..=arrays.len()).map(|number| format!("p{number}")).collect();
    let sql = format!("SELECT {} FROM unnest({}) AS t({})", calls.join(", "), arrays.join(", "), columns.join(", "));
    in_time(session.prepare(&sql)).await
}

/// A type by its whole name.
fn named(kind: &Type) -> String {
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    format!("{}.{}", quoted(kind.schema()), quoted(kind.name()))
}

impl Wrapped {
    /// For how many deliveries to call it, so that it takes about so long.
    pub(super) fn size(&self, time: Duration) -> usize {
        let size = time.as_micros() / u128::from(self.pace.load(Ordering::Relaxed).max(1));
        usize::try_from(size).unwrap_or(usize::MAX).max(1)
    }

    /// Runs the statements for deliveries: for each the values of all statements, one after the other.
    pub(super) async fn call<'d>(
        &self,
        session: &Session,
        deliveries: impl ExactSizeIterator<Item = impl Iterator<Item = Option<&'d str>>>,
    ) -> Result<(), EngineError> {
        let (begun, count) = (Instant::now(), deliveries.len());
        let new = |_| Vec::with_capacity(count);
        let mut columns: Vec<Vec<Option<&str>>> = self.statement.params().iter().map(new).collect();
        for values in deliveries {
            for (column, value) in columns.iter_mut().zip(values) {
                column.push(value);
            }
        }
        let columns: Vec<&(dyn ToSql + Sync)> = columns.iter().map(|column| column as &(dyn ToSql + Sync)).collect();
        let ran = in_time(session.execute(&self.statement, &columns)).await;
        let pace = begun.elapsed().as_micros() / count.max(1) as u128;
        // Perhaps it was too slow: the next call begins with one again.
        let pace = if ran.is_ok() { u64::try_from(pace).unwrap_or(u64::MAX) } else { u64::MAX };
        self.pace.store(pace, Ordering::Relaxed);
        // The caller may have settled the deliveries already: not one of them is left out unnoticed.
        match ran? {
            rows if usize::try_from(rows) == Ok(count) => Ok(()),
            rows => Err(EngineError::other(format!("{rows} of {count} deliveries were run"))),
        }
    }
}
