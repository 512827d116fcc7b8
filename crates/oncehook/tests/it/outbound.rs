//! The guard at the way out, over every form of address that is known to slip through guards.
//!
//! A canary listens where a request must not arrive. Each form is also tried where it is allowed, and then the canary
//! must sing: a form that reaches nothing anyway would prove nothing.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use oncehook::delivery::{Cause, Failure, Remedy};
use oncehook::handler::{HttpHandler, HttpOptions};
use oncehook::outbound::{Guard, LookingUp, Names, Reach};
use oncehook::verify::UnixMicros;
use oncehook_testkit::receiver::{Receiver, Reply};

use crate::http::claim;

const NOW: UnixMicros = UnixMicros(1_700_000_000_000_000);

/// Answers look-ups from a list, one after the other; the last one stays.
struct Listed {
    answers: Mutex<VecDeque<Vec<IpAddr>>>,
    asked: Mutex<Vec<String>>,
}

impl Listed {
    fn new(answers: &[&[&str]]) -> Arc<Self> {
        let answers = answers.iter().map(|answer| answer.iter().map(|ip| ip.parse().unwrap()).collect()).collect();
        Arc::new(Self { answers: Mutex::new(answers), asked: Mutex::default() })
    }

    fn asked(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

impl Names for Listed {
    fn look_up(&self, name: &str) -> LookingUp {
        self.asked.lock().unwrap().push(name.to_owned());
        let mut answers = self.answers.lock().unwrap();
        let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        Box::pin(async move { Ok(answer.unwrap_or_default()) })
    }
}

/// Every family of addresses, with its reach.
const ADDRESSES: &[(Reach, &[&str])] = &[
    (
        Reach::Public,
        &[
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.1",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.1",
            "192.167.0.1",
            "192.169.0.1",
            "198.17.255.255",
            "198.20.0.0",
            "203.0.112.1",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00:1450::1",
            "2001:4860:4860::8888",
            "2001:200::1",
            "::ffff:8.8.8.8",
            "::8.8.8.8",
            "::ffff:0:8.8.8.8",
            "64:ff9b::8.8.8.8",
            "2002:808:808::1",
            "2001:0:808:808:0:0:f7f7:f7f7",
            "2606:4700::5efe:808:808",
        ],
    ),
    (
        Reach::Private,
        &[
            "127.0.0.1",
            "127.0.0.2",
            "127.1.2.3",
            "127.255.255.254",
            "10.0.0.0",
            "10.0.0.1",
            "10.255.255.255",
            "172.16.0.0",
            "172.20.1.1",
            "172.31.255.255",
            "192.168.0.0",
            "192.168.1.1",
            "192.168.255.255",
            "100.64.0.0",
            "100.100.100.199",
            "100.127.255.255",
            "198.18.0.1",
            "198.19.255.255",
            "::1",
            "fc00::1",
            "fd00::1",
            "fd12:3456::1",
            "fdff:ffff::1",
            "fd00:ec2::253",
            "fec0::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:192.168.0.1",
            "::ffff:172.16.0.1",
            "::ffff:100.64.0.1",
            "::127.0.0.1",
            "::10.0.0.1",
            "::ffff:0:127.0.0.1",
            "::ffff:0:10.1.1.1",
            "64:ff9b::127.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b::192.168.0.1",
            "2002:7f00:1::",
            "2002:7f00:1::1",
            "2002:a00:1::1",
            "2002:c0a8:1::1",
            "2001:0:808:808:0:0:80ff:fffe",
            "2001:0:7f00:1:0:0:f7f7:f7f7",
            "2001:0:a00:1:0:0:f7f7:f7f7",
            "2606:4700::5efe:7f00:1",
            "2606:4700::200:5efe:a00:1",
            "fd00::5efe:808:808",
        ],
    ),
    (
        Reach::LinkLocal,
        &[
            "169.254.0.0",
            "169.254.0.1",
            "169.254.169.254",
            "169.254.170.2",
            "169.254.42.42",
            "169.254.255.255",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
            "fe80::1",
            "fe80::a9fe:a9fe",
            "febf::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fd00:42::42",
            "::ffff:169.254.169.254",
            "::ffff:a9fe:a9fe",
            "::169.254.169.254",
            "::ffff:0:169.254.169.254",
            "::ffff:100.100.100.200",
            "64:ff9b::169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::1",
            "64:ff9b:1:a9fe:a9:fe00::",
            "2002:a9fe:a9fe::1",
            "2002:6464:64c8::1",
            "2001:0:808:808:0:0:5601:5601",
            "2001:0:a9fe:a9fe:0:0:f7f7:f7f7",
            "2606:4700::5efe:a9fe:a9fe",
            "fe80::5efe:808:808",
        ],
    ),
    (
        Reach::Nowhere,
        &[
            "0.0.0.0",
            "0.0.0.1",
            "0.1.2.3",
            "0.255.255.255",
            "192.0.0.1",
            "192.0.0.8",
            "192.0.2.1",
            "198.51.100.7",
            "203.0.113.9",
            "192.88.99.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "254.1.1.1",
            "255.255.255.255",
            "::",
            "::2",
            "::ffff:0.0.0.0",
            "::ffff:255.255.255.255",
            "::ffff:224.0.0.1",
            "::ffff:0:0.0.0.0",
            "64:ff9b::0.0.0.0",
            "64:ff9b::224.0.0.1",
            "64:ff9b::1:0:0:1",
            "2002::",
            "2002:e000:1::1",
            "ff00::1",
            "ff02::1",
            "ff05::2",
            "ff0e::1",
            "100::1",
            "2001:db8::1",
            "3fff::1",
            "2001:2::1",
            "2001:10::1",
            "2001:20::1",
            "2001:1::1",
            "4000::1",
            "5f00::1",
            "8000::1",
            "fe00::1",
            "f000::1",
            "2001:0:808:808:0:0:ffff:ffff",
            "2606:4700::5efe:0:0",
            "0:0:1::",
            "::1:0:0:0",
        ],
    ),
];

#[test]
fn fault_89_r43_every_address_is_what_it_leads_to() {
    let mut count = 0;
    for (reach, addresses) in ADDRESSES {
        for text in *addresses {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(Reach::of(address), *reach, "{text}");
            let strict = Guard { allow_private: false };
            let lax = Guard { allow_private: true };
            let host = if address.is_ipv6() { format!("[{text}]") } else { (*text).to_owned() };
            let written = |guard: Guard| guard.check_url(&format!("http://{host}/")).is_ok();
            let resolved = |guard: Guard| guard.check(Some("name.test"), address).is_ok();
            let expected = match reach {
                Reach::Public => [true, true, true, true],
                Reach::Private => [true, true, false, true],
                Reach::LinkLocal => [false, true, false, true],
                Reach::Nowhere => [false, false, false, false],
            };
            assert_eq!([written(strict), written(lax), resolved(strict), resolved(lax)], expected, "{text}");
            count += 1;
        }
    }
    assert!(count >= 150, "{count}");
}

#[test]
fn fault_89_r43_addresses_in_disguise_are_seen_through() {
    // A form, and what it is: allowed as written out or not.
    for (host, address, allowed) in [
        ("127.0.0.1", "127.0.0.1", true),
        ("2130706433", "127.0.0.1", true),
        ("0x7f000001", "127.0.0.1", true),
        ("0x7F.1", "127.0.0.1", true),
        ("0177.0.0.1", "127.0.0.1", true),
        ("017700000001", "127.0.0.1", true),
        ("127.1", "127.0.0.1", true),
        ("127.0.1", "127.0.0.1", true),
        ("127.0.0.1.", "127.0.0.1", true),
        ("127.0.0.0x1", "127.0.0.1", true),
        ("%31%32%37.0.0.1", "127.0.0.1", true),
        ("１２７.０.０.１", "127.0.0.1", true),
        ("127。0。0。1", "127.0.0.1", true),
        ("①②⑦.⓪.⓪.①", "127.0.0.1", true),
        ("[::1]", "::1", true),
        ("[0:0:0:0:0:0:0:1]", "::1", true),
        ("[::ffff:127.0.0.1]", "::ffff:127.0.0.1", true),
        ("[::FFFF:7F00:1]", "::ffff:127.0.0.1", true),
        ("2852039166", "169.254.169.254", false),
        ("0xA9FEA9FE", "169.254.169.254", false),
        ("0xa9.0xfe.0xa9.0xfe", "169.254.169.254", false),
        ("0251.0376.0251.0376", "169.254.169.254", false),
        ("025177524776", "169.254.169.254", false),
        ("0xa9.254.0251.254", "169.254.169.254", false),
        ("169.254.43518", "169.254.169.254", false),
        ("169.16689662", "169.254.169.254", false),
        ("169.254.169.254.", "169.254.169.254", false),
        ("%31%36%39.254.169.254", "169.254.169.254", false),
        ("１６９.254.169.254", "169.254.169.254", false),
        ("169。254。169。254", "169.254.169.254", false),
        ("[::ffff:169.254.169.254]", "::ffff:169.254.169.254", false),
        ("[::ffff:a9fe:a9fe]", "::ffff:169.254.169.254", false),
        ("[0:0:0:0:0:FFFF:A9FE:A9FE]", "::ffff:169.254.169.254", false),
        ("[::a9fe:a9fe]", "::169.254.169.254", false),
        ("[64:ff9b::a9fe:a9fe]", "64:ff9b::a9fe:a9fe", false),
        ("[2002:a9fe:a9fe::]", "2002:a9fe:a9fe::", false),
        ("[fd00:ec2::254]", "fd00:ec2::254", false),
        ("[fe80::1]", "fe80::1", false),
        ("0", "0.0.0.0", false),
        ("0x0", "0.0.0.0", false),
        ("0.0", "0.0.0.0", false),
        ("0.0.0", "0.0.0.0", false),
        ("00.00.00.00", "0.0.0.0", false),
        ("0.0.0.0.", "0.0.0.0", false),
        ("[::]", "::", false),
        ("[::0]", "::", false),
        ("[0:0:0:0:0:0:0:0]", "::", false),
        ("[::ffff:0:0]", "::ffff:0.0.0.0", false),
        ("[::ffff:0.0.0.0]", "::ffff:0.0.0.0", false),
        ("4294967295", "255.255.255.255", false),
        ("0xffffffff", "255.255.255.255", false),
    ] {
        let guard = Guard { allow_private: false };
        let lax = Guard { allow_private: true };
        let url = format!("http://{host}:8080/x");
        // What the parser makes of it, so that a refusal is known to be one of this address.
        let parsed = url::Url::parse(&url).unwrap();
        let parsed: IpAddr = parsed.host_str().unwrap().trim_matches(['[', ']']).parse().unwrap();
        assert_eq!(parsed, address.parse::<IpAddr>().unwrap(), "{host}");
        assert_eq!(guard.check_url(&url).is_ok(), allowed, "{host}");
        let never = Reach::of(parsed) == Reach::Nowhere;
        assert_eq!(lax.check_url(&url).is_ok(), !never, "{host}");
        if !allowed {
            assert!(HttpHandler::new(HttpOptions::new(&url)).is_err(), "{host}");
        }
    }
    // Backslashes, missing slashes, tabs and newlines are what browsers make of them.
    for url in [
        "http:\\\\169.254.169.254\\",
        "http:/169.254.169.254/",
        "http:169.254.169.254/",
        "http:///169.254.169.254/",
        "http://169.254.\t169.254/",
        "\n http://169.254.169.254/ ",
        "HTTP://169.254.169.254/",
        "http://169.254.169.254#@example.com/",
        "http://169.254.169.254?@example.com/",
        "http://169.254.169.254\\@example.com/",
        "https://169.254.169.254:443/",
    ] {
        let error = Guard::default().check_url(url).unwrap_err().to_string();
        assert!(error.contains("169.254.169.254"), "{url:?}: {error}");
    }
}

#[test]
fn fault_89_urls_that_are_none_are_refused_when_configured() {
    for url in [
        "",
        "nonsense",
        "/path",
        "//127.0.0.1/",
        "127.0.0.1:80",
        "http://",
        "http:///",
        "https://",
        "http://:80/",
        "http://@/",
        "http://256.256.256.256/",
        "http://127.0.0.1.5/",
        "http://0x100000000/",
        "http://1.2.3.4.5/",
        "http://[::1/",
        "http://[::1%25lo]/",
        "http://[fe80::1%eth0]/",
        "http://[fe80::1%25eth0]/",
        "http://[v1.a]/",
        "http://[127.0.0.1]/",
        "http://a b/",
        "http://a%00b/",
        "http://a%0d%0ab/",
        "http://a<b/",
        "http://127.0.0.1:0/",
        "http://127.0.0.1:65536/",
        "http://127.0.0.1:-1/",
        "ftp://127.0.0.1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "unix:/run/x.sock",
        "data:text/plain,x",
        "javascript:1",
        "ws://127.0.0.1/",
        "dict://127.0.0.1/",
        "http+unix://x/",
        "jar:http://127.0.0.1/",
        "http://user@127.0.0.1/",
        "http://:pw@127.0.0.1/",
        "http://user:pw@127.0.0.1/",
        "http://example.com@127.0.0.1/",
        "http://127.0.0.1@example.com/",
        "http://a:b@c:d@127.0.0.1/",
        "http://127.0.0.1%2f@example.com/",
        "http://xn--/",
        "http://xn--a/",
    ] {
        let mut options = HttpOptions::new(url);
        options.allow_private = true;
        assert!(HttpHandler::new(options).is_err(), "{url:?}");
    }
}

async fn ask(url: String, allow_private: bool, names: Arc<dyn Names>) -> Result<Option<String>, Failure> {
    let mut options = HttpOptions::new(url);
    options.allow_private = allow_private;
    HttpHandler::with_names(options, names).unwrap().deliver(&claim(1), NOW).await
}

/// A canary on both loopback addresses and the same port, where the machine has both.
async fn canaries() -> (Receiver, Option<Receiver>) {
    let canary = Receiver::start(|_, _| Reply::status(200, "")).await;
    let six = SocketAddr::new("::1".parse().unwrap(), canary.address().port());
    let has_six = std::net::TcpListener::bind(six).is_ok();
    let other = if has_six { Some(Receiver::start_at(six, |_, _| Reply::status(200, "")).await) } else { None };
    (canary, other)
}

#[tokio::test]
async fn fault_91_r43_names_that_lead_inside_never_reach_the_canary() {
    let (canary, six) = canaries().await;
    let port = canary.address().port();
    let reached = || canary.connections() + six.as_ref().map_or(0, Receiver::connections);
    // What a name answers, and whether connecting there would reach the canary.
    let answers: &[(&[&str], bool)] = &[
        (&["127.0.0.1"], true),
        (&["::ffff:127.0.0.1"], true),
        (&["::ffff:7f00:1"], true),
        (&["127.0.0.1", "127.0.0.1"], true),
        (&["::1"], six.is_some()),
        (&["::1", "127.0.0.1"], true),
        // Mixed with an address of the world, in either order: all must be allowed. (Nobody has this one: should the
        // guard ever fail here, nobody is bothered.)
        (&["2e00::1", "127.0.0.1"], false),
        (&["127.0.0.1", "2e00::1"], false),
        (&["2e00::4", "::1"], false),
        (&["2e00::1", "2e00::2", "2e00::3", "::ffff:127.0.0.1"], false),
        (&["2e00::1", "169.254.169.254"], false),
    ];
    for name in ["canary.test", "canary.test.", "xn--bcher-kva.test", "BÜCHER.test", "a.b.c.d.e", "127.0.0.1.nip.test"]
    {
        for (addresses, would_reach) in answers {
            let before = reached();
            let names = Listed::new(&[addresses]);
            let url = format!("http://{name}:{port}/");
            let failure = ask(url.clone(), false, names.clone()).await.unwrap_err();
            assert!(failure.message.contains("needs allow_private = true"), "{name} {addresses:?}: {failure}");
            assert_eq!((failure.cause, failure.remedy), (Cause::Destination, Remedy::Retry(None)));
            assert_eq!((reached(), names.asked()), (before, 1), "{name} {addresses:?}");
            if *would_reach {
                ask(url, true, names).await.unwrap();
                assert_eq!(reached(), before + 1, "{name} {addresses:?} proves nothing");
            }
        }
    }
    // Linux connects the unspecified address to itself. Not even allow_private opens that.
    for addresses in [["0.0.0.0"], ["::"], ["::ffff:0.0.0.0"], ["0.0.0.1"]] {
        let before = reached();
        let failure = ask(format!("http://n.test:{port}/"), true, Listed::new(&[&addresses])).await.unwrap_err();
        assert!(failure.message.contains("never reached"), "{failure}");
        assert_eq!(reached(), before);
    }
    let failure = ask(format!("http://n.test:{port}/"), true, Listed::new(&[&[]])).await.unwrap_err();
    assert!(failure.message.contains("n.test has no address"), "{failure}");
}

#[tokio::test]
async fn fault_91_r43_a_name_is_looked_up_once_and_the_answer_is_what_is_connected_to() {
    let canary = Receiver::start(|_, _| Reply::status(200, "")).await;
    let port = canary.address().port();
    let meant = SocketAddr::new("127.0.0.2".parse().unwrap(), port);
    let meant =
        Receiver::start_at(meant, |_, _| Reply::Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_vec())).await;
    // The second answer is the canary. A guard that judges one look-up and connects after another would hit it.
    let names = Listed::new(&[&["127.0.0.2"], &["127.0.0.1"]]);
    ask(format!("http://rebind.test:{port}/"), true, names.clone()).await.unwrap();
    assert_eq!((names.asked(), meant.connections(), canary.connections()), (1, 1, 0));
    // Each new connection is judged anew: inside now, whatever it was before.
    let names = Listed::new(&[&["0.0.0.0"], &["127.0.0.2"], &["::"]]);
    let mut options = HttpOptions::new(format!("http://rebind.test:{port}/"));
    options.allow_private = true;
    let handler = HttpHandler::with_names(options, names.clone()).unwrap();
    handler.deliver(&claim(1), NOW).await.unwrap_err();
    handler.deliver(&claim(2), NOW).await.unwrap();
    handler.deliver(&claim(3), NOW).await.unwrap_err();
    assert_eq!((names.asked(), meant.connections(), canary.connections()), (3, 2, 0));
}

#[tokio::test]
async fn fault_89_r43_localhost_is_a_name_and_needs_permission() {
    let (canary, six) = canaries().await;
    let reached = || canary.connections() + six.as_ref().map_or(0, Receiver::connections);
    let port = canary.address().port();
    let system = |url: String, allow_private| {
        let mut options = HttpOptions::new(url);
        options.allow_private = allow_private;
        HttpHandler::new(options).unwrap()
    };
    for name in ["localhost", "LOCALHOST", "localhost.", "ｌｏｃａｌｈｏｓｔ", "%6cocalhost"] {
        let url = format!("http://{name}:{port}/");
        let failure = system(url, false).deliver(&claim(1), NOW).await.unwrap_err();
        assert!(failure.message.contains("localhost"), "{name}: {failure}");
        assert_eq!(reached(), 0, "{name}");
    }
    system(format!("http://localhost:{port}/"), true).deliver(&claim(1), NOW).await.unwrap();
    assert_eq!(reached(), 1, "the canary proves nothing");
    // Written out it is allowed: the operator has said so.
    for host in ["127.0.0.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"] {
        let before = reached();
        system(format!("http://{host}:{port}/"), false).deliver(&claim(1), NOW).await.unwrap();
        assert_eq!(reached(), before + 1, "{host}");
    }
}

#[tokio::test]
async fn fault_92_r43_redirects_lead_nowhere() {
    let (canary, six) = canaries().await;
    let port = canary.address().port();
    let targets = [
        format!("http://127.0.0.1:{port}/"),
        format!("//127.0.0.1:{port}/"),
        format!("http://localhost:{port}/"),
        format!("http://[::1]:{port}/"),
        format!("http://[::ffff:127.0.0.1]:{port}/"),
        format!("http://0x7f000001:{port}/"),
        format!("http://2130706433:{port}/"),
        format!("http://0.0.0.0:{port}/"),
        format!("https://127.0.0.1:{port}/"),
        "http://169.254.169.254/latest/meta-data/".to_owned(),
        "file:///etc/passwd".to_owned(),
        "gopher://127.0.0.1/".to_owned(),
        "/elsewhere".to_owned(),
        "http://[broken".to_owned(),
        String::new(),
    ];
    for status in [300, 301, 302, 303, 304, 305, 307, 308] {
        for target in targets.clone() {
            let told = target.clone();
            let receiver =
                Receiver::start(move |_, _| Reply::status(status, "moved").with("location", told.clone())).await;
            let failure = HttpHandler::new(HttpOptions::new(receiver.url("/hook")))
                .unwrap()
                .deliver(&claim(1), NOW)
                .await
                .unwrap_err();
            assert!(failure.message.contains("redirects are not followed"), "{status} {target}: {failure}");
            assert!(failure.message.contains(&status.to_string()), "{failure}");
            assert_eq!((failure.cause, failure.remedy), (Cause::Destination, Remedy::Retry(None)));
            assert_eq!(receiver.requests().len(), 1, "{status} {target}");
        }
    }
    assert_eq!(canary.connections() + six.as_ref().map_or(0, Receiver::connections), 0);
}
