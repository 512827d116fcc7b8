//! The configuration file: every mistake is found at once and in its place, and the default file tells the truth.

mod mistakes;
mod routes;

use std::path::Path;

use oncehook::retry::RetryPolicy;
use oncehook::route::{BreakerPolicy, USUAL_CONCURRENCY};
use oncehook_server::config::{Config, DEFAULT_FILE};

use crate::kit::{directory, run};

/// A file in which nearly everything is wrong.
const BAD: &str = r#"[server]
ingress = "8080"
admin = "0.0.0.0:8081"
admin_tokn = "env:TOKEN"
trusted_proxies = ["10.0.0.0/33", "proxy.internal"]
[server.limits]
body_bytes = 0
head = "15 seconds"
in_flight = "many"

[journal]
url = "mongodb://localhost/x"
[dedup]
window = "1h"
ttl = "5m"
[retention]
payload = "1y"
[[source]]
name = "a"
provider = "stripe"
secrets = []
tolerance = "0s"
secret = "x"
[[source]]
name = "a"
provider = "github"
secrets = ["whsec_plain_text_canary", "env:ONCEHOOK_TEST_NOT_SET", "file:no/such/file", "file:placeholder"]
tolerance = "5m"
allow_ips = ["1.2.3.4/x"]
verify = false
[[source]]
name = "Bad Name!"
provider = "strip"
secrets = ["file:good"]
missing_key = "ignore"
[[source]]
provider = "custom"
secrets = ["file:good"]
key = "id"
[[source]]
name = "none"
secrets = ["file:good"]
[[source]]
name = "signed"
provider = "custom"
secrets = ["file:good"]
[source.verify]
algorithm = "md5"
[sources]
"#;

/// What must be found: a piece of the message, and the place as the text at which it starts (the n-th occurrence).
const FOUND: [(&str, &str, usize); 29] = [
    ("`ingress`: \"8080\" is not an address and port", "\"8080\"", 0),
    ("unknown key `admin_tokn` in [server]", "admin_tokn", 0),
    ("\"10.0.0.0/33\" is not an address or network (CIDR)", "\"10.0.0.0/33\"", 0),
    ("\"proxy.internal\" is not an address or network (CIDR)", "\"proxy.internal\"", 0),
    ("`body_bytes` must be between 1 and", "0\nhead", 0),
    ("`head`: \"15 seconds\" is not a duration", "\"15 seconds\"", 0),
    ("`in_flight` must be a whole number, not a string", "\"many\"", 0),
    ("this is not a journal; write sqlite://PATH", "\"mongodb://", 0),
    ("`dedup.window` is shorter than the 72 h for which GitHub may retry", "\"1h\"", 0),
    ("unknown key `ttl` in [dedup]", "ttl", 0),
    ("`payload`: \"1y\" is not a duration", "\"1y\"", 0),
    ("`secrets` is empty; verification is never skipped", "[]\ntolerance", 0),
    ("a `tolerance` of zero would refuse every request", "\"0s\"", 0),
    ("unknown key `secret` in [[source]]", "secret = \"x\"", 0),
    ("there are two sources named `a`", "\"a\"", 1),
    ("never as plain text here", "\"whsec_plain", 0),
    ("the environment variable ONCEHOOK_TEST_NOT_SET is not set", "\"env:ONCEHOOK_TEST_NOT_SET\"", 0),
    ("the secret file no/such/file cannot be read", "\"file:no/such/file\"", 0),
    ("the secret of file:placeholder: the secret is a placeholder", "\"file:placeholder\"", 0),
    ("\"1.2.3.4/x\" is not an address or network (CIDR)", "\"1.2.3.4/x\"", 0),
    ("`verify`: ", "false", 0),
    ("`name`: ", "\"Bad Name!\"", 0),
    ("there is no preset `strip`", "\"strip\"", 0),
    ("`missing_key`: ", "\"ignore\"", 0),
    ("provider = \"custom\" needs a [source.verify] table", "[[source]]\nprovider = \"custom\"", 0),
    ("a [[source]] needs a `name`", "[[source]]\nprovider = \"custom\"", 0),
    ("a [[source]] needs a `provider`", "[[source]]\nname = \"none\"", 0),
    ("md5", "\"md5\"", 0),
    ("unknown key `sources` in the file", "sources]", 0),
];

