//! What an address leads to: the world, the own network, a neighbour on the wire, or nothing sensible.
//!
//! Promises: an IPv6 address that carries an IPv4 address is judged by what it carries, because that is where the
//! packets end. What is not known to be public is not public: outside the IPv6 space that is handed out, everything that
//! is not named here is [`Reach::Nowhere`].
//!
//! Does not: decide what is allowed. That is `Guard`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// How far an address reaches. The later, the more dangerous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// The internet.
    Public,
    /// This machine or the networks around it.
    Private,
    /// Neighbours on the same wire, and the places where clouds hand out credentials.
    LinkLocal,
    /// No destination of a request: unspecified, multicast, broadcast, documentation, reserved.
    Nowhere,
}

impl Reach {
    /// The reach of an address.
    pub fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => of_v4(address),
            IpAddr::V6(address) => of_v6(address),
        }
    }

    /// The word for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Private => "private",
            Self::LinkLocal => "link-local or metadata",
            Self::Nowhere => "reserved",
        }
    }
}

fn of_v4(address: Ipv4Addr) -> Reach {
    match address.octets() {
        // Alibaba's metadata (inside the carrier's private range), Oracle's, and Azure's wire server, which is outside
        // any private range.
        [100, 100, 100, 200] | [192, 0, 0, 192] | [168, 63, 129, 16] => Reach::LinkLocal,
        [169, 254, ..] => Reach::LinkLocal,
        [10 | 127, ..] | [172, 16..=31, ..] | [192, 168, ..] | [100, 64..=127, ..] => Reach::Private,
        // Meant for benchmarks, used as one more private network.
        [198, 18..=19, ..] => Reach::Private,
        // "This network". Linux connects 0.0.0.0 to itself.
        [0, ..] => Reach::Nowhere,
        [192, 0, 0 | 2, _] | [192, 88, 99, _] | [198, 51, 100, _] | [203, 0, 113, _] => Reach::Nowhere,
        [224..=255, ..] => Reach::Nowhere,
        _ => Reach::Public,
    }
}

fn of_v6(address: Ipv6Addr) -> Reach {
    let reach = of_prefix(address);
    match address.segments() {
        // ISATAP: an IPv4 address in the host's part, whatever the network in front of it.
        [_, _, _, _, 0x0000 | 0x0200, 0x5efe, high, low] => reach.max(inner(high, low)),
        _ => reach,
    }
}

/// The IPv4 address that two segments carry.
fn inner(high: u16, low: u16) -> Reach {
    let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
    of_v4(Ipv4Addr::new(a, b, c, d))
}

fn of_prefix(address: Ipv6Addr) -> Reach {
    match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 1] => Reach::Private,
        // IPv4-compatible (`::` itself carries 0.0.0.0), IPv4-mapped, IPv4-translated.
        [0, 0, 0, 0, 0, 0, high, low] | [0, 0, 0, 0, 0, 0xffff, high, low] | [0, 0, 0, 0, 0xffff, 0, high, low] => {
            inner(high, low)
        }
        // NAT64. In the range for local use the place of the IPv4 address is the operator's secret.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => inner(high, low),
        [0x64, 0xff9b, 1, ..] => Reach::LinkLocal,
        // The metadata of AWS, Google and Scaleway.
        [0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x0254]
        | [0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x0254]
        | [0xfd00, 0x0042, 0, 0, 0, 0, 0, 0x0042] => Reach::LinkLocal,
        [0xfe80..=0xfebf, ..] => Reach::LinkLocal,
        [0xfc00..=0xfdff, ..] | [0xfec0..=0xfeff, ..] => Reach::Private,
        // Teredo: the server's address as it is, the client's with every bit turned.
        [0x2001, 0, server_high, server_low, _, _, high, low] => inner(server_high, server_low).max(inner(!high, !low)),
        // The rest of what is set aside for protocols; documentation.
        [0x2001, 0..=0x01ff, ..] | [0x2001, 0x0db8, ..] | [0x3fff, 0..=0x0fff, ..] => Reach::Nowhere,
        // 6to4.
        [0x2002, high, low, ..] => inner(high, low),
        [0x2000..=0x3fff, ..] => Reach::Public,
        _ => Reach::Nowhere,
    }
}
