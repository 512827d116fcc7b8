//! A small client of a running gateway: its admin API for commands that read or order something, and the HTTP client that
//! `send` uses too.
//!
//! Promises: no redirect is followed and no proxy is asked, so a token goes to the configured address only; every call has
//! a deadline and every answer a limit; an error says what to do about it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, bail};
use reqwest::{RequestBuilder, Response, Url};
use serde::Deserialize;
use serde_json::Value;

use super::{Usage, text};
use crate::config::{Config, ServerConfig, did_you_mean, operator};

/// How long a request may take, from the first byte to the last.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The largest answer of the API: a page of a thousand events, or one body.
const MAX_ANSWER_BYTES: usize = 128 << 20;

/// The admin API of a running gateway.
pub(super) struct Client {
    runtime: tokio::runtime::Runtime,
    http: reqwest::Client,
    server: ServerConfig,
    /// The sources of the configuration.
    sources: Vec<String>,
}

/// Whether there are events.
#[derive(Deserialize)]
struct Found {
    events: Vec<serde::de::IgnoredAny>,
}

/// The error for a source that nobody knows.
pub(super) fn no_source(name: &str, known: &[String]) -> Usage {
    let meant = did_you_mean(name, known.iter().map(String::as_str));
    let help = meant.unwrap_or_else(|| format!("the configuration has: {}", known.join(", ")));
    Usage(format!("there is no source `{}`; {help}", text::shown(name, 64)))
}

/// What the API says when it refuses.
#[derive(Deserialize)]
pub(super) struct ErrorBody {
    pub(super) error: ErrorText,
}

#[derive(Deserialize)]
pub(super) struct ErrorText {
    pub(super) code: String,
    pub(super) message: String,
}

impl Client {
    /// A client for the gateway that runs with this configuration. Connects to nothing yet.
    pub(super) fn new(config: Config) -> anyhow::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
        let sources = config.sources.iter().map(|source| source.name.to_string()).collect();
        Ok(Self { runtime, http: http_client(false, 1)?, server: config.server, sources })
    }

    /// Fails if a source is neither configured nor known to the gateway by its events: nothing could ever be found.
    pub(super) fn check_source(&self, name: &str) -> anyhow::Result<()> {
        if self.sources.iter().any(|known| known == name) {
            return Ok(());
        }
        let page: Found = self.get_json("/api/events", &[("source", Some(name)), ("limit", Some("1"))])?.read()?;
        if page.events.is_empty() { Err(no_source(name, &self.sources).into()) } else { Ok(()) }
    }

    /// The answer to `GET path?params`: exactly its bytes. Parameters without a value are left out.
    pub(super) fn get(&self, path: &str, params: &[(&str, Option<&str>)]) -> anyhow::Result<Vec<u8>> {
        let url = url(self.server.admin, path, params)?;
        self.runtime.block_on(self.fetch(self.http.get(url)))
    }

    /// The same, read as JSON.
    pub(super) fn get_json(&self, path: &str, params: &[(&str, Option<&str>)]) -> anyhow::Result<Json> {
        Json::new(self.get(path, params)?)
    }

    /// The answer to an order.
    pub(super) fn post(&self, path: &str, order: &Value) -> anyhow::Result<Json> {
        let url = url(self.server.admin, path, &[])?;
        let mut request = self.http.post(url).json(order);
        if let Some(who) = operator() {
            request = request.header("oncehook-who", who);
        }
        Json::new(self.runtime.block_on(self.fetch(request))?)
    }

    /// The answer to a cancellation.
    pub(super) fn delete(&self, path: &str) -> anyhow::Result<Json> {
        let url = url(self.server.admin, path, &[])?;
        Json::new(self.runtime.block_on(self.fetch(self.http.delete(url)))?)
    }

    /// Waits a while, unless somebody presses Ctrl-C: then `true`.
    pub(super) fn wait(&self, time: Duration) -> bool {
        self.runtime.block_on(async {
            tokio::select! {
                () = tokio::time::sleep(time) => false,
                _ = tokio::signal::ctrl_c() => true,
            }
        })
    }

    async fn fetch(&self, mut request: RequestBuilder) -> anyhow::Result<Vec<u8>> {
        if let Some(token) = &self.server.admin_token {
            request = request.bearer_auth(token.reveal());
        }
        let response = request.send().await.map_err(|error| self.unreachable(&error))?;
        let status = response.status();
        let (body, whole) = read_answer(response, MAX_ANSWER_BYTES).await.map_err(|error| self.unreachable(&error))?;
        if !status.is_success() {
            return Err(Refused { status, code: code(&body), message: refusal(status, &body) }.into());
        }
        if !whole {
            bail!("the gateway's answer is too large");
        }
        Ok(body)
    }

    fn unreachable(&self, error: &reqwest::Error) -> anyhow::Error {
        let admin = self.server.admin;
        let message = if error.is_connect() {
            format!(
                "no gateway answers on {admin} (server.admin): {}; is it running? `oncehook serve` starts it",
                cause(error)
            )
        } else {
            format!("the gateway on {admin} (server.admin) gave no answer: {}", cause(error))
        };
        Unreachable(message).into()
    }
}

/// Nobody answered.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Unreachable(String);

/// The gateway said no.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(super) struct Refused {
    status: reqwest::StatusCode,
    code: Option<String>,
    message: String,
}

