//! Does the ledger still remember? Asked at start-up, whenever a connection was lost, and every minute (R44).
//!
//! A renamed column, a lost or folding unique key: each once made somebody's dedup fail silently. Here it is tried out in a
//! transaction that is rolled back, with the very statements that accept events, and the catalogue is compared with what
//! this program makes. Probe rows never become visible.

use bytes::Bytes;
use oncehook_verify::{EventKey, Integrity, UnixMicros};

use super::connection::Session;
use super::engine_error::{EngineError, Tries};
use super::queries::{self, Candidate};
use super::schema;
use crate::event::{EventIds, NewEvent, SourceName};
use crate::journal::{PROBE_SOURCE, SelfTestError, probe_keys};

/// Ids of probes: above every real one for the next few thousand years.
const PROBES_ABOVE: i64 = i64::MAX - (1 << 20);

/// A duplicate that was refused (`ER_DUP_ENTRY`), and the key that refused it: the name of a primary key is given.
const REFUSED: (u16, &str) = (1062, "for key 'PRIMARY'");

/// What a probe can fail by.
enum Fault {
    /// The ledger does not do what it must.
    Broken(String),
    /// The database failed, or nodes that probe at once stood in each other's way.
    Engine(EngineError),
}

impl From<EngineError> for Fault {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

pub(super) async fn run(session: &mut Session) -> Result<(), SelfTestError> {
    schema::check(session).await.map_err(|error| SelfTestError(error.to_string()))?;
    let mut tries = Tries::default();
    loop {
        let verdict = probe(session).await;
        session.run("ROLLBACK").await.map_err(|error| SelfTestError(error.told))?;
        match verdict {
            Ok(()) => return Ok(()),
            Err(Fault::Broken(what)) => return Err(SelfTestError(what)),
            Err(Fault::Engine(error)) => tries.again(error).map_err(|error| SelfTestError(error.told))?,
        }
    }
}

async fn probe(session: &mut Session) -> Result<(), Fault> {
    let mut nonce = [0; 8];
    // Without randomness two nodes that probe at once wait for each other for a moment, which is all.
    let _ = aws_lc_rs::rand::fill(&mut nonce);
    let nonce = u64::from_ne_bytes(nonce);
    let (key, capitals) = probe_keys(nonce);
    let mut ids = EventIds::above(PROBES_ABOVE, nonce);
    let now = UnixMicros(1);
    let (first, again, other) = (event(&key, 1), event(&key, 2), event(&capitals, 1));
    let (first_id, again_id, other_id) = (ids.next(now), ids.next(now), ids.next(now));
    let fail = |what: &str| Err(Fault::Broken(what.to_owned()));
    // Nobody else's shard: a probe must not wait for those who count.
    let shard = u16::MAX;

    let one = [Candidate { id: first_id, event: &first }];
    let known = queries::append(session, Some(1), shard, &one).await?;
    if known.first().map(|ruling| ruling.known.event) != Some(first_id) {
        return fail("a new key was not stored");
    }
    let two = [Candidate { id: again_id, event: &again }, Candidate { id: other_id, event: &other }];
    let known = queries::append(session, Some(1), shard, &two).await?;
    let events: Vec<_> = known.iter().map(|ruling| ruling.known.event).collect();
    if events.first() == Some(&again_id) {
        return fail("a known key was stored a second time");
    }
    if events.get(1) != Some(&other_id) {
        return fail("a key in capitals was taken for the same key");
    }
    if events.first() != Some(&first_id) {
        return fail("a known key led to another event");
    }
    refuses_by_name(session, &key).await
}

/// A plain insert of a known key must fail, and must name the key that refused it.
async fn refuses_by_name(session: &mut Session, key: &EventKey) -> Result<(), Fault> {
    let sql = "INSERT INTO oncehook_keys (source, `key`, event, digest, first_seen, expires_at)
               VALUES (?, ?, REPEAT(x'00', 16), REPEAT(x'00', 32), 1, 1)";
    match session.change(sql, vec![PROBE_SOURCE.into(), key.as_bytes().into()]).await {
        Ok(_) => Err(Fault::Broken("a known key was stored a second time".to_owned())),
        // MySQL puts the table's name before that of the key.
        Err(error)
            if error.code() == Some(REFUSED.0)
                && error.told.replace("oncehook_keys.", "").contains(REFUSED.1) =>
        {
            Ok(())
        }
        Err(error) if error.is_collision() => Err(Fault::Engine(error)),
        Err(error) => Err(Fault::Broken(format!("a known key was refused for another reason: {error}"))),
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
        by_entity: false,
        received_at: UnixMicros(1),
        expires_at: UnixMicros(1),
        integrity: Integrity::None,
        headers: Bytes::new(),
        body: Bytes::new(),
        digest: [digest; 32],
        quarantine: None,
        routes: Default::default(),
        peer: std::net::Ipv4Addr::UNSPECIFIED.into(),
    }
}
