//! The journal on MariaDB: the suites, random histories, and what only a server can go through.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook::clock::Clock;
use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Handler, SqlHandler};
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions, OpenError};
use oncehook::journal::{AppendError, Appended, Deliveries, Durability, Journal, Verdict};
use oncehook::route::Route;
use oncehook_testkit::deliveries::{compare_deliveries, exercise_deliveries, exercise_ordering};
use oncehook_testkit::journal::{NOW, Subject, append, event, exercise, try_append};
use oncehook_testkit::model::compare;
use oncehook_testkit::mysql::{Server, is_mariadb};

/// Opens the journal in the database of a directory.
fn open_in(directory: &Path, clock: Clock) -> MysqlJournal {
    let options = MysqlOptions { clock, ..MysqlOptions::new(Server::shared().database_of(directory).url()) };
    let opening = MysqlJournal::open(&options);
    tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(opening)).unwrap()
}

fn subject() -> Subject<MysqlJournal> {
    Subject { open: Box::new(|directory, clock| Arc::new(open_in(directory, clock))), survives: true }
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_mysql_behaves_like_a_journal() {
    exercise(&subject()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_random_histories_end_on_mysql_as_in_the_reference() {
    for seed in 1..=5 {
        let directory = tempfile::tempdir().unwrap();
        let journal = open_in(directory.path(), Clock::manual(NOW));
        compare(&journal, seed, 300).await;
        journal.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r14_mysql_hands_out_work_like_a_journal() {
    exercise_deliveries(&subject()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r24_r29_r30_mysql_keeps_the_lines_of_entities() {
    exercise_ordering(&subject()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r14_random_histories_of_work_end_on_mysql_as_in_the_reference() {
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
async fn the_expected_shape_on_mysql_is_what_the_migration_makes() {
    let database = Server::shared().database();
    let made = MysqlJournal::shape(&database.url()).await.unwrap().join("\n") + "\n";
    let expected = include_str!("../../src/journal/mysql/shape.txt");
    assert!(made == expected, "shape.txt should read:\n{made}");
}

async fn open(url: &str) -> Result<MysqlJournal, OpenError> {
    MysqlJournal::open(&MysqlOptions::new(url)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn r3_a_mysql_server_that_does_not_sync_is_refused() {
    let server = Server::start(&["--innodb-flush-log-at-trx-commit=2"]);
    let database = server.database();
    let refused = open(&database.url()).await.err().unwrap();
    let named = |refused: &OpenError, what: &str| matches!(refused, OpenError::Durability(told) if told.contains(what));
    assert!(named(&refused, "innodb_flush_log_at_trx_commit"), "{refused}");
    database.query("SET GLOBAL innodb_flush_log_at_trx_commit = 1; SET GLOBAL read_only = 1");
    let refused = open(&database.url()).await.err().unwrap();
    assert!(named(&refused, "read-only"), "{refused}");
    if !is_mariadb() {
        database.query("SET GLOBAL read_only = 0; ALTER INSTANCE DISABLE INNODB REDO_LOG");
        let refused = open(&database.url()).await.err().unwrap();
        assert!(named(&refused, "redo log"), "{refused}");
        database.query("ALTER INSTANCE ENABLE INNODB REDO_LOG");
    }
    // What a session can choose, the journal chooses, whatever the server's own settings are.
    let isolation = if is_mariadb() { "tx_isolation" } else { "transaction_isolation" };
    database.query(&format!(
        "SET GLOBAL read_only = 0; SET GLOBAL sql_mode = 'ANSI_QUOTES'; SET GLOBAL autocommit = 1; SET GLOBAL unique_checks = 0;
         SET GLOBAL {isolation} = 'SERIALIZABLE'; SET GLOBAL time_zone = '+05:00'"
    ));
    let journal = open(&database.url()).await.unwrap();
    let clock = Clock::system().now();
    append(&journal, [NewEvent { received_at: clock, ..routed("evt_1") }]).await;
    assert_eq!((journal.state().kind, journal.state().durability), ("mysql", Durability::DurableFsync));
    let due = "SELECT run_at FROM oncehook_deliveries";
    let due: i64 = database.query(due).parse().unwrap();
    assert!((due - clock.0).abs() < 60_000_000, "times are UTC: {due} {}", clock.0);
    journal.close().await;
}

fn routed(key: &str) -> NewEvent {
    NewEvent { routes: [RouteName::new("orders").unwrap()].into_iter().collect(), ..event(key, "{}") }
}

/// Another program changes the schema while nobody looks: the journal must not open.
#[tokio::test(flavor = "multi_thread")]
async fn fault_105_r44_a_changed_ledger_is_found_on_mysql_before_the_first_request() {
    for change in [
        "ALTER TABLE oncehook_keys CHANGE `key` idempotency_key VARBINARY(255) NOT NULL",
        "ALTER TABLE oncehook_keys DROP CONSTRAINT oncehook_keys_length, CHANGE `key` k VARBINARY(255) NOT NULL",
        "ALTER TABLE oncehook_keys DROP PRIMARY KEY",
        "ALTER TABLE oncehook_keys DROP PRIMARY KEY, ADD KEY keys_once (source, `key`)",
        "ALTER TABLE oncehook_keys DROP PRIMARY KEY, ADD PRIMARY KEY (source, `key`, event)",
        "ALTER TABLE oncehook_keys DROP PRIMARY KEY, ADD UNIQUE (source, `key`(8))",
        "ALTER TABLE oncehook_keys ADD UNIQUE (event)",
        "ALTER TABLE oncehook_keys MODIFY `key` VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci NOT NULL",
        "ALTER TABLE oncehook_keys MODIFY source VARCHAR(64) CHARACTER SET ascii COLLATE ascii_general_ci NOT NULL",
        "ALTER TABLE oncehook_keys ENGINE = MyISAM",
        "CREATE TRIGGER trick BEFORE INSERT ON oncehook_keys FOR EACH ROW SET NEW.first_seen = 0",
        "DROP TABLE oncehook_keys",
        "UPDATE oncehook_migrations SET digest = 'other'",
        "INSERT INTO oncehook_migrations VALUES ('999_future', '', 0)",
    ] {
        if change.contains("idempotency_key") && !is_mariadb() {
            // MySQL lets no column be renamed that a check names. The next change drops the check first.
            continue;
        }
        let database = Server::shared().database();
        MysqlJournal::migrate(&database.url()).await.unwrap();
        database.query(change);
        let refused = open(&database.url()).await.err();
        assert!(matches!(refused, Some(OpenError::Schema(_))), "{change}: {refused:?}");
    }
}

/// The records of a newer version, of an older one with several migrations, and of one with another text.
#[tokio::test(flavor = "multi_thread")]
async fn a_journal_on_mysql_that_another_version_made_is_refused_and_left_as_it_is() {
    for change in [
        "INSERT INTO oncehook_migrations VALUES ('002_order', '', 0)",
        "UPDATE oncehook_migrations SET digest = 'other'",
        "DROP TABLE oncehook_buckets; ALTER TABLE oncehook_events DROP COLUMN version;
         UPDATE oncehook_migrations SET digest = 'older'",
        "UPDATE oncehook_migrations SET name = '900_journal'",
    ] {
        let database = Server::shared().database();
        MysqlJournal::migrate(&database.url()).await.unwrap();
        database.query(change);
        let tables =
            || database.query("SELECT COUNT(*) FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE()");
        let before = tables();
        let refused = MysqlJournal::migrate(&database.url()).await.unwrap_err().to_string();
        assert!(refused.contains("made by another version of oncehook"), "{change}: {refused}");
        assert!(refused.contains("start it with the version that made it"), "{change}: {refused}");
        assert_eq!(tables(), before, "{change}");
    }
}

/// A node of another version ended half-way: nothing is recorded, and a table has another shape.
#[tokio::test(flavor = "multi_thread")]
async fn a_journal_on_mysql_that_another_version_made_half_is_refused() {
    let database = Server::shared().database();
    database.query("CREATE TABLE oncehook_keys (source VARBINARY(64) NOT NULL PRIMARY KEY) ENGINE = InnoDB");
    let refused = MysqlJournal::migrate(&database.url()).await.unwrap_err().to_string();
    assert!(refused.contains("not as this version of oncehook made it"), "{refused}");
    assert!(refused.contains("oncehook_keys"), "{refused}");
}

/// Another program changes the schema while it is in use: appends fail, and the self-test says why.
#[tokio::test(flavor = "multi_thread")]
async fn fault_105_r44_a_running_journal_on_mysql_notices_a_changed_ledger() {
    let database = Server::shared().database();
    let journal = open(&database.url()).await.unwrap();
    // Keys that are about to be forgotten prove nothing, so these are of today.
    let now = Clock::system().now();
    let fresh = |key: &str| NewEvent {
        received_at: now,
        expires_at: oncehook_verify::UnixMicros(now.0 + 86_400_000_000),
        ..event(key, "{}")
    };
    let first = append(&journal, [fresh("evt_1")]).await[0];
    // Silent for plain inserts; the append names what it relies on.
    database.query("ALTER TABLE oncehook_keys DROP PRIMARY KEY");
    assert!(matches!(try_append(&journal, [fresh("evt_2")]).await, Err(AppendError::Unavailable(_))));
    assert!(journal.self_test().await.is_err());
    assert!(journal.state().failing.is_some());
    database.query("ALTER TABLE oncehook_keys ADD PRIMARY KEY (source, `key`)");
    let again = until_stored(&journal, "evt_1").await;
    assert_eq!((again.id, again.verdict), (first.id, Verdict::Duplicate));
    journal.self_test().await.unwrap();
    journal.close().await;
}

async fn until_stored(journal: &MysqlJournal, key: &str) -> Appended {
    for _ in 0..200 {
        if let Ok(receipt) = try_append(journal, [event(key, "{}")]).await {
            return receipt[0];
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{key} is never stored");
}

/// Statements that make tables cannot be undone: whatever the migration has done when it is killed, it is done again.
#[tokio::test(flavor = "multi_thread")]
async fn fault_107_a_migration_on_mysql_killed_at_every_statement_can_be_rerun() {
    let server = Server::start(&[]);
    let database = server.database();
    let url = database.url();
    let count = || -> usize {
        let made = format!("SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = '{}'", database.name());
        database.query(&made).parse().unwrap()
    };
    let mut seen = std::collections::BTreeSet::new();
    for step in 0..60_u64 {
        // The connection is dropped wherever it is.
        let migrating = MysqlJournal::migrate(&url);
        let wait = Duration::from_micros(3_000 + step * step * 200);
        let done = tokio::time::timeout(wait, migrating).await;
        seen.insert(count());
        if matches!(done, Ok(Ok(_))) {
            break;
        }
    }
    assert!(seen.len() > 3, "it was killed at {seen:?} tables only");
    MysqlJournal::migrate(&url).await.unwrap();
    database.query(&format!("DROP DATABASE {0}; CREATE DATABASE {0}", database.name()));
    // Nodes that start at once make each part of it once.
    let nodes = (0..4).map(|_| {
        let url = url.clone();
        tokio::spawn(async move { MysqlJournal::migrate(&url).await.unwrap() })
    });
    let mut applied = 0;
    for node in nodes.collect::<Vec<_>>() {
        applied += node.await.unwrap().len();
    }
    let recorded: usize = database.query("SELECT COUNT(*) FROM oncehook_migrations").parse().unwrap();
    assert_eq!(applied, recorded);
}

/// Two nodes get the same events in different order: one of each is new, and both name the same event.
#[tokio::test(flavor = "multi_thread")]
async fn r12_r15_nodes_on_mysql_that_race_agree_on_the_first() {
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
        database.query("SELECT count(*), sum(duplicates) FROM oncehook_processed_events"),
        format!("{KEYS}|{KEYS}")
    );
    assert_eq!(database.query("SELECT sum(events), sum(duplicates) FROM oncehook_totals"), format!("{KEYS}|{KEYS}"));
}

/// A row that the database refuses costs its own request, and nobody else's.
#[tokio::test(flavor = "multi_thread")]
async fn one_bad_row_on_mysql_does_not_fail_its_batch() {
    let database = Server::shared().database();
    let journal = open(&database.url()).await.unwrap();
    let tickets: Vec<_> = (0..200)
        .map(|number| {
            let mut events = vec![event(&format!("a_{number}"), "{}"), event(&format!("b_{number}"), "{}")];
            if number % 50 == 7 {
                events[1].entity = Some("longer than its column".repeat(20));
            }
            journal.submit(events.into_iter().collect()).unwrap()
        })
        .collect();
    for (number, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(ticket.await.unwrap().is_err(), number % 50 == 7, "{number}");
    }
    assert_eq!(database.query("SELECT count(*) FROM oncehook_events"), "392");
    assert_eq!(journal.state().failing, None);
    journal.close().await;
}

/// The database goes away in the middle of everything and comes back.
#[tokio::test(flavor = "multi_thread")]
async fn fault_12_r4_r15_a_lost_mysql_is_a_refusal_at_once_and_is_taken_up_again() {
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
    let handler = SqlHandler::new(&["SELECT 1"], &bind, Dialect::Mysql).unwrap();
    Arc::new(Route::new(name, SourceName::new("shop").unwrap(), Handler::Sql(Arc::new(handler))))
}

/// One node stores, another one's worker hears of it before it would look by itself.
#[tokio::test(flavor = "multi_thread")]
async fn fault_48_other_nodes_on_mysql_are_woken() {
    let database = Server::shared().database();
    let one = open(&database.url()).await.unwrap();
    let other = open(&database.url()).await.unwrap();
    let mut changes = other.changes();
    append(&one, [routed("evt_1")]).await;
    let woken = tokio::time::timeout(Duration::from_secs(5), changes.changed()).await;
    assert!(woken.is_ok(), "nobody was told");
    assert_eq!(other.claim(route("orders"), 10, Duration::from_secs(15)).await.unwrap().len(), 1);
    assert_eq!(one.claim(route("orders"), 10, Duration::from_secs(15)).await.unwrap().len(), 0);
    one.close().await;
    other.close().await;
}
