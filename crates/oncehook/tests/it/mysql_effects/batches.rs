//! Many deliveries in one transaction on MariaDB: every one of them takes effect, whatever its statement meets on its way.
//!
//! MariaDB can be given a statement once with the values of many rows (bulk execution), and passes rows over then without a word:
//! behind a row that is there already, under a trigger; a `SELECT` among the values is asked once for all. These are the
//! cases, and no batch may be run like that.

use super::*;

/// Deliveries in each batch.
const EVENTS: i64 = 120;

/// Makes a shop with something in it, applies a statement for every event, and asks for a number.
struct Case {
    what: &'static str,
    made: &'static str,
    statement: &'static str,
    asked: &'static str,
    wanted: i64,
}

const UPSERT: &str =
    "INSERT INTO orders (payment, amount) VALUES (:payment, :amount) ON DUPLICATE KEY UPDATE payment = VALUES(payment)";
/// A table of the numbers from 0 to 200.
const NUMBERS: &str = "(SELECT n - 1 AS seq FROM JSON_TABLE(CONCAT('[0', REPEAT(',0', 200), ']'), '$[*]'
                                                           COLUMNS (n FOR ORDINALITY)) t) numbers";
const LOGGED: &str = "CREATE TABLE log (payment VARCHAR(64) NOT NULL);
    CREATE TRIGGER logged AFTER INSERT ON orders FOR EACH ROW INSERT INTO log VALUES (NEW.payment)";

