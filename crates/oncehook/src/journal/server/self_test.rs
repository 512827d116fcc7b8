//! Does the ledger still refuse a known key? Asked at start-up, whenever a connection was lost, and every minute (R44).
//!
//! A renamed column, a lost, invalid or folding unique key: each once made a receiver's dedup fail silently. Here it is tried
//! in a transaction that is rolled back, with the very statements that accept events, and the catalogue is compared with what
//! this program makes. Probe rows never become visible.

use oncehook_verify::UnixMicros;

use super::append::Appends;
use super::engine::{AppendContext, Candidate, Session};
use super::error::{EngineError, Tries};
use super::schema;
use super::shared::random;
use crate::event::{EventIds, NewEvent};
use crate::journal::decide::append::Holder;
use crate::journal::{PROBE_SOURCE, SelfTestError, probe_keys};

/// Ids of probes: above every real one for the next few thousand years.
const PROBES_ABOVE: i64 = i64::MAX - (1 << 20);

/// A shard that no lane uses: a probe must not wait for those who count.
const PROBE_SHARD: i64 = 32_767;

pub(super) async fn run<E: Appends>(engine: &E, session: &mut E::Session) -> Result<(), SelfTestError> {
    schema::check::<E>(session).await.map_err(|error| SelfTestError(error.to_string()))?;
    let mut tries = Tries::default();
    loop {
        let probed = match session.begin(Some(1)).await {
            Ok(_) => probe(engine, session).await,
            Err(error) => Err(error),
        };
        session.rollback().await.map_err(|error| SelfTestError(error.message))?;
        match probed {
            Ok(None) => return Ok(()),
            Ok(Some(broken)) => return Err(SelfTestError(broken)),
            // The database failed, or nodes that probe at once got in each other's way.
            Err(error) => tries.again(error).map_err(|error| SelfTestError(error.message))?,
        }
    }
}

/// What the ledger does that it must not, if there is something.
async fn probe<E: Appends>(engine: &E, session: &mut E::Session) -> Result<Option<String>, EngineError> {
    // Without randomness two nodes that probe at once wait for each other for a moment, which is all.
    let nonce = random();
    let (key, capitals) = probe_keys(nonce);
    let mut ids = EventIds::above(PROBES_ABOVE, nonce);
    let mut candidate = |event| Candidate { id: ids.next(UnixMicros(1)), event };
    let event = |key, digest| NewEvent::probe(key, digest, UnixMicros(1));
    let (first, again, other) = (event(&key, 1), event(&key, 2), event(&capitals, 1));
    let (first, again, other) = (candidate(&first), candidate(&again), candidate(&other));
    let fail = |what: &str| Ok(Some(what.to_owned()));
    let context = AppendContext { given: Some(1), about_now: i64::MAX >> 1, shard: PROBE_SHARD };
    let mut memory = E::careful();

    let stored = engine.append(session, &mut memory, context, &[first]).await?;
    if stored.holders != [Holder::Stored(first.known())] {
        return fail("a new key was not stored");
    }
    let stored = engine.append(session, &mut memory, context, &[again, other]).await?;
    match stored.holders.as_slice() {
        [Holder::Stored(_), _] => return fail("a known key was stored a second time"),
        [_, Holder::Known(_)] => return fail("a key in capitals was taken for the same key"),
        [Holder::Known(known), Holder::Stored(_)] if *known == first.known() => {}
        _ => return fail("a known key led to another event"),
    }
    // A plain insert must fail, and must name the constraint.
    match session.change(E::APPEND.insert_key, &[PROBE_SOURCE.into(), (&key).into()]).await {
        Ok(_) => fail("a known key was stored a second time"),
        Err(error) if E::is_refused_key(&error) => Ok(None),
        Err(error) if error.is_collision() => Err(error),
        Err(error) => fail(&format!("a known key was refused for another reason: {error}")),
    }
}
