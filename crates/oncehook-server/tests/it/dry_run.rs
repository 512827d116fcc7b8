//! A dry run never changes anything: every command that has `--dry-run` and every call that changes something are tried
//! against a gateway with events in every state. Neither the database nor the destination may notice.
//!
//! The commands are found in the program's own help, the calls in its OpenAPI document: one that is not in the tables
//! below fails the test.

use std::collections::BTreeMap;

use oncehook_testkit::receiver::{Receiver, Reply};
use serde_json::{Value, json};

use crate::kit::{Rig, Signs, run, soon, text};
use crate::operate::{client, deliver, post, rig_with, until};

/// Beside the routes of `operate`: a destination, one that stays away for long, and a source that holds what has no key.
fn config(destination: &str) -> String {
    format!(
        r#"{base}
[[route]]
name = "notify"
source = "stripe"
types = ["order.*"]
[route.http]
url = "{destination}"

[[route]]
name = "away"
source = "stripe"
types = ["away"]
retry = {{ max_attempts = 9, base = "1h", cap = "1h" }}
[route.sql]
statement = "INSERT INTO later (event) VALUES (:event)"
bind = {{ event = "$key" }}

[[source]]
name = "careful"
provider = "stripe"
secrets = ["file:stripe.secret"]
missing_key = "quarantine"
[[route]]
name = "released"
source = "careful"
[route.http]
url = "{destination}"
"#,
        base = crate::operate::CONFIG
    )
}

/// A gateway with one event in each state that an order can be for.
struct Scene {
    rig: Rig,
    destination: Receiver,
    done: String,
    dead: String,
    retrying: String,
    held: String,
}

