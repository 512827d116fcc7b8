//! One mistake in a file that is right otherwise gives one problem, which says what to do about it.

use crate::kit::{directory, run};

/// Everything that a file usually has, and nothing wrong.
const GOOD: &str = r#"
[server]
ingress = "127.0.0.1:8080"
admin = "0.0.0.0:8081"
admin_token = "file:token"
admin_hosts = ["gate.example"]
trusted_proxies = ["10.0.0.0/8"]
[server.limits]
body = "15s"
[journal]
url = "postgres://user@127.0.0.1/shop"
[spool]
after = "2s"
[dedup]
window = "35d"
[retention]
payload = "30d"
dead = "60d"

[[source]]
name = "stripe"
provider = "stripe"
secrets = ["file:stripe"]
tolerance = "5m"
allow_ips = ["192.0.2.0/24"]
rate_limit = { per_second = 5 }
wait = { route = "orders", up_to = "5s" }

[[source]]
name = "hub"
provider = "github"
secrets = ["file:plain"]

[[source]]
name = "pay"
provider = "paypal"
params = { webhook_id = "WH-1" }

[[source]]
name = "ours"
provider = "custom"
secrets = ["file:plain"]
key = "/id"
missing_key = "reject"
[source.verify]
algorithm = "hmac-sha256"
key = "utf8"
content = "{body}"
signature = { header = "x-signature", encoding = "hex" }

[[machine]]
name = "payment"
states = ["new", "paid"]
initial = "new"
transitions = [{ on = "order.paid", from = "new", to = "paid" }]

[[route]]
name = "orders"
source = "stripe"
types = ["order.*"]
machine = "payment"
retry = { max_attempts = 8, base = "2s", cap = "3s" }
breaker = { failures = 5, rest = "1s", longest_rest = "2s" }
[route.sql]
statement = "INSERT INTO orders (id, state) VALUES (:id::text, :state)"
bind = { id = "/id", state = "$state" }

[[route]]
name = "mails"
after = "orders"
[route.http]
url = "http://127.0.0.1:9000/mail"
secret = "file:stripe"
timeout = "5s"
body = '{"order": {{$result/id}}}'
headers = { x-team = "file:plain" }

[[route]]
name = "books"
source = "ours"
fetch = { url = "https://api.example.com/{entity}" }
[route.sql]
database = "mysql://user@127.0.0.1/books"
statement = "INSERT INTO books (entry) VALUES (:entry)"
bind = { entry = "$current/x" }
"#;

