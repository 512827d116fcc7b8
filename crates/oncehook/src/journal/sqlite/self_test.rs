//! Does the ledger still remember? Asked at start-up, after a failure, and every minute (R44).
//!
//! A renamed column, a lost or folding unique key: each once made somebody's dedup fail silently. Here it is tried out in a
//! transaction that is rolled back, with the very code that accepts events, and the schema is compared with the one
//! that this program makes. A probe key goes the whole way: staged with its batch, in the current generation, read back
//! from the event log as after a crash, half merged, in the table. At each place it must be recognised. Probe rows never
//! become visible; the ledger that is tried out is one of its own.

use std::sync::Arc;

use oncehook_verify::{EventKey, UnixMicros};
use rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior, params};

use super::ledger::Ledger;
use super::queries::Statements;
use super::schema;
use crate::event::{EventId, EventIds};
use crate::journal::{PROBE_SOURCE, SelfTestError, Verdict, probe_event, probe_keys};

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
    let mut probe = Probe {
        statements: Statements::prepare(transaction).map_err(broken)?,
        ids: EventIds::above(PROBES_ABOVE, 0),
        ledger: Ledger::new(2, Arc::default()),
        now,
    };
    probe.ledger.begin();
    let first = probe.expect("a new key", &key, 1, Verdict::New)?;
    probe.expect_known("in its batch", &key, first)?;
    let capitals = probe.expect("a key in capitals", &key_in_capitals, 1, Verdict::New)?;
    probe.ledger.committed();
    probe.ledger.begin();
    probe.expect_known("in memory", &key, first)?;
    probe.ledger = Ledger::new(2, Arc::default());
    probe.ledger.read_back(transaction, PROBES_ABOVE).map_err(broken)?;
    probe.expect_known("read back from the events", &key, first)?;
    // The capitals sort first, so the key itself is the one that is not in the table yet.
    probe.ledger.merge_now(transaction, 1).map_err(broken)?;
    probe.expect_known("half merged", &key, first)?;
    probe.expect_known("half merged, in capitals", &key_in_capitals, capitals)?;
    probe.ledger.merge_now(transaction, 1).map_err(broken)?;
    probe.ledger = Ledger::new(2, Arc::default());
    probe.expect_known("in the table", &key, first)?;
    probe.expect_known("in the table, in capitals", &key_in_capitals, capitals)?;
    refuses_by_name(transaction, &key, now)
}

/// Ids of probes: above every real one for the next few thousand years.
const PROBES_ABOVE: i64 = i64::MAX - (1 << 20);

struct Probe<'t> {
    statements: Statements<'t>,
    ids: EventIds,
    ledger: Ledger,
    now: UnixMicros,
}

impl Probe<'_> {
    fn expect(&mut self, what: &str, key: &EventKey, digest: u8, wanted: Verdict) -> Result<EventId, SelfTestError> {
        let event = probe_event(key, digest, self.now);
        let appended = self
            .statements
            .append(&mut self.ids, &mut self.ledger, &event, self.now)
            .map_err(|error| SelfTestError(error.to_string()))?;
        if appended.verdict == wanted {
            Ok(appended.id)
        } else {
            Err(SelfTestError(format!("{what} was taken for {}", appended.verdict.as_str())))
        }
    }

    /// The key is a duplicate with the same body and a conflict with another, both of the same event.
    fn expect_known(&mut self, place: &str, key: &EventKey, first: EventId) -> Result<(), SelfTestError> {
        let again = self.expect(&format!("a known key ({place})"), key, 1, Verdict::Duplicate)?;
        let what = format!("another body under a known key ({place})");
        let other = self.expect(&what, key, 2, Verdict::Conflict)?;
        if first == again && first == other {
            Ok(())
        } else {
            Err(SelfTestError(format!("a known key ({place}) led to another event")))
        }
    }
}

/// A plain insert of a known key must fail, and must name the key's two columns.
fn refuses_by_name(transaction: &Transaction<'_>, key: &EventKey, now: UnixMicros) -> Result<(), SelfTestError> {
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