fn place(text: &str, needle: &str, occurrence: usize) -> (u64, u64) {
    let (at, _) = text.match_indices(needle).nth(occurrence).unwrap_or_else(|| panic!("{needle:?} is not in the file"));
    let before = &text[..at];
    let line = before.matches('\n').count() as u64 + 1;
    let column = before.rsplit('\n').next().unwrap().chars().count() as u64 + 1;
    (line, column)
}

fn bad() -> tempfile::TempDir {
    directory(BAD, &[("good", "a real secret"), ("placeholder", "changeme")])
}

#[test]
fn fault_108_all_mistakes_are_reported_at_once_with_their_places() {
    let directory = bad();
    let (code, out, err) = run(directory.path(), &["check", "--json"]);
    assert_eq!((code, err.as_str()), (1, ""));
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["ok"], false);
    let problems = report["problems"].as_array().unwrap();
    for (message, needle, occurrence) in FOUND {
        let (line, column) = place(BAD, needle, occurrence);
        let found = problems.iter().any(|problem| {
            problem["message"].as_str().unwrap().contains(message)
                && problem["line"] == line
                && problem["column"] == column
        });
        assert!(found, "{message:?} at {line}:{column} is not among:\n{problems:#?}");
    }
    let positions: Vec<_> =
        problems.iter().map(|problem| (problem["line"].as_u64(), problem["column"].as_u64())).collect();
    assert!(positions.is_sorted(), "in the order of the file: {positions:?}");
    assert!(!out.contains("canary"), "a secret that was written down is not repeated: {out}");
}

#[test]
fn fault_108_the_same_as_text() {
    let directory = bad();
    let (code, out, err) = run(directory.path(), &["check"]);
    assert_eq!((code, out.as_str()), (1, ""));
    for (message, needle, occurrence) in FOUND {
        let (line, column) = place(BAD, needle, occurrence);
        assert!(err.contains(message), "{message:?} is not in:\n{err}");
        assert!(
            err.contains(&format!("oncehook.toml:{line}:{column}")),
            "{message:?} at {line}:{column} is not in:\n{err}"
        );
    }
    assert!(err.contains("problems in oncehook.toml"), "{err}");
    assert!(!err.contains('\u{1b}'), "no colour when nobody looks");
    // `serve` says the same and does not start.
    let (code, _, served) = run(directory.path(), &["serve"]);
    assert_eq!((code, served), (1, err));
}

#[test]
fn fault_108_a_slip_of_the_pen_is_understood() {
    for (written, meant) in [
        ("[server]\nadmin_tokn = \"env:X\"", "admin_token"),
        ("[server]\ningres = \"127.0.0.1:1\"", "ingress"),
        ("[server.limits]\nbody_byte = 1", "body_bytes"),
        ("[dedup]\nwindows = \"1d\"", "window"),
        ("[retention]\npayloads = \"1d\"", "payload"),
        ("[journal]\nurls = \"sqlite://x\"", "url"),
        ("[[source]]\nname = \"a\"\nprovider = \"stripe\"\nsecret = [\"file:x\"]", "secrets"),
        ("[[source]]\nname = \"a\"\nproviders = \"stripe\"", "provider"),
        ("[dedupe]\nwindow = \"1d\"", "dedup"),
    ] {
        let problems = Config::parse("x.toml", written).unwrap_err();
        let help = format!("did you mean `{meant}`?");
        assert!(
            problems.list.iter().any(|problem| problem.help.as_deref() == Some(&help)),
            "{written}: {:#?}",
            problems.list
        );
    }
}

