//! The command line, as people and scripts use it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use oncehook_testkit::gateway::now;
use oncehook_verify::UnixMicros;
use serde_json::Value;

use crate::kit::{Headers, Rig, Signs, directory, raw, run, text, with};

const STRIPE: &str = "whsec_cli_stripe";
const GITHUB: &str = "github cli secret";
const SECRETS: [(&str, &str); 2] = [("stripe.secret", STRIPE), ("github.secret", GITHUB)];
const SOURCES: &str = "[[source]]\nname = \"stripe\"\nprovider = \"stripe\"\nsecrets = [\"file:stripe.secret\"]\n\
                       [[source]]\nname = \"github\"\nprovider = \"github\"\nsecrets = [\"file:github.secret\"]\n";

/// A gateway, and beside it a configuration with the ports that it has got.
fn rig() -> Rig {
    let rig = Rig::start("", SOURCES, &SECRETS);
    write_client_config(&rig, "");
    rig
}

fn write_client_config(rig: &Rig, server: &str) {
    let (ingress, admin) = (rig.gateway.ingress, rig.gateway.admin);
    let config = format!("[server]\ningress = \"{ingress}\"\nadmin = \"{admin}\"\n{server}\n{SOURCES}");
    std::fs::write(rig.directory.path().join("client.toml"), config).unwrap();
}

fn client(rig: &Rig, arguments: &[&str]) -> (i32, String, String) {
    run(rig.directory.path(), &[&["--config", "client.toml"], arguments].concat())
}