/// Whether the same call may work in a moment: the gateway is being restarted, or its journal is busy.
pub(super) fn may_pass(error: &anyhow::Error) -> bool {
    error.is::<Unreachable>() || error.downcast_ref::<Refused>().is_some_and(|refused| refused.status.is_server_error())
}

/// Whether the gateway refused for this reason.
pub(super) fn is_refused_for(error: &anyhow::Error, code: &str) -> bool {
    error.downcast_ref::<Refused>().is_some_and(|refused| refused.code.as_deref() == Some(code))
}

/// An answer, as it came and as it is understood.
pub(super) struct Json {
    text: String,
}

impl Json {
    fn new(bytes: Vec<u8>) -> anyhow::Result<Self> {
        Ok(Self { text: String::from_utf8(bytes).context("the gateway's answer is not text")? })
    }

    /// The text as the API wrote it. For [`print_json`](super::print_json), not for a terminal.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn read<'t, T: Deserialize<'t>>(&'t self) -> anyhow::Result<T> {
        serde_json::from_str(&self.text).context("the gateway's answer is not what this version expects")
    }
}

/// A client for this many connections. `secure` reads the system's certificates, which plain HTTP does without.
pub(super) fn http_client(secure: bool, connections: usize) -> anyhow::Result<reqwest::Client> {
    // Whoever was first has installed the same one.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let builder = reqwest::Client::builder()
        .user_agent(concat!("oncehook/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .pool_max_idle_per_host(connections)
        .timeout(TIMEOUT);
    let builder = if secure { builder } else { builder.tls_certs_only(Vec::new()) };
    builder.build().context("prepare the HTTP client")
}

/// An answer's body up to a limit, and whether that was all of it.
pub(super) async fn read_answer(mut response: Response, limit: usize) -> Result<(Vec<u8>, bool), reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        let room = limit.saturating_sub(body.len());
        body.extend_from_slice(chunk.get(..room).unwrap_or(&chunk));
        if chunk.len() > room {
            return Ok((body, false));
        }
    }
    Ok((body, true))
}

/// The innermost reason, such as `Connection refused`; the layers above it repeat the address.
pub(super) fn cause(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return format!("nothing came within {} s", TIMEOUT.as_secs());
    }
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    text::shown(&cause.to_string(), 200)
}

/// An address to connect to: a listener on all addresses is reached on the loopback one.
pub(super) fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

fn url(address: SocketAddr, path: &str, params: &[(&str, Option<&str>)]) -> anyhow::Result<Url> {
    let base = format!("http://{}{path}", reachable(address));
    let given: Vec<_> = params.iter().filter_map(|(name, value)| Some((*name, (*value)?))).collect();
    let url = if given.is_empty() { Url::parse(&base) } else { Url::parse_with_params(&base, given) };
    url.with_context(|| format!("make a URL of {base}"))
}

fn code(body: &[u8]) -> Option<String> {
    serde_json::from_slice::<ErrorBody>(body).ok().map(|body| body.error.code)
}

fn refusal(status: reqwest::StatusCode, body: &[u8]) -> String {
    let said = match serde_json::from_slice::<ErrorBody>(body) {
        Ok(ErrorBody { error }) => {
            format!("{} [{}]", text::shown(&error.message, 500), text::shown(&error.code, 64))
        }
        Err(_) => {
            format!("it answered HTTP {}, not as a gateway does; is something else on that port?", status.as_u16())
        }
    };
    let help = if status == reqwest::StatusCode::UNAUTHORIZED {
        "; server.admin_token must be the one that the running gateway has"
    } else {
        ""
    };
    format!("the gateway refused: {said}{help}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_encoded_and_empty_ones_left_out() {
        let admin = "127.0.0.1:8081".parse().unwrap();
        let url = |params: &[(&str, Option<&str>)]| super::url(admin, "/api/events", params).unwrap().to_string();
        assert_eq!(url(&[]), "http://127.0.0.1:8081/api/events");
        assert_eq!(url(&[("source", None)]), "http://127.0.0.1:8081/api/events");
        assert_eq!(
            url(&[("key", Some("a&b=c d+é/#")), ("type", None), ("limit", Some("20"))]),
            "http://127.0.0.1:8081/api/events?key=a%26b%3Dc+d%2B%C3%A9%2F%23&limit=20"
        );
    }

    #[test]
    fn a_listener_everywhere_is_reached_at_home() {
        for (listens, reached) in
            [("0.0.0.0:8081", "127.0.0.1:8081"), ("[::]:8081", "[::1]:8081"), ("10.0.0.7:80", "10.0.0.7:80")]
        {
            assert_eq!(reachable(listens.parse().unwrap()), reached.parse().unwrap());
        }
    }

    #[test]
    fn refusals_carry_code_and_message() {
        let said = refusal(
            reqwest::StatusCode::NOT_FOUND,
            br#"{"error":{"code":"no_event","message":"there is no such event"}}"#,
        );
        assert_eq!(said, "the gateway refused: there is no such event [no_event]");
        assert!(
            refusal(reqwest::StatusCode::UNAUTHORIZED, br#"{"error":{"code":"token","message":"m"}}"#)
                .contains("admin_token")
        );
        assert!(refusal(reqwest::StatusCode::BAD_GATEWAY, b"<html>\x1b").contains("something else"));
    }
}
