//! `[[route]]` and `[[machine]]`: every mistake in its place, and what is read as it was written.

use std::path::Path;

use oncehook_server::config::Config;

use super::{place, placed};
use crate::kit::{directory, run};

/// Routes in which nearly everything is wrong.
const BAD_ROUTES: &str = r#"
[retention]
dead = "forever"
audit = "200ms"
[[source]]
name = "shop"
provider = "stripe"
secrets = ["file:good"]
[[route]]
name = "first"
source = "shop"
types = ["order.*", "order.paid", "", "a?c", "*"]
order = "sideways"
retry = { max_attempts = 0, base = "2h", cap = "1h", tries = 3 }
concurrency = 0
breaker = { failures = 0, rest = "1m", longest_rest = "1s" }
[route.sql]
statement = "INSERT INTO t VALUES (:a, :result)"
bind = { a = "data/id", result = "$result/id" }
[[route]]
name = "second"
source = "nobody"
types = []
[route.sql]
statement = ["INSERT INTO t VALUES (:a)", "SELECT :b"]
bind = { a = "$key" }
[[route]]
name = "second"
source = "shop"
[route.sql]
statement = "SELECT 1"
[[route]]
name = "third"
after = "nowhere"
source = "shop"
types = ["x"]
[route.http]
url = "http://127.0.0.1:9/"
body = "{{$key"
timeout = "0s"
secret = "plain_text_canary"
on_4xx = "ignore"
allow_private = "yes"
headers = { x-token = "env:ONCEHOOK_TEST_NOT_SET", x-number = 1 }
[[route]]
name = "circle-a"
after = "circle-b"
[route.sql]
statement = "SELECT 1"
[[route]]
name = "circle-b"
after = "circle-a"
[route.sql]
statement = "SELECT 2"
[[route]]
name = "Bad Name"
[[route]]
name = "both"
source = "shop"
[route.sql]
bind = { a = 1 }
[route.http]
timeout = "1h"
body = '{"order": {{$result}}}'
[[route]]
name = "after-broken"
after = "both"
[route.sql]
statement = "SELECT 1"
[[route]]
name = "mail"
source = "shop"
[route.http]
url = "ftp://127.0.0.1/"
[[route]]
name = "signed"
source = "shop"
[route.http]
url = "http://127.0.0.1:9/"
secret = "file:good"
[[route]]
name = "headed"
source = "shop"
[route.http]
url = "http://127.0.0.1:9/"
headers = { "not a header" = "x" }
[[route]]
name = "lonely"
after = "never"
[route.sql]
statement = "SELECT 3"
"#;

/// What must be found in it, and where.
const FOUND_IN_ROUTES: [(&str, &str, usize); 39] = [
    ("`dead`: \"forever\" is not a duration", "\"forever\"", 0),
    ("`audit`: \"200ms\" is not a duration", "\"200ms\"", 0),
    ("`order.paid` is of no use: `order.*` takes all of it", "\"order.paid\"", 0),
    ("an empty pattern takes no event", "\"\", \"a?c\"", 0),
    ("`*` takes all of `order.*`", "\"*\"]", 0),
    ("\"sideways\" is not an order", "\"sideways\"", 0),
    ("`max_attempts` must be between 1 and 100", "0, base", 0),
    ("`base` (7200s) is longer than `cap` (3600s)", "\"2h\"", 0),
    ("unknown key `tries` in [route.retry]", "tries", 0),
    ("`concurrency` must be between 1 and 1000", "0\nbreaker", 0),
    ("`failures` must be between 1 and", "0, rest", 0),
    ("`rest` (60s) is longer than `longest_rest` (1s)", "\"1m\"", 0),
    ("\"data/id\" is neither a JSON pointer", "\"data/id\"", 0),
    ("this route has no `after`", "\"$result/id\"", 0),
    ("there is no source `nobody`", "\"nobody\"", 0),
    ("`types` is empty, so it chooses nothing", "[]\n[route.sql]", 0),
    ("the statement uses :b, which is not bound", "[\"INSERT", 0),
    ("a route with `after` has no `source` of its own", "\"shop\"\ntypes = [\"x\"]", 0),
    ("a route with `after` has no `types` of its own", "[\"x\"]", 0),
    ("a `{{` is not closed", "\"{{$key\"", 0),
    ("`timeout`: must be longer than nothing", "\"0s\"", 0),
    ("never as plain text here", "\"plain_text_canary\"", 0),
    ("\"ignore\" is not \"retry\", \"dead\" or \"result\"", "\"ignore\"", 0),
    ("`allow_private` must be true or false, not a string", "\"yes\"", 0),
    ("the environment variable ONCEHOOK_TEST_NOT_SET is not set", "\"env:ONCEHOOK_TEST_NOT_SET\"", 0),
    ("`x-number` must be a string, not a integer", "1 }\n[[route]]\nname = \"circle-a\"", 0),
    ("route `circle-a` comes after itself", "\"circle-b\"\n[route.sql]", 0),
    ("`name`: a route name has", "\"Bad Name\"", 0),
    ("a [[route]] needs a `source`", "[[route]]\nname = \"Bad Name\"", 0),
    ("a [[route]] needs a handler", "[[route]]\nname = \"Bad Name\"", 0),
    ("a route has one handler", "[route.http]\ntimeout = \"1h\"", 0),
    ("[route.sql] needs a `statement`", "[route.sql]\nbind = { a = 1 }", 0),
    ("`a` must be a string", "1 }\n[route.http]", 0),
    ("[route.http] needs a `url`", "[route.http]\ntimeout = \"1h\"", 0),
    ("`timeout` must not be longer than 300 s", "\"1h\"\nbody", 0),
    ("", "\"ftp://127.0.0.1/\"", 0),
    ("base64", "\"file:good\"\n[[route]]\nname = \"headed\"", 0),
    ("", "[route.http]\nurl = \"http://127.0.0.1:9/\"\nheaders", 0),
    ("route `lonely` comes after `never`, which does not exist", "\"never\"", 0),
];