/// What is written instead of what, and a piece of what must be said about it (in the message or the help).
const MISTAKES: &[(&str, &str, &str)] = &[
    // The listeners.
    ("ingress = \"127.0.0.1:8080\"", "ingress = \"8080\"", "is not an address and port"),
    ("ingress = \"127.0.0.1:8080\"", "ingress = 8080", "`ingress` must be a string"),
    ("ingress = \"127.0.0.1:8080\"", "ingress = \"127.0.0.1:8081\"", "the same port"),
    ("admin = \"0.0.0.0:8081\"", "admin = \"0.0.0.0:8080\"", "the same port"),
    ("admin_token = \"file:token\"", "admin_token = \"hunter2\"", "never as plain text here"),
    ("admin_token = \"file:token\"", "admin_tokn = \"file:token\"", "did you mean `admin_token`?"),
    ("admin_token = \"file:token\"", "admin_token = \"file:short\"", "openssl rand -hex 32"),
    ("admin_token = \"file:token\"\n", "", "has no `admin_token`"),
    ("[\"10.0.0.0/8\"]", "[\"10.0.0.0/80\"]", "is not an address or network"),
    ("[server.limits]", "[server.limit]", "did you mean `limits`?"),
    ("body = \"15s\"", "body = \"15\"", "write \"15s\" for seconds"),
    ("body = \"15s\"", "body = 15", "write \"15s\" for seconds"),
    // The journal.
    ("postgres://user@", "postgers://user@", "this is not a journal"),
    ("url = \"postgres", "ulr = \"postgres", "did you mean `url`?"),
    ("[journal]", "[jounal]", "did you mean `journal`?"),
    ("after = \"2s\"", "after = \"2 s\"", "is not a duration"),
    // How long things are kept.
    ("window = \"35d\"", "window = \"1h\"", "`dedup.window` is shorter"),
    ("window = \"35d\"", "window = \"35\"", "write \"35s\" for seconds"),
    ("payload = \"30d\"", "payload = \"1y\"", "is not a duration"),
    ("payload = \"30d\"", "payload = \"50d\"", "`dedup.window` is shorter"),
    ("dead = \"60d\"", "dead = \"1d\"", "`retention.dead` is shorter"),
    // Sources.
    ("name = \"stripe\"\n", "name = \"Stripe!\"\n", "a source name has"),
    ("name = \"stripe\"\n", "nmae = \"stripe\"\n", "did you mean `name`?"),
    ("name = \"stripe\"\n", "name = 7\n", "`name` must be a string"),
    ("name = \"hub\"\n", "name = \"stripe\"\n", "two sources named `stripe`"),
    ("name = \"hub\"\n", "", "a [[source]] needs a `name`"),
    ("provider = \"stripe\"", "provider = \"strip\"", "did you mean `stripe`?"),
    ("provider = \"stripe\"", "provider = \"Stripe\"", "did you mean `stripe`?"),
    ("provider = \"github\"", "provider = \"gihtub\"", "did you mean `github`?"),
    ("provider = \"paypal\"", "provider = \"paypall\"", "did you mean `paypal`?"),
    ("provider = \"custom\"", "provider = \"costum\"", "did you mean `custom`?"),
    ("provider = \"stripe\"", "provder = \"stripe\"", "did you mean `provider`?"),
    ("provider = \"stripe\"", "provider = true", "`provider` must be a string"),
    ("provider = \"github\"\n", "", "a [[source]] needs a `provider`"),
    ("secrets = [\"file:stripe\"]", "secrets = \"file:stripe\"", "`secrets` must be a list"),
    ("secrets = [\"file:stripe\"]", "secret = [\"file:stripe\"]", "did you mean `secrets`?"),
    ("secrets = [\"file:stripe\"]", "secrets = [\"file:nowhere\"]", "cannot be read"),
    ("secrets = [\"file:stripe\"]", "secrets = []", "`secrets` is empty"),
    ("secrets = [\"file:stripe\"]\n", "", "a [[source]] needs `secrets`"),
    ("secrets = [\"file:stripe\"]", "secrets = [\"file:api\"]", "whsec_"),
    ("tolerance = \"5m\"", "tolerance = \"300\"", "write \"300s\" for seconds"),
    ("tolerance = \"5m\"", "tolerance = \"0s\"", "would refuse every request"),
    ("[\"192.0.2.0/24\"]", "[\"192.0.2.0/x\"]", "is not an address or network"),
    ("{ per_second = 5 }", "{ per_secnd = 5 }", "did you mean `per_second`?"),
    ("{ per_second = 5 }", "{ per_second = 0 }", "must be between 1"),
    ("{ per_second = 5 }", "5", "`rate_limit` must be a table"),
    ("up_to = \"5s\"", "up_to = \"5\"", "write \"5s\" for seconds"),
    ("wait = { route = \"orders\"", "wait = { route = \"ordres\"", "did you mean `orders`?"),
    ("params = { webhook_id = \"WH-1\" }\n", "", "needs `params.webhook_id`"),
    ("webhook_id = \"WH-1\"", "webhook_ids = \"WH-1\"", "did you mean `webhook_id`?"),
    ("key = \"/id\"", "key = \"id\"", "`key`"),
    ("missing_key = \"reject\"", "missing_key = \"rejct\"", "did you mean `reject`?"),
    ("[source.verify]", "[source.verfy]", "did you mean `verify`?"),
    ("\"hmac-sha256\"", "\"hmac-sha265\"", "did you mean `hmac-sha256`?"),
    ("\"hmac-sha256\"", "\"md5\"", "md5"),
    ("content = \"{body}\"", "contents = \"{body}\"", "did you mean `content`?"),
    ("encoding = \"hex\"", "encoding = \"hexx\"", "did you mean `hex`?"),
    // Machines.
    ("[[machine]]\nname = \"payment\"", "[[machine]]\nname = \"Pay!\"", "a machine's name has"),
    ("[[machine]]\nname = \"payment\"", "[[machine]]", "a [[machine]] needs `name`"),
    ("states = [", "state = [", "did you mean `states`?"),
    ("initial = \"new\"", "initial = \"nwe\"", "nwe"),
    ("on = \"order.paid\", ", "", "a transition needs `on`"),
    // Routes.
    ("[[route]]\nname = \"orders\"", "[[route]]\nname = \"Orders!\"", "a route name has"),
    ("[[route]]\nname = \"mails\"", "[[route]]\nname = \"orders\"", "orders"),
    ("[[route]]\nname = \"books\"", "[[route]]", "a [[route]] needs a `name`"),
    ("source = \"stripe\"", "source = \"strip\"", "did you mean `stripe`?"),
    ("source = \"stripe\"", "soruce = \"stripe\"", "did you mean `source`?"),
    ("source = \"ours\"\n", "", "a [[route]] needs a `source`"),
    ("source = \"ours\"", "source = 5", "`source` must be a string"),
    ("types = [\"order.*\"]", "types = \"order.*\"", "`types` must be a list"),
    ("after = \"orders\"", "after = \"ordres\"", "did you mean `orders`?"),
    ("after = \"orders\"", "after = \"Orders!\"", "a route name has"),
    ("machine = \"payment\"", "machine = \"paymnet\"", "did you mean `payment`?"),
    ("base = \"2s\"", "base = \"2\"", "write \"2s\" for seconds"),
    ("base = \"2s\"", "base = \"2h\"", "is longer than `cap`"),
    ("rest = \"1s\"", "rest = \"1\"", "write \"1s\" for seconds"),
    ("max_attempts = 8", "max_attempts = 0", "must be between 1 and 100"),
    ("statement = \"INSERT INTO orders", "statment = \"INSERT INTO orders", "did you mean `statement`?"),
    ("statement = \"INSERT INTO books (entry) VALUES (:entry)\"", "statement = 5", "`statement` must be a string"),
    ("state = \"$state\" }", "sate = \"$state\" }", "state"),
    ("entry = \"$current/x\"", "entry = 5", "`entry` must be a string"),
    ("[route.http]", "[route.htpp]", "did you mean `http`?"),
    ("url = \"http://127.0.0.1:9000/mail\"", "url = \"127.0.0.1:9000/mail\"", "http://"),
    ("url = \"http://127.0.0.1:9000/mail\"", "url = \"/mail\"", "write http://"),
    ("url = \"http://127.0.0.1:9000/mail\"", "url = \"mail.example/x\"", "write http://"),
    ("url = \"http://127.0.0.1:9000/mail\"", "ur = \"http://127.0.0.1:9000/mail\"", "did you mean `url`?"),
    ("url = \"https://api.example.com/{entity}\"", "url = \"api.example.com/{entity}\"", "write http://"),
    ("fetch = { url = \"https://api.example.com/{entity}\" }", "fetch = 5", "`fetch` must be a table"),
    ("timeout = \"5s\"", "timeout = \"5\"", "write \"5s\" for seconds"),
    ("timeout = \"5s\"", "timeout = \"5h\"", "must not be longer"),
    ("x-team = \"file:plain\"", "x-team = \"file:nowhere\"", "cannot be read"),
    ("mysql://user@127.0.0.1/books", "mongo://user@127.0.0.1/books", "a database is a URL"),
    // The file itself.
    ("[[source]]\nname = \"stripe\"", "[[source]\nname = \"stripe\"", ""),
    ("name = \"stripe\"\n", "name = \"stripe\n", ""),
    ("[[source]]\nname = \"pay\"", "[[sorce]]\nname = \"pay\"", "did you mean `source`?"),
];