#[test]
fn fault_61_no_secret_means_no_source() {
    let source = |secrets: &str| format!("[[source]]\nname = \"a\"\nprovider = \"stripe\"\n{secrets}");
    let directory = directory("", &[("empty", ""), ("blank", " \n"), ("whsec", "whsec_"), ("dots", "whsec_...")]);
    let file = |name: &str| format!("secrets = [\"file:{}\"]", directory.path().join(name).display());
    for secrets in [
        String::new(),
        "secrets = []".into(),
        "secrets = [\"\"]".into(),
        "secrets = \"env:X\"".into(),
        "secrets = [1]".into(),
        "secrets = [\"env:\"]".into(),
        "secrets = [\"file:\"]".into(),
        file("empty"),
        file("blank"),
        file("whsec"),
        file("dots"),
    ] {
        assert!(Config::parse("x.toml", &source(&secrets)).is_err(), "{secrets}");
    }
}

#[test]
fn what_cannot_be_read_is_said_with_its_place() {
    for (text, line, column) in [
        ("[server\n", 1, 8),
        ("[server]\ningress = 127.0.0.1:80\n", 2, 16),
        ("a = \"x\n", 1, 7),
        ("[server]\nadmin = \"127.0.0.1:1\"\nadmin = \"127.0.0.1:2\"\n", 3, 1),
    ] {
        let problems = Config::parse("x.toml", text).unwrap_err();
        assert!(
            problems.list.iter().any(|problem| (problem.line, problem.column) == (line, column)),
            "{text:?} at {line}:{column}: {:#?}",
            problems.list
        );
    }
    // Columns count characters.
    let problems = Config::parse("x.toml", "\"größe\" = 1; \n").unwrap_err();
    assert!(problems.list.iter().any(|problem| (problem.line, problem.column) == (1, 11)), "{:#?}", problems.list);
    // Not text at all.
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("oncehook.toml"), b"\xff\xfe").unwrap();
    let (code, _, err) = run(directory.path(), &["check"]);
    assert_eq!(code, 1);
    assert!(err.contains("cannot read oncehook.toml"), "{err}");
}

#[test]
fn r31_what_is_fetched_is_checked_in_the_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, "whsec_of_a_source_that_fetches").unwrap();
    let secret = format!("file:{}", secret.display());
    let config = |fetch: &str, handler: &str| {
        format!(
            "[[source]]\nname = \"a\"\nprovider = \"stripe\"\nsecrets = [\"{secret}\"]\n\
             [[route]]\nname = \"r\"\nsource = \"a\"\n{fetch}\n{handler}\n"
        )
    };
    let current = "[route.sql]\nstatement = \"SELECT :now\"\nbind = { now = \"$current\" }";
    let body = "[route.http]\nurl = \"http://127.0.0.1:9/\"\nbody = '{{$current/id}}'";
    for (fetch, handler, said) in [
        ("", current, "this route has no `fetch`"),
        ("", body, "this route has no `fetch`"),
        ("fetch = { auth = \"x\" }", current, "`fetch` needs a `url`"),
        ("fetch = { url = \"https://api.example.com/payouts\" }", current, "needs {entity}"),
        ("fetch = { url = \"http://169.254.169.254/{entity}\" }", current, "allow_private"),
        ("fetch = { url = \"https://api.example.com/{entity}\", cache = true }", current, "cache"),
        ("fetch = { url = \"https://api.example.com/{entity}\", timeout = \"1h\" }", current, "timeout"),
    ] {
        let problems = Config::parse("x.toml", &config(fetch, handler)).unwrap_err().to_string();
        assert!(problems.contains(said), "{fetch} {handler}: {problems}");
    }
    let whole = "fetch = { url = \"https://api.example.com/{entity}\", timeout = \"5s\", allow_private = true }";
    for handler in [current, body] {
        let parsed = Config::parse("x.toml", &config(whole, handler));
        assert!(parsed.is_ok(), "{}", parsed.unwrap_err());
    }
}

