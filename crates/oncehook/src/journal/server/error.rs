//! What went wrong with a statement or a connection, and what that means to the caller.
//!
//! Promises: the message holds no values of the user's, and nothing that a terminal would obey. What an error means is decided
//! once, by the engine that made it, from the server's code and never from its text.
//! Does not: decide what to do about it.

/// An error of the database, or of the way to it.
#[derive(Debug, Clone)]
pub(in crate::journal) struct EngineError {
    /// For people and logs.
    pub(in crate::journal) message: String,
    /// The server's code: a SQLSTATE, or MySQL's number.
    pub(in crate::journal) code: Option<String>,
    /// The constraint that refused, if the server names one.
    pub(in crate::journal) constraint: Option<String>,
    pub(in crate::journal) meaning: Meaning,
}

/// What an error means. An engine fills this in when it makes the error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::journal) struct Meaning {
    /// The server is unreachable, or refuses connections for now (starting, stopping, full). Worth retrying.
    pub(in crate::journal) away: bool,
    /// Two transactions got in each other's way. The same again may work; nothing was stored.
    pub(in crate::journal) collision: bool,
    /// A collision that took long: another transaction held a lock for the whole time that we may wait.
    pub(in crate::journal) lock_wait: bool,
    /// One row was refused (its data, a constraint, its size). The other rows are not to blame.
    pub(in crate::journal) row: bool,
    /// The statement took too long, or was interrupted.
    pub(in crate::journal) slow: bool,
    /// The server answered, and about this statement: not a lost connection, a shutdown, a full disk or a new replica.
    pub(in crate::journal) statement: bool,
    /// The server's settings do not make commits durable.
    pub(in crate::journal) unsound: bool,
    /// A savepoint is gone: the transaction in which it was set has ended.
    pub(in crate::journal) lost_savepoint: bool,
    /// The server cannot encrypt.
    pub(in crate::journal) no_tls: bool,
}

impl EngineError {
    /// An error that means none of the things that [`Meaning`] names.
    pub(in crate::journal) fn other(message: impl Into<String>) -> Self {
        Self::with(message, Meaning::default())
    }

    pub(in crate::journal) fn with(message: impl Into<String>, meaning: Meaning) -> Self {
        let message = crate::text::printable(&message.into()).into_owned();
        Self { message, code: None, constraint: None, meaning }
    }

    /// The database cannot be reached.
    pub(in crate::journal) fn away(message: impl Into<String>) -> Self {
        Self::with(message, Meaning { away: true, ..Meaning::default() })
    }

    pub(in crate::journal) fn no_answer(patience: std::time::Duration) -> Self {
        Self::away(format!("the database did not answer within {} s", patience.as_secs()))
    }

    /// The server is not set up so that a commit is durable.
    pub(in crate::journal) fn unsound(message: impl Into<String>) -> Self {
        Self::with(message, Meaning { unsound: true, ..Meaning::default() })
    }

    pub(in crate::journal) fn damaged() -> Self {
        Self::other("a row of the journal is damaged")
    }

    /// Rows that the transaction has locked were changed all the same, so nothing it read can be trusted.
    pub(in crate::journal) fn changed_under_lock() -> Self {
        Self::other("a delivery changed although it was locked")
    }

    pub(in crate::journal) fn has_code(&self, code: &str) -> bool {
        self.code.as_deref() == Some(code)
    }

    pub(in crate::journal) fn is_collision(&self) -> bool {
        self.meaning.collision
    }

    pub(in crate::journal) fn is_too_slow(&self) -> bool {
        self.meaning.slow
    }

    pub(in crate::journal) fn blames_the_statement(&self) -> bool {
        self.meaning.statement
    }
}

impl std::fmt::Display for EngineError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

/// Counts collisions: the first few are worth another try.
#[derive(Default)]
pub(in crate::journal) struct Tries(u32);

impl Tries {
    /// `Ok`: try the same again. Otherwise the error, which is final.
    pub(in crate::journal) fn again(&mut self, error: EngineError) -> Result<(), EngineError> {
        self.0 += 1;
        // After one long wait for a lock another is likely to be as long.
        let most = if error.meaning.lock_wait { 2 } else { 10 };
        if error.is_collision() && self.0 < most { Ok(()) } else { Err(error) }
    }
}
