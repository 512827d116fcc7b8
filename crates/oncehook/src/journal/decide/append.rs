//! What an append says of one event: new, quarantined, a duplicate or a conflict.
//!
//! Promises: the holder of the key decides, and nothing else. An event that holds its key itself gets its own verdict, also if
//! an earlier append stored it and the answer to that append got lost.
//!
//! Does not: find the holder. The unique key of a journal does that, inside the append.

use oncehook_verify::UnixMicros;

use crate::event::{EventId, NewEvent};
use crate::journal::{Appended, Verdict};

/// What the ledger knows of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Known {
    /// The event that holds the key.
    pub(crate) event: EventId,
    /// The digest of that event's body.
    pub(crate) digest: [u8; 32],
    /// Until when the key is remembered at least.
    pub(crate) expires_at: UnixMicros,
}

impl Known {
    /// What the ledger knows of the key of an event that is stored under this id.
    pub(crate) fn of(id: EventId, event: &NewEvent) -> Self {
        Self { event: id, digest: event.digest, expires_at: event.remembered_until(id) }
    }
}

/// Who holds the key of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    /// This event: it was stored just now.
    Stored(Known),
    /// Another event, or this one since an earlier append whose answer got lost.
    Known(Known),
    /// The holder could not be read.
    Unknown,
}

impl Holder {
    /// Who holds the key for every further copy of the event.
    pub(crate) fn once_stored(self) -> Self {
        if let Self::Stored(known) = self { Self::Known(known) } else { self }
    }
}

/// Rules about one event, given who holds its key. `None`: the outcome is unknown, and the sender must try again.
pub(crate) fn rule(event: &NewEvent, holder: Holder) -> Option<Appended> {
    let own = if event.quarantine.is_some() { Verdict::Quarantined } else { Verdict::New };
    let (known, verdict) = match holder {
        Holder::Stored(known) => (known, own),
        Holder::Known(known) if event.id == Some(known.event) => (known, own),
        Holder::Known(known) if event.digest == known.digest => (known, Verdict::Duplicate),
        Holder::Known(known) => (known, Verdict::Conflict),
        Holder::Unknown => return None,
    };
    Some(Appended { id: known.event, verdict, expires_at: known.expires_at })
}
