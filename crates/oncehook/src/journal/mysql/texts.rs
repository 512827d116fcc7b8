//! The texts of our statements in the driver's form.
//!
//! Our texts number their parameters (`$1`); the driver wants question marks in the order of use. A name in braces stands for one
//! of the [`FRAGMENTS`], with its arguments behind bars: `{fenced|$2}`. [`Texts`] translates, once for each text and connection.
//!
//! Does not: touch the user's statements.

use std::collections::HashMap;
use std::sync::Arc;

use mysql_async::Value;

use super::engine_error::EngineError;
use super::value::value;
use crate::journal::server::value::Param;

/// What a name in braces stands for; `@1` and `@2` are its arguments. A list of rows becomes a table `t`, whose places are
/// counted from 1.
const FRAGMENTS: &[(&str, &str)] = &[
    ("now", "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"),
    // A list of events.
    ("ids", "JSON_TABLE(@1, '$[*]' COLUMNS (id VARCHAR(32) PATH '$')) t"),
    // A list of names.
    ("names", "JSON_TABLE(@1, '$[*]' COLUMNS (name VARCHAR(256) CHARACTER SET utf8mb4 PATH '$')) t"),
    // A list of keys with their sources.
    (
        "keys",
        "JSON_TABLE(@1, '$[*]' COLUMNS (place FOR ORDINALITY, source VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[0]',
           name VARCHAR(510) PATH '$[1]')) t STRAIGHT_JOIN oncehook_keys k ON k.source = t.source AND k.`key` = UNHEX(t.name)",
    ),
    // A list of deliveries, perhaps with their attempts, and the deliveries `d`.
    (
        "fenced",
        "JSON_TABLE(@1, '$[*]' COLUMNS (place FOR ORDINALITY, event VARCHAR(32) PATH '$[0]',
           route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]', epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]')) t
         STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch",
    ),
    // A list of deliveries of one route, perhaps with their attempts.
    (
        "places",
        "JSON_TABLE(@1, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', epoch INT UNSIGNED PATH '$[1]',
           attempt INT UNSIGNED PATH '$[2]')) t",
    ),
    // The same, and the deliveries `d` of the route.
    (
        "deliveries",
        "{places|@1} STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = @2 AND d.epoch = t.epoch",
    ),
    // What is in the queue of an entity of that name (`l`), leased (`r`) or parked (`p`).
    ("line", "d.line = CONCAT('@1', CONVERT(t.name USING binary))"),
    // The columns of events `e`, with the result of the route before. A follow-up that is forced alone knows the result of the
    // epoch before.
    (
        "events",
        "SELECT e.id, e.source, e.`key`, e.type, e.entity, e.occurred_at, e.received_at, e.headers, e.body,
                IF(@1 IS NULL, NULL, (SELECT p.result FROM oncehook_deliveries p
                    WHERE p.event = e.id AND p.route = @1 AND p.epoch <= t.epoch AND p.state = 'succeeded'
                    ORDER BY p.epoch DESC LIMIT 1)), e.version, t.epoch FROM",
    ),
    // Attempts that have ended, as `SettleSql` lists them.
    (
        "ended",
        "JSON_TABLE($2, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET utf8mb4 PATH '$[1]',
           epoch INT UNSIGNED PATH '$[2]', attempt INT UNSIGNED PATH '$[3]', state VARCHAR(16) PATH '$[4]',
           wait BIGINT PATH '$[5]', result MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[6]',
           error MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[7]', cause VARCHAR(16) PATH '$[8]', counts INT PATH '$[9]',
           outcome VARCHAR(16) PATH '$[10]', row_error MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[11]')) t",
    ),
    // Settles them; more columns and the fence follow.
    (
        "settle",
        "UPDATE {ended}
         STRAIGHT_JOIN oncehook_deliveries d ON d.event = UNHEX(t.event) AND d.route = t.route AND d.epoch = t.epoch
            SET d.state = t.state, d.run_at = COALESCE($1 + t.wait, d.run_at), d.lease_until = NULL,
                d.settled_at = IF(t.wait IS NULL, $1, NULL), d.result = t.result, d.error = t.error, d.cause = t.cause,
                d.blocked_at = NULL, d.parked_at = IF(t.state = 'parked', COALESCE(d.parked_at, $1), NULL),",
    ),
    // The columns of the front of a queue.
    (
        "front",
        "SELECT d.event, d.route, d.epoch, d.attempt, d.entity, d.state, d.version, d.place = 0 AND d.place_at <= $3 FROM",
    ),
    // The first of each queue, found in the index alone, where a filter allows it. The limit has them found before they are
    // taken apart, or each would be looked for once per column.
    (
        "first",
        "SELECT LEFT(f.first, 16), $1, CAST(SUBSTR(f.first, 17) AS UNSIGNED), 0, f.name FROM
           (SELECT t.name, (SELECT CONCAT(d.event, d.epoch) FROM oncehook_deliveries d
                             WHERE {line|l} AND d.route = $1 @1 ORDER BY d.version, d.event, d.epoch LIMIT 1) AS first
              FROM {names|$2} @2 LIMIT 1000000) f WHERE f.first IS NOT NULL",
    ),
    // The front of one queue.
    (
        "more",
        "{front} oncehook_deliveries d WHERE d.line = CONCAT('l', CAST($2 AS BINARY)) AND d.route = $1 @1
          ORDER BY d.version, d.event, d.epoch LIMIT $5",
    ),
    // Deliveries as `row::due` reads them: of the event nothing is known yet, and the entity is not locked.
    (
        "lock_due",
        "SELECT event, NULL, NULL, NULL, NULL, epoch, attempt, attempt_limit, parked_at, entity IS NOT NULL, 0
           FROM oncehook_deliveries WHERE @1 FOR UPDATE SKIP LOCKED",
    ),
    // Attempts or deliveries of guards: event, route, epoch, and what comes fourth.
    (
        "guarded",
        "JSON_TABLE($1, '$[*]' COLUMNS (event VARCHAR(32) PATH '$[0]', route VARCHAR(64) CHARACTER SET ascii PATH '$[1]',
           epoch INT UNSIGNED PATH '$[2]', @1 PATH '$[3]')) t",
    ),
    // The same, and their guards `a`.
    (
        "guards",
        "{guarded|@1} STRAIGHT_JOIN oncehook_applied a @2
            ON a.event = UNHEX(t.event) AND a.route = t.route AND a.epoch = t.epoch",
    ),
    // An event's status, derived: quarantined, else unrouted, else the worst of its deliveries.
    (
        "status",
        "CASE WHEN EXISTS (SELECT 1 FROM oncehook_flags f WHERE f.event = e.id AND f.flag = 'quarantined') THEN 'quarantined'
              ELSE COALESCE((SELECT CONVERT(w.state USING utf8mb4) FROM oncehook_deliveries w WHERE w.event = e.id
                              ORDER BY FIELD(w.state, 'dead', 'parked', 'retrying', 'running', 'ready', 'superseded', 'skipped', 'succeeded')
                              LIMIT 1), 'unrouted') END",
    ),
];

