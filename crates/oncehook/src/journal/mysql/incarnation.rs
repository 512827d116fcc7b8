//! Which life of the database this is. See [`Incarnation`](crate::journal::Incarnation).
//!
//! The name is made of what changes whenever committed rows may be gone:
//!
//! - who the server is (its id, name, port and directory): a promoted replica, or a dump restored elsewhere;
//! - when the ledger's table was made: a dump restored in its place;
//! - a row that every start of the server empties (`oncehook_life`, a table in memory): files that were put back need a start to be
//!   used. Whoever finds it empty writes a number there, drawn at random.
//!
//! So every restart of the server is another life, although nothing is lost by most of them. The caches are warmed again.
//!
//! What that leaves: a machine that is put back together with its memory looks the same.

use super::connection::Session;
use super::engine_error::EngineError;
use crate::journal::server::shared::random;
use crate::journal::server::value::Row as _;

/// What tells one life from another.
const SIGNS: &str = "SELECT CONCAT_WS(' ', @@server_id, @@hostname, @@port, @@datadir, DATABASE(),
         (SELECT CREATE_TIME FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'oncehook_keys')),
       (SELECT life FROM oncehook_life WHERE one = 1)";

/// The name of the present life.
pub(super) async fn name(session: &mut Session) -> Result<String, EngineError> {
    for _ in 0..3 {
        let row = session.row(SIGNS, Vec::new()).await?.ok_or_else(EngineError::damaged)?;
        let (server, life) = (row.text(0)?, row.maybe_int(1)?);
        session.run("ROLLBACK").await?;
        if let Some(life) = life {
            let digest = oncehook_verify::digest(format!("{server} {life}").as_bytes());
            return Ok(hex::encode(digest.get(..16).unwrap_or(&digest)));
        }
        // The server was started since. The first who says so names this life.
        let life = random() >> 1;
        let sql =
            "INSERT INTO oncehook_life (one, life) VALUES (1, ?) ON DUPLICATE KEY UPDATE life = oncehook_life.life";
        session.change(sql, vec![life.into()]).await?;
        session.run("COMMIT").await?;
    }
    Err(EngineError::other("the database does not tell its identity"))
}
