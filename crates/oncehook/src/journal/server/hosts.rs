//! What the URL of a database server says beside user and database: its hosts, and parameters about certificates.
//!
//! Promises: hosts are tried one after another, the last good one first; the first one that lets us in is taken. No error
//! repeats a password.
//!
//! Does not: connect, or wait. The engine does, with a deadline of its own for each host, so that a host that is silent (a
//! frozen machine, a lost route) does not keep us from the next.

use std::sync::atomic::{AtomicUsize, Ordering};

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use super::error::{EngineError, Meaning};
use crate::journal::BoxFuture;

/// The hosts of a database: the name of each for people, and how the driver reaches it.
#[derive(Debug)]
pub(in crate::journal) struct Hosts<C> {
    pub(in crate::journal) each: Vec<(String, C)>,
    /// The one that let us in last.
    good: AtomicUsize,
}

impl<C> Hosts<C> {
    pub(in crate::journal) fn new(each: Vec<(String, C)>) -> Self {
        Self { each, good: AtomicUsize::new(0) }
    }

    /// Where they are, for people.
    pub(in crate::journal) fn names(&self) -> String {
        self.each.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(",")
    }

    /// Opens a connection to the first host that lets us in.
    pub(in crate::journal) async fn connect<'s, S>(
        &'s self,
        open: impl Fn(&'s C) -> BoxFuture<'s, Result<S, EngineError>>,
    ) -> Result<S, EngineError> {
        let good = self.good.load(Ordering::Relaxed);
        let (before, from) = self.each.split_at(good.min(self.each.len()));
        let mut refusals = Vec::new();
        for (place, (name, host)) in from.iter().chain(before).enumerate() {
            match open(host).await {
                Ok(opened) => {
                    self.good.store((good + place) % self.each.len(), Ordering::Relaxed);
                    return Ok(opened);
                }
                Err(error) => refusals.push((name, error)),
            }
        }
        Err(sum_up(refusals))
    }
}

/// One error out of each host's; a single host's own is the most telling. If one of the hosts may come back by itself, so may
/// the database.
fn sum_up(mut refusals: Vec<(&String, EngineError)>) -> EngineError {
    if refusals.len() == 1
        && let Some((_, only)) = refusals.pop()
    {
        return only;
    }
    let away = refusals.iter().any(|(_, error)| error.meaning.away);
    let unsound = !away && refusals.iter().any(|(_, error)| error.meaning.unsound);
    let each: Vec<String> = refusals.iter().map(|(name, error)| format!("{name}: {error}")).collect();
    EngineError::with(each.join("; "), Meaning { away, unsound, ..Meaning::default() })
}

/// Offers each parameter of a URL (what stands behind the `?`), by name and decoded value, to `take`. Returns those that it
/// did not take, as they were.
pub(in crate::journal) fn take_parameters(
    parameters: &str,
    mut take: impl FnMut(&str, String) -> Result<bool, String>,
) -> Result<String, String> {
    let mut others = Vec::new();
    for parameter in parameters.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let pairs = format!("v={}", value.replace('+', "%2B"));
        let value = url::form_urlencoded::parse(pairs.as_bytes()).next().map(|(_, value)| value.into_owned());
        if !take(name, value.unwrap_or_default())? {
            others.push(parameter);
        }
    }
    Ok(others.join("&"))
}

/// The certificates in a PEM file that a parameter of the URL names.
pub(in crate::journal) fn certificates(parameter: &str, file: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let found = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match found {
        Ok(found) if found.is_empty() => Err(format!("{parameter} {file}: there is no certificate in it")),
        found => found.map_err(|error| format!("{parameter} {file}: {error}")),
    }
}