#[test]
fn fault_108_all_mistakes_in_routes_are_reported_at_once_with_their_places() {
    let directory = directory(BAD_ROUTES, &[("good", "a real secret")]);
    let (code, out, err) = run(directory.path(), &["check", "--json"]);
    assert_eq!((code, err.as_str()), (1, ""));
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let problems = report["problems"].as_array().unwrap();
    for (message, needle, occurrence) in FOUND_IN_ROUTES {
        let (line, column) = place(BAD_ROUTES, needle, occurrence);
        let found = problems.iter().any(|problem| {
            problem["message"].as_str().unwrap().contains(message)
                && problem["line"] == line
                && problem["column"] == column
        });
        assert!(found, "{message:?} at {line}:{column} is not among:\n{problems:#?}");
    }
    assert!(!out.contains("canary"), "a secret that was written down is not repeated: {out}");
    // What is wrong with a route is not held against the one that follows it.
    assert!(!out.contains("after-broken") && !out.contains("`circle-b` comes"), "{out}");
}

/// A whole configuration with one source and these routes.
fn with_routes(directory: &Path, routes: &str) -> String {
    let secret = directory.join("good");
    std::fs::write(&secret, "a real secret").unwrap();
    format!("[[source]]\nname = \"shop\"\nprovider = \"stripe\"\nsecrets = [\"file:{}\"]\n{routes}", secret.display())
}

