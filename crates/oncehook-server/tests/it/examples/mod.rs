//! The examples, run as their readers would: the commands are taken from their READMEs and pasted into a shell, only the
//! ports are others. And the receivers of the recipe (docs/RECEIVER.md), killed at random while events are forwarded.
//!
//! Does not: skip anything. Python and Node are needed; `make services` installs what is missing.

mod example;
mod receiver;
mod thief;

use std::time::Duration;

use oncehook_testkit::mysql;
use oncehook_testkit::postgres::Server;
use serde_json::Value;

use example::Example;

/// Whatever has to happen in the end has happened by then, also on a busy machine.
const IN_THE_END: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_shop_orders_11247_deliveries_make_one_order_one_mail_one_shipment() {
    let example = Example::copy("shop-orders");
    let [prepare, start, send, count] = example.blocks("sh").try_into().unwrap();
    let [expected] = example.blocks("text").try_into().unwrap();
    example.paste(&prepare);
    let gateway = example.start(&start);
    let said = example.paste(&send);
    assert!(said.contains("11246"), "{said}");
    let event = gateway.only_event("succeeded").await;
    assert_eq!(event["duplicates"], 11_246, "{event}");
    assert_eq!(routes(&event), ["confirmation-mail", "orders", "shipment"]);
    assert_eq!(example.paste(&count), expected);

    // All three programs die, and the provider goes on.
    drop(gateway);
    let gateway = example.start(&start);
    example.paste(&send.replace("11247", "500"));
    gateway.only_event("succeeded").await;
    assert_eq!(example.paste(&count), expected);

    // Another event about the same payment, as the README ends.
    let body = gateway.inner.get(&format!("/api/events/{}/body", event["id"].as_str().unwrap())).await.body;
    let body = String::from_utf8(body).unwrap().replace(r#""id":"evt_1""#, r#""id":"evt_2""#);
    std::fs::write(example.path("other.json"), body).unwrap();
    example.paste("oncehook send --source stripe --body other.json");
    let mut other = gateway.event("evt_2", "dead").await;
    // The first dead follow-up makes the event dead; the second comes to its end in its own time.
    for _ in 0..400 {
        if delivery(&other, "confirmation-mail")["state"] == delivery(&other, "shipment")["state"] {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        other = gateway.event("evt_2", "dead").await;
    }
    let of = |route: &str| delivery(&other, route).clone();
    assert_eq!(of("orders")["state"], "succeeded", "{other}");
    for route in ["confirmation-mail", "shipment"] {
        assert_eq!(of(route)["state"], "dead", "{other}");
        assert!(of(route)["error"].to_string().contains("$result"), "{other}");
    }
    example.paste(&format!("oncehook skip {}", other["id"].as_str().unwrap()));
    gateway.event("evt_2", "skipped").await;
    assert_eq!(example.paste(&count), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_payout_fees_two_deliveries_a_second_apart_take_one_fee() {
    let example = Example::copy("payout-fees");
    let [prepare, start, send, look, send_many] = example.blocks("sh").try_into().unwrap();
    let [expected] = example.blocks("text").try_into().unwrap();
    example.paste(&prepare);
    let gateway = example.start(&start);
    example.paste(&send);
    let event = gateway.only_event("succeeded").await;
    assert_eq!(event["duplicates"], 1, "{event}");
    assert_eq!(example.paste(&look), expected);
    example.paste(&send_many);
    let event = gateway.only_event("succeeded").await;
    assert_eq!(event["duplicates"], 1_001, "{event}");
    assert_eq!(example.paste(&look), expected);

    // Another event about the same payout fails as a whole: the balance stays.
    let body = std::fs::read_to_string(example.path("payout.json")).unwrap();
    std::fs::write(example.path("other.json"), body.replace("evt_payout_1", "evt_payout_2")).unwrap();
    example.paste("oncehook send --source stripe --body other.json");
    let other = gateway.event("evt_payout_2", "retrying").await;
    assert!(delivery(&other, "payout-fee")["error"].to_string().contains("fees.payout_id"), "{other}");
    assert_eq!(example.paste(&look), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_both_stories_with_the_shop_in_postgres_and_the_journal_in_a_file() {
    both_stories_on_postgres("sqlite://journal.db").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_both_stories_with_shop_and_journal_in_one_postgres() {
    both_stories_on_postgres("$SHOP_DATABASE").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_both_stories_with_the_shop_in_mariadb_and_the_journal_in_a_file() {
    both_stories_on_mariadb("sqlite://journal.db").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r20_r25_both_stories_with_shop_and_journal_in_one_mariadb() {
    both_stories_on_mariadb("$SHOP_DATABASE").await;
}

async fn both_stories_on_postgres(journal: &str) {
    let database = Server::shared().database();
    let places = [("postgres://localhost/shop", database.url()), (JOURNAL_IN_A_FILE, journal.to_owned())];
    both_stories(&Example::copy("postgres"), &places).await;
    let guards = database.query("SELECT count(*) FROM pg_namespace WHERE nspname = 'oncehook_guard'");
    assert_eq!(guards, if journal.contains("sqlite") { "1" } else { "0" }, "one database needs no guards");
}

async fn both_stories_on_mariadb(journal: &str) {
    let server = mysql::Server::shared();
    let database = server.database();
    let places = [
        ("SHOP_PORT=3306", format!("SHOP_PORT={}", server.port())),
        ("SHOP_NAME=shop", format!("SHOP_NAME={}", database.name())),
        (JOURNAL_IN_A_FILE, journal.to_owned()),
    ];
    both_stories(&Example::copy("mariadb"), &places).await;
    let guards = database.query("SHOW TABLES LIKE 'oncehook\\_applied'");
    assert_eq!(
        guards,
        if journal.contains("sqlite") { "oncehook_applied" } else { "" },
        "one database needs no guards"
    );
}

const JOURNAL_IN_A_FILE: &str = "sqlite://journal.db";

/// Both stories as a README tells them that begins with the places of shop and journal, which are others here.
async fn both_stories(example: &Example, places: &[(&str, String)]) {
    let [place, prepare, start, send, count, start_fees, send_fees, look] = example.blocks("sh").try_into().unwrap();
    let [orders, fees] = example.blocks("text").try_into().unwrap();
    let place = places.iter().fold(place, |place, (written, other)| {
        assert!(place.contains(written), "{place}");
        place.replace(written, other)
    });
    example.paste(&place);
    example.paste(&prepare);
    let gateway = example.start(&start);
    example.paste(&send);
    let event = gateway.only_event("succeeded").await;
    assert_eq!(event["duplicates"], 11_246, "{event}");
    assert_eq!(routes(&event), ["confirmation-mail", "orders", "shipment"]);
    assert_eq!(example.paste(&count), orders);
    // All three programs die, and the provider goes on.
    drop(gateway);
    let gateway = example.start(&start);
    example.paste(&send.replace("11247", "500"));
    gateway.only_event("succeeded").await;
    assert_eq!(example.paste(&count), orders);
    drop(gateway);

    let gateway = example.start(&start_fees);
    example.paste(&send_fees);
    let event = gateway.event("evt_payout_1", "succeeded").await;
    assert_eq!(event["duplicates"], 1_000, "{event}");
    assert_eq!(example.paste(&look), fees);
}

fn routes(event: &Value) -> Vec<&str> {
    let mut routes: Vec<&str> =
        event["deliveries"].as_array().unwrap().iter().map(|one| one["route"].as_str().unwrap()).collect();
    routes.sort_unstable();
    routes
}

fn delivery<'e>(event: &'e Value, route: &str) -> &'e Value {
    let mut deliveries = event["deliveries"].as_array().unwrap().iter();
    deliveries.find(|delivery| delivery["route"] == route).unwrap_or_else(|| panic!("no {route}: {event}"))
}
