//! What operators order, on MariaDB and MySQL.

use super::Mysql;
use super::connection::Session;
use super::engine_error::EngineError;
use crate::delivery::RouteName;
use crate::journal::server::deliver::entity::unblock;
use crate::journal::sql::operate::Operates;

impl Operates for Session {
    const ENQUEUE: &'static str = "
        INSERT INTO oncehook_deliveries (event, route, epoch, state, run_at, entity, version)
        SELECT $2, $3, $4, 'ready', $1, l.entity, l.version
          FROM (SELECT 1) one
          LEFT JOIN (SELECT entity, version FROM oncehook_deliveries
                      WHERE event = $2 AND entity IS NOT NULL LIMIT 1) l ON TRUE
        ON DUPLICATE KEY UPDATE epoch = oncehook_deliveries.epoch";
    // A row that stays as it is does not count as affected.
    const PAUSE: &'static str = "INSERT INTO oncehook_pauses (at, kind, name) VALUES ($1, $2, $3)
                                 ON DUPLICATE KEY UPDATE at = oncehook_pauses.at";

    async fn unblock(&mut self, now: i64, route: &RouteName, entity: &str) -> Result<(), EngineError> {
        unblock::<Mysql>(self, now, route, &[(entity, 1)]).await
    }
}
