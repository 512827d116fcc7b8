//! What an error of the server or the driver means.
//!
//! Promises: the message holds no values of the user's. What it means is decided by the server's number or by what the driver
//! says, never by the text.

use mysql_async::{DriverError, Error};

pub(super) use crate::journal::server::error::EngineError;
use crate::journal::server::error::Meaning;

/// A lock was waited for too long.
const LOCK_WAIT: u16 = 1205;

/// A row was refused: its data, a constraint.
const DATA: [u16; 12] = [1048, 1062, 1263, 1264, 1265, 1292, 1364, 1366, 1406, 1526, 3819, 4025];

/// The server is in trouble, not the statement. 1243 and 1615: a statement has to be prepared anew, and is on the next connection.
const ENGINE: [u16; 38] = [
    1016, 1021, 1023, 1024, 1026, 1028, 1030, 1034, 1036, 1037, 1038, 1040, 1041, 1047, 1053, 1077, 1080, 1105, 1114,
    1152, 1158, 1159, 1160, 1161, 1180, 1181, 1184, 1206, 1243, 1290, 1461, 1615, 1792, 1836, 1927, 3100, 3101, 4031,
];

/// What an error of the server means. What the transaction of a collision did must be undone by ROLLBACK: after a deadlock the
/// transaction is gone, after a wait for a lock only its last statement is.
fn meaning(code: u16) -> Meaning {
    Meaning {
        away: [1040, 1053, 1077, 1927, 4031].contains(&code),
        collision: [LOCK_WAIT, 1213, 1020].contains(&code),
        lock_wait: code == LOCK_WAIT,
        row: DATA.contains(&code),
        slow: [1317, 1969, 3024].contains(&code),
        statement: !ENGINE.contains(&code),
        ..Meaning::default()
    }
}

/// A row that no packet can carry.
pub(super) fn too_big(packet: usize) -> EngineError {
    let message = format!("it is larger than the server's max_allowed_packet ({packet} bytes) lets in");
    EngineError::with(message, Meaning { row: true, statement: true, ..Meaning::default() })
}

impl From<mysql_async::Error> for EngineError {
    fn from(error: mysql_async::Error) -> Self {
        let statement = Meaning { statement: true, ..Meaning::default() };
        match error {
            Error::Server(said) => Self {
                code: Some(said.code.to_string()),
                ..Self::with(format!("{} ({})", without_values(&said.message), said.code), meaning(said.code))
            },
            Error::Driver(DriverError::NoClientSslFlagFromServer) => Self::with(
                "the server does not speak TLS, and ssl-mode in the URL asks for it",
                Meaning { no_tls: true, ..Meaning::default() },
            ),
            // Not the connection, but who is at its other end. Waiting does not mend a certificate.
            Error::Io(error) if is_about_tls(&error) => {
                Self::other(format!("TLS: {error}; see ssl-mode and ssl-ca in the URL"))
            }
            Error::Io(error) => Self::away(error.to_string()),
            // The connection was closed under the driver's hands.
            Error::Driver(
                error @ (DriverError::ConnectionClosed
                | DriverError::PoolDisconnected
                | DriverError::UnexpectedPacket { .. }),
            ) => Self::away(error.to_string()),
            // Parameters were named, too many or too few.
            Error::Driver(
                error @ (DriverError::MixedParams
                | DriverError::Params(_)
                | DriverError::StmtParamsMismatch { .. }
                | DriverError::StmtParamsNumberExceedsLimit { .. }),
            ) => Self::with(error.to_string(), statement),
            other => Self::other(other.to_string()),
        }
    }
}

fn is_about_tls(error: &mysql_async::IoError) -> bool {
    match error {
        mysql_async::IoError::Tls(_) => true,
        mysql_async::IoError::Io(error) => error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()),
    }
}

/// The server quotes the value that did not fit, and says what for, or says first what is wrong with it: the value is left out.
fn without_values(message: &str) -> String {
    const BEFORE: [&str; 5] = ["value: '", "error: '", "out of range in '", "convert string '", "lock name '"];
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
            ("Cannot convert string '\\xFFG' from binary to utf8mb4", "Cannot convert string … from binary to utf8mb4"),
            ("User-level lock name 'x' should not exceed 64", "User-level lock name … should not exceed 64"),
            ("Data too long for column 'a' at row 1", "Data too long for column 'a' at row 1"),
        ] {
            assert_eq!(without_values(said), told);
        }
    }
}
