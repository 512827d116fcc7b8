//! What holds for `sql` routes wherever their statements run: each scenario in every place ([`place::Place`]).

mod place;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncehook::delivery::Failure;
use oncehook::handler::{Dialect, Handler, OnMysql, OnPostgres};
use oncehook::journal::Delivery;
use tracing::field::{Field, Visit};

use place::{Place, Shop};

/// Each scenario in each of these places.
macro_rules! everywhere {
    ($($scenario:ident),* $(,)?) => {
        everywhere!(@ on_sqlite Sqlite $($scenario)*);
        everywhere!(@ on_postgres Postgres $($scenario)*);
        everywhere!(@ on_mysql Mysql $($scenario)*);
        everywhere!(@ elsewhere_on_postgres PostgresElsewhere $($scenario)*);
        everywhere!(@ elsewhere_on_mysql MysqlElsewhere $($scenario)*);
    };
    (@ $module:ident $place:ident $($scenario:ident)*) => {
        mod $module {
            $(#[tokio::test]
            async fn $scenario() {
                super::$scenario(super::Place::$place).await;
            })*
        }
    };
}

everywhere!(
    r20_a_result_of_more_than_100_rows_is_an_error_and_leaves_nothing,
    r20_a_table_that_was_altered_costs_no_attempt,
    r9_errors_of_statements_tell_no_value_of_the_event,
);

