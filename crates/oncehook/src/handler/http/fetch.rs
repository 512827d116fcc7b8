//! The source of truth: what the provider says of an entity now, asked before a handler runs.
//!
//! An event tells what was; in between others may have come, or have been lost. A handler that needs the state of today asks for
//! it, and gets it as `$current`.
//!
//! Promises: one request per attempt, with one deadline; at most [`MOST_BYTES`] are read; the entity becomes one segment of the
//! path (or one value of the query) and can lead nowhere else; the guard of `outbound` stands before the connection, redirects
//! are not followed. Neither an error nor what is fetched holds the token; no error holds more of the URL than scheme, host
//! and port.
//!
//! Does not: make what it fetched newer than what the provider says, or keep it for another attempt. Whatever goes wrong is a
//! failure that is tried again.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, AUTHORIZATION, HeaderValue};
use oncehook_verify::Secret;
use tokio::time::Instant;
use url::Url;
use url::form_urlencoded::byte_serialize;

use super::destination::{Destination, read};
use super::hidden::Hidden;
use crate::delivery::{Cause, Failure, HandedEvent};
use crate::json::{SHOWN_LEVELS, is_json_within};
use crate::outbound::{Guard, SystemNames};

/// What stands for the entity in the URL.
const ENTITY: &str = "{entity}";

/// An object beyond this size is not read.
const MOST_BYTES: usize = 1 << 20;

/// How the current state of an entity is asked for. Cannot be printed: URL and token may be secret.
pub struct FetchOptions {
    /// Where, with `{entity}` in the path or the query.
    pub url: String,
    /// What `Authorization` says: a token (sent as `Bearer`), or with a space in it the whole value.
    pub auth: Option<Secret>,
    /// How long it may take, from connecting to the end of the answer.
    pub timeout: Duration,
    /// Whether names that resolve to private addresses, and link-local addresses, may be reached.
    pub allow_private: bool,
}

impl FetchOptions {
    /// The usual way to ask a URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), auth: None, timeout: Duration::from_secs(10), allow_private: false }
    }
}

/// Asks for the current state of an entity.
pub struct Fetch {
    /// What stands before the entity, and behind it.
    before: String,
    behind: String,
    auth: Option<HeaderValue>,
    destination: Destination,
}

/// Scheme, host and port.
impl fmt::Debug for Fetch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fetch").field(&self.destination.name).finish()
    }
}

impl Fetch {
    /// Checks the options. The error is for the author of the configuration.
    pub fn new(options: &FetchOptions) -> Result<Self, String> {
        let guard = Guard { allow_private: options.allow_private };
        let Some((before, behind)) = options.url.split_once(ENTITY) else {
            return Err(format!("the URL needs {ENTITY} where the entity is to stand"));
        };
        // Judged with something harmless in its place. Where it stood in the host, it would choose who is asked.
        let asked =
            |entity: &str| guard.check_url(&format!("{before}{entity}{behind}")).map_err(|refused| refused.to_string());
        let url = asked("a")?;
        if url.origin() != asked("b")?.origin() || behind.contains(ENTITY) || url.fragment().is_some() {
            return Err(format!("{ENTITY} stands once, in the path or the query"));
        }
        let auth = options.auth.as_ref().map(|auth| authorization(auth.reveal())).transpose()?;
        let hidden = Hidden::new(&url, options.auth.iter().map(Secret::reveal));
        let destination = Destination::new(&url, guard, Arc::new(SystemNames), options.timeout, hidden)?;
        Ok(Self { before: before.to_owned(), behind: behind.to_owned(), auth, destination })
    }

