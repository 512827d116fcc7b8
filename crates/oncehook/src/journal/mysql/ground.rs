//! The ground a connection stands on: is what this server commits durable, and does it know what we ask of it?
//!
//! Promises: settings are read back from the server, on every connection, and never assumed. The error names the setting.
//! Does not: look at the disk. A server on a memory file system keeps what it is set to keep.

use std::collections::HashMap;

use super::connection::Session;
use super::engine_error::EngineError;
use crate::journal::server::value::Row as _;

/// What a server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ground {
    pub(super) mariadb: bool,
    /// The largest packet it takes.
    pub(super) packet: usize,
}

const SETTINGS: &str =
    "SHOW VARIABLES WHERE Variable_name IN ('version', 'innodb_flush_log_at_trx_commit', 'innodb_doublewrite',
  'innodb_flush_method', 'log_bin', 'sync_binlog', 'binlog_format', 'read_only', 'innodb_read_only', 'wsrep_on',
  'max_allowed_packet')";

/// MySQL can be ordered to write no log at all, and says so in its status. MariaDB has no such line.
const REDO_LOG: &str = "SHOW GLOBAL STATUS LIKE 'Innodb_redo_log_enabled'";

pub(super) async fn check(session: &mut Session) -> Result<Ground, EngineError> {
    let mut settings = HashMap::new();
    for sql in [SETTINGS, REDO_LOG] {
        for row in session.ask(sql).await? {
            settings.insert(row.text(0)?.to_lowercase(), row.text(1)?);
        }
    }
    judge(&settings).map_err(EngineError::unsound)
}

/// All that is asked of the settings. The error is for the operator.
fn judge(settings: &HashMap<String, String>) -> Result<Ground, String> {
    let setting = |name: &str| settings.get(name).map(String::as_str).unwrap_or_default();
    let is_on = |name: &str| matches!(setting(name).to_uppercase().as_str(), "ON" | "1" | "YES");
    let version = setting("version");
    let mariadb = version.to_lowercase().contains("mariadb");
    let (name, least) = if mariadb { ("MariaDB", (10, 6, 0)) } else { ("MySQL", (8, 0, 16)) };
    if numbers(version) < least {
        let (major, minor, patch) = least;
        return Err(format!("this is {name} {version}; it needs {major}.{minor}.{patch} or later"));
    }
    if is_on("read_only") || is_on("innodb_read_only") {
        return Err("the server is read-only: a replica, not a primary".to_owned());
    }
    if is_on("wsrep_on") {
        return Err("the server is a node of a Galera cluster, which can undo what it has committed".to_owned());
    }
    let lost = "so an acknowledged event would not be durable";
    let flush = setting("innodb_flush_log_at_trx_commit");
    if flush != "1" {
        return Err(format!("innodb_flush_log_at_trx_commit is {flush}, {lost}"));
    }
    // DETECT_ONLY (MySQL) finds a torn page, and has no copy to repair it from.
    if matches!(setting("innodb_doublewrite").to_uppercase().as_str(), "OFF" | "0" | "DETECT_ONLY") {
        return Err(format!("innodb_doublewrite is {}, {lost}", setting("innodb_doublewrite")));
    }
    if setting("innodb_redo_log_enabled").eq_ignore_ascii_case("off") {
        return Err(format!("the redo log is off (ALTER INSTANCE DISABLE INNODB REDO_LOG), {lost}"));
    }
    let method = setting("innodb_flush_method");
    if matches!(method.to_lowercase().as_str(), "nosync" | "littlesync") {
        return Err(format!("innodb_flush_method is {method}, {lost}"));
    }
    if is_on("log_bin") {
        let sync = setting("sync_binlog");
        if sync != "1" {
            return Err(format!("log_bin is on and sync_binlog is {sync}, {lost}"));
        }
        if setting("binlog_format").eq_ignore_ascii_case("statement") {
            return Err("binlog_format is STATEMENT; READ COMMITTED needs ROW or MIXED".to_owned());
        }
    }
    let packet: usize = setting("max_allowed_packet").parse().unwrap_or(0);
    if packet < 1 << 20 {
        return Err(format!("max_allowed_packet is {packet}; it needs 1048576 or more"));
    }
    Ok(Ground { mariadb, packet })
}

/// `10.11.19-MariaDB-…` as numbers.
fn numbers(version: &str) -> (u32, u32, u32) {
    let mut parts = version.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    (next(), next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r3_settings_that_lose_commits_are_refused_by_name() {
        let sound = [
            ("version", "10.11.19-MariaDB-0+deb12u1"),
            ("innodb_flush_log_at_trx_commit", "1"),
            ("innodb_doublewrite", "ON"),
            ("log_bin", "OFF"),
            ("sync_binlog", "0"),
            ("read_only", "OFF"),
            ("max_allowed_packet", "16777216"),
        ];
        let with = |changes: &[(&str, &str)]| {
            let all = sound.iter().chain(changes);
            judge(&all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
        };
        assert_eq!(with(&[]), Ok(Ground { mariadb: true, packet: 16 << 20 }));
        let mysql = with(&[("version", "8.0.36"), ("log_bin", "ON"), ("sync_binlog", "1"), ("binlog_format", "ROW")]);
        assert_eq!(mysql, Ok(Ground { mariadb: false, packet: 16 << 20 }));
        for (changes, told) in [
            (&[("version", "10.5.9-MariaDB")][..], "10.6.0 or later"),
            (&[("version", "5.7.44")], "8.0.16 or later"),
            (&[("innodb_flush_log_at_trx_commit", "2")], "innodb_flush_log_at_trx_commit is 2"),
            (&[("innodb_doublewrite", "OFF")], "innodb_doublewrite"),
            (&[("version", "9.7.4"), ("innodb_doublewrite", "DETECT_ONLY")], "innodb_doublewrite is DETECT_ONLY"),
            (&[("version", "9.7.4"), ("innodb_redo_log_enabled", "OFF")], "the redo log is off"),
            (&[("innodb_flush_method", "nosync")], "innodb_flush_method"),
            (&[("log_bin", "ON")], "sync_binlog is 0"),
            (&[("log_bin", "ON"), ("sync_binlog", "1"), ("binlog_format", "STATEMENT")], "binlog_format"),
            (&[("read_only", "ON")], "read-only"),
            (&[("wsrep_on", "ON")], "Galera"),
            (&[("max_allowed_packet", "1024")], "max_allowed_packet"),
        ] {
            let refused = with(changes).unwrap_err();
            assert!(refused.contains(told), "{refused}");
        }
    }
}
