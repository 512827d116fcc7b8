//! The journal on PostgreSQL: the suites, random histories, and what only a server can go through.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook::clock::Clock;
use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Handler, SqlHandler};
use oncehook::journal::postgres::{OpenError, PostgresJournal, PostgresOptions};
use oncehook::journal::{AppendError, Appended, Deliveries, Durability, Journal, Verdict};
use oncehook::route::Route;
use oncehook_testkit::deliveries::{compare_deliveries, exercise_deliveries, exercise_ordering};
use oncehook_testkit::journal::{NOW, Subject, append, event, exercise, try_append};
use oncehook_testkit::model::compare;
use oncehook_testkit::postgres::Server;

/// Opens the journal in the database of a directory.
fn open_in(directory: &Path, clock: Clock) -> PostgresJournal {
    let options = PostgresOptions { clock, ..PostgresOptions::new(Server::shared().database_of(directory).url()) };
    let opening = PostgresJournal::open(&options);
    tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(opening)).unwrap()
}

fn subject() -> Subject<PostgresJournal> {
    Subject { open: Box::new(|directory, clock| Arc::new(open_in(directory, clock))), survives: true }
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_postgres_behaves_like_a_journal() {
    exercise(&subject()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_random_histories_end_on_postgres_as_in_the_reference() {
    for seed in 1..=5 {
        let directory = tempfile::tempdir().unwrap();
        let journal = open_in(directory.path(), Clock::manual(NOW));
        compare(&journal, seed, 300).await;
        journal.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r14_postgres_hands_out_work_like_a_journal() {
    exercise_deliveries(&subject()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r14_random_histories_of_work_end_on_postgres_as_in_the_reference() {
    for seed in 1..=5 {
        let directory = tempfile::tempdir().unwrap();
        let clock = Clock::manual(NOW);
        let journal = open_in(directory.path(), clock.clone());
        compare_deliveries(&journal, &clock, seed, 400).await;
        journal.close().await;
    }
}

/// The expected shape is a file, so that a start needs no second schema to compare with.
#[tokio::test(flavor = "multi_thread")]
async fn the_expected_shape_is_what_the_migration_makes() {
    let database = Server::shared().database();
    let made = PostgresJournal::shape(&database.url()).await.unwrap().join("\n") + "\n";
    let expected = include_str!("../../src/journal/postgres/shape.txt");
    assert!(made == expected, "shape.txt should read:\n{made}");
}

async fn open(url: &str) -> Result<PostgresJournal, OpenError> {
    PostgresJournal::open(&PostgresOptions::new(url)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r3_a_server_that_does_not_sync_is_refused() {
    let server = Server::start(&["fsync=off"]);
    let refused = open(&server.database().url()).await.err().unwrap();
    assert!(matches!(&refused, OpenError::Durability(what) if what.contains("fsync")), "{refused}");
    // A commit that is not waited for is a choice of the session, so the journal makes the other one.
    let database = Server::shared().database();
    database.query(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$",
    );
    let journal = open(&database.url()).await.unwrap();
    append(&journal, [event("evt_1", "{}")]).await;
    assert_eq!((journal.state().kind, journal.state().durability), ("postgres", Durability::DurableFsync));
    let setting = "SELECT DISTINCT setting FROM pg_settings WHERE name = 'synchronous_commit'";
    assert_eq!(database.query(setting), "off", "the test's own session shows that the setting was there");
    journal.close().await;
}

/// Another program changes the schema while nobody looks: the journal must not open.
#[tokio::test(flavor = "multi_thread")]
async fn fault_105_r44_a_changed_ledger_is_found_on_postgres_before_the_first_request() {
    for change in [
        "ALTER TABLE oncehook.keys RENAME COLUMN key TO idempotency_key",
        "ALTER TABLE oncehook.keys DROP CONSTRAINT keys_once",
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'oncehook.keys_once'::regclass",
        "ALTER TABLE oncehook.keys DROP CONSTRAINT keys_once; CREATE INDEX keys_once ON oncehook.keys (source, key)",
        "CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
         ALTER TABLE oncehook.keys ALTER COLUMN source TYPE text COLLATE folding",
        "ALTER TABLE oncehook.keys ALTER COLUMN key TYPE text USING lower(encode(key, 'escape'))",
        "ALTER TABLE oncehook.keys SET UNLOGGED",
        "CREATE FUNCTION trick() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
         CREATE TRIGGER trick BEFORE INSERT ON oncehook.keys FOR EACH ROW EXECUTE FUNCTION trick()",
        "CREATE RULE trick AS ON INSERT TO oncehook.keys DO INSTEAD NOTHING",
        "DROP TABLE oncehook.keys",
        "UPDATE oncehook.migrations SET digest = 'other'",
        "INSERT INTO oncehook.migrations VALUES ('999_future', '', 0)",
    ] {
        let database = Server::shared().database();
        PostgresJournal::migrate(&database.url()).await.unwrap();
        database.query(change);
        let refused = open(&database.url()).await.err();
        assert!(matches!(refused, Some(OpenError::Schema(_))), "{change}: {refused:?}");
    }
}

/// The records of a newer version, of an older one with several migrations, and of one with another text.
#[tokio::test(flavor = "multi_thread")]
async fn a_journal_on_postgres_that_another_version_made_is_refused_and_left_as_it_is() {
    for change in [
        "INSERT INTO oncehook.migrations VALUES ('002_order', '', 0)",
        "UPDATE oncehook.migrations SET digest = 'other'",
        "DROP TABLE oncehook.sweeps; ALTER TABLE oncehook.events DROP COLUMN version;
         UPDATE oncehook.migrations SET digest = 'older'",
        "UPDATE oncehook.migrations SET name = '900_journal'",
    ] {
        let database = Server::shared().database();
        PostgresJournal::migrate(&database.url()).await.unwrap();
        database.query(change);
        let tables =
            || database.query("SELECT count(*) FROM information_schema.columns WHERE table_schema = 'oncehook'");
        let before = tables();
        let refused = PostgresJournal::migrate(&database.url()).await.unwrap_err().to_string();
        assert!(refused.contains("made by another version of oncehook"), "{change}: {refused}");
        assert!(refused.contains("start it with the version that made it"), "{change}: {refused}");
        assert_eq!(tables(), before, "{change}");
    }
}

/// Another program changes the schema while it is in use: appends fail, and the self-test says why.
#[tokio::test(flavor = "multi_thread")]
async fn fault_105_r44_a_running_journal_on_postgres_notices_a_changed_ledger() {
    let database = Server::shared().database();
    let journal = open(&database.url()).await.unwrap();
    let first = append(&journal, [event("evt_1", "{}")]).await[0];
    // Silent for plain inserts; the append names what it relies on, whether one event comes or several that may all be new.
    database.query("ALTER TABLE oncehook.keys DROP CONSTRAINT keys_once");
    let several = [event("evt_0", "{}"), event("evt_1", "{}")];
    assert!(matches!(try_append(&journal, several).await, Err(AppendError::Unavailable(_))));
    assert!(matches!(try_append(&journal, [event("evt_1", "{}")]).await, Err(AppendError::Unavailable(_))));
    assert!(journal.self_test().await.is_err());
    assert!(journal.state().failing.is_some());
    database.query("ALTER TABLE oncehook.keys ADD CONSTRAINT keys_once PRIMARY KEY (source, key)");
    let again = until_stored(&journal, "evt_1").await;
    assert_eq!((again.id, again.verdict), (first.id, Verdict::Duplicate));
    journal.self_test().await.unwrap();
    journal.close().await;
}

async fn until_stored(journal: &PostgresJournal, key: &str) -> Appended {
    for _ in 0..200 {
        if let Ok(receipt) = try_append(journal, [event(key, "{}")]).await {
            return receipt[0];
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{key} is never stored");
}

/// The server ends the migrating connection at its first statement, at its second, and so on until it gets through.
#[tokio::test(flavor = "multi_thread")]
async fn fault_107_a_migration_on_postgres_killed_at_every_statement_can_be_rerun() {
    let database = Server::shared().database();
    // A sequence counts on although the transaction is undone.
    database.query(
        "CREATE SEQUENCE steps; CREATE TABLE plan (last bigint);
         CREATE FUNCTION die() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
           IF nextval('public.steps') = (SELECT last FROM public.plan) THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
         END $$;
         CREATE EVENT TRIGGER die ON ddl_command_end EXECUTE FUNCTION die()",
    );
    let url = database.url();
    let mut statement = 1;
    loop {
        database.query(&format!(
            "DELETE FROM plan; INSERT INTO plan VALUES ({statement}); SELECT setval('steps', 1, false)"
        ));
        if PostgresJournal::migrate(&url).await.is_ok() {
            break;
        }
        let left = "SELECT count(*) FROM pg_namespace WHERE nspname = 'oncehook'";
        assert_eq!(database.query(left), "0", "after statement {statement}");
        statement += 1;
    }
    assert!(statement > 20, "it was killed {} times only", statement - 1);
    database.query("DROP EVENT TRIGGER die; DROP SCHEMA oncehook CASCADE");
    // Nodes that start at once make it once.
    let nodes = (0..4).map(|_| {
        let url = url.clone();
        tokio::spawn(async move { PostgresJournal::migrate(&url).await.unwrap() })
    });
    let mut applied = Vec::new();
    for node in nodes.collect::<Vec<_>>() {
        applied.extend(node.await.unwrap());
    }
    let recorded = database.query("SELECT name FROM oncehook.migrations ORDER BY name");
    applied.sort();
    assert_eq!(applied, recorded.lines().collect::<Vec<_>>());
}

/// Two nodes get the same events in different order: one of each is new, and both name the same event.
#[tokio::test(flavor = "multi_thread")]
async fn r12_r15_nodes_that_race_agree_on_the_first() {
    const KEYS: usize = 3_000;
    let database = Server::shared().database();
    let mut answers = Vec::new();
    let mut nodes = Vec::new();
    for node in 0..2_usize {
        let journal = Arc::new(open(&database.url()).await.unwrap());
        nodes.push(Arc::clone(&journal));
        answers.push(tokio::spawn(async move {
            let order = |place: usize| if node == 0 { place } else { (place * 7 + 11) % KEYS };
            let mut tickets = Vec::new();
            for place in 0..KEYS {
                let key = order(place);
                tickets
                    .push((key, journal.submit([event(&format!("evt_{key}"), "{}")].into_iter().collect()).unwrap()));
            }
            let mut fates = vec![None; KEYS];
            for (key, ticket) in tickets {
                fates[key] = Some(ticket.await.unwrap().unwrap()[0]);
            }
            fates
        }));
    }
    let first = answers.remove(0).await.unwrap();
    let second = answers.remove(0).await.unwrap();
    for (one, other) in first.iter().zip(&second) {
        let (one, other) = (one.unwrap(), other.unwrap());
        assert_eq!(one.id, other.id);
        let verdicts = [one.verdict, other.verdict];
        assert!(verdicts == [Verdict::New, Verdict::Duplicate] || verdicts == [Verdict::Duplicate, Verdict::New]);
    }
    for node in nodes {
        node.close().await;
    }
    assert_eq!(
        database.query("SELECT count(*), sum(duplicates) FROM oncehook.processed_events"),
        format!("{KEYS}|{KEYS}")
    );
    assert_eq!(database.query("SELECT sum(events), sum(duplicates) FROM oncehook.totals"), format!("{KEYS}|{KEYS}"));
}

/// A row that the database refuses costs its own request, and nobody else's.
#[tokio::test(flavor = "multi_thread")]
async fn one_bad_row_does_not_fail_its_batch() {
    let database = Server::shared().database();
    let journal = open(&database.url()).await.unwrap();
    let tickets: Vec<_> = (0..200)
        .map(|number| {
            let mut events = vec![event(&format!("a_{number}"), "{}"), event(&format!("b_{number}"), "{}")];
            if number % 50 == 7 {
                events[1].entity = Some("zero \0 character".to_owned());
            }
            journal.submit(events.into_iter().collect()).unwrap()
        })
        .collect();
    for (number, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(ticket.await.unwrap().is_err(), number % 50 == 7, "{number}");
    }
    assert_eq!(database.query("SELECT count(*) FROM oncehook.events"), "392");
    assert_eq!(journal.state().failing, None);
    journal.close().await;
}

/// A batch is taken to be new, and is not: whatever of it is new is stored once, whatever is known is a duplicate, wherever it
/// stands in the batch.
#[tokio::test(flavor = "multi_thread")]
async fn r12_a_batch_with_known_keys_among_new_ones_is_told_apart() {
    let database = Server::shared().database();
    for known in ["evt_a", "evt_b", "evt_c"] {
        // A new journal guesses; one that has been wrong does not for a while.
        let journal = open(&database.url()).await.unwrap();
        let before = append(&journal, [event(known, "{}")]).await[0];
        let batch = ["evt_a", "evt_b", "evt_c"].map(|key| event(key, "{}"));
        for (receipt, key) in append(&journal, batch).await.iter().zip(["evt_a", "evt_b", "evt_c"]) {
            let expected = if key == known { Verdict::Duplicate } else { Verdict::New };
            assert_eq!(receipt.verdict, expected, "{key} after {known}");
            assert!(key != known || receipt.id == before.id);
        }
        assert_eq!(database.query("SELECT count(*), count(DISTINCT key) FROM oncehook.events"), "3|3");
        assert_eq!(database.query("SELECT sum(events) FROM oncehook.totals"), "3");
        journal.close().await;
        database.query("TRUNCATE oncehook.events, oncehook.keys, oncehook.deliveries, oncehook.totals");
    }
}

/// The database goes away in the middle of everything and comes back.
#[tokio::test(flavor = "multi_thread")]
async fn fault_12_r4_r15_a_lost_database_is_a_refusal_at_once_and_is_taken_up_again() {
    let server = Server::start(&[]);
    let database = server.database();
    let journal = Arc::new(open(&database.url()).await.unwrap());
    append(&*journal, [event("evt_before", "{}")]).await;
    let sending = {
        let journal = Arc::clone(&journal);
        tokio::spawn(async move {
            let (mut stored, mut slowest) = (Vec::new(), Duration::ZERO);
            // At least 2,000, and on a busy machine more, until enough are stored behind the outage.
            for number in 0..40_000 {
                if number >= 2_000 && stored.len() > 100 {
                    break;
                }
                let key = format!("evt_{number}");
                let begun = Instant::now();
                if try_append(&*journal, [event(&key, "{}")]).await.is_ok() {
                    stored.push(key);
                }
                slowest = slowest.max(begun.elapsed());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            (stored, slowest)
        })
    };
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.crash();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(journal.state().failing.is_some(), "an idle lane sees it too");
    let begun = Instant::now();
    assert!(matches!(try_append(&*journal, [event("evt_gone", "{}")]).await, Err(AppendError::Unavailable(_))));
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    assert!(journal.claim(route("orders"), 1, Duration::from_secs(1)).await.is_err());
    server.restart();
    assert_eq!(until_stored(&journal, "evt_before").await.verdict, Verdict::Duplicate);
    let (stored, slowest) = sending.await.unwrap();
    assert!(stored.len() > 100 && stored.len() < 2_000, "{}", stored.len());
    assert!(slowest < Duration::from_secs(6), "{slowest:?}");
    for key in &stored {
        assert_eq!(try_append(&*journal, [event(key, "{}")]).await.unwrap()[0].verdict, Verdict::Duplicate, "{key}");
    }
    assert_eq!(journal.state().failing, None);
    journal.close().await;
}

fn route(name: &str) -> Arc<Route> {
    let name = RouteName::new(name).unwrap();
    let bind = std::collections::BTreeMap::new();
    let handler = SqlHandler::new(&["SELECT 1"], &bind, Dialect::Postgres).unwrap();
    Arc::new(Route::new(name, SourceName::new("shop").unwrap(), Handler::Sql(Arc::new(handler))))
}

/// One node stores, another one's worker hears of it before it would look by itself.
#[tokio::test(flavor = "multi_thread")]
async fn fault_48_other_nodes_are_woken() {
    let database = Server::shared().database();
    let one = open(&database.url()).await.unwrap();
    let other = open(&database.url()).await.unwrap();
    let mut changes = other.changes();
    let routed = NewEvent { routes: [RouteName::new("orders").unwrap()].into_iter().collect(), ..event("evt_1", "{}") };
    append(&one, [routed]).await;
    let woken = tokio::time::timeout(Duration::from_secs(5), changes.changed()).await;
    assert!(woken.is_ok(), "nobody was told");
    assert_eq!(other.claim(route("orders"), 10, Duration::from_secs(15)).await.unwrap().len(), 1);
    assert_eq!(one.claim(route("orders"), 10, Duration::from_secs(15)).await.unwrap().len(), 0);
    one.close().await;
    other.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r17_postgres_says_which_life_it_is_in() {
    let server = Server::start(&[]);
    let (database, another) = (server.database(), server.database());
    // A role like any other: nothing that is asked for needs more rights.
    database.query("CREATE ROLE plain LOGIN");
    database.query(&format!("GRANT CREATE ON DATABASE {} TO plain", database.query("SELECT current_database()")));
    let url = database.url().replace("postgres@", "plain@");
    let (one, two) = (open(&url).await.unwrap(), open(&url).await.unwrap());
    let name = |journal: &PostgresJournal| journal.incarnation().name().map(|(_, name)| name.to_string());
    let first = name(&one).unwrap();
    assert_eq!(name(&two), Some(first.clone()), "all nodes know it by the same name");
    let elsewhere = open(&another.url()).await.unwrap();
    assert_ne!(name(&elsewhere), Some(first.clone()));

    // While the server is away it is in doubt; whatever it was then, a start is another life.
    let era = one.incarnation().era();
    server.stop();
    until(|| one.incarnation().era().is_none() && two.incarnation().name().is_none()).await;
    server.restart();
    until(|| name(&one).is_some() && name(&two).is_some()).await;
    let second = name(&one).unwrap();
    assert_eq!(name(&two), Some(second.clone()));
    assert_ne!(second, first);
    assert_ne!(one.incarnation().era(), era);

    // A connection that breaks is no other life.
    let era = one.incarnation().era();
    let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'oncehook'";
    database.query(cut);
    tokio::time::sleep(Duration::from_millis(500)).await;
    until(|| name(&one) == Some(second.clone()) && one.incarnation().era() == era).await;

    // A ledger that was emptied, as when a dump is put back.
    database.query("TRUNCATE oncehook.keys");
    until(|| name(&one).is_some_and(|name| name != second)).await;
    let third = name(&one);
    until(|| name(&two) == third).await;
}

async fn until(holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(30), "it never came about");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r24_r29_r30_postgres_keeps_the_lines_of_entities() {
    exercise_ordering(&subject()).await;
}