#[test]
fn keys_of_later_versions_are_named_as_such() {
    for text in ["[server.tls]\ncert = \"x\"", "[[route]]\n[route.publish]\nx = 1"] {
        let problems = Config::parse("x.toml", text).unwrap_err();
        assert!(
            problems.list.iter().any(|problem| problem.message.contains("is not part of this version yet")),
            "{text}: {:#?}",
            problems.list
        );
    }
}

/// The default file with its secret in a directory.
fn placed(text: &str, directory: &Path) -> String {
    let path = directory.join("stripe.secret");
    std::fs::write(&path, "whsec_of_the_default_file").unwrap();
    text.replace("file:stripe.secret", &format!("file:{}", path.display()))
}

/// `# key = value` and `# [table]` become what they show.
fn uncomment(line: &str) -> Option<&str> {
    let text = line.strip_prefix("# ")?;
    let name = text.split([' ', '=']).next()?;
    let is_key = !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
        && text.get(name.len()..)?.starts_with(" = ");
    (is_key || text.starts_with('[')).then_some(text)
}

#[test]
fn the_default_file_shows_the_defaults() {
    let directory = tempfile::tempdir().unwrap();
    let file = placed(DEFAULT_FILE, directory.path());
    let (file, examples) = file.split_once("# A provider without a preset:").unwrap();
    let (example, routes) = examples.split_once("# What to do with events.").unwrap();
    let mut shown = String::new();
    let mut keys = 0;
    for line in file.lines() {
        // Shown, but there is none by default, and other providers than this one have it.
        let others = ["rate_limit", "admin_token", "params", "handover", "wait"];
        let text = uncomment(line).filter(|text| !others.iter().any(|other| text.starts_with(other)));
        keys += usize::from(text.is_some());
        shown.push_str(text.unwrap_or(line));
        shown.push('\n');
    }
    assert!(keys >= 16, "{keys} commented keys in:\n{file}");
    let source = shown.clone();
    let shown = Config::parse("shown", &shown).unwrap_or_else(|problems| panic!("{problems}"));
    let short = placed(
        "[[source]]\nname = \"stripe\"\nprovider = \"stripe\"\nsecrets = [\"file:stripe.secret\"]\n",
        directory.path(),
    );
    let plain = Config::parse("plain", &short).unwrap_or_else(|problems| panic!("{problems}"));

    assert_eq!(format!("{:#?}", shown.server), format!("{:#?}", plain.server));
    assert_eq!(shown.journal.shown(), plain.journal.shown());
    assert_eq!(shown.spool, plain.spool);
    assert_eq!((shown.dedup_window, shown.retention_payload), (plain.dedup_window, plain.retention_payload));
    assert_eq!((shown.retention_dead, shown.retention_audit), (plain.retention_dead, plain.retention_audit));
    let (shown, plain) = (&shown.sources[0], &plain.sources[0]);
    assert_eq!((shown.name.as_str(), &shown.provider), (plain.name.as_str(), &plain.provider));
    assert_eq!(shown.verifier.tolerance_secs(), plain.verifier.tolerance_secs());
    // Key, policy and places.
    assert_eq!(format!("{:?}", shown.identifier), format!("{:?}", plain.identifier));
    assert_eq!((&shown.allow_ips, shown.on_outage), (&plain.allow_ips, plain.on_outage));

    // And the examples of an own provider and of an endpoint are such.
    let secret = format!("file:{}", directory.path().join("stripe.secret").display());
    let read = |example: &str, secret_of: &str, rest: &str| {
        let lines = example.lines().map(|line| uncomment(line).unwrap_or(line));
        let text = lines.collect::<Vec<_>>().join("\n").replace(secret_of, &secret) + rest;
        Config::parse("own", &text).unwrap_or_else(|problems| panic!("{problems}"))
    };
    let (own, endpoint) = example.split_once("# An ordinary endpoint").unwrap();
    assert_eq!(read(own, "env:BILLING_SECRET", "").sources[0].name.as_str(), "billing");
    let route = "\n[[route]]\nname = \"pay\"\nsource = \"payouts\"\n[route.http]\nurl = \"http://127.0.0.1:1/\"\n";
    let endpoint = read(&format!("#{endpoint}"), "env:PAYOUTS_TOKEN", route);
    assert!(endpoint.sources[0].endpoint && endpoint.sources[0].wait.is_some());

    // And the example routes work, with policies that are the usual ones.
    let mut text = source;
    for line in routes.lines() {
        // Another database has no place for `requires` and `machine`.
        let shown = uncomment(line).filter(|text| !text.starts_with("database = "));
        text.push_str(shown.unwrap_or(line));
        text.push('\n');
    }
    let mail_secret = directory.path().join("mail.secret");
    std::fs::write(&mail_secret, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
    let mail_secret = format!("file:{}", mail_secret.display());
    let text = text.replace("env:MAIL_SECRET", &mail_secret).replace("env:STRIPE_KEY", &mail_secret);
    // The rest of the line with the marker.
    let text = text.replacen(" Without a route they are kept", "# Without a route they are kept", 1);
    let config = Config::parse("routes", &text).unwrap_or_else(|problems| panic!("{problems}"));
    let (orders, mail) = (config.routes.get("orders").unwrap(), config.routes.get("confirmation-mail").unwrap());
    assert_eq!((orders.handler.kind(), mail.handler.kind()), ("sql", "http"));
    assert_eq!(orders.followups, std::slice::from_ref(&mail.name));
    assert_eq!((orders.retry, mail.retry), (RetryPolicy::default(), RetryPolicy::patient()));
    for route in [orders, mail] {
        assert_eq!(route.breaker, BreakerPolicy::default());
        assert_eq!(route.concurrency, USUAL_CONCURRENCY);
    }
}

#[test]
fn every_key_is_in_the_default_file() {
    // The help for an unknown key lists the known ones.
    let text = "zzzzzzzz = 1\n[server]\nzzzzzzzz = 1\n[server.limits]\nzzzzzzzz = 1\n[journal]\nzzzzzzzz = 1\n[spool]\nzzzzzzzz = 1\n[dedup]\nzzzzzzzz = 1\n\
                [retention]\nzzzzzzzz = 1\n[[source]]\nzzzzzzzz = 1\nname = \"a\"\nprovider = \"stripe\"\n\
                [[route]]\nzzzzzzzz = 1\n[route.retry]\nzzzzzzzz = 1\n[route.breaker]\nzzzzzzzz = 1\n\
                [route.sql]\nzzzzzzzz = 1\n[route.http]\nzzzzzzzz = 1\n";
    let problems = Config::parse("x.toml", text).unwrap_err();
    let mut known = Vec::new();
    for help in problems.list.iter().filter_map(|problem| problem.help.as_deref()) {
        if let Some((_, keys)) = help.split_once(" has: ") {
            known.extend(keys.split(", ").map(str::to_owned));
        }
    }
    assert!(known.len() >= 56, "{known:?}");
    for key in known {
        let written = [
            format!("{key} = "),
            format!("[{key}]"),
            format!("[[{key}]]"),
            format!("[server.{key}]"),
            format!("[source.{key}]"),
            format!("[route.{key}]"),
        ];
        assert!(written.iter().any(|written| DEFAULT_FILE.contains(written)), "`{key}` is not in the default file");
    }
}

#[test]
fn init_writes_what_check_accepts() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(run(directory.path(), &["init"]).0, 0);
    let (code, out, err) = run(directory.path(), &["check"]);
    assert_eq!((code, out.as_str(), err.as_str()), (0, "", "oncehook.toml is fine: 1 source, 0 routes\n"));
    let (code, out, _) = run(directory.path(), &["check", "--json"]);
    assert_eq!(code, 0);
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        report,
        serde_json::json!({ "ok": true, "sources": ["stripe"], "routes": [], "problems": [], "warnings": [] })
    );
    let written = std::fs::read_to_string(directory.path().join("oncehook.toml")).unwrap();
    assert_eq!(written, DEFAULT_FILE);
}