fn problems(config: &str) -> (i32, Vec<(String, String)>) {
    let secrets = [
        ("stripe", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
        ("plain", "a secret of our own"),
        ("api", "sk_live_canary_canary_canary"),
        ("token", "5f2c9d0f6a1b4e3c8d7a6b5c4d3e2f10"),
        ("short", "hunter2hunter"),
    ];
    let directory = directory(config, &secrets);
    let (code, out, err) = run(directory.path(), &["check", "--json"]);
    assert!(!out.contains("canary") && !err.contains("canary"), "a secret was printed: {out}{err}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let list = report["problems"].as_array().unwrap().iter();
    (code, list.map(|problem| (text(&problem["message"]), text(&problem["help"]))).collect())
}

#[test]
fn one_mistake_gives_one_problem_that_says_what_to_do() {
    assert_eq!(problems(GOOD), (0, Vec::new()));
    let mut wrong = Vec::new();
    for (right, mistake, said) in MISTAKES {
        assert!(GOOD.contains(right), "{right:?} is not in the file");
        let (_, found) = problems(&GOOD.replacen(right, mistake, 1));
        let fits = |(message, help): &(String, String)| message.contains(said) || help.contains(said);
        if found.len() != 1 || !found.iter().any(fits) {
            wrong.push(format!("{mistake:?} (should say {said:?}) gives {found:#?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), MISTAKES.len(), wrong.join("\n"));
}

/// A key of the provider's API where its signing secret should stand would refuse every request.
#[test]
fn an_api_key_in_place_of_a_signing_secret_is_noticed_and_not_printed() {
    for (provider, key, wanted) in [
        ("stripe", "sk_live_canary51H", true),
        ("stripe", "rk_test_canary51H", true),
        ("stripe", "pk_live_canary51H", true),
        ("stripe", "whsec_canary51H", false),
        ("clerk", "sk_live_canary51H", true),
        ("resend", "re_canary51H_xyz", true),
        ("openai", "sk-proj-canary51H", true),
        ("github", "ghp_canary51Hxyz", true),
        ("github", "github_pat_canary51H", true),
        ("gitlab", "glpat-canary51H", true),
        ("slack", "xoxb-canary-51H", true),
        ("linear", "lin_api_canary51H", true),
        ("sendgrid", "SG.canary.51H", true),
        ("shopify", "shpat_canary51H", true),
        // Paystack signs with the API key itself.
        ("paystack", "sk_live_canary51H", false),
    ] {
        let config = format!("[[source]]\nname = \"a\"\nprovider = \"{provider}\"\nsecrets = [\"file:key\"]\n");
        let directory = directory(&config, &[("key", key)]);
        let (code, out, err) = run(directory.path(), &["check", "--json"]);
        assert!(!out.contains("canary") && !err.contains("canary"), "{provider}: {out}{err}");
        assert_eq!(out.contains("is a key of the provider's API"), wanted, "{provider} {key}: {code} {out}");
        assert_eq!(code == 1, wanted, "{provider} {key}: {out}");
    }
}
