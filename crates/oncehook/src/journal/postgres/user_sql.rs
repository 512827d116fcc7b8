//! The user's own statements, run on a worker's connection in the transaction that settles the delivery.
//!
//! Promises: values are bound, never written into the text; a statement is one of those that read or change rows, names
//! nothing of schemas `oncehook` and `oncehook_guard`, and ends after the time a handler has (`statement_timeout`). Tables are found by the
//! search path of the user's role; ours is not in it.
//!
//! They run behind a savepoint. If it is gone afterwards, a statement has ended the transaction in spite of all checks, and what it
//! did may be committed: the delivery does not run again ([`Trouble::Ended`]).
//!
//! Does not: look into functions, views and triggers of the user's, nor into texts that a function runs as SQL. Whoever lets
//! a function end sessions, change settings or write into our schema by a detour can do harm; a role of its own for the
//! journal's tables is the stronger fence.
//! Does not settle anything either: what an error means for the delivery is the caller's to say.

use std::borrow::Cow;
use std::error::Error;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use oncehook_verify::UnixMicros;
use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{Format, FromSql, IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Row, Statement};

use super::Postgres;
use super::connection::{EngineError, Session, in_time};
use super::wrapped::{self, Wrapped};
use crate::delivery::{Cause, Failure, HandedEvent};
use crate::handler::{Dialect, Found, SqlHandler};
use crate::journal::server::user_sql::{self, Surroundings, UserSql, unquoted};
pub(super) use crate::journal::server::user_sql::{Ran, Trouble};

/// The statements of a handler, ready to run.
pub(in crate::journal) struct Prepared {
    statements: Vec<Statement>,
    /// All of them for many deliveries at once.
    at_once: Option<Arc<Wrapped>>,
}

impl Prepared {
    /// Whether they can only succeed without a result, or fail.
    pub(super) fn tells_nothing(&self) -> bool {
        self.statements.iter().all(|statement| statement.columns().is_empty())
    }
}

/// What a handler's statements are given: a text for each parameter, or null.
pub(in crate::journal) struct Bound(Vec<Vec<Parameter>>);

/// What is set while the user's statements run, and what afterwards.
#[derive(Clone, Copy)]
pub(super) struct Settings {
    pub(super) theirs: &'static str,
    pub(super) ours: &'static str,
}

/// Our own statements are planned once for a connection: all they look up stands in an index, row by row. Plans that read a
/// whole table (to scan, sort, hash or merge it) are not to be chosen, however small it was when they were made. The user's
/// statements are planned as the server likes.
pub(super) const OUR_PLANS: &str = "SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL enable_seqscan = off;
    SET LOCAL enable_bitmapscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";
const USER_PLANS: &str = "SET LOCAL plan_cache_mode TO DEFAULT; SET LOCAL enable_seqscan TO DEFAULT;
    SET LOCAL enable_bitmapscan TO DEFAULT; SET LOCAL enable_hashjoin TO DEFAULT; SET LOCAL enable_mergejoin TO DEFAULT";

pub(super) fn settings(surroundings: Surroundings) -> Settings {
    match surroundings {
        Surroundings::Batch => Settings { theirs: USER_PLANS, ours: OUR_PLANS },
        Surroundings::Leased => Settings {
            theirs: "SET LOCAL plan_cache_mode = auto",
            ours: "SET LOCAL plan_cache_mode = force_custom_plan",
        },
        Surroundings::External => super::guard::SETTINGS,
    }
}

impl UserSql for Postgres {
    type Prepared = Prepared;
    type Bound = Bound;
    type Statement = Statement;