fn json(out: &str) -> Value {
    serde_json::from_str(out).unwrap_or_else(|error| panic!("{error}: {out}"))
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn help_and_version() {
    let directory = tempfile::tempdir().unwrap();
    let (code, out, _) = run(directory.path(), &["--help"]);
    assert_eq!(code, 0);
    for command in [
        "init",
        "check",
        "serve",
        "migrate",
        "send",
        "verify",
        "events",
        "show",
        "retry",
        "replay",
        "skip",
        "release",
        "pause",
        "resume",
        "tail",
        "providers",
    ] {
        assert!(out.contains(command), "{command} is not in:\n{out}");
        let (code, out, _) = run(directory.path(), &[command, "--help"]);
        assert!(code == 0 && out.contains("Usage: oncehook"), "{command}: {out}");
    }
    assert_eq!(run(directory.path(), &["--version"]).1.trim(), format!("oncehook {}", env!("CARGO_PKG_VERSION")));
    for wrong in [
        &[][..],
        &["nonsense"],
        &["serve", "--nonsense"],
        &["send", "--times", "0"],
        &["events", "--limit", "1001"],
        &["retry", "--rate", "0", "--status", "dead"],
        &["retry", "some-id", "--status", "dead"],
        &["replay", "some-id", "--epoch", "1"],
        &["verify"],
    ] {
        let (code, out, err) = run(directory.path(), wrong);
        assert_eq!((code, out.as_str()), (2, ""), "{wrong:?}");
        assert!(!err.is_empty(), "{wrong:?}");
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing was left behind");
}

#[test]
fn without_a_configuration_every_command_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let id = "0199d2a0-0000-7000-8000-000000000000";
    for command in [
        &["check"][..],
        &["serve"],
        &["migrate"],
        &["send"],
        &["events"],
        &["show", id],
        &["retry", id],
        &["replay", id],
        &["retry", "--status", "dead", "--yes"],
        &["skip", id],
        &["release", id],
        &["pause", "--source", "a"],
        &["resume", "--route", "a"],
        &["tail"],
        &["verify", "--body", "x"],
    ] {
        let (code, out, err) = run(directory.path(), command);
        assert_eq!((code, out.as_str()), (1, ""), "{command:?}");
        assert!(
            err.contains("cannot read oncehook.toml") && err.contains("`oncehook init` writes a commented one"),
            "{command:?}: {err}"
        );
    }
    let (code, _, err) = run(directory.path(), &["--config", "elsewhere.toml", "check"]);
    assert!(code == 1 && err.contains("elsewhere.toml"), "{err}");
}

#[test]
fn init_does_not_overwrite() {
    let directory = tempfile::tempdir().unwrap();
    let (config, secret) = (directory.path().join("oncehook.toml"), directory.path().join("stripe.secret"));
    let (code, out, err) = run(directory.path(), &["init"]);
    assert_eq!((code, out.as_str()), (0, ""), "{err}");
    assert!(err.contains("oncehook serve") && err.contains("oncehook send --source stripe"), "{err}");
    assert_eq!(mode(&secret), 0o600);
    let first = std::fs::read_to_string(&secret).unwrap();
    assert!(first.starts_with("whsec_") && first.trim().len() == 70, "the length of the secret");
    assert!(!err.contains(first.trim()), "the secret was shown");

    std::fs::write(&config, "# mine").unwrap();
    let (code, _, err) = run(directory.path(), &["init"]);
    assert!(code == 1 && err.contains("oncehook.toml exists and is not overwritten"), "{err}");
    assert_eq!(std::fs::read_to_string(&config).unwrap(), "# mine");
    let (code, _, _) = run(directory.path(), &["init", "--force"]);
    assert_eq!(code, 0);
    assert_ne!(std::fs::read_to_string(&config).unwrap(), "# mine");
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), first, "a secret that exists is kept");
    // A secret in the way stops it too, and nothing is half done.
    std::fs::remove_file(&config).unwrap();
    let (code, _, err) = run(directory.path(), &["init"]);
    assert!(code == 1 && err.contains("stripe.secret exists"), "{err}");
    assert!(!config.exists());
    // Two secrets are never the same.
    let other = tempfile::tempdir().unwrap();
    let (code, out, err) = run(other.path(), &["init", "--json"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(json(&out)["config"], "oncehook.toml");
    assert_ne!(std::fs::read_to_string(other.path().join("stripe.secret")).unwrap(), first);
    // A directory that is not there.
    assert_eq!(run(other.path(), &["--config", "no/where.toml", "init"]).0, 1);
}

#[test]
fn migrate_twice() {
    let directory = directory(SOURCES, &SECRETS);
    let (code, out, err) = run(directory.path(), &["migrate"]);
    assert_eq!((code, out.as_str(), err.as_str()), (0, "", "applied: 001_journal\n"));
    let (code, _, err) = run(directory.path(), &["migrate"]);
    assert_eq!((code, err.as_str()), (0, "the journal is up to date\n"));
    assert_eq!(json(&run(directory.path(), &["migrate", "--json"]).1), serde_json::json!({ "applied": [] }));
    // Not a database.
    std::fs::write(
        directory.path().join("oncehook.db"),
        "this is a diary, not a journal; dear diary, today I was overwritten".repeat(100),
    )
    .unwrap();
    let (code, _, err) = run(directory.path(), &["migrate"]);
    assert!(code == 1 && err.contains("error:"), "{err}");
}

#[tokio::test]
async fn a_journal_in_use_is_left_alone() {
    let rig = Rig::start("", SOURCES, &SECRETS);
    for command in ["migrate", "serve"] {
        let (code, _, err) = run(rig.directory.path(), &[command]);
        assert!(code == 1 && err.contains("in use by another oncehook process"), "{command}: {err}");
    }
    assert_eq!(rig.gateway.get("/readyz").await.status, 200);
}

#[test]
fn providers_need_no_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let (code, out, err) = run(directory.path(), &["providers"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let listed = json(&run(directory.path(), &["providers", "--json"]).1);
    let listed = listed.as_array().unwrap();
    let names: Vec<_> = listed.iter().map(|provider| text(&provider["name"])).collect();
    assert_eq!(names, oncehook_verify::Preset::all().iter().map(|preset| preset.name.clone()).collect::<Vec<_>>());
    for provider in listed {
        let name = text(&provider["name"]);
        assert!(out.contains(&name), "{out}");
        for field in [
            "title",
            "integrity",
            "tolerance_seconds",
            "signature_headers",
            "key_signed",
            "retries",
            "retry_horizon_seconds",
            "ack_status",
            "config",
        ] {
            assert!(provider.get(field).is_some(), "{field} of {name}");
        }
        let (code, story, _) = run(directory.path(), &["providers", &name]);
        assert!(code == 0 && story.contains(&text(&provider["config"])), "{story}");
        assert_eq!(json(&run(directory.path(), &["providers", &name, "--json"]).1), *provider);
    }
    let (code, out, err) = run(directory.path(), &["providers", "nobody"]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("there is no preset `nobody`;"), "{err}");
}

#[tokio::test]
async fn send_once() {
    let rig = rig();
    let (code, out, err) = client(&rig, &["send", "--source", "stripe", "--key", "evt_once"]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(out.starts_with("200 OK\n") && out.contains("\"status\":\"accepted\""), "{out}");
    let (code, out, _) = client(&rig, &["send", "--source", "stripe", "--key", "evt_once", "--json"]);
    let report = json(&out);
    assert_eq!((code, &report["requests"], &report["errors"]), (0, &1.into(), &0.into()), "{report}");
    // Signed at another second the sample is another body; either way it is known.
    assert!(report["verdicts"]["duplicate"] == 1 || report["verdicts"]["conflict"] == 1, "{report}");
    assert_eq!(rig.stored().await, 1);
    // Several sources: one must be named.
    let (code, _, err) = client(&rig, &["send"]);
    assert!(code == 1 && err.contains("choose one with --source: stripe, github"), "{err}");
    let (code, _, err) = client(&rig, &["send", "--source", "nobody"]);
    assert!(code == 2 && err.contains("there is no source `nobody`"), "{err}");
    // Without a configuration, by provider.
    let url = format!("http://{}/webhooks/github", rig.gateway.ingress);
    let (code, out, _) = run(
        rig.directory.path(),
        &["send", "--provider", "github", "--secret", "file:github.secret", "--url", &url, "--type", "push"],
    );
    assert!(code == 0 && out.contains("accepted"), "{out}");
    let (code, out, _) =
        run(rig.directory.path(), &["send", "--provider", "github", "--secret", "file:stripe.secret", "--url", &url]);
    assert!(code == 1 && out.starts_with("401 Unauthorized"), "{out}");
}

#[tokio::test]
async fn send_with_a_key_means_one_event_whenever_it_is_sent() {
    let rig = rig();
    let mut verdicts = Vec::new();
    for _ in 0..2 {
        let (code, out, _) = client(&rig, &["send", "--source", "stripe", "--key", "evt_named"]);
        assert_eq!(code, 0, "{out}");
        verdicts.push(["accepted", "duplicate", "conflict"].into_iter().find(|word| out.contains(word)));
        // The next second would show in a body that held the time of sending.
        tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    }
    assert_eq!(verdicts, [Some("accepted"), Some("duplicate")]);
}

#[tokio::test]
async fn send_many_at_once_and_one_is_accepted() {
    let rig = rig();
    let (code, out, err) =
        client(&rig, &["send", "--source", "stripe", "--times", "100", "--concurrency", "8", "--json"]);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let report = json(&out);
    assert_eq!(report["verdicts"], serde_json::json!({ "accepted": 1, "duplicate": 99 }));
    assert_eq!(report["statuses"], serde_json::json!({ "200": 100 }));
    assert_eq!(
        (&report["requests"], &report["distinct_events"], &report["errors"]),
        (&100.into(), &1.into(), &0.into())
    );
    let events = rig.gateway.events().await;
    assert_eq!((events.len(), &events[0]["duplicates"]), (1, &99.into()));
    let (code, out, _) =
        client(&rig, &["send", "--source", "github", "--events", "20", "--times", "5", "--concurrency", "4"]);
    assert_eq!(code, 0);
    assert!(out.contains("accepted × 20, duplicate × 80") && out.contains("20 distinct"), "{out}");
    assert_eq!(rig.stored().await, 21);
    // One that is refused is a failure.
    let (code, out, _) =
        client(&rig, &["send", "--source", "stripe", "--times", "3", "--header", "Stripe-Signature: t=1,v1=00"]);
    assert!(code == 1 && out.contains("401 × 3") && out.contains("refused    3 × signature"), "{out}");
}

#[test]
fn send_to_nobody() {
    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let config = format!("[server]\ningress = \"{free}\"\nadmin = \"{other}\"\n{SOURCES}");
    let directory = directory(&config, &SECRETS);
    for times in ["1", "50"] {
        let (code, out, err) =
            run(directory.path(), &["send", "--source", "stripe", "--times", times, "--concurrency", "4"]);
        assert_eq!((code, out.as_str()), (1, ""));
        assert!(
            err.contains(&format!("nobody answers at http://{free}/webhooks/stripe"))
                && err.contains("`oncehook serve` starts it"),
            "{err}"
        );
    }
    for command in [&["events"][..], &["show", "0199d2a0-0000-7000-8000-000000000000"]] {
        let (code, out, err) = run(directory.path(), command);
        assert_eq!((code, out.as_str()), (1, ""));
        assert!(err.contains("no gateway answers on") && err.contains("is it running?"), "{err}");
    }
}

/// A saved request: its file, and the same as separate files.
fn save(directory: &Path, body: &[u8], at: UnixMicros) -> Headers {
    let headers = Signs::preset("stripe", STRIPE, "stripe").headers(&[], br#"{"id":"evt_v","type":"a.b"}"#, "", at);
    std::fs::write(directory.join("request.http"), raw("/webhooks/stripe", &headers, body)).unwrap();
    std::fs::write(directory.join("body.json"), body).unwrap();
    headers
}

#[test]
fn verify_explains() {
    let directory = directory(SOURCES, &SECRETS);
    let verify = |arguments: &[&str]| run(directory.path(), &[&["verify", "--source", "stripe"], arguments].concat());
    let genuine = br#"{"id":"evt_v","type":"a.b"}"#;
    let headers = save(directory.path(), genuine, now());
    let (code, out, _) = verify(&["--request", "request.http"]);
    assert!(code == 0 && out.starts_with("genuine: signed ") && out.contains("\n  event key evt_v, type a.b"), "{out}");
    let (code, out, _) = verify(&["--request", "request.http", "--json"]);
    let report = json(&out);
    assert_eq!((code, &report["genuine"], &report["events"][0]["key"]), (0, &true.into(), &"evt_v".into()));
    let signature = format!("Stripe-Signature: {}", crate::kit::value(&headers, "stripe-signature"));
    assert_eq!(verify(&["--header", &signature, "--body", "body.json"]).0, 0);
    // No configuration, only a provider and a secret.
    let (code, out, _) = run(
        directory.path(),
        &[
            "--config",
            "none",
            "verify",
            "--provider",
            "stripe",
            "--secret",
            "file:stripe.secret",
            "--request",
            "request.http",
        ],
    );
    assert_eq!(code, 0, "{out}");

    for (altered, explained) in [
        (&b"{\"id\":\"evt_v\",\"type\":\"a.b\"}\n"[..], "without the line ending"),
        (b"\xef\xbb\xbf{\"id\":\"evt_v\",\"type\":\"a.b\"}", "byte order mark"),
        (b"{\"id\": \"evt_v\", \"type\": \"a.b\"}", ""),
        (b"{\"id\":\"evt_w\",\"type\":\"a.b\"}", ""),
    ] {
        save(directory.path(), altered, now());
        let (code, out, _) = verify(&["--request", "request.http"]);
        assert_eq!(code, 1, "{out}");
        assert!(out.starts_with("refused: the signature does not match [signature_mismatch]\n  - "), "{out}");
        assert!(out.to_lowercase().contains(explained), "{explained:?} is not in: {out}");
        let report = json(&verify(&["--request", "request.http", "--json"]).1);
        assert_eq!((&report["genuine"], &report["code"]), (&false.into(), &"signature_mismatch".into()));
        assert!(!report["findings"].as_array().unwrap().is_empty(), "{report}");
    }
    // The wrong secret, no signature, an old request, another provider's request.
    save(directory.path(), genuine, now());
    let (code, out, _) = verify(&["--request", "request.http", "--secret", "file:github.secret"]);
    assert!(code == 1 && out.contains("[signature_mismatch]"), "{out}");
    let (code, out, _) = verify(&["--body", "body.json"]);
    assert!(code == 1 && out.contains("[missing_header]"), "{out}");
    save(directory.path(), genuine, UnixMicros::from_secs(1_700_000_000));
    let (code, out, _) = verify(&["--request", "request.http"]);
    assert!(code == 1 && out.contains("[too_old]") && out.contains("--at TIME"), "{out}");
    assert_eq!(verify(&["--request", "request.http", "--at", "1700000010"]).0, 0);
    let (code, out, _) = run(directory.path(), &["verify", "--source", "github", "--request", "request.http"]);
    assert!(code == 1 && out.contains("Stripe"), "{out}");
    // Neither secrets nor the right signature.
    let right = crate::kit::value(&headers, "stripe-signature");
    let right = right.split_once("v1=").unwrap().1;
    std::fs::write(
        directory.path().join("forged.http"),
        raw(
            "/webhooks/stripe",
            &with(
                &headers,
                "stripe-signature",
                crate::kit::value(&headers, "stripe-signature").replace(right, &"0".repeat(64)),
            ),
            genuine,
        ),
    )
    .unwrap();
    let (code, out, err) = verify(&["--request", "forged.http"]);
    assert!(code == 1 && !format!("{out}{err}").contains(right) && !out.contains(STRIPE), "{out}");
    // A file that is not there.
    let (code, out, err) = verify(&["--request", "nothing"]);
    assert!(code == 1 && out.is_empty() && err.contains("nothing"), "{err}");
}

#[tokio::test]
async fn events_and_show() {
    let rig = rig();
    let (code, out, err) = client(&rig, &["events"]);
    assert_eq!((code, out.as_str(), err.as_str()), (0, "", "no events\n"));
    for number in 0..3 {
        let body = format!(r#"{{"id":"evt_{number}","type":"a.b","data":{{"object":{{"id":"pi_{number}"}}}}}}"#);
        rig.deliver(&Signs::preset("stripe", STRIPE, "stripe").post(&[], body.as_bytes())).await;
    }
    let body = br#"{"id":"evt_1","type":"a.b","data":{"object":{"id":"pi_1"}}}"#;
    rig.deliver(&Signs::preset("stripe", STRIPE, "stripe").post(&[], body)).await;
    let (code, out, err) = client(&rig, &["events"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let lines: Vec<_> = out.lines().collect();
    assert!(
        lines.len() == 4
            && lines[0].starts_with("RECEIVED")
            && lines[1].contains("evt_2")
            && lines[3].contains("evt_0"),
        "{out}"
    );
    let (_, out, err) = client(&rig, &["events", "--limit", "2"]);
    assert_eq!(out.lines().count(), 3);
    let cursor = err.trim().rsplit(' ').next().unwrap();
    let (_, out, err) = client(&rig, &["events", "--limit", "2", "--cursor", cursor]);
    assert!(out.lines().count() == 2 && out.contains("evt_0") && err.is_empty(), "{out}{err}");
    // JSON is the API's own.
    let (_, out, _) = client(
        &rig,
        &[
            "events", "--json", "--key", "evt_1", "--source", "stripe", "--type", "a.b", "--entity", "pi_1",
            "--status", "unrouted",
        ],
    );
    let page = json(&out);
    assert_eq!(page["events"].as_array().unwrap().len(), 1);
    let event = text(&page["events"][0]["id"]);
    let (code, out, err) = client(&rig, &["events", "--status", "nonsense"]);
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("quarantined"), "{err}");

    let (code, out, _) = client(&rig, &["show", &event]);
    assert_eq!(code, 0);
    for line in [
        &format!("event       {event}"),
        "key         evt_1",
        "type        a.b",
        "entity      pi_1",
        "status      unrouted",
        "conflicts   none",
        "  stripe-signature: t=",
    ] {
        assert!(out.contains(line), "{line:?} is not in:\n{out}");
    }
    assert!(out.contains("duplicates  1, first "), "{out}");
    assert_eq!(json(&client(&rig, &["show", &event, "--json"]).1), rig.show(&event).await);
    assert_eq!(client(&rig, &["show", &event, "--body"]).1.as_bytes(), body);
    let (code, _, err) = client(&rig, &["show", "0199d2a0-0000-7000-8000-000000000000"]);
    assert!(code == 1 && err.contains("there is no such event [no_event]"), "{err}");
    let (code, _, err) = client(&rig, &["show", "nonsense"]);
    assert!(code == 2 && err.contains("`nonsense` is not an event's id"), "{err}");
}

#[tokio::test]
async fn fault_83_the_terminal_is_given_no_orders() {
    let rig = rig();
    let body = br#"{"action":"opened"}"#;
    let headers = Signs::preset("github", GITHUB, "github").headers(&[], body, "", now());
    let headers = with(&headers, "x-github-delivery", "id\u{202e}txt.exe");
    let headers = with(&headers, "x-github-event", "issues\u{2066}");
    let headers = with(&headers, "user-agent", "agent\u{9b}31m\u{200b}");
    let (_, event) = rig.deliver(&raw("/webhooks/github", &headers, body)).await;
    // And a key with an escape in it.
    rig.deliver(&Signs::preset("stripe", STRIPE, "stripe").post(&[], br#"{"id":"a\u001b]0;title\u0007b","type":"x"}"#))
        .await;
    for arguments in [&["events"][..], &["show", &event]] {
        let (code, out, _) = client(&rig, arguments);
        assert_eq!(code, 0);
        assert!(out.contains("id\\u{202e}txt.exe"), "{out}");
        let harmful = out.chars().find(|char| {
            (char.is_control() && *char != '\n')
                || matches!(char, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        });
        assert_eq!(harmful, None, "{out:?}");
    }
    let (_, out, _) = client(&rig, &["show", &event]);
    assert!(out.contains("agent\\u{9b}31m\\u{200b}"), "{out}");
}

#[tokio::test]
async fn a_token_is_passed_on() {
    let secrets = [SECRETS[0], SECRETS[1], ("token", "cli admin token"), ("wrong", "another token")];
    let rig = Rig::start("admin_token = \"file:token\"", SOURCES, &secrets);
    write_client_config(&rig, "admin_token = \"file:token\"");
    assert_eq!(client(&rig, &["events"]).0, 0);
    for server in ["", "admin_token = \"file:wrong\""] {
        write_client_config(&rig, server);
        let (code, _, err) = client(&rig, &["events"]);
        assert!(
            code == 1 && err.contains("a valid bearer token is needed [token]") && err.contains("server.admin_token"),
            "{err}"
        );
        assert!(!err.contains("another token"), "{err}");
    }
}

/// Prints a request of a provider and saves it as `curl -v` would have shown it, with the body in a file of its own.
fn save_as_curl(directory: &Path, provider: &str, more: &[&str]) {
    let send = ["send", "--provider", provider, "--secret", "file:secret", "--print"];
    let (code, out, error) = run(directory, &[&send, more].concat());
    assert_eq!((code, error.as_str()), (0, ""), "{provider}");
    let (head, body) = out.split_once("\r\n\r\n").unwrap();
    let head: String = head.lines().map(|line| format!("> {line}\r\n")).collect();
    let text = format!("* Connected\n{head}> \n* upload completely sent off\n< HTTP/1.1 401 Unauthorized\n");
    std::fs::write(directory.join("saved.curl"), text).unwrap();
    std::fs::write(directory.join("saved.body"), body).unwrap();
}

#[test]
fn r45_what_is_printed_and_saved_from_curl_is_explained() {
    const URL: &str = "https://gateway.example:8443/hooks/1";
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("secret"), "a secret").unwrap();
    std::fs::write(directory.path().join("other"), "another secret").unwrap();
    for (provider, kind) in [
        ("slack", "app_mention"),
        ("shopify", "refunds/create"),
        ("calendly", "invitee.canceled"),
        ("mailgun", "failed"),
        ("twilio", "completed"),
    ] {
        save_as_curl(directory.path(), provider, &["--type", kind, "--url", URL]);
        let verify = |secret: &str, more: &[&str]| {
            let verify =
                ["verify", "--provider", provider, "--secret", secret, "--request", "saved.curl", "--public-url", URL];
            run(directory.path(), &[&verify, more].concat())
        };
        let (code, out, error) = verify("file:secret", &["--body", "saved.body"]);
        assert!(code == 0 && out.starts_with("genuine: ") && out.contains(&format!("type {kind}")), "{out}{error}");
        let (code, out, _) = verify("file:other", &["--body", "saved.body"]);
        assert!(code == 1 && out.contains("most likely the secret belongs to another endpoint"), "{out}");
        if !["mailgun", "twilio"].contains(&provider) {
            let (code, out, _) = verify("file:secret", &[]);
            let first = out.lines().nth(1).unwrap();
            assert!(code == 1 && first.contains("give them with --body"), "{out}");
            assert!(!out.contains("No common mistake"), "{out}");
        }
    }
    let curl = std::fs::read_to_string(directory.path().join("saved.curl")).unwrap();
    assert!(curl.contains("> host: gateway.example:8443\r\n"), "{curl}");
}

#[test]
fn r45_a_type_without_a_sample_says_so_and_an_ed25519_key_may_be_pem() {
    let directory = tempfile::tempdir().unwrap();
    let pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n-----END PRIVATE KEY-----\n";
    std::fs::write(directory.path().join("key.pem"), pem).unwrap();
    let public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
    std::fs::write(directory.path().join("public"), public).unwrap();
    let send = |kind: &str| {
        let send = ["send", "--provider", "discord", "--secret", "file:key.pem", "--print", "--type", kind];
        run(directory.path(), &send)
    };
    let (code, _, error) = send("ENTITLEMENT_CREATED");
    assert_eq!(code, 0);
    assert!(error.contains("there is no sample of `ENTITLEMENT_CREATED`"), "{error}");
    let (code, out, error) = send("ENTITLEMENT_CREATE");
    assert_eq!((code, error.as_str()), (0, ""));
    std::fs::write(directory.path().join("saved.http"), out).unwrap();
    let verify = ["verify", "--provider", "discord", "--secret", "file:public", "--request", "saved.http"];
    let (code, out, _) = run(directory.path(), &verify);
    assert!(code == 0 && out.contains("type ENTITLEMENT_CREATE"), "{out}");
}
