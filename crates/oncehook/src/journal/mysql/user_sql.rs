//! The user's own statements, run on a worker's connection in the transaction that settles the delivery.
//!
//! Promises: values are bound, never written into the text; a statement is one of those that read or change rows, names no
//! table of ours, writes no table that cannot be rolled back, and cannot end the transaction; after the first error nothing
//! more is sent (a deadlock has ended the transaction, and what came next would stand alone). A connection on which a
//! statement used a variable (`@name`) or took a lock by name is not used again.
//!
//! After each of them the server says whether the transaction is still open. If it is not, a statement has ended it in spite of all
//! checks, and what it did may be committed: the delivery does not run again ([`Trouble::Ended`]).
//!
//! The result is what the last statement returned that returned rows: `RETURNING` (MariaDB), or a statement of its own such as
//! `SELECT LAST_INSERT_ID() AS id`. Where a handler asks for that, it is 0 unless this delivery's own statements made an id.
//!
//! Does not: look into functions, views and triggers of the user's; the server lets none of these end a transaction. Does not
//! call procedures, which can. Does not settle anything: what an error means for the delivery is the caller's to say.

use mysql_async::consts::{ColumnFlags, ColumnType};
use mysql_async::{Column, Row, Statement, Value as Raw};
use serde_json::Value;

use super::Mysql;
use super::connection::Session;
use super::engine_error::EngineError;
use super::many_rows::ManyRows;
use crate::delivery::{Failure, HandedEvent};
use crate::handler::sql::lexer::{self, Piece, pieces};
use crate::handler::{Dialect, Found, SqlHandler};
use crate::journal::server::user_sql::{self, Surroundings, UserSql, unquoted};
pub(super) use crate::journal::server::user_sql::{Ran, Trouble};
use crate::journal::server::value::Row as _;

/// The statements of a handler, checked and prepared.
pub(in crate::journal) struct Prepared {
    statements: Vec<Statement>,
    /// One of them asks for the id that was made last.
    asks_for_id: bool,
    /// A single statement that can be said of many deliveries at once.
    many: Option<ManyRows>,
    /// What is said of a delivery for which the first statement finds no row, if that one asks whether the others may run.
    deferral: Option<Failure>,
}

/// What a handler's statements are given, a list for each.
pub(in crate::journal) struct Bound(Vec<Vec<Raw>>);

/// Runs the statements of several deliveries, one after the other. Returns what each came to, or what stopped them: then the
/// transaction is spoilt. Errors of several are not kept, so `about` is for one.
async fn run(
    session: &mut Session,
    handler: &SqlHandler,
    prepared: &Prepared,
    deliveries: Vec<Bound>,
    about: Option<&HandedEvent>,
) -> Result<Vec<Ran>, Trouble> {
    let told_of = |error| Mysql::trouble_about(error, handler, about);
    let begun = session.is_in_transaction();
    if let Some(many) = prepared.many.as_ref().filter(|_| deliveries.len() > 1) {
        let count = deliveries.len();
        let rows: Vec<Vec<Raw>> = deliveries.into_iter().flat_map(|bound| bound.0).collect();
        session.insert(many.insert(), rows).await.map_err(told_of)?;
        still_open(session, begun, count)?;
        return Ok(vec![Ok(None); count]);
    }
    let mut results = Vec::with_capacity(deliveries.len());
    'deliveries: for bound in deliveries {
        if prepared.asks_for_id {
            session.row("SELECT LAST_INSERT_ID(0)", Vec::new()).await.map_err(Mysql::trouble)?;
        }
        let mut result = None;
        for (place, (statement, parameters)) in prepared.statements.iter().zip(bound.0).enumerate() {
            let rows = session.rows_of(statement, parameters).await.map_err(told_of)?;
            still_open(session, begun, results.len() + 1)?;
            if let Some(deferral) = prepared.deferral.as_ref().filter(|_| place == 0) {
                if rows.is_empty() {
                    results.push(Err(deferral.clone()));
                    continue 'deliveries;
                }
                // What it found is no result.
                continue;
            }
            result = user_sql::result(rows.iter().map(object))?.or(result);
        }
        results.push(Ok(result));
    }
    Ok(results)
}

