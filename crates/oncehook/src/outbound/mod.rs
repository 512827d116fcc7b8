//! The guard at the way out: which addresses a request may go to.
//!
//! Promises: a request never reaches a private address that the operator has neither written out in the URL nor
//! allowed (R43). In detail:
//!
//! - public addresses: always;
//! - private and loopback addresses: if written out as an address, or with `allow_private`. A name (`localhost` too) is
//!   not an address written out: who answers for the name decides where it leads;
//! - link-local addresses and those where clouds hand out credentials: with `allow_private` only;
//! - unspecified, multicast, broadcast, documentation and reserved addresses: never.
//!
//! An address counts as what the `url` crate makes of it, the same parser that the client uses: `http://2130706433/` and
//! `http://0x7f.1/` are `127.0.0.1` written out. Names are judged in `names` at each look-up, because the client does not
//! ask a resolver about addresses that stand in the URL, and a name may lead elsewhere tomorrow.
//!
//! Does not: follow redirects, or know about proxies; the HTTP handler uses neither.

mod names;
mod reach;

use std::net::IpAddr;

use url::{Host, Url};

pub(crate) use names::GuardedNames;
pub use names::{LookingUp, Names, SystemNames};
pub use reach::Reach;

/// What one route may reach.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Guard {
    /// Whether names may lead to private addresses, and whether link-local and metadata addresses may be reached.
    pub allow_private: bool,
}

/// Why a destination is not reached. Holds nothing of a URL but its host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not a URL.
    #[error("the URL cannot be read: {0}")]
    NotAUrl(url::ParseError),
    /// Another scheme.
    #[error("the URL must start with http:// or https://")]
    Scheme,
    /// A name or password in the URL. They are not repeated here.
    #[error("the URL holds a user name or a password; use a header instead")]
    Credentials,
    /// Nothing that could be connected to.
    #[error("the URL has no host or no usable port")]
    NoHost,
    /// An address that stands in the URL, or that the name leads to.
    #[error("{}", unreached(.name, .address, *.reach))]
    Address {
        /// The name, if there is one.
        name: Option<String>,
        /// The address, or one of the name's.
        address: IpAddr,
        /// What that is.
        reach: Reach,
    },
    /// The name exists and has no address.
    #[error("{0} has no address")]
    NoAddress(String),
}

impl Guard {
    /// Reads a URL and judges the address that stands in it. A name is judged when it is looked up.
    pub fn check_url(&self, text: &str) -> Result<Url, Refused> {
        let url = Url::parse(text).map_err(Refused::NotAUrl)?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(Refused::Scheme);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(Refused::Credentials);
        }
        if url.port() == Some(0) {
            return Err(Refused::NoHost);
        }
        match url.host() {
            Some(Host::Ipv4(address)) => self.check(None, address.into())?,
            Some(Host::Ipv6(address)) => self.check(None, address.into())?,
            Some(Host::Domain(name)) if !name.is_empty() => {}
            Some(Host::Domain(_)) | None => return Err(Refused::NoHost),
        }
        Ok(url)
    }

    /// Judges an address that stands in a URL, or that this name leads to.
    pub fn check(self, name: Option<&str>, address: IpAddr) -> Result<(), Refused> {
        let reach = Reach::of(address);
        let allowed = match reach {
            Reach::Public => true,
            Reach::Private => self.allow_private || name.is_none(),
            Reach::LinkLocal => self.allow_private,
            Reach::Nowhere => false,
        };
        if allowed { Ok(()) } else { Err(Refused::Address { name: name.map(str::to_owned), address, reach }) }
    }
}

/// Why an address is not reached: it never is, or it needs permission.
fn unreached(name: &Option<String>, address: &IpAddr, reach: Reach) -> String {
    let kind = reach.as_str();
    match (name, reach) {
        (None, Reach::Nowhere) => format!("{address} is a {kind} address and is never reached"),
        (None, _) => format!("{address} is a {kind} address; it needs allow_private = true"),
        (Some(name), Reach::Nowhere) => format!("{name} leads to {address}, a {kind} address, which is never reached"),
        (Some(name), _) => format!("{name} leads to {address}, a {kind} address; it needs allow_private = true"),
    }
}
