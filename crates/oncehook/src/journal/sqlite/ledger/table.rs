//! Looking a key up in `oncehook_keys`: the exact answer for every key that has been merged.

use oncehook_verify::UnixMicros;
use rusqlite::{Connection, OptionalExtension, params};

use super::Known;
use crate::event::EventId;

pub(super) fn find(connection: &Connection, source: &str, key: &[u8]) -> Result<Option<Known>, rusqlite::Error> {
    connection
        .prepare_cached("SELECT event, digest, expires_at FROM oncehook_keys WHERE source = ?1 AND key = ?2")?
        .query_row(params![source, key], |row| {
            Ok(Known {
                event: EventId::from_bytes(row.get(0)?),
                digest: row.get(1)?,
                expires_at: UnixMicros(row.get(2)?),
            })
        })
        .optional()
}
