//! Many deliveries in one call on PostgreSQL: nobody can tell by the tables.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Expression, Handler, SqlHandler};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::{Deliveries, Journal, Progress};
use oncehook::route::Route;
use oncehook_testkit::journal::{append, event};
use oncehook_testkit::postgres::{Database, Server};

fn route(statements: &[&str], names: &[&str]) -> Arc<Route> {
    let bind: BTreeMap<_, _> =
        names.iter().map(|name| ((*name).to_owned(), Expression::parse(&format!("/{name}")).unwrap())).collect();
    let handler = Handler::Sql(Arc::new(SqlHandler::new(statements, &bind, Dialect::Postgres).unwrap()));
    Arc::new(Route::new(RouteName::new("orders").unwrap(), SourceName::new("shop").unwrap(), handler))
}

/// Applies these bodies as one batch.
async fn apply(url: &str, route: Arc<Route>, bodies: &[String]) -> (PostgresJournal, Progress) {
    let options = PostgresOptions { handler_time: Duration::from_millis(500), ..PostgresOptions::new(url) };
    let journal = PostgresJournal::open(&options).await.unwrap();
    let events: Vec<NewEvent> = bodies
        .iter()
        .enumerate()
        .map(|(number, body)| NewEvent {
            routes: [route.name.clone()].into_iter().collect(),
            ..event(&format!("evt_{number}"), body)
        })
        .collect();
    append(&journal, events).await;
    let progress = journal.apply(route, 256).await.unwrap();
    (journal, progress)
}

/// How many functions of ours sessions have made.
fn functions(database: &Database<'_>) -> String {
    database.query("SELECT count(*) FROM pg_proc WHERE proname LIKE 'oncehook_effect%'")
}

/// Tables that show in which order and how often statements ran, and what they saw.
const TELLING: &str = "
    CREATE TYPE colour AS ENUM ('red', 'green');
    CREATE DOMAIN small AS integer CHECK (value < 1000);
    CREATE TABLE kinds (id serial, a bigint, b numeric, c boolean, d jsonb, e timestamptz, f uuid, g text, h colour, i bytea,
                        j double precision, k text[], l date, m small, n varchar(40), o char(12));
    CREATE TABLE totals (id serial, number bigint, before bigint, found boolean);
    CREATE TABLE fired (table_name text, rows bigint);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
      BEGIN INSERT INTO fired SELECT TG_TABLE_NAME, count(*) FROM fresh; RETURN NULL; END $$;
    CREATE TRIGGER note AFTER INSERT ON totals REFERENCING NEW TABLE AS fresh FOR EACH STATEMENT EXECUTE FUNCTION note();
    GRANT ALL ON ALL TABLES IN SCHEMA public TO plain; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO plain";

