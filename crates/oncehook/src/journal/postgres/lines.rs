//! Lets deliveries go on after an operator's order.

use super::connection::{EngineError, Session};
use crate::delivery::RouteName;
use crate::ordering::NO_TIME;

/// Puts the first of those that wait for their turn in each line back into the queue, at most as many as are said. If it is not
/// their turn after all, they are taken out again when they are looked at.
pub(super) async fn let_go_on(
    session: &Session,
    given: Option<i64>,
    route: &RouteName,
    entities: &[(&str, usize)],
) -> Result<(), EngineError> {
    if entities.is_empty() {
        return Ok(());
    }
    let (entities, counts): (Vec<&str>, Vec<i64>) =
        entities.iter().map(|(entity, count)| (*entity, i64::try_from(*count).unwrap_or(i64::MAX))).unzip();
    session
        .change(
            "UPDATE oncehook.deliveries d SET run_at = coalesce($1::bigint, oncehook.micros())
               FROM (SELECT f.event, f.epoch FROM unnest($3::text[], $5::bigint[]) AS u(entity, count)
                      CROSS JOIN LATERAL (
                        SELECT event, epoch FROM oncehook.deliveries
                         WHERE route = $2 AND entity = u.entity AND state IN ('ready', 'retrying')
                           AND run_at + 0 = $4 -- by the line, not by the queue
                         ORDER BY version NULLS FIRST, event, epoch LIMIT u.count) f) AS n
              WHERE d.event = n.event AND d.route = $2 AND d.epoch = n.epoch AND d.run_at = $4
                -- Asked once for all: usually nobody waits.
                AND EXISTS (SELECT 1 FROM oncehook.deliveries
                             WHERE route = $2 AND blocked_at IS NOT NULL AND state IN ('ready', 'retrying'))",
            &[&given, &route.as_str(), &entities, &NO_TIME.0, &counts],
        )
        .await?;
    Ok(())
}
