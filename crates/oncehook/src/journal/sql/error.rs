//! What went wrong with a statement or a connection, and what that means to the caller.
//!
//! Promises: the message holds no values of the user's, and nothing that a terminal would obey. What an error means is decided
//! once, by the engine that made it, from the server's code and never from its text.
//! Does not: decide what to do about it.

/// An error of the database, or of the way to it.
#[derive(Debug, Clone)]
pub(crate) struct EngineError {
    /// For people and logs.
    pub(crate) message: String,
    /// The server's code: a SQLSTATE, or MySQL's number.
    pub(crate) code: Option<String>,
    /// The constraint that refused, if the server names one.
    pub(crate) constraint: Option<String>,
    pub(crate) meaning: Meaning,
}

/// What a step of the work came to.
pub(in crate::journal) type EngineResult<T = ()> = Result<T, EngineError>;

/// What an error means. An engine fills this in when it makes the error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Meaning {
    /// The server is unreachable, or refuses connections for now (starting, stopping, full). Worth retrying.
    pub(crate) away: bool,
    /// Two transactions got in each other's way. The same again may work; nothing was stored.
    pub(crate) collision: bool,
    /// A collision that took long: another transaction held a lock for the whole time that we may wait.
    pub(crate) lock_wait: bool,
    /// One row was refused (its data, a constraint, its size). The other rows are not to blame.
    pub(crate) row: bool,
    /// The statement took too long, or was interrupted.
    pub(crate) slow: bool,
    /// The server answered, and about this statement: not a lost connection, a shutdown, a full disk or a new replica.
    pub(crate) statement: bool,
    /// The server's settings do not make commits durable.
    pub(crate) unsound: bool,
    /// A savepoint is gone: the transaction in which it was set has ended.
    pub(crate) lost_savepoint: bool,
    /// The server cannot encrypt.
    pub(crate) no_tls: bool,
}

impl EngineError {
    /// An error that means none of the things that [`Meaning`] names.
    pub(crate) fn other(message: impl Into<String>) -> Self {
        Self::with(message, Meaning::default())
    }

    pub(crate) fn with(message: impl Into<String>, meaning: Meaning) -> Self {
        let message = crate::text::printable(&message.into()).into_owned();
        Self { message, code: None, constraint: None, meaning }
    }

    /// The database cannot be reached.
    pub(crate) fn away(message: impl Into<String>) -> Self {
        Self::with(message, Meaning { away: true, ..Meaning::default() })
    }

    pub(crate) fn no_answer(patience: std::time::Duration) -> Self {
        Self::away(format!("the database did not answer within {} s", patience.as_secs()))
    }

    /// The server is not set up so that a commit is durable.
    pub(crate) fn unsound(message: impl Into<String>) -> Self {
        Self::with(message, Meaning { unsound: true, ..Meaning::default() })
    }

    pub(crate) fn damaged() -> Self {
        Self::other("a row of the journal is damaged")
    }

    /// Rows that the transaction has locked were changed all the same, so nothing it read can be trusted.
    pub(crate) fn changed_under_lock() -> Self {
        Self::other("a delivery changed although it was locked")
    }

    pub(crate) fn has_code(&self, code: &str) -> bool {
        self.code.as_deref() == Some(code)
    }

    pub(crate) fn is_collision(&self) -> bool {
        self.meaning.collision
    }

    pub(crate) fn is_too_slow(&self) -> bool {
        self.meaning.slow
    }

    pub(crate) fn blames_the_statement(&self) -> bool {
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
pub(crate) struct Tries(u32);

impl Tries {
    /// `Ok`: try the same again. Otherwise the error, which is final.
    pub(crate) fn again(&mut self, error: EngineError) -> Result<(), EngineError> {
        self.0 += 1;
        // After one long wait for a lock another is likely to be as long.
        let most = if error.meaning.lock_wait { 2 } else { 10 };
        if error.is_collision() && self.0 < most { Ok(()) } else { Err(error) }
    }
}
