//! The spool's one table: events in the order in which they were accepted, each with a sum over all that it says.
//!
//! Promises: a row that reads back is the event that was written, bit for bit; a row that does not is named, never guessed.
//! (source, key, digest) is unique: a copy is counted at its row, another body under the key is a row of its own, which the
//! journal will find to be a conflict.

use aws_lc_rs::digest::{Context, Digest, SHA256};
use bytes::Bytes;
use oncehook_verify::{EventKey, Integrity, Quarantine, UnixMicros};
use rusqlite::types::FromSql;
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::Spooled;
use crate::delivery::RouteName;
use crate::event::{EventId, NewEvent, SourceName};
use crate::journal::sqlite::OpenError;

/// `once` in ASCII: what SQLite calls an application id.
const APPLICATION: i32 = 0x6f6e_6365;
const VERSION: i32 = 1;

/// What a row counts for beside its headers and body.
const ROW_BYTES: u64 = 512;

const SCHEMA: &str = "
CREATE TABLE oncehook_spool (
  seq         INTEGER PRIMARY KEY AUTOINCREMENT,
  id          BLOB    NOT NULL UNIQUE CHECK (length(id) = 16),
  source      TEXT    NOT NULL,
  key         BLOB    NOT NULL,
  digest      BLOB    NOT NULL CHECK (length(digest) = 32),
  key_signed  INTEGER NOT NULL,
  type        TEXT,
  entity      TEXT,
  occurred_at INTEGER,
  received_at INTEGER NOT NULL,
  expires_at  INTEGER NOT NULL,
  integrity   TEXT    NOT NULL,
  quarantine  TEXT,
  routes      TEXT    NOT NULL, -- names, parted by spaces
  peer        TEXT    NOT NULL,
  headers     BLOB    NOT NULL,
  body        BLOB    NOT NULL,
  copies      INTEGER NOT NULL DEFAULT 0,
  aside       TEXT, -- why it cannot be drained
  version     INTEGER,
  by_entity   INTEGER NOT NULL,
  sum         BLOB    NOT NULL,
  UNIQUE (source, key, digest)
) STRICT";

/// Makes the table in an empty file, or checks that the file is a spool, and sound.
pub(super) fn prepare(connection: &mut Connection) -> Result<(), OpenError> {
    let transaction = connection.transaction()?;
    let number = |name: &str| transaction.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    match (number("application_id")?, number("user_version")?) {
        (APPLICATION, VERSION) => {}
        (APPLICATION, version) => {
            return Err(OpenError::Schema(format!("the spool was made by another oncehook (version {version})")));
        }
        _ => {
            let objects: i64 = transaction.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
            if objects > 0 {
                return Err(OpenError::Schema("the file is a database, but not a spool".to_owned()));
            }
            transaction.execute_batch(SCHEMA)?;
            transaction.pragma_update(None, "application_id", APPLICATION)?;
            transaction.pragma_update(None, "user_version", VERSION)?;
        }
    }
    transaction.commit()?;
    let verdict: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    if verdict != "ok" {
        return Err(OpenError::Schema(format!("the spool's file is damaged: {verdict}")));
    }
    Ok(())
}

/// What the table holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Events that wait to be drained.
    pub(super) rows: u64,
    /// What they weigh, and those that were set aside.
    pub(super) bytes: u64,
    /// Events that cannot be drained.
    pub(super) aside: u64,
}

pub(super) fn counts(connection: &Connection) -> rusqlite::Result<Counts> {
    let sql = format!(
        "SELECT count(*) FILTER (WHERE aside IS NULL), coalesce(sum(length(headers) + length(body) + {ROW_BYTES}), 0),
                count(aside) FROM oncehook_spool"
    );
    connection.query_row(&sql, [], |row| {
        let count = |at: usize| row.get::<_, i64>(at).map(|count| u64::try_from(count).unwrap_or(0));
        Ok(Counts { rows: count(0)?, bytes: count(1)?, aside: count(2)? })
    })
}

/// What a new row for the event would weigh.
pub(super) fn weight(event: &NewEvent) -> u64 {
    (event.headers.len() + event.body.len()) as u64 + ROW_BYTES
}

/// The highest sequence among the ids.
pub(super) fn last_sequence(connection: &Connection) -> rusqlite::Result<i64> {
    let sql = "SELECT id FROM oncehook_spool ORDER BY id DESC LIMIT 1";
    let last = connection.query_row(sql, [], |row| row.get(0)).optional()?;
    Ok(last.map_or(0, |id| EventId::from_bytes(id).sequence()))
}