#[tokio::test(flavor = "multi_thread")]
async fn r20_many_deliveries_in_one_call_do_what_each_statement_does_alone() {
    let statements = [
        "INSERT INTO kinds (a, b, c, d, e, f, g, h, i, j, k, l, m, n, o)
         VALUES (:a, :b, :c, :d, :e, :f, :g, :h, :i, :j, :k, :l, :m, :n, :o) -- a comment at the end",
        // It reads what it wrote before, and has a column with a name that means something to plpgsql.
        "INSERT INTO totals (number, before, found)
         SELECT :a, coalesce(sum(number), 0), bool_and(found) IS NULL FROM totals WHERE found IS NOT NULL",
        "UPDATE totals SET number = number WHERE false",
    ];
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o"];
    let bodies: Vec<String> = (0..60)
        .map(|number| {
            let text = if number % 7 == 0 { "null".to_owned() } else { format!(r#""it's \"ü\" \\ {{{number}}}, NULL""#) };
            format!(
                r#"{{"a":{number},"b":12345678901234567890.{number},"c":{},"d":{{"x":[1,null,"{number}"]}},
                "e":"2026-01-02T03:04:05Z","f":"00000000-0000-7000-8000-0000000000{number:02}","g":{text},"h":"green","i":"raw {number}",
                "j":1e-{},"k":"{{x,\"y {number}\"}}","l":"2026-02-03","m":{number},"n":"","o":"padded"}}"#,
                number % 2 == 0,
                number % 5
            )
        })
        .collect();
    let server = Server::start(&[]);
    let (together, alone) = (server.database(), server.database());
    together.query("CREATE ROLE plain LOGIN");
    let mut seen = Vec::new();
    for (database, right) in [(&together, "GRANT"), (&alone, "REVOKE")] {
        database.query(TELLING);
        let to = if right == "GRANT" { "TO plain" } else { "FROM PUBLIC" };
        database.query(&format!("GRANT CREATE ON DATABASE {} TO plain", database.name()));
        database.query(&format!("{right} TEMPORARY ON DATABASE {} {to}", database.name()));
        let url = database.url().replace("postgres@", "plain@");
        let (journal, progress) = apply(&url, route(&statements, &names), &bodies).await;
        assert_eq!((progress.succeeded, progress.more), (60, false), "{right}");
        assert_eq!(functions(database), if right == "GRANT" { "3" } else { "0" });
        journal.close().await;
        assert_eq!(database.query("SELECT count(DISTINCT xmin::text) FROM totals"), "1", "one batch");
        seen.push(
            ["kinds", "totals", "fired"].map(|table| database.query(&format!("SELECT * FROM {table} ORDER BY 1, 2"))),
        );
    }
    let [kinds, totals, fired] = &seen[0];
    assert_eq!(kinds.lines().count(), 60);
    assert!(totals.starts_with("1|0|0|t\n2|1|0|f\n3|2|1|f\n4|3|3|f\n5|4|6|f\n"), "{totals}");
    assert_eq!((fired.lines().count(), fired.lines().all(|line| line == "totals|1")), (60, true));
    assert_eq!(seen[0], seen[1]);
}

/// A batch takes longer than one statement may, and no statement does.
#[tokio::test(flavor = "multi_thread")]
async fn r20_a_call_for_many_deliveries_does_not_use_up_the_time_of_one() {
    let database = Server::shared().database();
    database.query("CREATE TABLE slow (number bigint, seconds double precision)");
    let insert = "INSERT INTO slow SELECT :number, :seconds FROM pg_sleep(:seconds)";
    let bodies: Vec<String> = (0..8).map(|number| format!(r#"{{"number":{number},"seconds":0.2}}"#)).collect();
    let route = route(&[insert], &["number", "seconds"]);
    let (journal, progress) = apply(&database.url(), route, &bodies).await;
    assert_eq!((progress.succeeded, progress.retrying), (8, 0));
    assert_eq!(functions(&database), "1");
    journal.close().await;
    assert_eq!(database.query("SELECT count(*), count(DISTINCT xmin::text) FROM slow"), "8|1");
}

/// A delivery that breaks the call costs the others nothing.
#[tokio::test(flavor = "multi_thread")]
async fn r20_r28_what_breaks_a_call_costs_only_itself() {
    let database = Server::shared().database();
    database.query("CREATE TABLE paid (payment text UNIQUE, amount integer CHECK (amount > 0))");
    let insert = "INSERT INTO paid VALUES (:payment, :amount)";
    let bodies: Vec<String> = (0..100)
        .map(|number| match number {
            40 => r#"{"payment":"pi_40","amount":"much"}"#.to_owned(),
            60 => r#"{"payment":"pi_60","amount":-1}"#.to_owned(),
            80 => r#"{"payment":"pi_\u0000","amount":1}"#.to_owned(),
            _ => format!(r#"{{"payment":"pi_{number}","amount":1{number}}}"#),
        })
        .collect();
    let (journal, progress) = apply(&database.url(), route(&[insert], &["payment", "amount"]), &bodies).await;
    assert_eq!(progress.succeeded, 97);
    journal.close().await;
    assert_eq!(database.query("SELECT count(*), count(DISTINCT payment) FROM paid"), "97|97");
    let states = "SELECT state, attempt, count(*) FROM oncehook.deliveries GROUP BY 1, 2 ORDER BY 1";
    assert_eq!(database.query(states), "retrying|1|3\nsucceeded|1|97");
}