#[test]
fn routes_are_read_as_they_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let text = with_routes(
        directory.path(),
        r#"
        [retention]
        dead = "400d"
        audit = "10d"
        [[route]]
        name = "orders"
        source = "shop"
        types = ["order.*", "invoice.paid"]
        order = "none"
        retry = { max_attempts = 3, base = "200ms", cap = "5s" }
        concurrency = 4
        breaker = { failures = 2, rest = "50ms", longest_rest = "1s" }
        [route.sql]
        statement = ["INSERT INTO orders (id) VALUES (:id)", "UPDATE t SET n = n + 1 WHERE k = :key RETURNING n"]
        bind = { id = "/data/id", key = "$key" }
        [[route]]
        name = "mail"
        after = "orders"
        [route.http]
        url = "http://127.0.0.1:9/mail"
        body = '{"order": {{$result/id}}}'
        timeout = "500ms"
        on_4xx = "dead"
        [[route]]
        name = "count"
        after = "mail"
        [route.sql]
        statement = "INSERT INTO t (x) VALUES (:x)"
        bind.x = "$result"
        "#,
    );
    let config = Config::parse("x.toml", &text).unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!(config.retention_dead.unwrap().as_secs(), 400 * 86_400);
    assert_eq!(config.retention_audit.as_secs(), 10 * 86_400);
    let orders = config.routes.get("orders").unwrap();
    assert_eq!(orders.types.iter().map(|glob| glob.as_str()).collect::<Vec<_>>(), ["order.*", "invoice.paid"]);
    assert_eq!((orders.retry.max_attempts, orders.retry.base.as_millis(), orders.retry.cap.as_secs()), (3, 200, 5));
    assert_eq!(orders.concurrency, 4);
    assert_eq!((orders.breaker.failures, orders.breaker.rest.as_millis()), (2, 50));
    let count = config.routes.get("count").unwrap();
    assert_eq!((count.source.as_str(), count.types.len()), ("shop", 2), "taken over two steps");
    std::fs::write(directory.path().join("oncehook.toml"), &text).unwrap();
    let (code, _, err) = run(directory.path(), &["check"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(
        err,
        "oncehook.toml is fine: 1 source, 3 routes\n  orders: shop (order.*, invoice.paid) to sql\n  \
         mail: after orders to http\n  count: after mail to sql\n"
    );
    let report: serde_json::Value = serde_json::from_str(&run(directory.path(), &["check", "--json"]).1).unwrap();
    assert_eq!(
        report["routes"][1],
        serde_json::json!({ "name": "mail", "source": "shop", "types": ["order.*", "invoice.paid"], "after": "orders", "handler": "http" })
    );
    let never = text.replace("\"400d\"", "\"never\"");
    assert_eq!(Config::parse("x.toml", &never).unwrap().retention_dead, None);
    let short = text.replace("\"400d\"", "\"1d\"");
    let problems = Config::parse("x.toml", &short).unwrap_err();
    assert!(problems.to_string().contains("`retention.dead` is shorter than `retention.payload`"), "{problems}");
}

const PAYOUTS: &str = r#"
[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe.secret"]

[[machine]]
name = "payout"
states = ["new", "pending", "done", "lost"]
initial = "new"
transitions = [
  { on = "payout.created", from = "new", to = "pending" },
  { on = "payout.paid", from = ["new", "pending"], to = "done" },
]

[[route]]
name = "fees"
source = "stripe"
types = ["payout.created", "payout.paid", "payout.canceled"]
order = "entity"
on_dead = "continue"
newer_only = true
machine = "payout"
park_for = "2h"
[route.sql]
requires = "SELECT 1 FROM accounts WHERE id = :id"
statement = "INSERT INTO fees (id, state) VALUES (:id, :state)"
bind = { id = "/data/object/id", state = "$state" }
"#;

#[test]
fn r13_r24_r29_r30_order_and_machines_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let config = Config::parse("x.toml", &placed(PAYOUTS, directory.path())).unwrap();
    let route = config.routes.get("fees").unwrap();
    let ordering = &route.ordering;
    assert!(ordering.by_entity && ordering.newer_only);
    assert_eq!(ordering.on_dead, oncehook::ordering::OnDead::Continue);
    assert_eq!(ordering.parking.longest.as_secs(), 7_200);
    assert_eq!(ordering.machine.as_ref().unwrap().name, "payout");
    assert_eq!(config.machines.len(), 1);
    assert!(config.routes.look_at_entities(&route.source));

    let refused = |from: &str, to: &str, message: &str| {
        let text = placed(&PAYOUTS.replace(from, to), directory.path());
        let problems = Config::parse("x.toml", &text).unwrap_err();
        let found = problems.list.iter().any(|problem| problem.message.contains(message));
        assert!(found, "{to}: {:#?}", problems.list);
    };
    refused("order = \"entity\"\n", "", "nobody is behind anybody");
    refused("\"entity\"", "\"time\"", "is not an order");
    refused("machine = \"payout\"", "machine = \"payin\"", "there is no [[machine]] named `payin`");
    refused("machine = \"payout\"\n", "", "this route has no `machine`");
    refused("initial = \"new\"", "initial = \"old\"", "`old` is not one of the states");
    refused("initial = \"new\"\n", "", "needs `initial`");
    refused("to = \"done\"", "to = \"gone\"", "`gone` is not one of the states");
    refused("SELECT 1 FROM accounts", "DELETE FROM accounts", "`requires` is one SELECT");

    // In another database it is the same, and what is remembered stands there.
    let elsewhere = PAYOUTS.replace("requires =", "database = \"postgres://shop@127.0.0.1:1/shop\"\nrequires =");
    let config = Config::parse("x.toml", &placed(&elsewhere, directory.path())).unwrap();
    let ordering = &config.routes.get(route.name.as_str()).unwrap().ordering;
    assert_eq!(ordering.memory, oncehook::ordering::Memory::Effect);
    assert!(ordering.newer_only && ordering.machine.is_some());
}

#[test]
fn r24_machines_are_drawn_and_doubts_are_told() {
    let directory = tempfile::tempdir().unwrap();
    let text = placed(PAYOUTS, directory.path());
    std::fs::write(directory.path().join("oncehook.toml"), text).unwrap();
    let (code, out, err) = run(directory.path(), &["machine", "payout"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("pending  --payout.paid-->  done"), "{out}");
    let (_, out, _) = run(directory.path(), &["machine", "payout", "--format", "graphviz"]);
    assert!(out.starts_with("digraph \"payout\""), "{out}");
    let (_, out, _) = run(directory.path(), &["machine", "--format", "mermaid"]);
    assert!(out.starts_with("stateDiagram-v2"), "{out}");
    let (_, out, _) = run(directory.path(), &["--json", "machine"]);
    let told: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&told[0]["initial"], &told[0]["unreachable"][0]), (&"new".into(), &"lost".into()));
    let (code, _, err) = run(directory.path(), &["machine", "payin"]);
    assert!(code != 0 && err.contains("no machine `payin`"), "{err}");
    let (code, _, err) = run(directory.path(), &["check"]);
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("nothing leads to the state `lost`"), "{err}");
    assert!(err.contains("takes `payout.canceled`, which has no transition"), "{err}");
}