/// That a transaction which was open is open after the statements of so many deliveries.
pub(super) fn still_open(session: &Session, begun: bool, ran: usize) -> Result<(), Trouble> {
    if begun && !session.is_in_transaction() { Err(Trouble::Ended(ran)) } else { Ok(()) }
}

/// The server prepares a statement anew by itself when its tables have changed. Preparing changes nothing and ends no
/// transaction.
impl UserSql for Mysql {
    type Prepared = Prepared;
    type Bound = Bound;
    type Statement = Statement;

    const DIALECT: Dialect = Dialect::Mysql;
    // A procedure may end the transaction, so `CALL` is not among them.
    const ALLOWED: &'static [&'static str] = &["select", "insert", "update", "delete", "replace", "with", "values"];
    const CODE: &'static str = "database error";

    fn forbidden(word: &str) -> Option<String> {
        match word {
            "outfile" | "dumpfile" | "load_file" => Some(format!("a handler may not touch files (`{word}`)")),
            _ if word.starts_with("oncehook_") => Some("a handler may not touch tables named oncehook_…".to_owned()),
            _ => None,
        }
    }

    async fn prepare_one(session: &mut Session, statement: &str) -> Result<Statement, Trouble> {
        if !session.is_known(statement) {
            if let Some(table) = cannot_roll_back(session, statement).await.map_err(Self::trouble)? {
                let reason = format!("table {table} cannot be rolled back; a handler needs InnoDB tables");
                return Err(Trouble::refused(reason));
            }
            session.make_known(statement);
        }
        if leaves_something(statement) {
            session.retire();
        }
        session.prepared(statement).await.map_err(Self::trouble)
    }

    async fn prepare(
        session: &mut Session,
        handler: &SqlHandler,
        _surroundings: Surroundings,
    ) -> Result<Prepared, Trouble> {
        let mut statements = Vec::with_capacity(handler.statements().len());
        let mut asks_for_id = false;
        for statement in handler.statements() {
            statements.push(Self::checked(session, statement.text()).await?);
            asks_for_id |= words(statement.text()).iter().any(|word| word == "last_insert_id");
        }
        let many = match handler.statements() {
            [only] if !only.parameters().is_empty() => ManyRows::of(only.text()),
            _ => None,
        };
        let deferral = handler.has_requirement().then(|| handler.deferral());
        Ok(Prepared { statements, asks_for_id, many, deferral })
    }

    fn bind(handler: &SqlHandler, _prepared: &Prepared, values: &[Found<'_>]) -> Result<Bound, Failure> {
        let bound = handler.statements().iter().map(|statement| {
            let parameters = statement.parameters().iter();
            parameters.map(|place| values.get(*place).map_or(Raw::NULL, parameter)).collect()
        });
        Ok(Bound(bound.collect()))
    }

    async fn run(
        session: &mut Session,
        handler: &SqlHandler,
        prepared: &Prepared,
        deliveries: Vec<Bound>,
        surroundings: Surroundings,
        about: Option<&HandedEvent>,
    ) -> Result<Vec<Ran>, Trouble> {
        let goes_on = surroundings == Surroundings::Batch && about.is_some();
        if goes_on {
            session.run("SAVEPOINT oncehook_effect").await.map_err(Trouble::Engine)?;
        }
        let ran = run(session, handler, prepared, deliveries, about).await;
        if goes_on && matches!(ran, Err(Trouble::Failed(_))) {
            // If the server has ended the transaction by itself, this fails, and nothing more is written.
            session.run("ROLLBACK TO SAVEPOINT oncehook_effect").await.map_err(Trouble::Engine)?;
        }
        ran
    }
}