async fn r20_a_result_of_more_than_100_rows_is_an_error_and_leaves_nothing(place: Place) {
    let shop = Shop::new(place, "CREATE TABLE orders (payment varchar(40) NOT NULL)").await;
    let count = |most: u32| {
        let insert = "INSERT INTO orders VALUES (:payment)";
        let rows = format!(
            "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < {most}) SELECT i FROM n"
        );
        shop.sql(&[insert, &rows], &[("payment", "/payment")])
    };
    shop.send(&[r#"{"payment":"pi_1"}"#, r#"{"payment":"pi_2"}"#]).await;
    let worker = shop.work(count(101));
    shop.drained().await;
    worker.stop().await;
    for delivery in shop.deliveries().await {
        let told = delivery.error.unwrap_or_default();
        assert_eq!((delivery.state.as_str(), delivery.attempt), ("dead", 1), "{told}");
        assert!(told.contains("at most 100 rows"), "{told}");
    }
    assert_eq!(shop.query("SELECT count(*) FROM orders"), "0");
    // One row less is fine.
    let shop = Shop::new(place, "CREATE TABLE orders (payment varchar(40) NOT NULL)").await;
    let rows = "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 100) SELECT i FROM n";
    let route = shop.sql(&["INSERT INTO orders VALUES (:payment)", rows], &[("payment", "/payment")]);
    shop.send(&[r#"{"payment":"pi_1"}"#]).await;
    let worker = shop.work(route);
    shop.drained().await;
    worker.stop().await;
    assert_eq!(shop.deliveries().await[0].state, "succeeded");
    assert_eq!(shop.query("SELECT count(*) FROM orders"), "1");
}

/// The parameter was an `integer` when the statement was prepared, and is a `bigint` now.
async fn r20_a_table_that_was_altered_costs_no_attempt(place: Place) {
    let shop = Shop::new(place, "CREATE TABLE orders (amount integer NOT NULL)").await;
    let route = shop.sql(&["INSERT INTO orders (amount) VALUES (:amount)"], &[("amount", "/amount")]);
    let worker = shop.work(route);
    // Several at once, so that every connection that a batch could take has its statements.
    for _ in 0..3 {
        let bodies: Vec<String> = (0..40).map(|number| format!(r#"{{"amount":{number}}}"#)).collect();
        shop.send(&bodies.iter().map(String::as_str).collect::<Vec<_>>()).await;
        shop.drained().await;
    }
    match place.dialect() {
        Dialect::Postgres => shop.query("ALTER TABLE orders ALTER COLUMN amount TYPE bigint"),
        Dialect::Mysql => shop.query("ALTER TABLE orders MODIFY amount bigint NOT NULL"),
        Dialect::Sqlite => shop.query("ALTER TABLE orders ADD COLUMN note text"),
    };
    shop.send(&[r#"{"amount":3000000000}"#]).await;
    shop.drained().await;
    worker.stop().await;
    let deliveries = shop.deliveries().await;
    let failed: Vec<&Delivery> =
        deliveries.iter().filter(|one| one.state != "succeeded" || one.attempts.len() != 1).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// A text that would end a log line, begin another one, and colour it.
const EVIL: &str = r"zebra-4711\n\u001b[31mERROR forged\u202e";

async fn r9_errors_of_statements_tell_no_value_of_the_event(place: Place) {
    let (logged, _guard) = Logged::here();
    let refuse = match place.dialect() {
        Dialect::Sqlite => "",
        Dialect::Postgres => {
            "; CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN RAISE EXCEPTION 'payment % was refused', NEW.payment; END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON refused FOR EACH ROW EXECUTE FUNCTION refuse()"
        }
        Dialect::Mysql => {
            "; CREATE TRIGGER refuse BEFORE INSERT ON refused FOR EACH ROW
                 SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'payment was refused'"
        }
    };
    let tables = format!(
        "CREATE TABLE numbers (n integer NOT NULL);
         CREATE TABLE texts (payment varchar(80) PRIMARY KEY);
         INSERT INTO texts VALUES ('taken-zebra');
         CREATE TABLE refused (payment varchar(80) NOT NULL){refuse}"
    );
    // Each with a word that the error should still have.
    let statements: &[(&str, &str)] = match place.dialect() {
        Dialect::Sqlite => &[
            ("INSERT INTO numbers SELECT json_extract('{}', :payment)", "path"),
            ("INSERT INTO texts VALUES (:taken)", "UNIQUE"),
        ],
        Dialect::Postgres => &[
            ("INSERT INTO numbers VALUES (:payment)", "integer"),
            ("INSERT INTO numbers VALUES (CAST(CAST(:payment AS text) AS timestamptz)::text::integer)", "timestamp"),
            ("INSERT INTO numbers VALUES (:large)", "range"),
            ("INSERT INTO texts VALUES (:taken)", "texts_pkey"),
            ("INSERT INTO refused VALUES (:payment)", "was refused"),
        ],
        Dialect::Mysql => &[
            ("INSERT INTO numbers VALUES (:payment)", "integer"),
            (
                "INSERT INTO numbers SELECT 1 FROM texts WHERE payment = 'taken-zebra' AND CAST(:payment AS DATETIME) > 1",
                "datetime",
            ),
            ("INSERT INTO numbers VALUES (:large)", "range"),
            ("INSERT INTO texts VALUES (:taken)", "PRIMARY"),
            ("INSERT INTO refused VALUES (:taken)", "was refused"),
        ],
    };
    for (statement, word) in statements {
        let shop = Shop::new(place, &tables).await;
        let names = [("payment", "/payment"), ("taken", "/taken"), ("large", "/large")];
        let bind: Vec<(&str, &str)> =
            names.into_iter().filter(|(name, _)| statement.contains(&format!(":{name}"))).collect();
        let worker = shop.work(shop.sql(&[statement], &bind));
        let body = format!(r#"{{"payment":"{EVIL}","taken":"taken-zebra","large":98765432109876}}"#);
        shop.send(&[&body]).await;
        shop.drained().await;
        worker.stop().await;
        let delivery = shop.deliveries().await.remove(0);
        assert_eq!(delivery.state, "dead", "{statement}");
        let mut told: Vec<String> = delivery.attempts.iter().filter_map(|one| one.error.clone()).collect();
        told.extend(delivery.error.clone());
        assert!(told.len() > 1 && told.iter().all(|text| text.contains(word)), "{statement}: {told:?}");
        for text in told.into_iter().chain(logged.take()) {
            let leaks = ["zebra", "4711", "98765432109876", "forged", "\n", "\u{1b}", "\u{202e}"];
            let leaked: Vec<_> = leaks.iter().filter(|leak| text.contains(**leak)).collect();
            assert!(leaked.is_empty(), "{statement}: {text:?} has {leaked:?}");
        }
    }
}

/// Every log line of this thread, its fields as they are.
struct Logged(Arc<Mutex<Vec<String>>>);

impl Logged {
    fn here() -> (Self, tracing::subscriber::DefaultGuard) {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let guard = tracing::subscriber::set_default(Collector(Arc::clone(&lines)));
        (Self(lines), guard)
    }

    fn take(&self) -> Vec<String> {
        let lines = std::mem::take(&mut *self.0.lock().unwrap());
        assert!(lines.iter().any(|line| line.contains("a delivery is dead")), "{lines:?}");
        lines
    }
}

struct Collector(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_str(&mut self, _: &Field, value: &str) {
        self.0.push_str(value);
        self.0.push(' ');
    }

    fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
        self.0.push_str(&format!("{value:?} "));
    }
}

impl tracing::Subscriber for Collector {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("oncehook")
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

const EFFECTS: &str = "CREATE TABLE orders (payment varchar(40) NOT NULL)";

/// Comments that are nested, names in other spellings and texts with backslashes hide nothing.
#[tokio::test]
async fn r20_on_postgres_nothing_is_hidden_from_the_check_by_comments_names_or_texts() {
    for place in [Place::Postgres, Place::PostgresElsewhere] {
        for hidden in [
            "/* /* */ SELECT */ COMMIT",
            r#"DELETE FROM U&"\006fncehook".keys"#,
            r#"DELETE FROM U&"!006fncehook_guard" UESCAPE '!' .oncehook_applied"#,
            r"SELECT E'\'' FROM oncehook.keys WHERE 'a' = ' '",
            "SELECT $$'$$, count(*) FROM oncehook.keys WHERE $$'$$ = ''",
            "SELECT 1 --\r FROM oncehook.keys",
            "SELECT set_config('search_path', 'oncehook', true)",
        ] {
            let shop = Shop::new(place, EFFECTS).await;
            let route = shop.sql(&["INSERT INTO orders VALUES (:key)", hidden], &[("key", "$key")]);
            let worker = shop.work(route);
            shop.send(&["{}", "{}", "{}"]).await;
            shop.drained().await;
            worker.stop().await;
            let count = shop.query("SELECT count(*) FROM orders");
            assert_eq!(count, "0", "{place:?} {hidden}: effects of 3 events");
            for delivery in shop.deliveries().await {
                let told = delivery.error.unwrap_or_default();
                assert!(delivery.state == "dead" && told.contains("may not"), "{place:?} {hidden}: {told}");
            }
        }
    }
}

/// What is said on the way to the server, and what is heard there instead, so that no check of ours can see it.
const SAID: &str = "SELECT 'the end' WHERE 1 = 0";
const HEARD: &str = "COMMIT /*                 */";

/// If a statement ends the transaction although the check let it pass, what it did is not done again, whether or not those
/// behind it fail.
#[tokio::test]
async fn r20_a_statement_that_ended_the_transaction_does_not_run_again() {
    let insert = "INSERT INTO orders VALUES (:key)";
    for place in [Place::Postgres, Place::Mysql, Place::PostgresElsewhere, Place::MysqlElsewhere] {
        for behind in ["SELECT 1", "INSERT INTO orders VALUES (NULL)"] {
            let shop = Shop::with_line(place, EFFECTS, SAID, HEARD).await;
            let route = shop.sql(&[insert, SAID, behind], &[("key", "$key")]);
            shop.send(&["{}", "{}", "{}"]).await;
            let worker = shop.work(route);
            shop.drained().await;
            worker.stop().await;
            let effects = shop.query("SELECT count(DISTINCT payment) FROM orders");
            assert_eq!(shop.query("SELECT count(*) FROM orders"), effects, "{place:?} {behind}");
            let mut succeeded = 0;
            for delivery in shop.deliveries().await {
                let told = delivery.error.unwrap_or_default();
                assert_eq!(delivery.attempt, 1, "{place:?} {behind}: {told}");
                if place.is_elsewhere() && delivery.state == "succeeded" {
                    // The guard was committed with the effect.
                    succeeded += 1;
                } else {
                    assert!(delivery.state == "dead" && told.contains("ended the transaction"), "{told}");
                }
            }
            assert!(succeeded == 0 || succeeded.to_string() == effects, "{place:?}: {succeeded} of {effects}");
        }
    }
}

/// The same for functions.
#[tokio::test]
async fn r20_a_function_whose_statement_ended_the_transaction_does_not_run_again() {
    for place in [Place::Postgres, Place::Mysql] {
        let shop = Shop::with_line(place, EFFECTS, SAID, HEARD).await;
        let function: Handler = match place.dialect() {
            Dialect::Postgres => Handler::Function(Arc::new(OnPostgres::new(|database, _| {
                Box::pin(async move {
                    database.execute("INSERT INTO orders VALUES ('x')", &[]).await?;
                    database.execute(SAID, &[]).await?;
                    Ok::<_, Failure>(None)
                })
            }))),
            _ => Handler::Function(Arc::new(OnMysql::new(|database, _| {
                Box::pin(async move {
                    database.execute("INSERT INTO orders VALUES ('x')", &[]).await?;
                    database.execute(SAID, &[]).await?;
                    Ok::<_, Failure>(None)
                })
            }))),
        };
        let worker = shop.work(shop.route(function));
        shop.send(&["{}"]).await;
        shop.drained().await;
        worker.stop().await;
        let delivery = shop.deliveries().await.remove(0);
        let told = delivery.error.unwrap_or_default();
        assert_eq!((delivery.state.as_str(), delivery.attempt), ("dead", 1), "{place:?}: {told}");
        assert!(told.contains("ended the transaction"), "{told}");
        assert_eq!(shop.query("SELECT count(*) FROM orders"), "1", "{place:?}");
    }
}

/// Whoever has lost the database asks for it less and less often.
#[tokio::test]
async fn r15_lanes_that_lost_their_database_knock_less_and_less_often() {
    for place in [Place::Postgres, Place::Mysql] {
        let shop = Shop::with_line(place, EFFECTS, "nobody says this", "nor is it heard.").await;
        let worker = shop.work(shop.sql(&["INSERT INTO orders VALUES (:key)"], &[("key", "$key")]));
        shop.send(&["{}"]).await;
        shop.drained().await;
        let line = shop.line.as_ref().unwrap();
        line.cut.store(true, Ordering::SeqCst);
        let watched = async |time: Duration| {
            let before = line.made.load(Ordering::SeqCst);
            tokio::time::sleep(time).await;
            line.made.load(Ordering::SeqCst) - before
        };
        // Until they are as patient as they get.
        watched(Duration::from_secs(6)).await;
        let knocks = watched(Duration::from_secs(6)).await;
        assert!(knocks < 60, "{place:?}: {knocks} connections in 6 s");
        line.cut.store(false, Ordering::SeqCst);
        // And yet all is well soon after it is back.
        for _ in 0..400 {
            if shop.journal.state().failing.is_none() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        worker.stop().await;
    }
}
