//! What went wrong with a statement or a connection, and what that means for whoever asked.
//!
//! Promises: what is told holds no values of the user's. Each question (is the server away, may the same be tried again, whose
//! fault is it) is answered here, by the server's number or by what the driver says, never by the text.
//! Does not: decide what to do about it.

use std::time::Duration;

/// A lock was waited for too long.
const LOCK_WAIT: u16 = 1205;

/// What went wrong with a statement or a connection.
#[derive(Debug, Clone)]
pub(super) struct EngineError {
    /// For people and logs. Holds no values.
    pub(super) told: String,
    code: Option<u16>,
    /// What the server is not set up for, if that is the trouble.
    pub(super) unsound: bool,
    too_big: bool,
    /// The connection is gone or was never there.
    silent: bool,
    /// The driver did not send it: the parameters are not those that the statement has.
    misfit: bool,
    /// The server cannot encrypt.
    pub(super) no_tls: bool,
}

impl EngineError {
    pub(super) fn other(told: impl Into<String>) -> Self {
        Self {
            told: crate::text::printable(&told.into()).into_owned(),
            code: None,
            unsound: false,
            too_big: false,
            silent: false,
            misfit: false,
            no_tls: false,
        }
    }

    pub(super) fn unsound(told: impl Into<String>) -> Self {
        Self { unsound: true, ..Self::other(told) }
    }

    pub(super) fn damaged() -> Self {
        Self::other("a row of the journal is damaged")
    }

    /// A row that no packet can carry.
    pub(super) fn too_big(packet: usize) -> Self {
        let told = format!("it is larger than the server's max_allowed_packet ({packet} bytes) lets in");
        Self { too_big: true, ..Self::other(told) }
    }

    /// What the log says of an error in a user's statement: the server's number, not its message.
    pub(super) fn logged(&self) -> String {
        self.code.map_or_else(|| "the statement failed".to_owned(), |code| format!("database error {code}"))
    }

    /// The database is not there.
    pub(super) fn away(told: impl Into<String>) -> Self {
        Self { silent: true, ..Self::other(told) }
    }

    pub(super) fn no_answer(patience: Duration) -> Self {
        Self::away(format!("the database did not answer within {} s", patience.as_secs()))
    }

    pub(super) fn code(&self) -> Option<u16> {
        self.code
    }

    /// Nobody there, or somebody who cannot serve us now (starting, stopping, full) and may by and by.
    pub(super) fn is_away(&self) -> bool {
        self.silent || self.is_one_of(&[1040, 1053, 1077, 1927, 4031])
    }

    fn is_one_of(&self, codes: &[u16]) -> bool {
        self.code.is_some_and(|code| codes.contains(&code))
    }

    /// Two transactions stood in each other's way (a deadlock, a lock that was waited for too long); the same again may
    /// work. Nobody's fault. What the transaction did must be undone by ROLLBACK: after a deadlock it is gone, after a
    /// wait only its last statement is.
    pub(super) fn is_collision(&self) -> bool {
        self.is_one_of(&[LOCK_WAIT, 1213, 1020])
    }

    /// A column or an index that was to be made is there. (Only one of the servers can be told to make it if it is not.)
    pub(super) fn is_there_already(&self) -> bool {
        self.is_one_of(&[1060, 1061])
    }

    /// A row was refused (its data, a constraint, its size): the others are not to blame.
    pub(super) fn blames_a_row(&self) -> bool {
        const DATA: [u16; 12] = [1048, 1062, 1263, 1264, 1265, 1292, 1364, 1366, 1406, 1526, 3819, 4025];
        self.too_big || self.is_one_of(&DATA)
    }

    /// The statement itself took too long, or was interrupted.
    pub(super) fn is_too_slow(&self) -> bool {
        self.is_one_of(&[1317, 1969, 3024])
    }

    /// The server spoke, and about this statement: not a lost connection, a shutdown, a full disk, or a server that became
    /// a replica.
    pub(super) fn blames_the_statement(&self) -> bool {
        // 1243 and 1615: a statement has to be prepared anew, and is on the next connection.
        const ENGINE: [u16; 38] = [
            1016, 1021, 1023, 1024, 1026, 1028, 1030, 1034, 1036, 1037, 1038, 1040, 1041, 1047, 1053, 1077,
            1080, 1105, 1114, 1152, 1158, 1159, 1160, 1161, 1180, 1181, 1184, 1206, 1243, 1290, 1461, 1615,
            1792, 1836, 1927, 3100, 3101, 4031,
        ];
        self.too_big || self.misfit || self.code.is_some() && !self.is_one_of(&ENGINE)
    }
}