    /// What the provider says of the event's entity now: JSON text.
    pub async fn get(&self, event: &HandedEvent) -> Result<String, Failure> {
        let Some(entity) = event.entity.as_deref().filter(|entity| !entity.is_empty()) else {
            return Err(Failure::permanent(Cause::Poison, "the event has no entity whose state could be fetched"));
        };
        let url = self.url(entity).ok_or_else(|| {
            Failure::permanent(Cause::Poison, "the event's entity cannot stand in the URL that is fetched")
        })?;
        let deadline = Instant::now() + self.destination.timeout;
        let mut request = self.destination.client.get(url).header(ACCEPT, HeaderValue::from_static("application/json"));
        if let Some(auth) = &self.auth {
            request = request.header(AUTHORIZATION, auth.clone());
        }
        let mut response = self.destination.send(request, deadline).await?;
        let status = response.status();
        if !status.is_success() {
            let logged = format!("HTTP {} to the request for the current state", status.as_u16());
            let answered = format!("answered {status} when it was asked for the current state");
            return Err(self.failure(&answered).in_log(logged));
        }
        let (body, end) = read(&mut response, deadline, MOST_BYTES + 1).await;
        end.map_err(|broken| self.destination.unanswered(broken))?;
        if body.len() > MOST_BYTES {
            return Err(self.failure(&format!("told more than {MOST_BYTES} bytes about the current state")));
        }
        let text = String::from_utf8(body).ok().map(|text| self.destination.hidden.censor(&text).into_owned());
        text.filter(|text| is_json_within(text, SHOWN_LEVELS)).ok_or_else(|| {
            self.failure("told the current state in something that is not JSON, or that is nested too deep")
        })
    }

    fn failure(&self, what: &str) -> Failure {
        Failure::retry(Cause::Destination, format!("{} {what}", self.destination.name))
            .in_log("the current state of the entity could not be fetched")
    }

    /// The URL with the entity in it. Nothing if it would lead elsewhere: a dot segment is taken out of a path.
    fn url(&self, entity: &str) -> Option<Url> {
        if entity.bytes().all(|byte| byte == b'.') {
            return None;
        }
        // A plus would be a space in a query only, and a space may not stand in a path.
        let entity = byte_serialize(entity.as_bytes()).collect::<String>().replace('+', "%20");
        Url::parse(&format!("{}{entity}{}", self.before, self.behind)).ok()
    }
}

fn authorization(auth: &str) -> Result<HeaderValue, String> {
    let text = if auth.contains(' ') { auth.to_owned() } else { format!("Bearer {auth}") };
    let mut value = HeaderValue::from_str(&text).map_err(|_| "`auth` cannot stand in a header".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fetch(url: &str) -> Result<Fetch, String> {
        Fetch::new(&FetchOptions::new(url))
    }

    #[test]
    fn the_entity_can_lead_nowhere_else() {
        let asked = fetch("http://127.0.0.1:9/v1/payouts/{entity}?expand=all").unwrap();
        let url = |entity: &str| asked.url(entity).map(|url| url.to_string());
        assert_eq!(url("po_1").unwrap(), "http://127.0.0.1:9/v1/payouts/po_1?expand=all");
        assert_eq!(
            url("a/../b?c#d e+%").unwrap(),
            "http://127.0.0.1:9/v1/payouts/a%2F..%2Fb%3Fc%23d%20e%2B%25?expand=all"
        );
        assert_eq!((url("."), url("..")), (None, None));
        let host = |url: Option<Url>| url.unwrap().host_str().map(str::to_owned);
        assert_eq!(host(asked.url("@evil.example/")).as_deref(), Some("127.0.0.1"));
    }

    #[test]
    fn a_url_needs_one_place_for_the_entity() {
        for bad in [
            "https://api.example.com/payouts",
            "https://{entity}.example.com/",
            "https://api.example.com:{entity}/",
            "https://api.example.com/{entity}/{entity}",
            "https://api.example.com/#{entity}",
            "http://169.254.169.254/{entity}",
            "ftp://api.example.com/{entity}",
        ] {
            assert!(fetch(bad).is_err(), "{bad}");
        }
        assert!(fetch("https://api.example.com/payouts?id={entity}").is_ok());
    }
}
