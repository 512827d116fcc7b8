//! What a destination is sent, and what becomes of its answer: the provider's event headers, headers and bodies made from the
//! event, answers that repeat our credentials, and answers that are made to hurt whoever reads them.

use std::path::Path;
use std::process::Command;

use oncehook_server::config::Config;
use oncehook_testkit::gateway::{Gateway, now};
use oncehook_testkit::receiver::{Arrived, Receiver, Reply};
use oncehook_testkit::sender::{Answer, Provider, ask};
use oncehook_testkit::shop::drained;
use serde_json::{Value, json};

use crate::kit::{BINARY, Rig, Signs, directory, run, soon, text};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

fn source(preset: &str, more: &str) -> String {
    format!(
        "[[source]]\nname = \"{preset}\"\nprovider = \"{preset}\"\nsecrets = [\"file:secret\"]\n\
         url = \"https://gateway.example/webhooks/{preset}\"\n{more}\n"
    )
}

fn route(name: &str, from: &str, url: &str, http: &str) -> String {
    format!("[[route]]\nname = \"{name}\"\n{from}\n[route.http]\nurl = \"{url}\"\n{http}\n")
}

fn rig(sources: &str) -> Rig {
    Rig::start("", sources, &[("secret", SECRET), ("token", TOKEN)])
}