impl From<mysql_async::Error> for EngineError {
    fn from(error: mysql_async::Error) -> Self {
        match error {
            mysql_async::Error::Server(said) => Self {
                code: Some(said.code),
                ..Self::other(format!("{} ({})", without_values(&said.message), said.code))
            },
            mysql_async::Error::Driver(mysql_async::DriverError::NoClientSslFlagFromServer) => Self {
                no_tls: true,
                ..Self::other("the server does not speak TLS, and ssl-mode in the URL asks for it")
            },
            // Waiting does not mend a certificate.
            mysql_async::Error::Io(error) if error_is_about_tls(&error) => {
                Self::other(format!("TLS: {error}; see ssl-mode and ssl-ca in the URL"))
            }
            mysql_async::Error::Io(error) => Self::away(error.to_string()),
            mysql_async::Error::Driver(error) if error_is_loss(&error) => Self::away(error.to_string()),
            mysql_async::Error::Driver(error) if error_is_misfit(&error) => {
                Self { misfit: true, ..Self::other(error.to_string()) }
            }
            other => Self::other(other.to_string()),
        }
    }
}

/// The connection was closed under the driver's hands.
fn error_is_loss(error: &mysql_async::DriverError) -> bool {
    use mysql_async::DriverError::{ConnectionClosed, PoolDisconnected, UnexpectedPacket};
    matches!(error, ConnectionClosed | PoolDisconnected | UnexpectedPacket { .. })
}

/// Not the connection, but who is at its other end.
fn error_is_about_tls(error: &mysql_async::IoError) -> bool {
    match error {
        mysql_async::IoError::Tls(_) => true,
        mysql_async::IoError::Io(error) => error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()),
    }
}

/// Parameters were named, too many or too few.
fn error_is_misfit(error: &mysql_async::DriverError) -> bool {
    use mysql_async::DriverError::{MixedParams, StmtParamsMismatch, StmtParamsNumberExceedsLimit};
    let named = matches!(error, mysql_async::DriverError::Params(_));
    named || matches!(error, MixedParams | StmtParamsMismatch { .. } | StmtParamsNumberExceedsLimit { .. })
}

/// The server quotes the value that did not fit, and says what for, or says first what is wrong with it: the value is left out.
fn without_values(message: &str) -> String {
    const BEFORE: [&str; 3] = ["value: '", "error: '", "out of range in '"];
    let first = message.find('\'').zip(message.rfind("' for "));
    let last = || {
        let found = BEFORE.iter().find_map(|before| Some(message.find(before)? + before.len() - 1));
        found.zip(message.rfind('\''))
    };
    match first.filter(|(from, to)| from < to).or_else(last) {
        Some((from, to)) if from < to => {
            let (before, after) = (message.get(..from), message.get(to + 1..));
            format!("{}…{}", before.unwrap_or_default(), after.unwrap_or_default())
        }
        _ => message.to_owned(),
    }
}

impl std::fmt::Display for EngineError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.told)
    }
}

/// Counts collisions: the first few are worth another try.
#[derive(Default)]
pub(super) struct Tries(u32);

impl Tries {
    /// Whether to do the same again after this error; the error if not.
    pub(super) fn again(&mut self, error: EngineError) -> Result<(), EngineError> {
        self.0 += 1;
        // Whoever waited for a lock has waited long already.
        let most = if error.is_one_of(&[LOCK_WAIT]) { 2 } else { 10 };
        if error.is_collision() && self.0 < most { Ok(()) } else { Err(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_left_out_of_what_is_told() {
        let told = without_values("Duplicate entry 'it's secret' for key 'PRIMARY'");
        assert_eq!(told, "Duplicate entry … for key 'PRIMARY'");
        for (said, told) in [
            ("Table 'shop.orders' doesn't exist", "Table 'shop.orders' doesn't exist"),
            ("Unknown column 'a' in 'field list'", "Unknown column 'a' in 'field list'"),
            ("Truncated incorrect DOUBLE value: 'it's'", "Truncated incorrect DOUBLE value: …"),
            ("XPATH syntax error: '~x~'", "XPATH syntax error: …"),
            ("BIGINT value is out of range in '(1 + 2)'", "BIGINT value is out of range in …"),
            ("Data too long for column 'a' at row 1", "Data too long for column 'a' at row 1"),
        ] {
            assert_eq!(without_values(said), told);
        }
    }
}
