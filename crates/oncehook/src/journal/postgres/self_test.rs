//! Does the ledger still remember? Asked at start-up, whenever a connection was lost, and every minute (R44).
//!
//! A renamed column, a lost, invalid or folding unique key: each once made somebody's dedup fail silently. Here it is
//! tried out in a transaction that is rolled back, with the very statements that accept events, and the catalogue is
//! compared with what this program makes. Probe rows never become visible.

use bytes::Bytes;
use oncehook_verify::{EventKey, Integrity, UnixMicros};
use tokio_postgres::error::SqlState;

use super::connection::{EngineError, Session};
use super::queries::{self, Candidate};
use super::schema;
use crate::event::{EventIds, NewEvent, SourceName};
use crate::journal::{PROBE_SOURCE, SelfTestError, probe_keys};

/// Ids of probes: above every real one for the next few thousand years.
const PROBES_ABOVE: i64 = i64::MAX - (1 << 20);

/// The constraint that makes a key unique.
const CONSTRAINT: &str = "keys_once";

pub(super) async fn run(session: &Session) -> Result<(), SelfTestError> {
    schema::check(session).await.map_err(|error| SelfTestError(error.to_string()))?;
    session.run("BEGIN").await.map_err(broken)?;
    let verdict = probe(session).await;
    session.run("ROLLBACK").await.map_err(broken)?;
    verdict
}

fn broken(error: EngineError) -> SelfTestError {
    SelfTestError(error.told)
}

async fn probe(session: &Session) -> Result<(), SelfTestError> {
    let mut nonce = [0; 8];
    // Without randomness two nodes that probe at once wait for each other for a moment, which is all.
    let _ = aws_lc_rs::rand::fill(&mut nonce);
    let nonce = u64::from_ne_bytes(nonce);
    let (key, capitals) = probe_keys(nonce);
    let mut ids = EventIds::above(PROBES_ABOVE, nonce);
    let now = UnixMicros(1);
    let (first, again, other) = (event(&key, 1), event(&key, 2), event(&capitals, 1));
    let (first_id, again_id, other_id) = (ids.next(now), ids.next(now), ids.next(now));
    let fail = |what: &str| Err(SelfTestError(what.to_owned()));

    let mut one = [Candidate { id: first_id, event: &first }];
    if !queries::append(session, Some(1), 0, true, &mut one).await.map_err(broken)?.contains(&first_id) {
        return fail("a new key was not stored");
    }
    let mut two = [Candidate { id: again_id, event: &again }, Candidate { id: other_id, event: &other }];
    let won = queries::append(session, Some(1), 0, true, &mut two).await.map_err(broken)?;
    if won.contains(&again_id) {
        return fail("a known key was stored a second time");
    }
    if !won.contains(&other_id) {
        return fail("a key in capitals was taken for the same key");
    }
    let asked = [(PROBE_SOURCE, key.as_bytes()), (PROBE_SOURCE, capitals.as_bytes())];
    let known = queries::first_ids(session, &asked).await.map_err(broken)?;
    let events: Vec<_> = [0, 1].map(|place| known.get(&place).map(|known| known.event)).to_vec();
    if events != [Some(first_id), Some(other_id)] {
        return fail("a known key led to another event");
    }
    refuses_by_name(session, &key).await
}

/// A plain insert of a known key must fail, and must name the constraint.
async fn refuses_by_name(session: &Session, key: &EventKey) -> Result<(), SelfTestError> {
    let sql = "INSERT INTO oncehook.keys (source, key, event, digest, first_seen, expires_at)
               VALUES ($1, $2, gen_random_uuid(), decode(repeat('00', 32), 'hex'), 1, 1)";
    match session.change(sql, &[&PROBE_SOURCE, &key.as_bytes()]).await {
        Ok(_) => Err(SelfTestError("a known key was stored a second time".to_owned())),
        Err(error)
            if error.code() == Some(&SqlState::UNIQUE_VIOLATION)
                && error.constraint.as_deref() == Some(CONSTRAINT) =>
        {
            Ok(())
        }
        Err(error) => Err(SelfTestError(format!("a known key was refused for another reason: {error}"))),
    }
}

fn event(key: &EventKey, digest: u8) -> NewEvent {
    NewEvent {
        id: None,
        source: SourceName::probe(),
        key: key.clone(),
        key_signed: true,
        kind: None,
        entity: None,
        occurred_at: None,
        version: None,
        received_at: UnixMicros(1),
        expires_at: UnixMicros(1),
        integrity: Integrity::None,
        headers: Bytes::new(),
        body: Bytes::new(),
        digest: [digest; 32],
        quarantine: None,
        routes: Default::default(),
        by_entity: false,
        peer: std::net::Ipv4Addr::UNSPECIFIED.into(),
    }
}