/// The one request that arrived, once everything is delivered.
async fn the_request(gateway: &Gateway, receiver: &Receiver) -> Arrived {
    assert_eq!(drained(gateway).await, 0);
    let requests = receiver.requests();
    assert_eq!(requests.len(), 1, "{requests:?}");
    requests[0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn r21_the_providers_event_headers_go_along_and_its_signature_does_not() {
    type Case = (&'static str, &'static [(&'static str, &'static str)], &'static [(&'static str, &'static str)]);
    let cases: [Case; 4] = [
        (
            "github",
            &[
                ("x-github-event", "issues"),
                ("x-github-delivery", "72d3162e-cc78-11e3-81ab-4c9367dc0958"),
                ("x-github-hook-id", "292430182"),
                ("x-github-hook-installation-target-type", "repository"),
                ("x-github-hook-installation-target-id", "79929171"),
            ],
            &[("x-hub-signature", "sha1=00"), ("authorization", "Bearer nobody")],
        ),
        (
            "shopify",
            &[
                ("x-shopify-topic", "orders/create"),
                ("x-shopify-shop-domain", "acme.myshopify.com"),
                ("x-shopify-webhook-id", "b54557e4-bdd9-4b37-8a5f-bf7d70bcd043"),
                ("x-shopify-event-id", "98880550-7158-44d4-b7cd-2c97c8a091b5"),
                ("x-shopify-api-version", "2026-10"),
                ("x-shopify-triggered-at", "2026-11-15T12:00:00Z"),
            ],
            &[("x-shopify-access-token", "shpat_0123456789")],
        ),
        (
            "gitlab",
            &[
                ("x-gitlab-event", "Push Hook"),
                ("x-gitlab-instance", "https://gitlab.example"),
                ("x-gitlab-event-uuid", "13792a34"),
                ("x-gitlab-webhook-uuid", "02affd2d"),
            ],
            &[("x-unknown", "1")],
        ),
        (
            "woocommerce",
            &[
                ("x-wc-webhook-topic", "order.created"),
                ("x-wc-webhook-resource", "order"),
                ("x-wc-webhook-event", "created"),
                ("x-wc-webhook-source", "https://shop.example/"),
                ("x-wc-webhook-id", "5"),
                ("x-wc-webhook-delivery-id", "8f5a4b"),
            ],
            &[("x-forwarded-for", "192.0.2.1")],
        ),
    ];
    for (preset, wanted, unwanted) in cases {
        let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
        let to_shop = route("shop", &format!("source = \"{preset}\""), &receiver.url("/"), "secret = \"file:secret\"");
        let rig = rig(&(source(preset, "") + &to_shop));
        let given = [wanted, unwanted, &[("idempotency-key", "k1"), ("content-type", "application/json")]].concat();
        let body = br#"{"id":1,"action":"opened","object_kind":"push"}"#;
        rig.deliver(&Signs::preset(preset, SECRET, preset).post(&given, body)).await;
        let arrived = the_request(&rig.gateway, &receiver).await;
        assert_eq!(arrived.body, body);
        for (name, value) in wanted {
            assert_eq!(arrived.header(name), Some(*value), "{preset}: {name}");
        }
        for (name, _) in unwanted {
            assert_eq!(arrived.header(name), None, "{preset}: {name}");
        }
        for (name, value) in &arrived.headers {
            let ours = name.starts_with("webhook-") || name.starts_with("oncehook-");
            assert!(ours || !name.contains("signature") && !name.contains("hmac"), "{preset}: {name}");
            assert!(!value.contains(SECRET), "{preset}: {name}: {value}");
        }
        // The provider's own idempotency key does not take the place of ours.
        assert_eq!(arrived.header("idempotency-key"), arrived.header("webhook-id"), "{preset}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r21_headers_of_a_route_are_filled_from_the_event_and_secrets_are_not() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let headers = r#"headers = { x-kind = "{{$type}}", x-what = "{{/repository/id}} of {{ $source }}", x-name = "{{/name}}", x-none = "{{$version}}", x-list = "{{/list}}", x-team = "orders", authorization = "file:token" }"#;
    let to_shop = route("shop", "source = \"github\"", &receiver.url("/"), headers);
    let secrets = [("secret", SECRET), ("token", "Bearer {{$type}}-0123456789")];
    let rig = Rig::start("", &(source("github", "") + &to_shop), &secrets);
    let given = [("x-github-event", "push"), ("x-github-delivery", "d1")];
    let body = r#"{"repository":{"id":12345678901234567890},"name":"caf\u00e9 \"x\"","list":[1, {"a":null}]}"#;
    rig.deliver(&Signs::preset("github", SECRET, "github").post(&given, body.as_bytes())).await;
    let arrived = the_request(&rig.gateway, &receiver).await;
    for (name, value) in [
        ("x-kind", "push"),
        ("x-what", "12345678901234567890 of github"),
        ("x-none", ""),
        ("x-list", r#"[1, {"a":null}]"#),
        ("x-team", "orders"),
        ("authorization", "Bearer {{$type}}-0123456789"),
    ] {
        assert_eq!(arrived.header(name), Some(value), "{name}");
    }
    assert_eq!(arrived.header("x-name"), Some("café \"x\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn r21_a_value_that_cannot_stand_in_a_header_ends_the_delivery_and_injects_nothing() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let to_shop = route("shop", "source = \"github\"", &receiver.url("/"), "headers = { x-name = \"a {{/name}}\" }");
    let rig = rig(&(source("github", "") + &to_shop));
    let long = format!("{:?}", "x".repeat(9_000));
    let bad = [r#""a\r\nx-evil: 1""#, r#""a\nb""#, r#""a\u0000b""#, r#""\u007f""#, r#""\u0085""#, &long];
    for (number, name) in bad.iter().enumerate() {
        let given = [("x-github-event", "push"), ("x-github-delivery", &*format!("d{number}"))];
        let body = format!(r#"{{"name":{name}}}"#);
        let (_, event) = rig.deliver(&Signs::preset("github", SECRET, "github").post(&given, body.as_bytes())).await;
        assert_eq!(drained(&rig.gateway).await, number as u64 + 1, "every one of them is dead");
        let delivery = rig.show(&event).await["deliveries"][0].clone();
        assert_eq!((&delivery["state"], &delivery["cause"]), (&json!("dead"), &json!("poison")), "{delivery}");
        assert_eq!(delivery["attempt"], 1, "{delivery}");
        let error = text(&delivery["error"]);
        assert!(error.contains("`x-name`") && !error.contains("x-evil"), "{error}");
    }
    assert_eq!(receiver.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn r21_the_whole_body_in_a_template_is_json_where_it_is_json() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let body = r#"body = '{"event": {{$body}}, "type": {{$type}}}'"#;
    let to_shop = route("shop", "source = \"github\"", &receiver.url("/"), body);
    let rig = rig(&(source("github", "") + &to_shop));
    let deep = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
    // The body, and whether it is sent as JSON. What many parsers refuse or read differently is sent as text.
    let cases = [
        (r#"{"a": 12345678901234567890.10, "b":{"c":null}}"#.to_owned(), true),
        ("  [1,2]\n".to_owned(), true),
        ("3".to_owned(), true),
        ("payload=%7B%7D".to_owned(), false),
        (String::new(), false),
        (r#"{"a":1} x"#.to_owned(), false),
        (r#"{"a":"\ud800"}"#.to_owned(), false),
        (r#"{"a":1e999}"#.to_owned(), false),
        (deep(32), true),
        (deep(33), false),
        (deep(127), false),
        (deep(1_000), false),
    ];
    for (number, (body, is_json)) in cases.iter().enumerate() {
        let given = [("x-github-event", "push"), ("x-github-delivery", &*format!("d{number}"))];
        rig.deliver(&Signs::preset("github", SECRET, "github").post(&given, body.as_bytes())).await;
        assert_eq!(drained(&rig.gateway).await, 0);
        let arrived = receiver.requests()[number].clone();
        let sent = String::from_utf8(arrived.body.clone()).unwrap();
        let said: Value = serde_json::from_str(&sent).unwrap();
        match is_json {
            true => assert_eq!(sent, format!(r#"{{"event": {}, "type": "push"}}"#, body.trim()), "{number}"),
            false => assert_eq!(said["event"], **body, "{number}"),
        }
        assert_eq!(arrived.header("x-github-event"), None, "a message of one's own has no header of the provider's");
    }
}

fn problems(text: &str) -> String {
    let directory = directory("", &[("secret", SECRET)]);
    let text = text.replace("file:secret", &format!("file:{}/secret", directory.path().display()));
    Config::parse("oncehook.toml", &text).err().map(|problems| problems.to_string()).unwrap_or_default()
}

#[test]
fn r21_headers_that_cannot_be_filled_are_found_by_check() {
    for (headers, wanted) in [
        ("x-a = \"{{$tpye}}\"", "$type"),
        ("x-a = \"{{type}}\"", "JSON pointer"),
        ("x-a = \"{{$type\"", "not closed"),
        ("x-a = \"{{$result/id}}\"", "no `after`"),
        ("x-a = \"{{$current/id}}\"", "no `fetch`"),
        ("x-a = \"a\\nb{{$type}}\"", "characters that a header cannot"),
        ("idempotency-key = \"{{$key}}\"", "cannot be set"),
        ("x-a = \"{{$key}}\", X-A = \"b\"", "twice"),
    ] {
        let to_shop =
            route("shop", "source = \"github\"", "http://127.0.0.1:9/", &format!("headers = {{ {headers} }}"));
        let found = problems(&(source("github", "") + &to_shop));
        assert!(found.contains(wanted), "{headers}: {found}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r21_a_source_may_name_further_headers_to_forward_but_no_credentials() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "")).await;
    let custom = r#"[[source]]
name = "billing"
provider = "custom"
secrets = ["file:secret"]
forward_headers = ["X-My-Event", "x-my-absent"]
[source.verify]
algorithm = "hmac-sha256"
key = "utf8"
signature = { header = "x-signature", encoding = "hex" }
content = "{ts}.{body}"
timestamp = { header = "x-sent", unit = "s" }
[source.identify]
key = "header:x-my-id"
"#;
    let to_shop = route("shop", "source = \"billing\"", &receiver.url("/"), "");
    let rig = rig(&format!("{custom}{to_shop}"));
    let config: toml::Table = custom.parse().unwrap();
    let scheme = config["source"][0]["verify"].clone().try_into().unwrap();
    let given = [("x-my-event", "a"), ("x-my-event", "b"), ("x-my-id", "7"), ("x-other", "c")];
    rig.deliver(&Signs::scheme(&scheme, SECRET, "billing").post(&given, b"{}")).await;
    let arrived = the_request(&rig.gateway, &receiver).await;
    let events: Vec<_> = arrived.headers.iter().filter(|(name, _)| name == "x-my-event").collect();
    assert_eq!(events.len(), 2, "{:?}", arrived.headers);
    assert_eq!(arrived.header("x-my-id"), Some("7"), "what identifies the event goes along");
    for absent in ["x-other", "x-signature", "x-sent"] {
        assert_eq!(arrived.header(absent), None, "{absent}");
    }
    for name in ["x-signature", "authorization", "cookie", "host", "webhook-id", "a b", ""] {
        let found = problems(&custom.replace("x-my-absent", name));
        assert!(found.contains("forward_headers"), "{name}: {found}");
    }
}

const TOKEN: &str = "tok/d41d8cd98f00b204\"e9";

/// An answer that repeats what it was sent, in many ways of writing.
fn echo(request: &Arrived) -> String {
    let sent = request.header("authorization").unwrap_or_default();
    let token = sent.strip_prefix("Bearer ").unwrap_or(sent);
    let escaped: String = token.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
    let nested = json!({ "headers": { "authorization": sent } }).to_string();
    format!(
        r#"{{"you": {}, "slashes": "{}", "escaped": "{escaped}", "{escaped}": 1, "nested": {}, "twice": "{escaped}", "twice": 1, "base64": "{}", "id": 12345678901234567890}}"#,
        json!(sent),
        token.replace('/', "\\/").replace('"', "\\\""),
        json!(nested),
        base64(token),
    )
}

fn base64(text: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(text)
}

/// No way of writing the token is left.
#[track_caller]
fn assert_hidden(where_: &str, said: &[u8]) {
    let said = String::from_utf8_lossy(said);
    // Undoes escapes, as often as somebody may have escaped.
    let mut plain = said.clone().into_owned();
    for _ in 0..4 {
        for (index, letter) in TOKEN.char_indices() {
            let code = u32::from(TOKEN[index..].chars().next().unwrap());
            plain = plain.replace(&format!("\\u{code:04x}"), &letter.to_string());
        }
        plain = plain.replace("\\/", "/").replace("\\\"", "\"").replace("\\\\", "\\");
    }
    for word in ["d41d8cd98f00b204", &base64(TOKEN)[..20]] {
        assert!(!plain.contains(word), "{where_}: {said}");
    }
}

/// The journal's file and its log.
fn stored(directory: &Path) -> Vec<u8> {
    let read = |name: &str| std::fs::read(directory.join(name)).unwrap_or_default();
    [read("journal.db"), read("journal.db-wal")].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn r9_a_destination_that_repeats_our_credentials_has_them_hidden_everywhere() {
    let receiver = Receiver::start(|_, request| match request.line.split(['/', ' ']).nth(2) {
        Some("json") => Reply::status(200, echo(request)).with("content-type", "application/json"),
        Some("text") => {
            let text = format!("you said {}", request.header("authorization").unwrap_or_default());
            let kind = format!("text/plain; a={}", request.header("authorization").unwrap_or_default());
            Reply::status(200, text).with("content-type", kind)
        }
        Some("refusing") => Reply::status(400, echo(request)),
        _ => Reply::status(200, ""),
    })
    .await;
    let auth = "headers = { authorization = \"file:token\" }";
    // Answers of a webhook and of an endpoint, both waited for; a follow-up that is handed the result; a fetch.
    let waiting = "wait = { route = \"json\", up_to = \"15s\" }";
    let sources = [
        source("github", waiting),
        source("idempotency-key", "wait = { route = \"text\", up_to = \"15s\" }"),
        route("json", "source = \"github\"", &receiver.url("/json"), auth),
        route("after", "after = \"json\"", &receiver.url("/after"), "body = '{\"result\": {{$result}}}'"),
        route("text", "source = \"idempotency-key\"", &receiver.url("/text"), auth),
        route("refusing", "source = \"github\"\nretry = { max_attempts = 1 }", &receiver.url("/refusing"), auth),
        format!(
            "[[route]]\nname = \"fetching\"\nsource = \"github\"\nfetch = {{ url = \"{}\", auth = \"file:token\" }}\n\
             [route.http]\nurl = \"{}\"\nbody = '{{\"current\": {{{{$current}}}}}}'\n",
            receiver.url("/json/{entity}"),
            receiver.url("/after")
        ),
    ];
    let secrets = [("secret", SECRET), ("token", &*format!("Bearer {TOKEN}"))];
    let mut rig = Rig::start("", &sources.concat(), &secrets);
    let given = [("x-github-event", "push"), ("x-github-delivery", "d1")];
    let body = br#"{"repository":{"id":7}}"#;
    let github = soon(ask(rig.gateway.ingress, &Signs::preset("github", SECRET, "github").post(&given, body))).await;
    let github = github.unwrap();
    assert_eq!(github.status, 200, "{}", String::from_utf8_lossy(&github.body));
    assert_hidden("waited for", &github.body);
    let result = &github.json()["delivery"]["result"]["body"];
    assert_eq!(result["you"], "(hidden)", "{result}");
    assert!(result["nested"].as_str().unwrap().contains("(hidden)"), "{result}");
    let written = String::from_utf8_lossy(&github.body).into_owned();
    assert!(written.contains("12345678901234567890"), "numbers stay as they are: {written}");

    let endpoint = Provider::new("idempotency-key", SECRET, "idempotency-key");
    let endpoint = soon(ask(rig.gateway.ingress, &endpoint.sample("k1", now()))).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&endpoint.body), "you said (hidden)");
    assert_hidden("replayed", endpoint.head.as_bytes());

    assert_eq!(drained(&rig.gateway).await, 1, "only what was refused is dead");
    for event in rig.gateway.events().await {
        let id = text(&event["id"]);
        assert_hidden("shown", &rig.gateway.get(&format!("/api/events/{id}")).await.body);
        let (_, shown, _) = run(rig.directory.path(), &["show", &id, "--config", &with_admin(&rig)]);
        assert!(shown.contains("(hidden)"), "{shown}");
        assert_hidden("show", shown.as_bytes());
    }
    let handed: Vec<_> = receiver.requests().into_iter().filter(|request| request.line.contains("/after")).collect();
    assert_eq!(handed.len(), 2);
    for request in handed {
        assert!(String::from_utf8_lossy(&request.body).contains("(hidden)"));
        assert_hidden("handed on", &request.body);
    }
    assert!(rig.gateway.stop().success());
    assert_hidden("stored", &stored(rig.directory.path()));
    assert_hidden("logged", rig.gateway.log().as_bytes());
}

/// A configuration that knows where the gateway listens, for commands that ask it.
fn with_admin(rig: &Rig) -> String {
    let path = rig.directory.path().join("client.toml");
    let config = std::fs::read_to_string(rig.directory.path().join("oncehook.toml")).unwrap();
    let config = config.replace("admin = \"127.0.0.1:0\"", &format!("admin = \"{}\"", rig.gateway.admin));
    std::fs::write(&path, config).unwrap();
    path.display().to_string()
}

fn arrays(levels: usize) -> String {
    format!("{}1{}", "[".repeat(levels), "]".repeat(levels))
}

fn objects(levels: usize) -> String {
    format!("{}1{}", "{\"a\":".repeat(levels), "}".repeat(levels))
}

/// Answers that some parsers cannot read, or read differently.
fn monsters() -> Vec<String> {
    let mut monsters: Vec<String> =
        [30, 32, 33, 120, 126, 127, 128, 1_000].iter().flat_map(|levels| [arrays(*levels), objects(*levels)]).collect();
    monsters.extend(
        [
            "1e999",
            "-1e999",
            &"7".repeat(3_000),
            r#"{"a":1,"a":2}"#,
            r#""\ud800""#,
            r#"{"\udfff":1}"#,
            r#""\u0000""#,
            "\u{feff}1",
            "[1,]",
            "\"\u{1b}[31m\"",
        ]
        .map(str::to_owned),
    );
    monsters
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_79_no_answer_of_a_destination_blinds_those_who_look() {
    let answers = monsters();
    let receiver = {
        let answers = answers.clone();
        Receiver::start(move |_, request| {
            // Follow-ups send what was answered before, which may be no JSON.
            let sent: Value = serde_json::from_slice(&request.body).unwrap_or_default();
            let number = sent["n"].as_u64().unwrap_or_default() as usize;
            Reply::status(200, answers[number].clone()).with("content-type", "application/json")
        })
        .await
    };
    let sources = [
        source("github", "wait = { route = \"ask\", up_to = \"15s\" }"),
        route("ask", "source = \"github\"", &receiver.url("/"), ""),
        route("after", "after = \"ask\"", &receiver.url("/"), "body = '{\"n\": {{/n}}, \"r\": {{$result}}}'"),
        route("body", "after = \"ask\"", &receiver.url("/"), "body = '{\"n\": {{/n}}, \"r\": {{$result/body}}}'"),
    ];
    let rig = rig(&sources.concat());
    for (number, answer) in answers.iter().enumerate() {
        let given = [("x-github-event", "push"), ("x-github-delivery", &*format!("d{number}"))];
        let request = Signs::preset("github", SECRET, "github").post(&given, format!("{{\"n\":{number}}}").as_bytes());
        let waited: Answer = soon(ask(rig.gateway.ingress, &request)).await.unwrap();
        let start: String = answer.chars().take(40).collect();
        assert_eq!(waited.status, 200, "{start}");
        let result = waited.json()["delivery"]["result"].clone();
        assert_eq!(result["status"], 200, "{start}: {result}");
        // All of it is there, as JSON or as text.
        let kept = result["body"].as_str().map_or_else(|| result["body"].to_string(), str::to_owned);
        assert!(kept.len() + 8 >= answer.len().min(400), "{start}: {kept}");
    }
    assert_eq!(drained(&rig.gateway).await, 0);
    look_at_everything(&rig, answers.len());
    let states = rig.gateway.json("/api/events?limit=1000").await;
    for event in states["events"].as_array().unwrap() {
        for delivery in event["deliveries"].as_array().unwrap() {
            assert_eq!(delivery["state"], "succeeded", "{delivery}");
        }
    }
}

/// Every command that lists or shows events.
fn look_at_everything(rig: &Rig, events: usize) {
    let config = with_admin(rig);
    for arguments in [&["events", "--limit", "1000"][..], &["events", "--limit", "1000", "--json"]] {
        let (code, listed, said) = run(rig.directory.path(), &[arguments, &["--config", &config]].concat());
        assert_eq!(code, 0, "{arguments:?}: {said}");
        assert!(listed.lines().count() >= events.min(1), "{arguments:?}: {listed}");
    }
    let (_, listed, _) = run(rig.directory.path(), &["events", "--limit", "1000", "--json", "--config", &config]);
    let ids: Vec<String> = listed
        .lines()
        .flat_map(|line| {
            let page: Value = serde_json::from_str(line).unwrap();
            let events = page["events"].as_array().cloned().unwrap_or_else(|| vec![page.clone()]);
            events.into_iter().map(|event| text(&event["id"]))
        })
        .collect();
    assert_eq!(ids.len(), events, "{listed}");
    for id in ids {
        for json in [&[][..], &["--json"]] {
            let (code, _, said) = run(rig.directory.path(), &[&["show", &id, "--config", &config], json].concat());
            assert_eq!(code, 0, "show {id} {json:?}: {said}");
        }
    }
    let tail = Command::new("timeout")
        .args(["3", BINARY, "tail", "--lines", "1000", "--config", &config])
        .current_dir(rig.directory.path())
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&tail.stdout);
    assert_eq!(tail.status.code(), Some(124), "tail ended: {}", String::from_utf8_lossy(&tail.stderr));
    assert!(shown.lines().count() >= events, "{shown}");
}

/// Rows of earlier versions, and results of statements, hold whatever they hold.
#[tokio::test(flavor = "multi_thread")]
async fn fault_79_results_that_are_stored_already_are_shown_whatever_they_hold() {
    let receiver = Receiver::start(|_, _| Reply::status(200, "1")).await;
    let sources = [source("github", ""), route("ask", "source = \"github\"", &receiver.url("/"), "")];
    let mut rig = rig(&sources.concat());
    let results = monsters();
    for number in 0..results.len() {
        let given = [("x-github-event", "push"), ("x-github-delivery", &*format!("d{number}"))];
        rig.deliver(&Signs::preset("github", SECRET, "github").post(&given, b"{}")).await;
    }
    assert_eq!(drained(&rig.gateway).await, 0);
    assert!(rig.gateway.stop().success());
    let connection = rusqlite::Connection::open(rig.journal()).unwrap();
    let rows: Vec<rusqlite::types::Value> = connection
        .prepare("SELECT event FROM oncehook_deliveries")
        .unwrap()
        .query_map([], |row| row.get(0))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    assert_eq!(rows.len(), results.len());
    for (row, result) in rows.iter().zip(&results) {
        let result = format!("{{\"status\":200,\"body\":{result}}}");
        let changed =
            connection.execute("UPDATE oncehook_deliveries SET result = ?1 WHERE event = ?2", (result, row)).unwrap();
        assert_eq!(changed, 1);
    }
    drop(connection);
    rig.gateway = Gateway::start(Path::new(BINARY), rig.directory.path());
    look_at_everything(&rig, results.len());
}