/// A value on its way to the server. The type of the column is the server's to know: whole numbers go as numbers, other
/// numbers as text with all their digits, which fits a decimal column exactly.
fn parameter(found: &Found<'_>) -> Raw {
    match found {
        Found::Null => Raw::NULL,
        Found::Text(text) => Raw::from(text.as_bytes()),
        Found::Bytes(bytes) => Raw::from(*bytes),
        Found::Json(json) => json_parameter(json),
    }
}

fn json_parameter(json: &str) -> Raw {
    match json.as_bytes().first() {
        Some(b'n') => Raw::NULL,
        Some(b't') => Raw::Int(1),
        Some(b'f') => Raw::Int(0),
        Some(b'"') => Raw::from(unquoted(json).as_bytes()),
        _ => match (json.parse::<i64>(), json.parse::<u64>()) {
            (Ok(number), _) => Raw::Int(number),
            (_, Ok(number)) => Raw::UInt(number),
            _ => Raw::from(json.as_bytes()),
        },
    }
}

fn object(row: &Row) -> Value {
    let columns = row.columns_ref().iter().enumerate().map(|(place, column)| {
        let value = row.as_ref(place).map_or(Value::Null, |raw| value(raw, column));
        (column.name_str().into_owned(), value)
    });
    Value::Object(columns.collect())
}

/// The character set that means bytes.
const BINARY: u16 = 63;

/// A column's value. Numbers that JSON readers would round (`DECIMAL`) are text with all their digits.
fn value(raw: &Raw, column: &Column) -> Value {
    match raw {
        Raw::NULL => Value::Null,
        Raw::Int(number) => Value::from(*number),
        Raw::UInt(number) => Value::from(*number),
        Raw::Float(number) => Value::from(*number),
        Raw::Double(number) => Value::from(*number),
        Raw::Date(year, month, day, hour, minute, second, micros) => {
            let date = format!("{year:04}-{month:02}-{day:02}");
            Value::from(match column.column_type() {
                ColumnType::MYSQL_TYPE_DATE | ColumnType::MYSQL_TYPE_NEWDATE => date,
                _ => format!("{date}T{hour:02}:{minute:02}:{second:02}.{micros:06}"),
            })
        }
        Raw::Time(negative, days, hours, minutes, seconds, micros) => {
            let hours = days * 24 + u32::from(*hours);
            let sign = if *negative { "-" } else { "" };
            Value::from(format!("{sign}{hours:02}:{minutes:02}:{seconds:02}.{micros:06}"))
        }
        Raw::Bytes(bytes) => {
            let kind = column.column_type();
            let is_text = match kind {
                ColumnType::MYSQL_TYPE_DECIMAL | ColumnType::MYSQL_TYPE_NEWDECIMAL | ColumnType::MYSQL_TYPE_JSON => {
                    true
                }
                ColumnType::MYSQL_TYPE_BIT => false,
                _ => column.character_set() != BINARY || !column.flags().contains(ColumnFlags::BINARY_FLAG),
            };
            let read = std::str::from_utf8(bytes).ok().filter(|_| is_text).map(|text| match kind {
                ColumnType::MYSQL_TYPE_JSON => serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)),
                _ => Value::from(text),
            });
            // Bytes, and what is not UTF-8, so that nothing is lost.
            read.unwrap_or_else(|| Value::from(hex::encode(bytes)))
        }
    }
}

/// A table that a statement names and that does not take part in transactions, if there is one: what is written there stays
/// although the rest is undone.
async fn cannot_roll_back(session: &mut Session, statement: &str) -> Result<Option<String>, EngineError> {
    let names = Value::from_iter(words(statement)).to_string();
    let sql = "SELECT t.TABLE_NAME FROM information_schema.TABLES t
                WHERE t.TABLE_TYPE = 'BASE TABLE' AND t.TABLE_SCHEMA = DATABASE() AND t.ENGINE <> 'InnoDB'
                  AND t.TABLE_NAME IN (SELECT n.name FROM JSON_TABLE(?, '$[*]' COLUMNS (name VARCHAR(64) CHARACTER SET utf8mb3 PATH '$')) n)
                LIMIT 1";
    let row = session.row(sql, vec![names.into()]).await?;
    row.map(|row| row.text(0)).transpose()
}

