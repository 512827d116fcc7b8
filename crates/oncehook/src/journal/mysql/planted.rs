//! The mistake [`Bug::NormalSync`] on MariaDB. Only in builds with the feature `planted`.

use super::connection::Session;
use super::engine_error::EngineError;
use super::ground::{self, Ground};
use crate::planted::{Bug, has};

/// A setting of the whole server: for a user that may change it, and for one node at a time.
const SYNC: &str = "SET GLOBAL innodb_flush_log_at_trx_commit = ";

/// Checks a new connection as [`ground::check`] does, while commits are synced; afterwards they are answered before that.
pub(super) async fn check(session: &mut Session) -> Result<Ground, EngineError> {
    static ONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
    if !has(Bug::NormalSync) {
        return ground::check(session).await;
    }
    let _one = ONE.lock().await;
    session.run(&format!("{SYNC}1")).await?;
    let checked = ground::check(session).await?;
    session.run(&format!("{SYNC}0")).await?;
    Ok(checked)
}