/// When the first event that waits was received.
pub(super) fn oldest(connection: &Connection) -> rusqlite::Result<Option<i64>> {
    let sql = "SELECT received_at FROM oncehook_spool WHERE aside IS NULL ORDER BY seq LIMIT 1";
    connection.prepare_cached(sql)?.query_row([], |row| row.get(0)).optional()
}

/// Why a row is set aside that does not say what was written.
pub(super) const DAMAGED: &str = "damaged";

/// What the spool knows of an event's key.
#[derive(Default)]
pub(super) struct Known {
    /// The first event of the key, and whether it has the same body.
    pub(super) first: Option<(EventId, bool)>,
    /// The sound row that holds this very event, if there is one.
    pub(super) row: Option<i64>,
    /// A row of the same event that was found damaged, and the event's id if that can still be read.
    pub(super) damaged: Option<(i64, Option<EventId>)>,
}

pub(super) fn recall(connection: &Connection, event: &NewEvent) -> rusqlite::Result<Known> {
    let mut statement = connection.prepare_cached(
        "SELECT seq, id, digest, aside FROM oncehook_spool WHERE source = ?1 AND key = ?2 ORDER BY seq",
    )?;
    let mut rows = statement.query(params![event.source.as_str(), event.key.as_bytes()])?;
    let mut known = Known::default();
    while let Some(row) = rows.next()? {
        let seq = row.get(0)?;
        let same = row.get_ref(2)?.as_bytes().is_ok_and(|digest| digest == event.digest);
        let id = row.get(1).map(EventId::from_bytes).ok();
        let damaged = row.get_ref(3)?.as_bytes().is_ok_and(|reason| reason == DAMAGED.as_bytes());
        match id.filter(|_| !damaged) {
            Some(id) => {
                known.first.get_or_insert((id, same));
                known.row = known.row.or(same.then_some(seq));
            }
            // A promise that cannot be kept by itself is no reason to call anything its copy.
            None => known.damaged = known.damaged.or(same.then_some((seq, id))),
        }
    }
    Ok(known)
}

pub(super) fn count_copy(connection: &Connection, seq: i64) -> rusqlite::Result<()> {
    connection.prepare_cached("UPDATE oncehook_spool SET copies = copies + 1 WHERE seq = ?1")?.execute([seq])?;
    Ok(())
}

pub(super) fn insert(connection: &Connection, id: EventId, event: &NewEvent) -> rusqlite::Result<()> {
    let routes: Vec<&str> = event.routes.iter().map(RouteName::as_str).collect();
    let sql = "INSERT INTO oncehook_spool (id, source, key, digest, key_signed, type, entity, occurred_at, received_at, expires_at,
                                           integrity, quarantine, routes, peer, headers, body, sum, version, by_entity)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19)";
    connection.prepare_cached(sql)?.execute(params![
        id.as_bytes(),
        event.source.as_str(),
        event.key.as_bytes(),
        event.digest,
        event.key_signed,
        event.kind,
        event.entity,
        event.occurred_at.map(|at| at.0),
        event.received_at.0,
        event.expires_at.0,
        event.integrity.as_str(),
        event.quarantine.map(Quarantine::as_str),
        routes.join(" "),
        event.peer.to_string(),
        &event.headers[..],
        &event.body[..],
        sum(id, event).as_ref(),
        event.version,
        event.by_entity,
    ])?;
    Ok(())
}

const COLUMNS: &str =
    "seq, id, source, key, digest, key_signed, type, entity, occurred_at, received_at, expires_at, integrity,
                       quarantine, routes, peer, headers, body, sum, copies, aside, version, by_entity";

/// The first events that wait, at most `limit` of them or this many bytes, but one at least; and the rows that are damaged.
pub(super) fn read(connection: &Connection, limit: usize, bytes: u64) -> rusqlite::Result<(Vec<Spooled>, Vec<i64>)> {
    let sql = format!("SELECT {COLUMNS} FROM oncehook_spool WHERE aside IS NULL ORDER BY seq LIMIT ?1");
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query([i64::try_from(limit).unwrap_or(i64::MAX)])?;
    let (mut sound, mut damaged, mut taken) = (Vec::new(), Vec::new(), 0);
    while let Some(row) = rows.next()? {
        let Some(spooled) = decode(row) else {
            damaged.push(row.get(0)?);
            continue;
        };
        taken += weight(&spooled.event);
        if !sound.is_empty() && taken > bytes {
            break;
        }
        sound.push(spooled);
    }
    Ok((sound, damaged))
}

/// The event that was answered this id.
pub(super) fn find(connection: &Connection, id: EventId) -> rusqlite::Result<Option<Spooled>> {
    let sql = format!("SELECT {COLUMNS} FROM oncehook_spool WHERE id = ?1");
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query([id.as_bytes()])?;
    Ok(rows.next()?.and_then(decode))
}