#[tokio::test(flavor = "multi_thread")]
async fn r20_every_delivery_of_a_batch_on_mysql_takes_effect() {
    let cases = [
        Case {
            what: "an insert",
            made: "",
            statement: "INSERT INTO orders (payment, amount) VALUES (:payment, :amount)",
            asked: "SELECT COUNT(*) FROM orders",
            wanted: EVENTS,
        },
        Case {
            what: "rows that are there already",
            made: "INSERT INTO orders (payment, amount) VALUES ('pi_0', 1), ('pi_17', 1), ('pi_60', 1), ('pi_61', 1), ('pi_119', 1)",
            statement: UPSERT,
            asked: "SELECT COUNT(*) FROM orders",
            wanted: EVENTS,
        },
        Case {
            what: "rows that are there already, ignored",
            made: "INSERT INTO orders (payment, amount) VALUES ('pi_0', 1), ('pi_17', 1), ('pi_60', 1), ('pi_61', 1), ('pi_119', 1)",
            statement: "INSERT IGNORE INTO orders (payment, amount) VALUES (:payment, :amount)",
            asked: "SELECT COUNT(*) FROM orders",
            wanted: EVENTS,
        },
        Case {
            what: "rows that are replaced",
            made: "INSERT INTO orders (payment, amount) VALUES ('pi_0', 1), ('pi_17', 1), ('pi_60', 1), ('pi_61', 1), ('pi_119', 1)",
            statement: "REPLACE INTO orders (payment, amount) VALUES (:payment, 7)",
            asked: "SELECT COUNT(*) FROM orders WHERE amount = 7",
            wanted: EVENTS,
        },
        Case {
            what: "a trigger",
            made: LOGGED,
            statement: "INSERT INTO orders (payment, amount) VALUES (:payment, :amount)",
            asked: "SELECT COUNT(*) FROM orders JOIN log USING (payment)",
            wanted: EVENTS,
        },
        Case {
            what: "a trigger, and rows that are there already",
            made: "INSERT INTO orders (payment, amount) VALUES ('pi_0', 1), ('pi_17', 1), ('pi_60', 1);
                   CREATE TABLE log (payment VARCHAR(64) NOT NULL); INSERT INTO log SELECT payment FROM orders;
                   CREATE TRIGGER logged AFTER INSERT ON orders FOR EACH ROW INSERT INTO log VALUES (NEW.payment)",
            statement: UPSERT,
            asked: "SELECT COUNT(*) FROM orders JOIN log USING (payment)",
            wanted: EVENTS,
        },
        Case {
            what: "a question among the values",
            made: "CREATE TABLE prices (amount INT PRIMARY KEY, price INT NOT NULL); INSERT INTO prices SELECT seq, seq * 10 FROM NUMBERS",
            statement: "INSERT INTO orders (payment, amount) VALUES (:payment, (SELECT price FROM prices WHERE amount = :amount))",
            asked: "SELECT CAST(SUM(amount) AS SIGNED) FROM orders",
            wanted: 10 * EVENTS * (EVENTS - 1) / 2,
        },
        Case {
            what: "a change",
            made: "INSERT INTO orders (payment, amount) SELECT CONCAT('pi_', seq), 1 FROM NUMBERS WHERE seq < 120",
            statement: "UPDATE orders SET amount = amount + 1 WHERE payment = :payment OR amount < :amount - 1000",
            asked: "SELECT COUNT(*) FROM orders WHERE amount = 2",
            wanted: EVENTS,
        },
        Case {
            what: "a sum",
            made: "INSERT INTO orders (payment, amount) VALUES ('all', 0)",
            statement: "UPDATE orders SET amount = amount + 1 WHERE payment = 'all' AND :payment <> ''",
            asked: "SELECT CAST(SUM(amount) AS SIGNED) FROM orders",
            wanted: EVENTS,
        },
        Case {
            what: "a removal",
            made: "INSERT INTO orders (payment, amount) SELECT CONCAT('pi_', seq), 1 FROM NUMBERS WHERE seq < 120",
            statement: "DELETE FROM orders WHERE payment = :payment",
            asked: "SELECT COUNT(*) FROM orders",
            wanted: 0,
        },
    ];
    let mut wrong = Vec::new();
    for case in cases {
        let shop = Shop::new().await;
        if !case.made.is_empty() {
            shop.database.query(&case.made.replace("NUMBERS", NUMBERS));
        }
        fill(&shop).await;
        let found = applied(&shop, case.statement, case.asked).await;
        if found != case.wanted {
            wrong.push(format!("{}: {found} instead of {}", case.what, case.wanted));
        }
        shop.journal.close().await;
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

async fn fill(shop: &Shop) {
    for number in 0..EVENTS {
        let body = format!(r#"{{"payment":"pi_{number}","amount":{number}}}"#);
        append(&*shop.journal, [routed(&format!("evt_{number}"), &body)]).await;
    }
}

/// Applies a statement for every event, in as few batches as there are, and asks.
async fn applied(shop: &Shop, statement: &str, asked: &str) -> i64 {
    let bind: Vec<(&str, &str)> = [("payment", "/payment"), ("amount", "/amount")]
        .into_iter()
        .filter(|(name, _)| statement.contains(&format!(":{name}")))
        .collect();
    let route = Arc::new(route("orders", sql(&[statement], &bind)));
    while shop.journal.apply(Arc::clone(&route), 200).await.unwrap().more {}
    shop.drained().await;
    let states = "SELECT state, COUNT(*) FROM oncehook_deliveries GROUP BY 1";
    assert_eq!(shop.database.query(states), format!("succeeded|{EVENTS}"));
    shop.count(asked)
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_a_batch_on_mysql_that_waits_for_a_row_of_somebody_else_loses_nothing_behind_it() {
    for end in ["COMMIT", "ROLLBACK"] {
        let shop = Shop::with(Duration::from_secs(5)).await;
        fill(&shop).await;
        let database = shop.database.clone();
        let holder = std::thread::spawn(move || {
            database.query(&format!(
                "BEGIN; INSERT INTO orders (payment, amount) VALUES ('pi_40', 1), ('pi_80', 1); SELECT SLEEP(2); {end}"
            ))
        });
        tokio::time::sleep(Duration::from_millis(500)).await;
        let found = applied(&shop, UPSERT, "SELECT COUNT(*) FROM orders").await;
        holder.join().unwrap();
        assert_eq!(found, EVENTS, "{end}");
        shop.journal.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_batches_on_mysql_that_meet_the_same_rows_at_once_lose_nothing() {
    const PAYMENTS: i64 = 10_000;
    // With bulk execution the server passed over some thirty to a hundred rows in two of six turns.
    let mut missing = Vec::new();
    for _ in 0..3 {
        let shop = Shop::with(Duration::from_secs(5)).await;
        let payment = |event: &str, number: i64| {
            let body = format!(r#"{{"payment":"pi_{number:012}","amount":{number}}}"#);
            routed(&format!("evt_{event}_{number}"), &body)
        };
        // Every hundredth has come before.
        append(&*shop.journal, (0..PAYMENTS / 100).map(|number| payment("old", number * 100 + 99))).await;
        append(&*shop.journal, (0..PAYMENTS).map(|number| payment("new", number))).await;
        let bind = [("payment", "/payment"), ("amount", "/amount")];
        let route = Arc::new(route("orders", sql(&[UPSERT], &bind)));
        let workers = [0, 1].map(|_| {
            let (journal, route) = (Arc::clone(&shop.journal), Arc::clone(&route));
            tokio::spawn(async move { while journal.apply(Arc::clone(&route), 128).await.unwrap().more {} })
        });
        for worker in workers {
            worker.await.unwrap();
        }
        shop.drained().await;
        missing.push(PAYMENTS - shop.count("SELECT COUNT(*) FROM orders"));
        shop.journal.close().await;
    }
    assert_eq!(missing, [0; 3]);
}