    const DIALECT: Dialect = Dialect::Postgres;
    const ALLOWED: &'static [&'static str] =
        &["select", "insert", "update", "delete", "merge", "with", "values", "call"];
    const CODE: &'static str = "SQLSTATE";

    fn forbidden(word: &str) -> Option<String> {
        match word {
            "oncehook" | "oncehook_guard" => Some(format!("a handler may not touch schema {word}")),
            // Changes how the statements behind it are read.
            "set_config" => Some(format!("a handler may not change settings (`{word}`)")),
            _ => None,
        }
    }

    async fn prepare_one(session: &mut Session, statement: &str) -> Result<Statement, Trouble> {
        session.prepared(statement).await.map_err(Self::trouble)
    }

    /// Outside of a transaction: an error here must not end one.
    async fn prepare(
        session: &mut Session,
        handler: &SqlHandler,
        surroundings: Surroundings,
    ) -> Result<Prepared, Trouble> {
        let mut prepared = Prepared { statements: Vec::with_capacity(handler.statements().len()), at_once: None };
        for statement in handler.statements() {
            prepared.statements.push(Self::checked(session, statement.text()).await?);
        }
        if surroundings != Surroundings::Leased && !handler.has_requirement() {
            let texts = handler.statements().iter().map(|statement| statement.text());
            let statements: Vec<(&str, &Statement)> = texts.zip(&prepared.statements).collect();
            prepared.at_once = wrapped::wrap(session, &statements).await.map_err(Postgres::trouble)?;
        }
        Ok(prepared)
    }

    /// As the types of the parameters ask.
    fn bind(handler: &SqlHandler, prepared: &Prepared, values: &[Found<'_>]) -> Result<Bound, Failure> {
        let bound = handler.statements().iter().zip(&prepared.statements).map(|(statement, prepared)| {
            let parameters = statement.parameters().iter().zip(prepared.params());
            parameters.map(|(place, kind)| Parameter::new(values.get(*place).unwrap_or(&Found::Null), kind)).collect()
        });
        Ok(Bound(bound.collect::<Result<_, _>>()?))
    }

    /// Runs the statements of several deliveries, one after the other but without waiting in between: all are on their way
    /// before the first is answered. Returns what each came to. After [`Trouble::Failed`] and [`Trouble::Collision`] what all of them
    /// did is undone, and the transaction is as it was before.
    ///
    /// `about` is the event of the only delivery: its values are left out of errors. Those of several are not kept.
    async fn run(
        session: &mut Session,
        handler: &SqlHandler,
        prepared: &Prepared,
        deliveries: Vec<Bound>,
        surroundings: Surroundings,
        about: Option<&HandedEvent>,
    ) -> Result<Vec<Ran>, Trouble> {
        let session = &*session;
        let Settings { theirs, ours } = settings(surroundings);
        let (begin, end) = (format!("{theirs}; {SAVEPOINT}"), format!("{RELEASE}; {ours}"));
        // Statements that return no rows cannot return too many: then nothing has to be looked at before the savepoint goes.
        let early = prepared.tells_nothing().then_some(end.as_str());
        // Sent together: if the first fails, so does the rest.
        let (begun, (ran, released)) =
            tokio::join!(session.run(&begin), run_to_end(session, handler, prepared, &deliveries, early, about));
        begun.map_err(Trouble::Engine)?;
        if released.as_ref().is_some_and(|released| released.as_ref().is_err_and(|error| error.meaning.lost_savepoint))
        {
            return Err(Trouble::Ended(usize::MAX));
        }
        let mut outcomes = Vec::with_capacity(ran.len());
        for outcome in ran {
            outcomes.push(match outcome {
                Ok(result) => Ok(result),
                Err(Trouble::Deferred(failure)) => Err(failure),
                Err(trouble @ (Trouble::Engine(_) | Trouble::Ended(_))) => return Err(trouble),
                Err(trouble) => {
                    session.run(&format!("{UNDO}; {end}")).await.map_err(at_savepoint)?;
                    return Err(trouble);
                }
            });
        }
        match released {
            Some(released) => released.map_err(Trouble::Engine)?,
            None => session.run(&end).await.map_err(at_savepoint)?,
        }
        if outcomes.len() == deliveries.len() {
            Ok(outcomes)
        } else {
            Err(Trouble::Engine(EngineError::other("a statement was not answered")))
        }
    }

    /// In the transaction, which stays as it was.
    async fn renewed(
        session: &mut Session,
        handler: &SqlHandler,
        prepared: &Prepared,
        failure: &Failure,
    ) -> Option<Prepared> {
        const TRIED: &str = "SAVEPOINT oncehook_renewal";
        session.run(TRIED).await.ok()?;
        let mut statements = Vec::with_capacity(prepared.statements.len());
        for statement in handler.statements() {
            match session.prepared_anew(statement.text()).await {
                Ok(statement) => statements.push(statement),
                Err(_) => {
                    // If this fails too, so does what comes next.
                    let _ = session.run("ROLLBACK TO SAVEPOINT oncehook_renewal").await;
                    return None;
                }
            }
        }
        let kinds = |statement: &Statement| {
            let columns = statement.columns().iter().map(|column| column.type_().clone());
            (statement.params().to_vec(), columns.collect::<Vec<_>>())
        };
        let changed = statements.iter().map(kinds).ne(prepared.statements.iter().map(kinds));
        if !changed && !Self::is_outdated(failure) {
            return None;
        }
        // What stands for many of them has the old types.
        session.wrapped().clear();
        Some(Prepared { statements, at_once: None })
    }

    /// A plan does not fit its table any more (its columns are others), or is not there any more.
    fn is_outdated(failure: &Failure) -> bool {
        let codes = [SqlState::FEATURE_NOT_SUPPORTED, SqlState::INVALID_SQL_STATEMENT_NAME];
        codes.iter().any(|code| failure.message.ends_with(&format!("({})", code.code())))
    }
}

