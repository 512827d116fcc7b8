//! Where the database is: the URL, read into one way in per host.
//!
//! Promises: hosts are tried one after another, the last good one first, each with a deadline of its own, so a host that is
//! silent (a frozen machine, a lost route) does not keep us from the next. The one that can be written to is taken. No
//! error and no shown form repeats the password.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres::{Client, Config, Connection, Socket};

use super::OpenError;
use super::connection::EngineError;
use super::tls::{Encrypted, Tls, Wish};

/// The longest that one host may take to let us in.
const HOST_WAIT: Duration = Duration::from_secs(3);

/// The hosts of a database.
#[derive(Debug)]
pub(super) struct Hosts {
    each: Vec<Config>,
    names: Vec<String>,
    database: String,
    tls: Tls,
    /// The one that let us in last.
    good: AtomicUsize,
}

/// A connection that was let in, to be driven by its caller.
pub(super) type Opened = (Client, Connection<Socket, Encrypted<Socket>>);

impl Hosts {
    pub(super) fn new(url: &str) -> Result<Self, OpenError> {
        let (url, wish) = take_wish(url)?;
        let tls = Tls::new(&wish).map_err(OpenError::Url)?;
        let config: Config = url.parse().map_err(|error: tokio_postgres::Error| {
            // The URL holds a password, so it is not repeated.
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            OpenError::Url(format!("{error} {cause}").trim().to_owned())
        })?;
        let (hosts, ports) = (config.get_hosts(), config.get_ports());
        if !config.get_hostaddrs().is_empty() {
            return Err(OpenError::Url("hostaddr is not supported; write the address as the host".to_owned()));
        }
        if hosts.is_empty() {
            return Err(OpenError::Url("there is no host in it".to_owned()));
        }
        if ports.len() > 1 && ports.len() != hosts.len() {
            return Err(OpenError::Url("there are not as many ports as hosts".to_owned()));
        }
        let mut each = Vec::with_capacity(hosts.len());
        let mut names = Vec::with_capacity(hosts.len());
        for (place, host) in hosts.iter().enumerate() {
            let port = ports.get(place).or(ports.first()).copied().unwrap_or(5432);
            each.push(one(&config, host, port, tls.mode));
            names.push(match host {
                Host::Tcp(name) => format!("{name}:{port}"),
                Host::Unix(path) => path.display().to_string(),
            });
        }
        let database = config.get_dbname().unwrap_or_default().to_owned();
        Ok(Self { each, names, database, tls, good: AtomicUsize::new(0) })
    }

    /// Where it leads, without what is secret.
    pub(super) fn shown(&self) -> String {
        format!("postgres://{}/{}", self.names.join(","), self.database)
    }

    /// Connects to the first host that can be written to.
    pub(super) async fn connect(&self) -> Result<Opened, EngineError> {
        let good = self.good.load(Ordering::Relaxed);
        let mut refusals = Vec::new();
        for turn in 0..self.each.len() {
            let place = (good + turn) % self.each.len();
            let (Some(config), Some(name)) = (self.each.get(place), self.names.get(place)) else { continue };
            let opened = tokio::time::timeout(HOST_WAIT, config.connect(self.tls.clone())).await;
            match opened {
                Ok(Ok(opened)) => {
                    self.good.store(place, Ordering::Relaxed);
                    return Ok(opened);
                }
                Ok(Err(error)) => refusals.push((name, EngineError::from(error))),
                Err(_) => refusals.push((name, EngineError::away("no answer in time"))),
            }
        }
        Err(sum_up(refusals))
    }
}

/// One error out of each host's. If one of them may come back by itself, so may the database.
fn sum_up(mut refusals: Vec<(&String, EngineError)>) -> EngineError {
    if refusals.len() == 1
        && let Some((_, only)) = refusals.pop()
    {
        return only;
    }
    let told: Vec<String> = refusals.iter().map(|(name, error)| format!("{name}: {}", error.message)).collect();
    let told = told.join("; ");
    let away = refusals.iter().any(|(_, error)| error.is_away());
    if away { EngineError::away(told) } else { EngineError::other(told) }
}