/// The texts of a connection in the driver's form.
#[derive(Debug, Default)]
pub(super) struct Texts(HashMap<String, Arc<Text>>);

#[derive(Debug)]
struct Text {
    text: String,
    /// Which parameter each question mark stands for, counted from 0.
    order: Vec<usize>,
}

impl Texts {
    /// A text with question marks, and its values in their order.
    pub(super) fn bind(&mut self, sql: &str, params: &[Param<'_>]) -> Result<(String, Vec<Value>), EngineError> {
        let text = match self.0.get(sql) {
            Some(text) => Arc::clone(text),
            None => {
                let text = Arc::new(translate(sql));
                self.0.insert(sql.to_owned(), Arc::clone(&text));
                text
            }
        };
        let values = text.order.iter().map(|place| params.get(*place).map(value));
        let values: Option<Vec<Value>> = values.collect();
        let values = values.ok_or_else(|| EngineError::other("a statement lacks a parameter"))?;
        Ok((text.text.clone(), values))
    }
}

/// Puts fragments in the place of their names, the innermost first. An unknown name stays, and the server refuses it.
fn expand(sql: &str) -> String {
    let mut sql = sql.to_owned();
    while let Some((before, rest)) = sql.rsplit_once('{')
        && let Some((inside, behind)) = rest.split_once('}')
    {
        let (name, arguments) = inside.split_once('|').unwrap_or((inside, ""));
        let Some((_, fragment)) = FRAGMENTS.iter().find(|(known, _)| *known == name) else { break };
        let (first, second) = arguments.split_once('|').unwrap_or((arguments, ""));
        sql = format!("{before}{}{behind}", fragment.replace("@1", first).replace("@2", second));
    }
    sql
}

/// Replaces each `$n` by a question mark (`$[` is a JSON path), and the schema of a common text by the prefix of our tables.
fn translate(sql: &str) -> Text {
    let mut sql = expand(sql).replace("oncehook.", "oncehook_");
    if sql.contains("FOR UPDATE") {
        // MySQL does not lock rows in a statement that reads a JSON_TABLE beside them, unless it is a derived table.
        sql = sql.replace("JSON_TABLE(", "(SELECT * FROM JSON_TABLE(").replace(")) t", ")) t) t");
    }
    let mut pieces = sql.split('$');
    let mut text = pieces.next().unwrap_or_default().to_owned();
    let mut order = Vec::new();
    for piece in pieces {
        let digits = piece.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = piece.split_at(digits);
        match number.parse::<usize>() {
            Ok(number) => {
                order.push(number.saturating_sub(1));
                text.push('?');
            }
            Err(_) => text.push('$'),
        }
        text.push_str(rest);
    }
    Text { text, order }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::server::value::Column;

    #[test]
    fn parameters_are_bound_in_the_order_of_their_use() {
        let mut texts = Texts::default();
        let sql = "UPDATE JSON_TABLE($2, '$[*]' COLUMNS (a INT PATH '$[0]')) t SET b = $1, c = $1 + $10";
        let mut params = vec![Param::Int(7), Param::Table(vec![Column::ints([1, 2]), Column::texts(["x", "y"])])];
        params.extend((3..=10).map(Param::Int));
        let (text, values) = texts.bind(sql, &params).unwrap();
        assert_eq!(text, "UPDATE JSON_TABLE(?, '$[*]' COLUMNS (a INT PATH '$[0]')) t SET b = ?, c = ? + ?");
        let list = Value::from(r#"[[1,"x"],[2,"y"]]"#);
        assert_eq!(values, [list, Value::from(7), Value::from(7), Value::from(10)]);
        assert!(texts.bind("SELECT $1", &[]).is_err());
        let ids = "JSON_TABLE($1, '$[*]' COLUMNS (id VARCHAR(32) PATH '$')) t";
        assert_eq!(
            expand("SELECT t.id FROM {ids|$1} WHERE {line|l}"),
            format!("SELECT t.id FROM {ids} WHERE {}", expand("{line|l}"))
        );
        assert!(FRAGMENTS.iter().all(|(_, text)| !expand(text).contains('{')), "every name is known");
    }
}