/// Stands where the user's statements begin.
pub(super) const SAVEPOINT: &str = "SAVEPOINT oncehook_effect";
pub(super) const RELEASE: &str = "RELEASE SAVEPOINT oncehook_effect";
pub(super) const UNDO: &str = "ROLLBACK TO SAVEPOINT oncehook_effect";

/// What it means that the savepoint could not be used.
pub(super) fn at_savepoint(error: EngineError) -> Trouble {
    if error.meaning.lost_savepoint { Trouble::Ended(usize::MAX) } else { Trouble::Engine(error) }
}

/// Sends what comes right behind the statements, if anything does.
async fn send(session: &Session, end: Option<&str>) -> Option<Result<(), EngineError>> {
    Some(session.run(end?).await)
}

/// What the statements of each came to, up to the first failure, and what the end did.
async fn run_to_end(
    session: &Session,
    handler: &SqlHandler,
    prepared: &Prepared,
    deliveries: &[Bound],
    end: Option<&str>,
    about: Option<&HandedEvent>,
) -> (Vec<Result<Option<String>, Trouble>>, Option<Result<(), EngineError>>) {
    let trouble = |error| Postgres::trouble_about(error, handler, about);
    let Prepared { statements, at_once } = prepared;
    if let Some(at_once) = at_once.as_ref().filter(|_| deliveries.len() > 1) {
        return run_at_once(session, at_once, deliveries, end).await;
    }
    let Some((requirement, effects)) = statements.split_first().filter(|_| handler.has_requirement()) else {
        let all: Vec<&[Vec<Parameter>]> = deliveries.iter().map(|bound| bound.0.as_slice()).collect();
        return tokio::join!(run_all(session, statements, &all, trouble), send(session, end));
    };
    // Those that have to wait are known before anything is done for any of them.
    let split: Vec<_> = deliveries.iter().map(|bound| bound.0.split_at(bound.0.len().min(1))).collect();
    let asked: Vec<&[Vec<Parameter>]> = split.iter().map(|(asked, _)| *asked).collect();
    let answers = run_all(session, std::slice::from_ref(requirement), &asked, trouble).await;
    let ready = |answer: &Result<Option<String>, Trouble>| matches!(answer, Ok(Some(_)));
    let done: Vec<&[Vec<Parameter>]> =
        split.iter().zip(&answers).filter(|(_, answer)| ready(answer)).map(|((_, done), _)| *done).collect();
    let (results, released) = tokio::join!(run_all(session, effects, &done, trouble), send(session, end));
    let mut results = results.into_iter();
    let deferred = || Err(Trouble::Deferred(handler.deferral()));
    let outcomes = answers.into_iter().map(|answer| match answer {
        Ok(Some(_)) => results.next().unwrap_or_else(deferred),
        Ok(None) => deferred(),
        Err(trouble) => Err(trouble),
    });
    (outcomes.collect(), released)
}

/// Runs the wrapped statements, for as many deliveries in a call as should be done in a fifth of the time a handler has: it counts for the
/// whole call.
async fn run_at_once(
    session: &Session,
    at_once: &Wrapped,
    deliveries: &[Bound],
    end: Option<&str>,
) -> (Vec<Result<Option<String>, Trouble>>, Option<Result<(), EngineError>>) {
    let mut outcomes = Vec::with_capacity(deliveries.len());
    let mut released = None;
    while let Some(rest) = deliveries.get(outcomes.len()..).filter(|rest| !rest.is_empty()) {
        let call = rest.get(..at_once.size(session.handler_time / 5)).unwrap_or(rest);
        let values = call.iter().map(|bound| bound.0.iter().flatten().map(|parameter| parameter.0.as_deref()));
        let called = if call.len() == rest.len() {
            let (called, ended) = tokio::join!(at_once.call(session, values), send(session, end));
            released = ended;
            called
        } else {
            at_once.call(session, values).await
        };
        if let Err(error) = called {
            outcomes.push(Err(Postgres::trouble(error)));
            break;
        }
        outcomes.extend(call.iter().map(|_| Ok(None)));
    }
    (outcomes, released)
}

