//! One atomic piece of work on a connection of the workers' pool.

use super::error::EngineError;
use crate::journal::WorkError;

/// Does an atomic thing on a connection, and again if another transaction got in its way. After a collision it rolls back
/// explicitly; after any other error it drops the connection, which rolls back on the server.
macro_rules! work {
    ($journal:expr, |$session:ident| $work:expr) => {{
        let mut tries = $crate::journal::server::error::Tries::default();
        loop {
            let worked = match $journal.workers.take().await {
                Ok(mut $session) => match $work.await {
                    Ok(done) => {
                        $session.keep();
                        Ok(done)
                    }
                    Err(error) => {
                        if error.is_collision() && $session.rollback().await.is_ok() {
                            $session.keep();
                        }
                        Err(error)
                    }
                },
                Err(error) => Err(error),
            };
            match worked {
                Ok(done) => break Ok(done),
                Err(error) => {
                    if let Err(error) = tries.again(error) {
                        break Err($crate::journal::server::work::unavailable(error));
                    }
                }
            }
        }
    }};
}

pub(in crate::journal) use work;

pub(in crate::journal) fn unavailable(error: EngineError) -> WorkError {
    WorkError::Unavailable(error.message)
}
