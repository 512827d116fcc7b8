//! Where the database is: the URL, read into one way in per host.
//!
//! Promises: the host that can be written to is taken. No error and no shown form repeats the password.
//!
//! Does not: choose between hosts (`server::hosts`).

use std::time::Duration;

use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres::{Client, Config, Connection, Socket};

use super::OpenError;
use super::connection::EngineError;
use super::tls::{Encrypted, Tls};
use crate::journal::server::hosts::{Hosts, take_parameters};

/// The longest that one host may take to let us in.
const HOST_WAIT: Duration = Duration::from_secs(3);

/// A database, and how to reach it.
#[derive(Debug)]
pub(super) struct Place {
    hosts: Hosts<Config>,
    database: String,
    tls: Tls,
}

/// A connection that was let in, to be driven by its caller.
pub(super) type Opened = (Client, Connection<Socket, Encrypted<Socket>>);

impl Place {
    pub(super) fn new(url: &str) -> Result<Self, OpenError> {
        let wrong = |what: &str| OpenError::Url(what.to_owned());
        let (url, tls) = take_tls(url).map_err(OpenError::Url)?;
        let config: Config = url.parse().map_err(|error: tokio_postgres::Error| {
            // The URL holds a password, so it is not repeated.
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            wrong(format!("{error} {cause}").trim())
        })?;
        let (hosts, ports) = (config.get_hosts(), config.get_ports());
        if !config.get_hostaddrs().is_empty() {
            return Err(wrong("hostaddr is not supported; write the address as the host"));
        }
        if hosts.is_empty() {
            return Err(wrong("there is no host in it"));
        }
        if ports.len() > 1 && ports.len() != hosts.len() {
            return Err(wrong("there are not as many ports as hosts"));
        }
        let each = hosts.iter().enumerate().map(|(place, host)| {
            let port = ports.get(place).or(ports.first()).copied().unwrap_or(5432);
            let name = match host {
                Host::Tcp(name) => format!("{name}:{port}"),
                Host::Unix(path) => path.display().to_string(),
            };
            (name, one(&config, host, port, tls.mode))
        });
        let database = config.get_dbname().unwrap_or_default().to_owned();
        Ok(Self { hosts: Hosts::new(each.collect()), database, tls })
    }

    /// Where it leads, without what is secret.
    pub(super) fn shown(&self) -> String {
        format!("postgres://{}/{}", self.hosts.names(), self.database)
    }

    /// Connects to the first host that can be written to.
    pub(super) async fn connect(&self) -> Result<Opened, EngineError> {
        self.hosts.connect(|config| Box::pin(self.open_at(config))).await
    }

    async fn open_at(&self, config: &Config) -> Result<Opened, EngineError> {
        match tokio::time::timeout(HOST_WAIT, config.connect(self.tls.clone())).await {
            Ok(opened) => Ok(opened?),
            Err(_) => Err(EngineError::away("no answer in time")),
        }
    }
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
fn take_tls(url: &str) -> Result<(String, Tls), String> {
    let (place, parameters) = url.split_once('?').unwrap_or((url, ""));
    let (mut mode, mut roots) = (None, None);
    let others = take_parameters(parameters, |name, value| {
        match name {
            "sslmode" => mode = Some(value),
            "sslrootcert" => roots = Some(value),
            "sslcert" | "sslkey" => return Err(format!("{name} is not supported: no certificate of our own")),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let url = if others.is_empty() { place.to_owned() } else { format!("{place}?{others}") };
    Ok((url, Tls::new(mode.as_deref(), roots.as_deref())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_its_own_port_and_all_share_the_rest() {
        let place = Place::new("postgres://me:pw@a:1,b:2,c/shop?application_name=x&sslmode=disable").unwrap();
        assert_eq!(place.shown(), "postgres://a:1,b:2,c:5432/shop");
        assert_eq!(place.hosts.each.len(), 3);
        for ((_, config), port) in place.hosts.each.iter().zip([1, 2, 5432]) {
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
            let place = Place::new(&format!("postgres://a/shop?sslmode={mode}")).unwrap();
            assert_eq!(place.tls.mode, want, "{mode}");
        }
        assert_eq!(Place::new("postgres://a/shop").unwrap().tls.mode, SslMode::Prefer);
        for (parameters, told) in [
            ("sslmode=sometimes", "sslmode is disable"),
            ("sslmode=verify-full&sslrootcert=%2Fnowhere%2Froot.pem", "sslrootcert /nowhere/root.pem"),
            ("sslcert=me.pem", "sslcert is not supported"),
            ("hostaddr=10.0.0.1", "hostaddr is not supported"),
        ] {
            let refused = Place::new(&format!("postgres://me:hunter2@a/shop?{parameters}")).unwrap_err();
            let refused = refused.to_string();
            assert!(refused.contains(told) && !refused.contains("hunter2"), "{refused}");
        }
    }
}