async fn run_all(
    session: &Session,
    prepared: &[Statement],
    deliveries: &[&[Vec<Parameter>]],
    trouble: impl Fn(EngineError) -> Trouble,
) -> Vec<Result<Option<String>, Trouble>> {
    let statements = deliveries.iter().flat_map(|bound| prepared.iter().zip(*bound));
    let queries = statements.map(|(statement, parameters)| async move {
        let parameters: Vec<&(dyn ToSql + Sync)> =
            parameters.iter().map(|parameter| parameter as &(dyn ToSql + Sync)).collect();
        session.query(statement, &parameters).await
    });
    let mut answers = in_order(queries.collect()).await.into_iter();
    let one = |answers: &mut dyn Iterator<Item = Result<Vec<Row>, EngineError>>| {
        let mut result = None;
        let mut first_error = None;
        for answer in answers.take(prepared.len()) {
            match answer.map_err(&trouble).and_then(|rows| user_sql::result(rows.iter().map(object))) {
                Ok(told) => result = told.or(result),
                Err(trouble) => first_error = first_error.or(Some(trouble)),
            }
        }
        first_error.map_or(Ok(result), Err)
    };
    deliveries.iter().map(|_| one(&mut answers)).collect()
}

/// Starts all of them in order, then waits for each. A connection answers in the order it was asked.
async fn in_order<T>(
    queries: Vec<impl Future<Output = Result<T, tokio_postgres::Error>>>,
) -> Vec<Result<T, EngineError>> {
    let mut running: Vec<Pin<Box<_>>> = queries.into_iter().map(Box::pin).collect();
    let mut early: Vec<Option<Result<T, tokio_postgres::Error>>> = running.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (query, early) in running.iter_mut().zip(&mut early) {
            if let Poll::Ready(answer) = query.as_mut().poll(context) {
                *early = Some(answer);
            }
        }
        Poll::Ready(())
    })
    .await;
    let mut answers = Vec::with_capacity(running.len());
    for (query, early) in running.into_iter().zip(early) {
        answers.push(match early {
            Some(answer) => answer.map_err(EngineError::from),
            None => in_time(pin!(query)).await,
        });
    }
    answers
}

/// A value on its way to the server: in text form, which the server reads by the parameter's type.
#[derive(Debug)]
struct Parameter(Option<String>);

impl Parameter {
    fn new(found: &Found<'_>, kind: &Type) -> Result<Self, Failure> {
        let text = match found {
            Found::Null => None,
            Found::Text(text) => Some(in_bytes(Cow::Borrowed(text), kind)),
            Found::Bytes(bytes) if *kind == Type::BYTEA => Some(format!("\\x{}", hex::encode(bytes))),
            Found::Bytes(_) => {
                let message = format!("a value that is not UTF-8 cannot become {kind}");
                return Err(Failure::permanent(Cause::Poison, message));
            }
            Found::Json(json) => json_text(json, kind),
        };
        Ok(Self(text))
    }
}

/// Text for a column of bytes is the bytes of the text.
fn in_bytes(text: Cow<'_, str>, kind: &Type) -> String {
    if *kind == Type::BYTEA { format!("\\x{}", hex::encode(text.as_bytes())) } else { text.into_owned() }
}

/// A JSON value as a parameter of that type takes it. Nothing stands for null.
fn json_text(json: &str, kind: &Type) -> Option<String> {
    let json_column = *kind == Type::JSON || *kind == Type::JSONB;
    let whole = [Type::INT2, Type::INT4, Type::INT8].contains(kind);
    let numeric = whole || [Type::NUMERIC, Type::FLOAT4, Type::FLOAT8].contains(kind);
    match json.as_bytes().first() {
        Some(b'n') => None,
        _ if json_column => Some(json.to_owned()),
        Some(b'"') => Some(in_bytes(unquoted(json), kind)),
        Some(b't') if numeric => Some("1".to_owned()),
        Some(b'f') if numeric => Some("0".to_owned()),
        // 1e3 and 1.0 are whole numbers too.
        Some(b'-' | b'0'..=b'9') if whole && json.contains(['.', 'e', 'E']) => {
            let real = json.parse::<f64>().ok().filter(|real| real.fract() == 0.0 && real.abs() < 9e15);
            Some(real.map_or_else(|| json.to_owned(), |real| format!("{real:.0}")))
        }
        _ => Some(in_bytes(Cow::Borrowed(json), kind)),
    }
}