impl Scene {
    async fn prepare() -> Self {
        let destination = Receiver::start(|_, _| Reply::status(200, "{}")).await;
        let rig = rig_with("", &config(&destination.url("/notify")));
        let done = deliver(&rig, "evt_done", "order.paid").await;
        let dead = deliver(&rig, "evt_dead", "gone").await;
        let retrying = deliver(&rig, "evt_away", "away").await;
        let keyless = Signs::preset("stripe", "whsec_operate", "careful");
        let (status, held) = rig.deliver(&keyless.post(&[], br#"{"type":"order.paid"}"#)).await;
        assert_eq!(status, "quarantined");
        for (event, status) in [(&done, "succeeded"), (&dead, "dead"), (&retrying, "retrying"), (&held, "quarantined")]
        {
            until(&rig, event, status).await;
        }
        Self { rig, destination, done, dead, retrying, held }
    }

    /// Everything that an order could change: all tables of the file, and what has arrived. `oncehook_meta` is left out: the
    /// gateway notes there by itself how far its own work in the background has come.
    fn state(&self) -> (BTreeMap<String, Vec<String>>, usize) {
        let connection = rusqlite::Connection::open(self.rig.journal()).unwrap();
        connection.busy_timeout(std::time::Duration::from_secs(5)).unwrap();
        let mut tables = connection
            .prepare(
                "SELECT name FROM sqlite_master
                  WHERE type = 'table' AND name NOT LIKE 'sqlite_%' AND name <> 'oncehook_meta'",
            )
            .unwrap();
        let names: Vec<String> = tables.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap();
        let dump = |table: &String| {
            let mut rows = connection.prepare(&format!("SELECT * FROM \"{table}\"")).unwrap();
            let columns = rows.column_count();
            let row = |row: &rusqlite::Row<'_>| {
                Ok((0..columns).map(|at| format!("{:?}", row.get_ref(at).unwrap())).collect::<Vec<_>>().join("|"))
            };
            let mut lines: Vec<String> = rows.query_map([], row).unwrap().collect::<Result<_, _>>().unwrap();
            lines.sort();
            lines
        };
        (names.iter().map(|name| (name.clone(), dump(name))).collect(), self.destination.count())
    }

    /// Whether nothing has changed, also after the worker had time to look for work.
    async fn assert_untouched(&self, before: &(BTreeMap<String, Vec<String>>, usize), after: &str) {
        // A delivery that was made due would be run within this time; what is stored shows at once.
        tokio::time::sleep(std::time::Duration::from_millis(150)).await;
        let (tables, arrived) = self.state();
        for (table, rows) in &before.0 {
            assert_eq!(tables.get(table), Some(rows), "{after} changed the table {table}");
        }
        assert_eq!(tables.len(), before.0.len(), "{after} made a table");
        assert_eq!(arrived, before.1, "{after} reached the destination");
    }
}

/// The names of all commands, and of those that have the option.
fn commands_with(option: &str) -> (Vec<String>, Vec<String>) {
    let directory = tempfile::tempdir().unwrap();
    let (_, help, _) = run(directory.path(), &["--help"]);
    let list = help.split("Commands:").nth(1).unwrap().split("\n\n").next().unwrap();
    // Continued descriptions are indented further.
    let lines = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<String> = lines.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect();
    assert!(names.len() > 15, "{help}");
    let has = |name: &&String| run(directory.path(), &[name, "--help"]).1.contains(option);
    let with = names.iter().filter(|name| *name != "help").filter(has).cloned().collect();
    (names, with)
}

#[tokio::test(flavor = "multi_thread")]
async fn r48_no_command_with_dry_run_changes_anything() {
    let scene = Scene::prepare().await;
    let Scene { done, dead, retrying, held, .. } = &scene;
    // Each with what it must say.
    let table: Vec<(Vec<&str>, &str)> = vec![
        (vec!["replay", done, "--force", "--reason", "x"], "would replay: notify, orders (epoch 1)"),
        (vec!["replay", done, "--force", "--reason", "x", "--route", "mails"], "would replay: mails (epoch 1)"),
        (vec!["replay", done], "would replay: nothing to do (epoch 0)"),
        (vec!["replay", dead], "would replay: gone (epoch 0)"),
        (vec!["replay", "--type", "gone"], "replay: 1 event"),
        (vec!["replay", "--type", "gone", "--force", "--epoch", "1", "--reason", "x"], "force: 1 event"),
        (vec!["retry", dead], "would retry: gone (epoch 0)"),
        (vec!["retry", retrying, "--route", "away"], "would retry: away (epoch 0)"),
        (vec!["retry", "--status", "dead"], "retry: 1 event"),
        (vec!["skip", dead], "would skip: gone (epoch 0)"),
        (vec!["skip", retrying], "would skip: away (epoch 0)"),
        (vec!["release", held], "would release: released (epoch 0)"),
    ];
    let (all, accepting) = commands_with("--dry-run");
    for command in &accepting {
        assert!(table.iter().any(|(words, _)| words[0] == command), "`{command} --dry-run` is not tried here");
    }
    let before = scene.state();
    for (words, said) in &table {
        assert!(accepting.iter().any(|command| command == words[0]), "{words:?}");
        for json in [false, true] {
            let more: &[&str] = if json { &["--dry-run", "--json"] } else { &["--dry-run"] };
            let (code, out, err) = client(&scene.rig, &[words.as_slice(), more].concat());
            assert_eq!(code, 0, "{words:?}: {out}{err}");
            scene.assert_untouched(&before, &format!("{words:?}")).await;
            assert!(json || out.contains(said), "{words:?} said {out}");
        }
    }
    // Where a dry run is not known it is refused, never ignored.
    let without = all.iter().filter(|name| *name != "help" && !accepting.contains(name));
    for command in without {
        let (code, _, err) = client(&scene.rig, &[command, "--dry-run"]);
        assert!(code == 2 && err.contains("--dry-run"), "{command}: {err}");
        scene.assert_untouched(&before, command).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r48_no_call_with_dry_run_changes_anything() {
    let scene = Scene::prepare().await;
    let Scene { rig, done, dead, held, .. } = &scene;
    // Each path of the document, with the path that is called, and the order without the dry run.
    let table: Vec<(&str, String, Value)> = vec![
        ("/api/events/{id}/retry", format!("/api/events/{dead}/retry"), json!({})),
        ("/api/events/{id}/replay", format!("/api/events/{dead}/replay"), json!({})),
        (
            "/api/events/{id}/replay",
            format!("/api/events/{done}/replay"),
            json!({ "force": true, "epoch": 1, "reason": "x" }),
        ),
        ("/api/events/{id}/skip", format!("/api/events/{dead}/skip"), json!({})),
        ("/api/events/{id}/release", format!("/api/events/{held}/release"), json!({})),
        ("/api/replays", "/api/replays".to_owned(), json!({ "filter": { "source": "stripe" } })),
        ("/api/routes/{name}/pause", "/api/routes/orders/pause".to_owned(), json!({})),
        ("/api/routes/{name}/resume", "/api/routes/orders/resume".to_owned(), json!({})),
        ("/api/sources/{name}/pause", "/api/sources/stripe/pause".to_owned(), json!({})),
        ("/api/sources/{name}/resume", "/api/sources/stripe/resume".to_owned(), json!({})),
        ("/api/forgetting/resume", "/api/forgetting/resume".to_owned(), json!({})),
    ];
    let document = rig.gateway.json("/api/openapi.json").await;
    let paths = document["paths"].as_object().unwrap();
    for (path, calls) in paths.iter().filter(|(_, calls)| calls.get("post").is_some()) {
        assert!(table.iter().any(|(known, ..)| known == path), "POST {path} is not tried here");
        let schema = text(&calls["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]);
        assert!(document.pointer(schema.trim_start_matches('#')).is_some(), "{path}: {schema}");
    }
    let before = scene.state();
    for (path, called, order) in &table {
        let schema = &paths[*path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"];
        let schema = document.pointer(text(schema).trim_start_matches('#')).unwrap();
        let knows = schema["properties"].get("dry_run").is_some();
        let mut dry = order.clone();
        dry["dry_run"] = json!(true);
        let answer = soon(post(rig, called, &dry)).await;
        // Either it knows what a dry run is, or it refuses the word; it never ignores it.
        assert_eq!(answer.status, if knows { 200 } else { 400 }, "{called}: {:?}", answer.json());
        scene.assert_untouched(&before, called).await;
        let answer = soon(post(rig, &format!("{called}?dry_run=true"), order)).await;
        assert_eq!(answer.status, 400, "{called}?dry_run=true: {:?}", answer.json());
        scene.assert_untouched(&before, called).await;
    }
}

/// What a dry run says is what the order then does.
#[tokio::test(flavor = "multi_thread")]
async fn r48_a_dry_run_foretells_what_the_order_does() {
    let scene = Scene::prepare().await;
    let Scene { rig, done, dead, retrying, held, .. } = &scene;
    let cases = [
        (held, "retry", json!({})),
        (held, "replay", json!({})),
        (held, "release", json!({})),
        (held, "release", json!({})),
        (done, "retry", json!({})),
        (done, "skip", json!({})),
        (done, "replay", json!({ "force": true, "epoch": 3, "reason": "x" })),
        (done, "replay", json!({ "force": true, "epoch": 1, "reason": "x" })),
        (done, "replay", json!({ "force": true, "epoch": 2, "reason": "x", "route": "mails" })),
        (done, "replay", json!({ "force": true, "epoch": 3, "reason": "x", "route": "nowhere" })),
        (retrying, "retry", json!({ "route": "orders" })),
        (retrying, "skip", json!({})),
        (retrying, "skip", json!({})),
        (dead, "replay", json!({})),
    ];
    for (event, verb, given) in cases {
        // What the order before it started has come to its end.
        let deadline = std::time::Instant::now() + crate::kit::PATIENCE;
        while ["ready", "running"].contains(&text(&rig.show(event).await["status"]).as_str()) {
            assert!(std::time::Instant::now() < deadline);
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        let path = format!("/api/events/{event}/{verb}");
        let mut dry = given.clone();
        dry["dry_run"] = json!(true);
        let foretold = post(rig, &path, &dry).await;
        let done = post(rig, &path, &given).await;
        assert_eq!(foretold.status, done.status, "{verb} {given}: {:?} {:?}", foretold.json(), done.json());
        let (mut foretold, done) = (foretold.json(), done.json());
        if foretold["error"].is_null() {
            assert_eq!(foretold.as_object_mut().unwrap().remove("dry_run"), Some(json!(true)));
        }
        assert_eq!(foretold, done, "{verb} {given}");
    }
}