/// The same database on one of the hosts.
fn one(all: &Config, host: &Host, port: u16, mode: SslMode) -> Config {
    let mut one = Config::new();
    match host {
        Host::Tcp(name) => one.host(name),
        Host::Unix(path) => one.host_path(path),
    };
    if let Some(user) = all.get_user() {
        one.user(user);
    }
    if let Some(password) = all.get_password() {
        one.password(password);
    }
    if let Some(database) = all.get_dbname() {
        one.dbname(database);
    }
    if let Some(options) = all.get_options() {
        one.options(options);
    }
    one.port(port)
        .ssl_mode(mode)
        .ssl_negotiation(all.get_ssl_negotiation())
        .channel_binding(all.get_channel_binding())
        .connect_timeout(HOST_WAIT)
        .keepalives_idle(Duration::from_secs(10))
        .tcp_user_timeout(Duration::from_secs(15))
        .target_session_attrs(TargetSessionAttrs::ReadWrite);
    one
}

/// Takes out of the URL what is said about certificates: the driver knows only some of the words.
fn take_wish(url: &str) -> Result<(String, Wish), OpenError> {
    let mut wish = Wish::default();
    let Some((place, parameters)) = url.split_once('?') else { return Ok((url.to_owned(), wish)) };
    let mut others = Vec::new();
    for parameter in parameters.split('&') {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        match name {
            "sslmode" => wish.mode = Some(decoded(value)),
            "sslrootcert" => wish.roots = Some(decoded(value)),
            "sslcert" | "sslkey" => {
                return Err(OpenError::Url(format!("{name} is not supported: no certificate of our own")));
            }
            _ => others.push(parameter),
        }
    }
    let url = if others.is_empty() { place.to_owned() } else { format!("{place}?{}", others.join("&")) };
    Ok((url, wish))
}

/// The value of a parameter without its percent signs.
fn decoded(value: &str) -> String {
    let pairs = format!("v={}", value.replace('+', "%2B"));
    url::form_urlencoded::parse(pairs.as_bytes()).next().map(|(_, value)| value.into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_its_own_port_and_all_share_the_rest() {
        let hosts = Hosts::new("postgres://me:pw@a:1,b:2,c/shop?application_name=x&sslmode=disable").unwrap();
        assert_eq!(hosts.shown(), "postgres://a:1,b:2,c:5432/shop");
        assert_eq!(hosts.each.len(), 3);
        for (config, port) in hosts.each.iter().zip([1, 2, 5432]) {
            assert_eq!((config.get_ports(), config.get_user()), (&[port][..], Some("me")));
            assert_eq!(config.get_password(), Some(&b"pw"[..]));
            assert_eq!(config.get_ssl_mode(), SslMode::Disable);
        }
    }

    #[test]
    fn what_is_said_about_certificates_is_understood_or_refused() {
        for (mode, want) in [
            ("disable", SslMode::Disable),
            ("prefer", SslMode::Prefer),
            ("require", SslMode::Require),
            ("verify-ca", SslMode::Require),
            ("verify-full", SslMode::Require),
        ] {
            let hosts = Hosts::new(&format!("postgres://a/shop?sslmode={mode}")).unwrap();
            assert_eq!(hosts.tls.mode, want, "{mode}");
        }
        assert_eq!(Hosts::new("postgres://a/shop").unwrap().tls.mode, SslMode::Prefer);
        for (parameters, told) in [
            ("sslmode=sometimes", "sslmode is disable"),
            ("sslmode=verify-full&sslrootcert=%2Fnowhere%2Froot.pem", "sslrootcert /nowhere/root.pem"),
            ("sslcert=me.pem", "sslcert is not supported"),
            ("hostaddr=10.0.0.1", "hostaddr is not supported"),
        ] {
            let refused = Hosts::new(&format!("postgres://me:hunter2@a/shop?{parameters}")).unwrap_err();
            let refused = refused.to_string();
            assert!(refused.contains(told) && !refused.contains("hunter2"), "{refused}");
        }
    }
}