impl ToSql for Parameter {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match &self.0 {
            None => Ok(IsNull::Yes),
            Some(text) => {
                out.extend_from_slice(text.as_bytes());
                Ok(IsNull::No)
            }
        }
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    fn encode_format(&self, _: &Type) -> Format {
        Format::Text
    }

    to_sql_checked!();
}

fn object(row: &Row) -> Value {
    let columns = row.columns().iter().enumerate().map(|(place, column)| {
        let value = match row.try_get::<_, Option<Raw<'_>>>(place) {
            Ok(Some(Raw(bytes))) => value(bytes, column.type_()),
            Ok(None) | Err(_) => Value::Null,
        };
        (column.name().to_owned(), value)
    });
    Value::Object(columns.collect())
}

/// A column's bytes, whatever its type.
struct Raw<'r>(&'r [u8]);

impl<'r> FromSql<'r> for Raw<'r> {
    fn from_sql(_: &Type, raw: &'r [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}

/// A column's value. Numbers that JSON readers would round (`numeric`) are text with all their digits.
fn value(bytes: &[u8], kind: &Type) -> Value {
    let number = |width: usize| -> Option<i64> {
        let bytes: &[u8] = bytes.get(..width).filter(|_| bytes.len() == width)?;
        let sign = if bytes.first()? & 0x80 == 0 { 0_i64 } else { -1 };
        Some(bytes.iter().fold(sign, |whole, byte| (whole << 8) | i64::from(*byte)))
    };
    // Both count from the year 2000.
    const EPOCH: i64 = 946_684_800_000_000;
    const DAY: i64 = 86_400_000_000;
    let at = |micros: Option<i64>| micros.map(|micros| UnixMicros(micros.saturating_add(EPOCH)).to_rfc3339());
    let read = match *kind {
        Type::BOOL => bytes.first().map(|byte| Value::from(*byte != 0)),
        Type::INT2 => number(2).map(Value::from),
        Type::INT4 => number(4).map(Value::from),
        Type::INT8 => number(8).map(Value::from),
        Type::OID => number(4).map(|oid| Value::from(oid & 0xffff_ffff)),
        Type::FLOAT4 => bytes.try_into().ok().map(|bytes| Value::from(f32::from_be_bytes(bytes))),
        Type::FLOAT8 => bytes.try_into().ok().map(|bytes| Value::from(f64::from_be_bytes(bytes))),
        Type::NUMERIC => numeric(bytes).map(Value::from),
        Type::UUID => bytes.try_into().ok().map(|bytes| Value::from(uuid::Uuid::from_bytes(bytes).to_string())),
        Type::JSON => serde_json::from_slice(bytes).ok(),
        // The first byte is the version.
        Type::JSONB => bytes.get(1..).and_then(|json| serde_json::from_slice(json).ok()),
        Type::TIMESTAMPTZ => at(number(8)).map(Value::from),
        Type::TIMESTAMP => at(number(8)).map(|text| Value::from(text.trim_end_matches('Z'))),
        Type::DATE => {
            at(number(4).map(|days| days.saturating_mul(DAY))).and_then(|text| text.get(..10).map(Value::from))
        }
        Type::BYTEA => Some(Value::from(hex::encode(bytes))),
        _ => std::str::from_utf8(bytes).ok().map(Value::from),
    };
    // A type whose form is not known to us: its bytes, so that nothing is lost.
    read.unwrap_or_else(|| Value::from(hex::encode(bytes)))
}

/// The digits of a `numeric`: groups of four, the first one worth 10000 to the power of its weight.
fn numeric(bytes: &[u8]) -> Option<String> {
    let words: Vec<i16> = bytes.as_chunks().0.iter().map(|word| i16::from_be_bytes(*word)).collect();
    let [_, weight, sign, scale, groups @ ..] = words.as_slice() else { return None };
    let minus = match sign.cast_unsigned() {
        0xc000 => return Some("NaN".to_owned()),
        0xd000 => return Some("Infinity".to_owned()),
        0xf000 => return Some("-Infinity".to_owned()),
        0x4000 => "-",
        _ => "",
    };
    let digits: String = groups.iter().map(|group| format!("{group:04}")).collect();
    // How many digits stand before the point; if fewer than none, zeros come first behind it.
    let before = (i32::from(*weight) + 1) * 4;
    let (length, zeros) = (usize::try_from(before).unwrap_or(0), usize::try_from(-before).unwrap_or(0));
    let digits = "0".repeat(zeros) + &format!("{digits:0<length$}");
    let (whole, fraction) = digits.split_at_checked(length)?;
    let whole = whole.trim_start_matches('0');
    let whole = if whole.is_empty() { "0" } else { whole };
    let scale = usize::try_from(*scale).ok()?;
    let point = if scale > 0 { "." } else { "" };
    Some(format!("{minus}{whole}{point}{fraction:0<scale$.scale$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r20_statements_that_are_not_about_rows_are_refused() {
        for text in [
            "COMMIT",
            "begin",
            " /* x */ RollBack",
            "SAVEPOINT a",
            "SET search_path = oncehook",
            "DROP TABLE orders",
            "DO $$ BEGIN COMMIT; END $$",
            "INSERT INTO oncehook.keys VALUES (1)",
            "DELETE FROM OnceHook.events",
            "WITH a AS (SELECT 1) UPDATE \"oncehook\".deliveries SET state = 'ready'",
            "LOCK TABLE orders",
            "DELETE FROM oncehook_guard.oncehook_applied",
            "COPY orders TO PROGRAM 'true'",
            "/* /* */ SELECT */ COMMIT",
            "SELECT /* /* */ 1",
            r#"DELETE FROM U&"\006fncehook".keys"#,
            r"SELECT E'\'' FROM oncehook.keys WHERE 'a' = ' '",
            "SELECT $$'$$, count(*) FROM oncehook.keys WHERE $$'$$ = ''",
            "SELECT 1 --\r FROM oncehook.keys",
            "SELECT pg_catalog.set_config('search_path', 'oncehook', true)",
            "",
        ] {
            assert!(Postgres::refusal(text).is_some(), "{text}");
        }
        for text in [
            "INSERT INTO orders VALUES ($1, 'oncehook.keys') -- oncehook",
            "-- first\nSELECT * FROM oncehook_shop",
            "WITH a AS (SELECT 1) SELECT * FROM a",
            "UPDATE orders SET note = 'it''s oncehook'",
            "CALL book($1)",
            "SELECT /* /* oncehook */ */ $$ oncehook.keys $$, E'\\' oncehook'",
        ] {
            assert_eq!(Postgres::refusal(text), None, "{text}");
        }
    }

    #[test]
    fn json_becomes_what_the_parameter_asks_for() {
        let text = |json: &str, kind: Type| json_text(json, &kind);
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(text("12.50", Type::NUMERIC), some("12.50"));
        assert_eq!(text("1e3", Type::INT8), some("1000"));
        assert_eq!(text("1.5", Type::INT4), some("1.5"));
        assert_eq!(text("123456789012345678901234567890", Type::NUMERIC), some("123456789012345678901234567890"));
        assert_eq!(text("true", Type::INT4), some("1"));
        assert_eq!(text("true", Type::BOOL), some("true"));
        assert_eq!(text("null", Type::JSONB), None);
        assert_eq!(text(r#""a\"b""#, Type::TEXT), some("a\"b"));
        assert_eq!(text(r#""a\"b""#, Type::JSONB), some(r#""a\"b""#));
        assert_eq!(text(r#""ab""#, Type::BYTEA), some("\\x6162"));
        assert_eq!(text(r#"{"a":1}"#, Type::TEXT), some(r#"{"a":1}"#));
    }

    #[test]
    fn numerics_keep_their_digits() {
        let wire = |groups: &[i16], weight: i16, sign: u16, scale: i16| {
            let head = [groups.len() as i16, weight, sign.cast_signed(), scale];
            let bytes: Vec<u8> = head.iter().chain(groups).flat_map(|word| word.to_be_bytes()).collect();
            numeric(&bytes).unwrap()
        };
        assert_eq!(wire(&[12, 5000], 0, 0, 2), "12.50");
        assert_eq!(wire(&[1], 1, 0, 0), "10000");
        assert_eq!(wire(&[1, 0, 7], 2, 0x4000, 0), "-100000007");
        assert_eq!(wire(&[12], -2, 0, 8), "0.00000012");
        assert_eq!(wire(&[], 0, 0, 0), "0");
        assert_eq!(wire(&[], 0, 0xc000, 0), "NaN");
    }
}
