//! SQL as a handler: statements whose parameters are bound from the event, run in the journal's transaction.
//!
//! Promises: nothing from an event ever becomes part of a statement's text; every parameter has a value or the attempt
//! fails for good, naming the path.
//!
//! Does not: run anything. A journal does that, on its own connection, next to the rows that record it.

pub(crate) mod lexer;
mod redact;
mod statement;

pub use statement::{Dialect, Statement};

use std::collections::BTreeMap;

use super::value::{Expression, Found, Lookup};
use crate::delivery::{Cause, Failure, HandedEvent};

/// A result beyond this many rows or bytes is an error on every engine: it would be kept for every event, and a part of it
/// would pass for the whole.
pub(crate) const RESULT_ROWS: usize = 100;
pub(crate) const RESULT_BYTES: usize = 64 << 10;

/// The failure of statements that returned more than that. What they did is undone.
pub(crate) fn too_large() -> Failure {
    let told = format!("a handler's result has at most {RESULT_ROWS} rows and {RESULT_BYTES} bytes");
    Failure::permanent(Cause::Handler, told)
}

/// The failure of statements that ended the transaction they ran in. What they did may be committed, so they do not run again.
pub(crate) fn ended_transaction() -> Failure {
    let told = "a statement of the handler ended the transaction it ran in, so what it did may be committed; the delivery is \
                not tried again: look at the handler's statements, procedures and triggers, see what is there, and retry or \
                skip the delivery";
    Failure::permanent(Cause::Handler, told)
}

/// The statements of a route with what is bound to them.
#[derive(Debug, Clone)]
pub struct SqlHandler {
    statements: Vec<Statement>,
    /// The bound names, in the order in which [`SqlHandler::values`] gives their values.
    lookup: Lookup,
    /// The first statement asks whether the others may run.
    requirement: bool,
}

impl SqlHandler {
    /// Reads statements (each text may hold several, parted by semicolons) and their bindings. The error is for the
    /// author of the configuration.
    pub fn new(
        texts: &[impl AsRef<str>],
        bind: &BTreeMap<String, Expression>,
        dialect: Dialect,
    ) -> Result<Self, String> {
        let names: Vec<&str> = bind.keys().map(String::as_str).collect();
        let mut statements = Vec::new();
        for text in texts {
            let parsed = statement::parse(text.as_ref(), &names, dialect)?;
            statements.extend(parsed.into_iter().map(Statement::marked));
        }
        if statements.is_empty() {
            return Err("there is no statement".to_owned());
        }
        for (place, name) in names.iter().enumerate() {
            if !statements.iter().any(|statement| statement.parameters().contains(&place)) {
                return Err(format!("`{name}` is bound, but no statement uses :{name}"));
            }
        }
        Ok(Self { statements, lookup: Lookup::new(bind.values().cloned().collect())?, requirement: false })
    }

    /// The same with a requirement: a query that must return a row before the statements run. Until it does, deliveries are
    /// parked.
    pub fn with_requirement(
        requirement: &str,
        texts: &[impl AsRef<str>],
        bind: &BTreeMap<String, Expression>,
        dialect: Dialect,
    ) -> Result<Self, String> {
        let names: Vec<&str> = bind.keys().map(String::as_str).collect();
        let asked = statement::parse(requirement, &names, dialect)?;
        let is_query = |text: &str| text.trim_start().get(..6).is_some_and(|word| word.eq_ignore_ascii_case("select"));
        if asked.len() != 1 || !asked.iter().all(|one| is_query(one.text())) {
            return Err("`requires` is one SELECT".to_owned());
        }
        let all: Vec<&str> = std::iter::once(requirement).chain(texts.iter().map(AsRef::as_ref)).collect();
        let handler = Self::new(&all, bind, dialect)?;
        if handler.statements.len() == 1 {
            return Err("there is no statement".to_owned());
        }
        Ok(Self { requirement: true, ..handler })
    }

    /// Whether the first statement asks whether the others may run.
    pub fn has_requirement(&self) -> bool {
        self.requirement
    }

    /// What is said of a delivery whose requirement is not met.
    pub fn deferral(&self) -> Failure {
        Failure::defer("what it requires is not there yet")
    }

    /// Whether a binding satisfies that.
    pub fn binds(&self, needs: impl Fn(&Expression) -> bool) -> bool {
        self.lookup.any(needs)
    }

    /// The statements, in the order they run.
    pub fn statements(&self) -> &[Statement] {
        &self.statements
    }

    /// What an engine says of an error, without values of the event that were bound.
    pub(crate) fn without_values(&self, told: &str, event: &HandedEvent) -> String {
        // Without values nothing was run that could repeat them.
        self.values(event).map_or_else(|_| told.to_owned(), |values| redact::without(told, &values))
    }

    /// The values of the bound names.
    pub fn values<'e>(&self, event: &'e HandedEvent) -> Result<Vec<Found<'e>>, Failure> {
        self.lookup.find(event)
    }
}