/// Deletes rows, whatever their state.
pub(super) fn delete(connection: &Connection, seqs: &[i64], counts: &mut Counts) -> rusqlite::Result<()> {
    let sql = format!(
        "DELETE FROM oncehook_spool WHERE seq = ?1 RETURNING length(headers) + length(body) + {ROW_BYTES}, aside IS NULL"
    );
    let mut statement = connection.prepare_cached(&sql)?;
    for seq in seqs {
        for row in statement.query_map([seq], |row| Ok((row.get::<_, i64>(0)?, row.get(1)?)))? {
            let (bytes, waited) = row?;
            let count = if waited { &mut counts.rows } else { &mut counts.aside };
            *count = count.saturating_sub(1);
            counts.bytes = counts.bytes.saturating_sub(bytes.unsigned_abs());
        }
    }
    Ok(())
}

/// Sets rows aside.
pub(super) fn set_aside(
    connection: &Connection,
    seqs: &[i64],
    reason: &str,
    counts: &mut Counts,
) -> rusqlite::Result<()> {
    let mut statement =
        connection.prepare_cached("UPDATE oncehook_spool SET aside = ?2 WHERE seq = ?1 AND aside IS NULL")?;
    for seq in seqs {
        let changed = statement.execute(params![seq, reason])? as u64;
        counts.rows = counts.rows.saturating_sub(changed);
        counts.aside += changed;
    }
    Ok(())
}

/// The event of a row, or nothing if the row does not say what was written. (A row that was read at all is at fault itself, not
/// the file.)
fn decode(row: &Row<'_>) -> Option<Spooled> {
    fn get<T: FromSql>(row: &Row<'_>, column: usize) -> Option<T> {
        row.get(column).ok()
    }
    let blob = |column| get::<Vec<u8>>(row, column).map(Bytes::from);
    let text = |column| get::<String>(row, column);
    let quarantine = match get::<Option<String>>(row, 12)? {
        Some(reason) => Some(Quarantine::parse(&reason)?),
        None => None,
    };
    let id = EventId::from_bytes(get(row, 1)?);
    let event = NewEvent {
        id: Some(id),
        source: SourceName::new(&text(2)?).ok()?,
        key: EventKey::from_bytes(&blob(3)?)?,
        key_signed: get(row, 5)?,
        kind: get(row, 6)?,
        entity: get(row, 7)?,
        occurred_at: get::<Option<i64>>(row, 8)?.map(UnixMicros),
        version: get(row, 20)?,
        by_entity: get(row, 21)?,
        received_at: UnixMicros(get(row, 9)?),
        expires_at: UnixMicros(get(row, 10)?),
        integrity: Integrity::parse(&text(11)?)?,
        headers: blob(15)?,
        body: blob(16)?,
        digest: get(row, 4)?,
        quarantine,
        routes: text(13)?.split_ascii_whitespace().map(RouteName::new).collect::<Result<_, _>>().ok()?,
        peer: text(14)?.parse().ok()?,
    };
    let copies = u64::try_from(get::<i64>(row, 18)?).unwrap_or(0);
    let sound = blob(17)? == sum(id, &event).as_ref();
    sound.then_some(Spooled { seq: get(row, 0)?, id, event, copies, aside: get(row, 19)? })
}

/// A digest of all that a row says, each part with its length.
fn sum(id: EventId, event: &NewEvent) -> Digest {
    let mut context = Context::new(&SHA256);
    let mut add = |part: &[u8]| {
        context.update(&(part.len() as u64).to_le_bytes());
        context.update(part);
    };
    add(id.as_bytes());
    add(event.source.as_str().as_bytes());
    add(event.key.as_bytes());
    add(&event.digest);
    add(&[u8::from(event.key_signed)]);
    for text in [event.kind.as_deref(), event.entity.as_deref(), event.quarantine.map(Quarantine::as_str)] {
        add(&[u8::from(text.is_some())]);
        add(text.unwrap_or_default().as_bytes());
    }
    add(&event.occurred_at.map_or(i64::MIN, |at| at.0).to_le_bytes());
    add(&event.version.unwrap_or(i64::MIN).to_le_bytes());
    add(&[u8::from(event.by_entity)]);
    add(&event.received_at.0.to_le_bytes());
    add(&event.expires_at.0.to_le_bytes());
    add(event.integrity.as_str().as_bytes());
    for route in &event.routes {
        add(route.as_str().as_bytes());
    }
    add(event.peer.to_string().as_bytes());
    add(&event.headers);
    add(&event.body);
    context.finish()
}
