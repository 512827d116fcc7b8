//! What the commands print: it fits a usual terminal, it can be typed back in, and it does nothing to the terminal.

use std::process::{Command, Stdio};

use oncehook::event::EventId;
use oncehook_testkit::gateway::Gateway;
use serde_json::Value;
use unicode_width::UnicodeWidthStr as _;

use crate::kit::{BINARY, Rig, Signs, directory, run, text};
use crate::operate::{client, deliver, parsed, rig, until};

/// The columns of a usual terminal.
const COLUMNS: usize = 100;

/// A source whose name, types and keys are as long as they may be, in letters that take two columns.
const WIDE: &str = r#"
[[source]]
name = "a-very-long-name-of-a-source-that-somebody-has-thought-of-012345"
provider = "stripe"
secrets = ["file:stripe.secret"]
[[route]]
name = "a-very-long-name-of-a-route-that-somebody-has-thought-of-0123456"
source = "a-very-long-name-of-a-source-that-somebody-has-thought-of-012345"
retry = { max_attempts = 1 }
[route.sql]
statement = "INSERT INTO nowhere (event) VALUES (:event)"
bind = { event = "$key" }
"#;

fn wide_rig() -> Rig {
    let rig = Rig::start("", WIDE, &[("stripe.secret", "whsec_wide")]);
    let config = format!("[server]\nadmin = \"{}\"\n{WIDE}", rig.gateway.admin);
    std::fs::write(rig.directory.path().join("client.toml"), config).unwrap();
    rig
}