/// Whether a statement may leave something in its session that outlives the transaction: a variable, or a lock by name.
fn leaves_something(text: &str) -> bool {
    pieces(text, Dialect::Mysql).unwrap_or_default().iter().any(|piece| match piece {
        Piece::Variable => true,
        Piece::Word(word) => word.eq_ignore_ascii_case("get_lock"),
        _ => false,
    })
}

/// The words of a statement that was not refused.
fn words(text: &str) -> Vec<String> {
    lexer::words(text, Dialect::Mysql).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r20_on_mysql_statements_that_are_not_about_rows_are_refused() {
        for text in [
            "COMMIT",
            "begin",
            " /* x */ RollBack",
            "SAVEPOINT a",
            "SET autocommit = 1",
            "DROP TABLE orders",
            "CREATE TABLE a (x INT)",
            "TRUNCATE orders",
            "CALL book(?)",
            "LOCK TABLES orders WRITE",
            "LOAD DATA INFILE 'x' INTO TABLE orders",
            "INSERT INTO oncehook_keys VALUES (1)",
            "DELETE FROM OnceHook_Events",
            "UPDATE `oncehook_deliveries` SET state = 'ready'",
            "SELECT 5--(SELECT COUNT(*) FROM oncehook_keys)",
            "SELECT 'a\\' FROM oncehook_keys -- '\\'' FROM oncehook_keys",
            "/*! COMMIT */",
            "SELECT 1 /*! INTO OUTFILE 'x' */",
            "SELECT 1 /*M!100000 INTO OUTFILE 'x' */",
            "SELECT 1 INTO OUTFILE 'x'",
            "",
        ] {
            assert!(Mysql::refusal(text).is_some(), "{text}");
        }
        for text in [
            "INSERT INTO orders VALUES (?, 'oncehook_keys') -- oncehook_keys",
            "# first\nSELECT * FROM shop",
            "WITH a AS (SELECT 1) SELECT * FROM a",
            "UPDATE orders SET note = 'it''s \\' oncehook_keys'",
            "SELECT \"oncehook_keys\", '/*! x */'",
            "REPLACE INTO orders VALUES (?)",
        ] {
            assert_eq!(Mysql::refusal(text), None, "{text}");
        }
    }

    #[test]
    fn what_outlives_a_transaction_is_seen() {
        for text in ["SELECT @a := 1", "SELECT id INTO @id FROM orders", "SELECT GET_LOCK('a', 1)", "SELECT @`a`"] {
            assert!(leaves_something(text), "{text}");
        }
        for text in ["SELECT @@version", "SELECT 'me@shop', \"@a\" /* @b */ -- @c", "SELECT 'get_lock'"] {
            assert!(!leaves_something(text), "{text}");
        }
    }

    #[test]
    fn json_becomes_what_the_server_understands() {
        let text = |text: &str| Raw::Bytes(text.as_bytes().to_vec());
        for (json, value) in [
            ("12.50", text("12.50")),
            ("1e3", text("1e3")),
            ("9007199254740993", Raw::Int(9_007_199_254_740_993)),
            ("18446744073709551615", Raw::UInt(u64::MAX)),
            ("123456789012345678901234567890", text("123456789012345678901234567890")),
            ("true", Raw::Int(1)),
            ("false", Raw::Int(0)),
            ("null", Raw::NULL),
            (r#""a\"b""#, text("a\"b")),
            (r#"{"a":1}"#, text(r#"{"a":1}"#)),
        ] {
            assert_eq!(json_parameter(json), value, "{json}");
        }
    }
}
