//! Whose request is it? The peer's address, unless the peer is a proxy that the operator has named.

use std::net::IpAddr;

use http::HeaderMap;
use ipnet::IpNet;

/// The address of the sender. `X-Forwarded-For` is believed only as far as it was written by trusted proxies: it is read
/// from the right, and the first address that is not a trusted proxy is the sender's. What stands left of it was
/// written by the sender and means nothing.
pub(super) fn sender(peer: IpAddr, headers: &HeaderMap, trusted: &[IpNet]) -> IpAddr {
    let peer = peer.to_canonical();
    if !contains(trusted, peer) {
        return peer;
    }
    let mut sender = peer;
    for value in headers.get_all("x-forwarded-for").iter().rev() {
        for part in value.as_bytes().rsplit(|byte| *byte == b',') {
            let Some(address) = std::str::from_utf8(part).ok().and_then(parse) else {
                // A proxy of ours wrote something we cannot read. Its own address is the best that is known.
                return sender;
            };
            sender = address;
            if !contains(trusted, sender) {
                return sender;
            }
        }
    }
    sender
}

/// Whether one of the networks holds the address.
pub(super) fn contains(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

/// `1.2.3.4`, `1.2.3.4:5`, `::1`, `[::1]` or `[::1]:5`.
fn parse(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let address = text
        .parse::<IpAddr>()
        .ok()
        .or_else(|| text.parse::<std::net::SocketAddr>().ok().map(|address| address.ip()))
        .or_else(|| text.strip_prefix('[')?.strip_suffix(']')?.parse().ok())?;
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(peer: &str, forwarded: &[&str], expected: &str) {
        let trusted = ["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()];
        let mut headers = HeaderMap::new();
        for value in forwarded {
            headers.append("x-forwarded-for", value.parse().unwrap());
        }
        let found = sender(peer.parse().unwrap(), &headers, &trusted);
        assert_eq!(found, expected.parse::<IpAddr>().unwrap(), "{peer} {forwarded:?}");
    }

    #[test]
    fn fault_84_forwarded_for_is_believed_from_trusted_proxies_only_and_from_the_right() {
        check("203.0.113.9", &["1.1.1.1"], "203.0.113.9"); // spoofed: the peer is no proxy
        check("10.0.0.1", &[], "10.0.0.1");
        check("10.0.0.1", &["198.51.100.7"], "198.51.100.7");
        check("10.0.0.1", &["1.1.1.1, 198.51.100.7"], "198.51.100.7"); // the left part was sent by the client
        check("10.0.0.1", &["1.1.1.1", "198.51.100.7"], "198.51.100.7"); // two headers are one list
        check("10.0.0.1", &["198.51.100.7, 10.2.3.4"], "198.51.100.7"); // two proxies of ours
        check("10.0.0.1", &["10.9.9.9, 10.2.3.4"], "10.9.9.9"); // all ours
        check("10.0.0.1", &["198.51.100.7:4711"], "198.51.100.7");
        check("10.0.0.1", &["[2001:db8::1]:443"], "2001:db8::1");
        check("10.0.0.1", &["2001:db8::1"], "2001:db8::1");
        check("fd00::1", &["2001:db8::2"], "2001:db8::2");
        check("::ffff:10.0.0.1", &["::ffff:198.51.100.7"], "198.51.100.7"); // mapped
        check("10.0.0.1", &["1.1.1.1, unknown"], "10.0.0.1"); // unreadable: stop at what is known
        check("10.0.0.1", &["1.1.1.1, "], "10.0.0.1");
    }
}