async fn deliver_wide(rig: &Rig, number: usize) -> String {
    let source = "a-very-long-name-of-a-source-that-somebody-has-thought-of-012345";
    let body = format!(r#"{{"id":"evt_{number}_{}","type":"{}"}}"#, "東".repeat(50), "支払い.".repeat(20));
    rig.deliver(&Signs::preset("stripe", "whsec_wide", source).post(&[], body.as_bytes())).await.1
}

/// What a command prints at a terminal of its own.
fn at_terminal(rig: &Rig, command: &str, environment: &[(&str, &str)]) -> String {
    let output = Command::new("timeout")
        .args(["30", "script", "-qec", &format!("{BINARY} --config client.toml {command}"), "/dev/null"])
        .current_dir(rig.directory.path())
        .env_remove("NO_COLOR")
        .env("TERM", "xterm-256color")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_and_tail_fit_a_hundred_columns() {
    let rig = wide_rig();
    for number in 0..3 {
        let event = deliver_wide(&rig, number).await;
        until(&rig, &event, "dead").await;
    }
    let (code, out, err) = client(&rig, &["events"]);
    assert_eq!((code, out.lines().count()), (0, 4), "{out}{err}");
    let tail = Command::new("timeout")
        .args(["3", BINARY, "--config", "client.toml", "tail"])
        .current_dir(rig.directory.path())
        .output()
        .unwrap();
    let tail = String::from_utf8(tail.stdout).unwrap();
    assert!(tail.contains("dead") && tail.contains("no such table"), "{tail}");
    for line in out.lines().chain(tail.lines()) {
        assert!(line.width() <= COLUMNS, "{} columns: {line}", line.width());
    }
    // What is short is not cut, and a time is to the second.
    let short = crate::operate::rig();
    deliver(&short, "evt_short", "order.paid").await;
    let (_, out, _) = client(&short, &["events"]);
    assert!(out.contains("order.paid") && out.contains("evt_short") && !out.contains('…'), "{out}");
    assert!(!out.contains('T') || !out.contains('Z'), "a long time: {out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_can_be_given_by_its_beginning_and_an_event_by_its_key() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "gone").await;
    until(&rig, &event, "dead").await;
    let (_, out, _) = client(&rig, &["events"]);
    let short = out.lines().nth(1).unwrap().split_whitespace().find(|word| event.starts_with(*word));
    let short = short.unwrap_or_else(|| panic!("no beginning of {event} in {out}"));
    assert!(short.len() <= 21, "{short}");
    for arguments in [&["show", short][..], &["show", &event[..21]], &["show", "--key", "evt_1"]] {
        let (code, out, err) = client(&rig, arguments);
        assert!(code == 0 && out.contains(&event), "{arguments:?}: {out}{err}");
    }
    let (code, out, _) = client(&rig, &["show", "--key", "evt_1", "--source", "stripe", "--json"]);
    assert_eq!((code, parsed(&out)["id"].as_str()), (0, Some(event.as_str())));
    assert_eq!(client(&rig, &["show", short, "--body"]).0, 0);
    for verb in ["retry", "replay", "skip"] {
        let (code, out, err) = client(&rig, &[verb, short, "--dry-run"]);
        assert!(code == 0 && out.contains(&event), "{verb}: {out}{err}");
    }
    let (code, out, err) = client(&rig, &["replay", short, "--force", "--reason", "x", "--dry-run"]);
    assert!(code == 0 && out.contains("(epoch 1)"), "{out}{err}");
    let (code, _, err) = client(&rig, &["release", short, "--dry-run"]);
    assert!(code == 1 && err.contains("not held"), "{err}");
    let (code, _, err) = client(&rig, &["show", "--key", "nothing"]);
    assert!(code == 1 && err.contains("no event with the key `nothing`"), "{err}");
    let (code, _, err) = client(&rig, &["show", "01999999-9999"]);
    assert!(code == 1 && err.contains("no such event"), "{err}");
    let (code, _, err) = client(&rig, &["show", "nonsense"]);
    assert!(code == 2 && err.contains("`nonsense` is not an event's id"), "{err}");

    // What more than one begins with is not guessed.
    let other = deliver(&rig, "evt_2", "order.paid").await;
    let common: usize = event.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
    let common = event[..common.clamp(8, 20)].trim_end_matches('-');
    if other.starts_with(common) {
        for arguments in [&["show", common][..], &["retry", common], &["skip", common]] {
            let (code, _, err) = client(&rig, arguments);
            assert!(code == 1 && err.contains(&event) && err.contains(&other), "{arguments:?}: {err}");
        }
        assert_eq!(rig.show(&event).await["audit"], Value::Array(Vec::new()));
    }
}

/// Ids that follow each other, also within one millisecond: each is found by what `tail` shows of it, and by no other's.
#[test]
fn the_beginning_of_an_id_stands_for_what_begins_so() {
    let mut ids = oncehook::event::EventIds::above(0, 0x0123_4567_89ab_cdef);
    let at = |millis: i64| oncehook_verify::UnixMicros(1_794_871_636_000_000 + millis * 1_000);
    let mut made: Vec<EventId> = (0..100).map(|number| ids.next(at(number / 40))).collect();
    made.reverse();
    let texts: std::collections::HashSet<String> = made.iter().map(|id| id.to_string()[..21].to_owned()).collect();
    assert_eq!(texts.len(), made.len(), "what is shown tells them apart");
    for length in [8, 13, 14, 18, 19, 20, 21, 22, 30, 35] {
        for id in &made {
            let beginning = &id.to_string()[..length];
            let after = EventId::after_all_that_begin(beginning).unwrap();
            // As a journal goes on after an id: everything below it, the highest first.
            let below = made.iter().filter(|other| other.sequence() < after.sequence() && **other < after);
            let found: Vec<_> = below.take_while(|other| other.to_string().starts_with(beginning)).collect();
            let expected: Vec<_> = made.iter().filter(|other| other.to_string().starts_with(beginning)).collect();
            assert_eq!(found, expected, "{beginning}");
        }
    }
    for wrong in
        ["", "01a1e6a", "01a1e6afb", "01a1e6af-b5g", "nonsense", "01A1E6AF", "01a1e6af-b564-7000-8471-5c8b40d0acd5"]
    {
        assert_eq!(EventId::after_all_that_begin(wrong), None, "{wrong}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_and_retrying_are_coloured_at_a_terminal_only() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "gone").await;
    until(&rig, &event, "dead").await;
    let red = "\u{1b}[31mdead";
    for command in ["events".to_owned(), format!("show {event}")] {
        let coloured = at_terminal(&rig, &command, &[]);
        assert!(coloured.contains(red), "{command}: {coloured:?}");
        for (command, environment) in [
            (command.clone(), &[("NO_COLOR", "1")][..]),
            (format!("{command} --json"), &[]),
            (command.clone(), &[("TERM", "dumb")]),
        ] {
            let plain = at_terminal(&rig, &command, environment);
            assert!(plain.contains("dead") && !plain.contains('\u{1b}'), "{command}: {plain:?}");
        }
        let (_, piped, _) = client(&rig, &command.split(' ').collect::<Vec<_>>());
        assert!(piped.contains("dead") && !piped.contains('\u{1b}'), "{command}: {piped:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_ups_stand_under_their_effect() {
    let rig = rig();
    let event = deliver(&rig, "evt_1", "order.paid").await;
    until(&rig, &event, "succeeded").await;
    let (_, out, _) = client(&rig, &["show", &event]);
    let at = |route: &str| {
        let line = out.lines().find(|line| line.trim_start().starts_with(&format!("{route}: ")));
        line.map(|line| line.len() - line.trim_start().len()).unwrap_or_else(|| panic!("{route}: {out}"))
    };
    assert!(at("mails") > at("orders"), "{out}");
    assert!(out.find("orders: ").unwrap() < out.find("mails: ").unwrap(), "{out}");
}

/// JSON has escapes for what a terminal would obey, and other programs read the same.
#[tokio::test(flavor = "multi_thread")]
async fn json_does_nothing_to_a_terminal() {
    let rig = rig();
    // A key with control characters is shown as `hex:` anyway; what a handler returned is shown as it is.
    let harmful = "k\u{202e}gpj\u{2066}x\u{200f}\u{feff}\u{e0041}";
    let body = format!("{{\"id\":\"{harmful}\",\"type\":\"order.paid\",\"amount\":\"\u{9b}31m\u{85}\"}}");
    let signs = Signs::preset("stripe", "whsec_operate", "stripe");
    let (_, event) = rig.deliver(&signs.post(&[], body.as_bytes())).await;
    until(&rig, &event, "succeeded").await;
    for arguments in [
        &["events", "--json"][..],
        &["show", &event, "--json"],
        &["events"],
        &["show", &event],
        &["retry", "--key", harmful, "--dry-run", "--json"],
    ] {
        let (code, out, err) = client(&rig, arguments);
        assert_eq!(code, 0, "{arguments:?}: {out}{err}");
        let harms = |c: char| c != '\n' && (c.is_control() || "\u{202e}\u{2066}\u{200f}\u{feff}\u{e0041}".contains(c));
        assert!(!out.chars().any(harms), "{arguments:?}: {out:?}");
    }
    let shown = parsed(&client(&rig, &["show", &event, "--json"]).1);
    assert_eq!(shown, rig.show(&event).await);
}

#[test]
fn the_help_says_what_the_program_is_for() {
    let directory = tempfile::tempdir().unwrap();
    let (_, out, _) = run(directory.path(), &["--help"]);
    for words in ["webhook", "exactly once", "oncehook init", "oncehook serve", "database"] {
        assert!(out.contains(words), "{words:?} is not in:\n{out}");
    }
    let (_, short, _) = run(directory.path(), &["-h"]);
    assert!(short.contains("exactly once"), "{short}");
    for line in out.lines().chain(short.lines()) {
        assert!(line.width() <= COLUMNS, "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_word_on_the_command_line_is_a_usage_error() {
    let rig = rig();
    for arguments in [
        &["events", "--status", "bogus"][..],
        &["tail", "--status", "bogus"],
        &["retry", "--status", "bogus", "--yes"],
        &["replay", "--status", "bogus", "--dry-run"],
    ] {
        let (code, out, err) = client(&rig, arguments);
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        assert!(err.contains("quarantined") && err.contains("succeeded"), "{arguments:?}: {err}");
    }
    let (code, _, err) = client(&rig, &["events", "--status", "deda"]);
    assert!(code == 2 && err.contains("dead"), "{err}");
    for arguments in [
        &["events", "--source", "strip"][..],
        &["tail", "--source", "strip"],
        &["retry", "--source", "strip", "--yes"],
        &["replay", "--source", "strip", "--dry-run"],
        &["show", "--key", "evt", "--source", "strip"],
        &["send", "--source", "strip"],
    ] {
        let (code, out, err) = client(&rig, arguments);
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        assert!(err.contains("there is no source `strip`") && err.contains("did you mean `stripe`?"), "{err}");
    }
    // A source that is configured and has received nothing is no mistake.
    let (code, out, err) = client(&rig, &["events", "--source", "stripe"]);
    assert!(code == 0 && out.is_empty() && err.contains("no events"), "{out}{err}");
    // Neither is one that is not configured any more, but has events.
    let event = deliver(&rig, "evt_1", "order.paid").await;
    until(&rig, &event, "succeeded").await;
    let config = std::fs::read_to_string(rig.directory.path().join("client.toml")).unwrap();
    let config = config.replace("\"stripe\"\nprovider", "\"renamed\"\nprovider");
    let config = config.replace("source = \"stripe\"", "source = \"renamed\"");
    std::fs::write(rig.directory.path().join("client.toml"), config).unwrap();
    let (code, out, err) = client(&rig, &["events", "--source", "stripe"]);
    assert!(code == 0 && out.contains("evt_1"), "{out}{err}");
    let (code, _, err) = client(&rig, &["events", "--source", "stripe", "--status", "dead"]);
    assert!(code == 0 && err.contains("no events"), "{err}");
}

#[test]
fn custom_is_explained_and_not_taken_for_a_misspelling() {
    let directory = tempfile::tempdir().unwrap();
    let (code, out, err) = run(directory.path(), &["providers", "custom"]);
    assert!(code == 0 && !out.contains("customer-io") && !err.contains("customer-io"), "{out}{err}");
    assert!(out.contains("[source.verify]") && out.contains("algorithm = \"hmac-sha256\""), "{out}");
    let (code, out, _) = run(directory.path(), &["providers", "custom", "--json"]);
    assert!(code == 0 && parsed(&out)["name"] == "custom", "{out}");
    // What it shows can be pasted.
    let block = out_block(&parsed(&out));
    std::fs::write(directory.path().join("oncehook.toml"), block).unwrap();
    std::fs::write(directory.path().join("secret"), "a secret of our own").unwrap();
    let (code, out, err) = run(directory.path(), &["check"]);
    assert_eq!(code, 0, "{out}{err}");
    let (code, _, err) = run(directory.path(), &["providers", "stirpe"]);
    assert!(code == 2 && err.contains("did you mean `stripe`?"), "{err}");
}

fn out_block(facts: &Value) -> String {
    text(&facts["config"]).replace("env:CUSTOM_SECRET", "file:secret")
}

#[test]
fn the_number_of_providers_is_the_same_everywhere() {
    let directory = tempfile::tempdir().unwrap();
    let (_, out, _) = run(directory.path(), &["providers", "--json"]);
    let count = parsed(&out).as_array().unwrap().len();
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for file in ["README.md", "docs/providers/README.md"] {
        let page = std::fs::read_to_string(root.join(file)).unwrap();
        let said = [format!("{count} providers"), format!("{count} presets")];
        assert!(said.iter().any(|said| page.contains(said)), "{file} does not say {count}");
        for other in (100..200).filter(|other| *other != count) {
            assert!(
                !page.contains(&format!("{other} providers")) && !page.contains(&format!("{other} presets")),
                "{file} says {other}, and there are {count}"
            );
        }
    }
}

/// Everything that `serve --log-json` writes is JSON, from its first line to its last.
#[test]
fn log_json_is_json_throughout() {
    let config = "[server]\ningress = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\
                  [[source]]\nname = \"stripe\"\nprovider = \"stripe\"\nsecrets = [\"file:s\"]\n";
    let directory = directory(config, &[("s", "whsec_json")]);
    let mut child = Command::new(BINARY)
        .args(["serve", "--log-json"])
        .current_dir(directory.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stderr.take().unwrap()));
    let mut said = Vec::new();
    while !said.iter().any(|line: &String| line.contains("is ready")) {
        said.push(lines.next().expect("it ended before it was ready").unwrap());
    }
    let told = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(told.success());
    said.extend(lines.map(Result::unwrap));
    assert!(child.wait().unwrap().success());
    let ready = said.iter().map(|line| parsed(line)).find(|line| line.to_string().contains("is ready")).unwrap();
    assert!(text(&ready["fields"]["admin"]).starts_with("http://127.0.0.1:"), "{ready}");
    assert!(ready["fields"]["webhooks"].to_string().contains("/webhooks/stripe"), "{ready}");
    // So is what is wrong with the configuration, and what keeps it from starting.
    for (config, says) in [("[server]\nnonsense = 1\n", "nonsense"), (config, "nowhere")] {
        let config = config.replacen("[[source]]", "[journal]\nurl = \"sqlite:///nowhere/at/all.db\"\n[[source]]", 1);
        std::fs::write(directory.path().join("oncehook.toml"), config).unwrap();
        let (code, _, err) = run(directory.path(), &["serve", "--log-json"]);
        assert_eq!(code, 1, "{err}");
        assert!(err.lines().all(|line| parsed(line)["level"].is_string()) && err.contains(says), "{err}");
    }
}

/// What should be in the search index by now is; the last, half full block is not what lags.
#[tokio::test(flavor = "multi_thread")]
async fn the_lag_of_the_search_index_falls_to_nothing() {
    let rig = rig();
    for number in 0..3 {
        deliver(&rig, &format!("evt_{number}"), "other").await;
    }
    let deadline = std::time::Instant::now() + crate::kit::PATIENCE;
    while rig.gateway.json("/api/stats").await["journal"]["index_lag"] != 0 {
        assert!(std::time::Instant::now() < deadline, "{}", rig.gateway.json("/api/stats").await);
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// Every admin route is in the document, and nothing else is.
#[tokio::test(flavor = "multi_thread")]
async fn the_openapi_document_has_every_admin_route() {
    let rig = rig();
    let document = rig.gateway.json("/api/openapi.json").await;
    let written = include_str!("../../src/http/admin.rs");
    let mut routes = Vec::new();
    for line in written.lines().filter(|line| line.trim_start().starts_with(".route(\"")) {
        let path = line.split('"').nth(1).unwrap();
        for method in ["get", "post", "delete", "put", "patch"] {
            if line.contains(&format!(" {method}(")) || line.contains(&format!(".{method}(")) {
                routes.push(format!("{method} {path}"));
            }
        }
    }
    assert!(routes.len() > 15, "{routes:?}");
    let mut described = Vec::new();
    let mut ids = std::collections::HashSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, call) in methods.as_object().unwrap() {
            described.push(format!("{method} {path}"));
            assert!(ids.insert(text(&call["operationId"])), "{path}: the operationId is taken: {call}");
            for name in path.split('{').skip(1).map(|rest| rest.split('}').next().unwrap()) {
                let parameters = call["parameters"].as_array().unwrap();
                assert!(parameters.iter().any(|one| one["name"] == name && one["in"] == "path"), "{path}");
            }
        }
    }
    routes.sort();
    described.sort();
    assert_eq!(described, routes);
}

/// An event whose key is not where the configuration says is counted, told once, and shows it.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_never_found_is_noticed() {
    let config =
        "[[source]]\nname = \"ours\"\nprovider = \"stripe\"\nsecrets = [\"file:s\"]\nkey = \"/no/such/place\"\n";
    let rig = Rig::start("", config, &[("s", "whsec_key")]);
    let signs = Signs::preset("stripe", "whsec_key", "ours");
    let mut events = Vec::new();
    for number in 0..3 {
        let body = format!(r#"{{"id":"evt_{number}","type":"a"}}"#);
        events.push(rig.deliver(&signs.post(&[], body.as_bytes())).await.1);
    }
    assert!((rig.gateway.metric("oncehook_key_missing_total").await - 3.0).abs() < 0.1);
    let shown = rig.show(&events[0]).await;
    assert!(shown["flags"].as_array().unwrap().contains(&"key_missing".into()), "{shown}");
    let log = rig.gateway.log();
    let told: Vec<_> = log.lines().filter(|line| line.contains("key is not where")).collect();
    assert!(told.len() == 1 && told[0].contains("ours"), "{log}");
}

/// The banner can still be read by people who do not ask for JSON.
#[test]
fn the_banner_is_text_for_people() {
    let config = "[server]\ningress = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\
                  [[source]]\nname = \"stripe\"\nprovider = \"stripe\"\nsecrets = [\"file:s\"]\n";
    let directory = directory(config, &[("s", "whsec_json")]);
    let mut gateway = Gateway::start(BINARY.as_ref(), directory.path());
    assert!(gateway.log().contains("\n  webhooks  http://"), "{}", gateway.log());
    assert!(gateway.stop().success());
}
