//! Does the ledger still remember? Asked at start-up, after a failure, and every minute (R44).
//!
//! A renamed column, a lost or folding unique key: each once made somebody's dedup fail silently. Here it is tried out in a
//! transaction that is rolled back, with the very statements that accept events, and the schema is compared with the one
//! that this program makes. Probe rows never become visible.

use bytes::Bytes;
use oncehook_verify::{EventKey, Integrity, UnixMicros};
use rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior, params};

use super::queries::Statements;
use super::schema;
use crate::event::{EventId, EventIds, NewEvent, SourceName};
use crate::journal::{PROBE_SOURCE, SelfTestError, Verdict, probe_keys};

pub(super) fn run(connection: &mut Connection, now: UnixMicros) -> Result<(), SelfTestError> {
    schema::check(connection).map_err(|error| SelfTestError(error.to_string()))?;
    let transaction = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .map_err(|error| SelfTestError(error.to_string()))?;
    let verdict = probe(&transaction, now);
    // Dropping the transaction would roll back too; here a failure to do so is seen.
    transaction.rollback().map_err(|error| SelfTestError(error.to_string()))?;
    verdict
}

fn probe(transaction: &Transaction<'_>, now: UnixMicros) -> Result<(), SelfTestError> {
    let (key, key_in_capitals) = probe_keys(now.0.unsigned_abs());
    let broken = |error: rusqlite::Error| SelfTestError(error.to_string());
    let mut ids = EventIds::above(i64::MAX - (1 << 20), 0);
    let mut statements = Statements::prepare(transaction).map_err(broken)?;
    let mut expect =
        |what: &str, key: &EventKey, digest: u8, wanted: Verdict| -> Result<EventId, SelfTestError> {
            let appended = statements.append(&mut ids, &event(key, digest, now), now).map_err(broken)?;
            if appended.verdict == wanted {
                Ok(appended.id)
            } else {
                Err(SelfTestError(format!("{what} was taken for {}", appended.verdict.as_str())))
            }
        };
    let first = expect("a new key", &key, 1, Verdict::New)?;
    let again = expect("a known key", &key, 1, Verdict::Duplicate)?;
    let other = expect("another body under a known key", &key, 2, Verdict::Conflict)?;
    expect("a key in capitals", &key_in_capitals, 1, Verdict::New)?;
    if first != again || first != other {
        return Err(SelfTestError("a known key led to another event".to_owned()));
    }
    refuses_by_name(transaction, &key, now)
}

/// A plain insert of a known key must fail, and must name the key's two columns.
fn refuses_by_name(
    transaction: &Transaction<'_>,
    key: &EventKey,
    now: UnixMicros,
) -> Result<(), SelfTestError> {
    let inserted = transaction.execute(
        "INSERT INTO oncehook_keys (source, key, event, digest, first_seen, expires_at)
         VALUES (?1, ?2, zeroblob(16), zeroblob(32), ?3, ?3)",
        params![PROBE_SOURCE, key.as_bytes(), now.0],
    );
    match inserted {
        Ok(_) => Err(SelfTestError("a known key was stored a second time".to_owned())),
        Err(rusqlite::Error::SqliteFailure(failure, Some(message)))
            if failure.code == ErrorCode::ConstraintViolation
                && message.contains("oncehook_keys.source, oncehook_keys.key") =>
        {
            Ok(())
        }
        Err(error) => Err(SelfTestError(format!("a known key was refused for another reason: {error}"))),
    }
}

fn event(key: &EventKey, digest: u8, now: UnixMicros) -> NewEvent {
    NewEvent {
        source: SourceName::probe(),
        key: key.clone(),
        key_signed: true,
        kind: None,
        entity: None,
        occurred_at: None,
        received_at: now,
        expires_at: now,
        integrity: Integrity::None,
        headers: Bytes::new(),
        body: Bytes::new(),
        digest: [digest; 32],
        quarantine: None,
        routes: Default::default(),
        peer: std::net::Ipv4Addr::UNSPECIFIED.into(),
    }
}
