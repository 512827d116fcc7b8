//! What operators order, on PostgreSQL. While a day is dropped, orders wait.

use super::connection::{EngineError, Session, first_text, in_time};
use super::{Postgres, days};
use crate::delivery::RouteName;
use crate::journal::server::deliver::entity::unblock;
use crate::journal::sql::operate::Operates;

impl Operates for Session {
    async fn begin_order(&mut self, given: Option<i64>) -> Result<i64, EngineError> {
        let time = given.map_or_else(|| "oncehook.micros()".to_owned(), |given| given.to_string());
        let no_drop = format!("SELECT pg_advisory_xact_lock_shared({})", days::ORDERS);
        let begin = format!("BEGIN; SELECT {time}; SET LOCAL lock_timeout = 5000; {no_drop}");
        let answer = in_time(self.simple_query(&begin)).await?;
        first_text(&answer).and_then(|text| text.parse().ok()).ok_or_else(EngineError::damaged)
    }

    async fn unblock(&mut self, now: i64, route: &RouteName, entity: &str) -> Result<(), EngineError> {
        unblock::<Postgres>(self, now, route, &[(entity, 1)]).await
    }
}
