//! Lists on the database servers: the search index that is filled behind the accepts finds what a walk finds, and spares the
//! walk.

use std::time::{Duration, Instant};

use oncehook::clock::Clock;
use oncehook::event::{EventIds, NewEvent, SourceName};
use oncehook::handler::Dialect;
use oncehook::journal::memory::MemoryJournal;
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresJournal, PostgresOptions};
use oncehook::journal::{Deliveries, EventQuery, EventStatus, Journal, JournalReader, Retention};
use oncehook_testkit::deliveries::WholeJournal;
use oncehook_testkit::journal::{NOW, append, event};
use oncehook_testkit::{mysql, postgres};
use oncehook_verify::UnixMicros;

use crate::lists::{fill, filters, keys, mixed, orders, second, work};

/// A database of one of the engines.
trait Database {
    type Journal: WholeJournal;
    const DIALECT: Dialect;
    /// The bucket of an event's id, in SQL.
    const BUCKET: &'static str;

    async fn open(&self, clock: Clock) -> Self::Journal;
    /// Asks. Tables are named as on PostgreSQL.
    fn ask(&self, sql: &str) -> String;
    /// The first id of a time, in SQL.
    fn first_id(at: UnixMicros) -> String;

    /// Waits until everything up to this time is in the index.
    async fn indexed(&self, to: UnixMicros) {
        let begun = Instant::now();
        let first = Self::first_id(UnixMicros(to.0 + 1_000));
        let open = format!(
            "SELECT COUNT(*) FROM oncehook.events WHERE id < {first} AND id > (SELECT last FROM oncehook.indexed)"
        );
        while self.ask(&open) != "0" {
            assert!(begun.elapsed() < Duration::from_secs(120), "the index is not filled");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Database for postgres::Database<'_> {
    type Journal = PostgresJournal;
    const DIALECT: Dialect = Dialect::Postgres;
    const BUCKET: &'static str = "oncehook.bucket(id)";

    async fn open(&self, clock: Clock) -> PostgresJournal {
        PostgresJournal::open(&PostgresOptions { clock, ..PostgresOptions::new(self.url()) }).await.unwrap()
    }

    fn ask(&self, sql: &str) -> String {
        self.query(sql)
    }

    fn first_id(at: UnixMicros) -> String {
        format!("oncehook.first_id({})", at.0)
    }
}

impl Database for mysql::Database<'_> {
    type Journal = MysqlJournal;
    const DIALECT: Dialect = Dialect::Mysql;
    const BUCKET: &'static str = "CAST(CONV(HEX(LEFT(id, 6)), 16, 10) AS UNSIGNED) DIV 4096";

    async fn open(&self, clock: Clock) -> MysqlJournal {
        MysqlJournal::open(&MysqlOptions { clock, ..MysqlOptions::new(self.url()) }).await.unwrap()
    }

    fn ask(&self, sql: &str) -> String {
        self.query(&sql.replace("oncehook.", "oncehook_"))
    }

    fn first_id(at: UnixMicros) -> String {
        format!("x'{:012x}00000000000000000000'", at.0 / 1_000)
    }
}

/// Both find the same, page by page, by every filter.
async fn agree(journal: &impl JournalReader, reference: &MemoryJournal, when: &str) {
    for filter in filters() {
        assert_eq!(keys(journal, &filter).await, keys(reference, &filter).await, "{when}: {filter:?}");
    }
}

async fn forget(journal: &impl Deliveries, age: Duration) {
    let retention = Retention { payload: age, dead: Some(age), audit: age, batch: 13 };
    while journal.forget(retention).await.unwrap().more {}
}

/// One that was spooled: it has an id of its own, of the time when it came, which is no other's millisecond.
fn spooled(at: UnixMicros, number: i64, event: NewEvent) -> NewEvent {
    let at = UnixMicros(at.0 + (500 + number) * 1_000);
    NewEvent { id: Some(EventIds::above(0, number.unsigned_abs()).next(at)), received_at: at, ..event }
}

fn late(key: &str) -> NewEvent {
    let late = NewEvent {
        source: SourceName::new("late").unwrap(),
        kind: Some("late".to_owned()),
        entity: Some("late".to_owned()),
        ..event(key, "{}")
    };
    spooled(second(60), 1, late)
}

async fn lists_find_with_the_index_what_the_reference_finds<D: Database>(database: &D) {
    let clock = Clock::manual(NOW);
    let reference = MemoryJournal::with_clock(clock.clone());
    let journal = database.open(clock.clone()).await;
    fill(&reference).await;
    fill(&journal).await;
    work(&reference, orders(D::DIALECT), 60).await;
    work(&journal, orders(D::DIALECT), 60).await;
    agree(&journal, &reference, "before anything is in the index").await;
    clock.set(second(100));
    database.indexed(second(60)).await;
    agree(&journal, &reference, "half of it in the index").await;
    clock.set(second(3_600));
    database.indexed(second(3_500)).await;
    agree(&journal, &reference, "all of it in the index").await;
    // Stored when its bucket is in the index already.
    append(&reference, [late("late")]).await;
    append(&journal, [late("late")]).await;
    let entity = EventQuery { entity: Some("late".to_owned()), ..Default::default() };
    assert_eq!(keys(&journal, &entity).await.len(), 1);
    agree(&journal, &reference, "with one that came late").await;
    // The older half, as far as it may be forgotten.
    forget(&reference, Duration::from_secs(3_500)).await;
    forget(&journal, Duration::from_secs(3_500)).await;
    agree(&journal, &reference, "with the older half forgotten").await;
    assert_eq!(keys(&journal, &entity).await.len(), 0);
    let left_over = format!(
        "SELECT COUNT(*) FROM oncehook.buckets WHERE bucket NOT IN (SELECT {} FROM oncehook.events)",
        D::BUCKET
    );
    assert_eq!(database.ask(&left_over), "0");
    // Into a bucket that was emptied.
    append(&reference, [late("later")]).await;
    append(&journal, [late("later")]).await;
    assert_eq!(keys(&journal, &entity).await.len(), 1);
    agree(&journal, &reference, "with one that came to an emptied bucket").await;
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_lists_on_postgres_find_with_the_index_what_the_reference_finds() {
    lists_find_with_the_index_what_the_reference_finds(&postgres::Server::shared().database()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_lists_on_mysql_find_with_the_index_what_the_reference_finds() {
    lists_find_with_the_index_what_the_reference_finds(&mysql::Server::shared().database()).await;
}

/// Random numbers that are the same for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

async fn lists_of_a_random_history_are_those_of_the_reference<D: Database>(database: &D, seed: u64) {
    let clock = Clock::manual(NOW);
    let reference = MemoryJournal::with_clock(clock.clone());
    let journal = database.open(clock.clone()).await;
    let mut dice = Dice(seed);
    let mut now = 0;
    for number in 1..=120 {
        // Most come as they are received, some much later.
        let behind = if dice.roll(4) == 0 { dice.roll(90) as i64 } else { 0 };
        let event = match behind {
            0 => NewEvent { received_at: second(now), ..mixed(number) },
            _ => spooled(second((now - behind).max(0)), number, mixed(number)),
        };
        append(&reference, [event.clone()]).await;
        append(&journal, [event]).await;
        match dice.roll(12) {
            0..6 => now += dice.roll(15) as i64,
            6 => {
                let many = dice.roll(12) as usize;
                work(&reference, orders(D::DIALECT), many).await;
                work(&journal, orders(D::DIALECT), many).await;
            }
            7 => {
                let age = Duration::from_secs(100 + dice.roll(200));
                forget(&reference, age).await;
                forget(&journal, age).await;
            }
            8 => database.indexed(second(now - 35)).await,
            _ => {}
        }
        clock.set(second(now));
        if number % 20 == 0 {
            agree(&journal, &reference, &format!("seed {seed}, event {number}")).await;
        }
    }
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_lists_of_random_histories_on_postgres_are_those_of_the_reference() {
    for seed in 1..=4 {
        let database = postgres::Server::shared().database();
        lists_of_a_random_history_are_those_of_the_reference(&database, seed).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_lists_of_random_histories_on_mysql_are_those_of_the_reference() {
    for seed in 1..=4 {
        let database = mysql::Server::shared().database();
        lists_of_a_random_history_are_those_of_the_reference(&database, seed).await;
    }
}

/// One that is stored, but whose commit takes longer than anything should, is not left out. (PostgreSQL ends such an append
/// before its bucket is looked at.)
#[tokio::test(flavor = "multi_thread")]
async fn r34_an_event_on_mysql_whose_commit_hangs_is_waited_for_before_its_bucket_is_indexed() {
    let database = mysql::Server::shared().database();
    let clock = Clock::manual(NOW);
    let journal = database.open(clock.clone()).await;
    append(&journal, [NewEvent { received_at: second(20), ..mixed(1) }]).await;
    let id = format!("UNHEX(CONCAT(LPAD(HEX({}), 12, '0'), '70008000000000000001'))", second(10).0 / 1_000);
    let slow = format!(
        "START TRANSACTION;
         INSERT INTO oncehook_events (id, source, `key`, key_signed, entity, received_at, integrity, digest, size, headers, body)
         VALUES ({id}, 'shop', 'slow', 1, 'slow', {}, 'body', REPEAT('x', 32), 0, '', '');
         SELECT SLEEP(3); COMMIT",
        second(10).0
    );
    std::thread::scope(|scope| {
        scope.spawn(|| database.query(&slow));
        let asleep =
            "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO = 'SELECT SLEEP(3)' AND DB = DATABASE()";
        // MySQL fails if it cannot show the statement of another session (of another test) as text. It is asked again.
        while database.try_query(asleep).as_deref() != Ok("1") {
            std::thread::sleep(Duration::from_millis(20));
        }
        clock.set(second(3_600));
    });
    database.indexed(second(20)).await;
    let entity = EventQuery { entity: Some("slow".to_owned()), ..Default::default() };
    assert_eq!(keys(&journal, &entity).await.len(), 1);
    journal.close().await;
}

/// A table of the numbers from 1, for MariaDB and MySQL.
fn numbers_to(count: i64) -> String {
    format!("JSON_TABLE(CONCAT('[0', REPEAT(',0', {count} - 1), ']'), '$[*]' COLUMNS (n FOR ORDINALITY)) s")
}

/// Stores events `n` of a table of numbers, each `step` microseconds after the one before.
fn load(database: &impl Database, count: i64, step: i64, source: &str, kind: &str) {
    let at = format!("{} + n * {step}", NOW.0);
    let numbers = |mysql: bool| match mysql {
        true => format!("(SELECT n, {at} AS at FROM {}) t", numbers_to(count)),
        false => format!("(SELECT n, {at} AS at FROM generate_series(1::bigint, {count}) AS n) AS t"),
    };
    let columns = "source, type, entity, received_at, integrity, headers, body, key_signed";
    database.ask(&match database_is_mysql(database) {
        true => format!(
            "INSERT INTO oncehook.events ({columns}, id, `key`, digest, size)
             SELECT {source}, {kind}, CONCAT('entity-', n), at, 'body', '', '', 1,
                    UNHEX(CONCAT(LPAD(HEX(at DIV 1000), 12, '0'), '70008000000000000000')), CONCAT('evt_', n), REPEAT('x', 32), 0
               FROM {}",
            numbers(true)
        ),
        false => format!(
            "INSERT INTO oncehook.events ({columns}, id, key, digest)
             SELECT {source}, {kind}, 'entity-' || n, at, 'body', ''::bytea, ''::bytea, true,
                    oncehook.first_id(at), convert_to('evt_' || n, 'UTF8'), sha256('x')
               FROM {}",
            numbers(false)
        ),
    });
}

fn database_is_mysql<D: Database>(_: &D) -> bool {
    D::DIALECT == Dialect::Mysql
}

/// One event a second, long ago; the odd ones are the oldest.
const LONG: i64 = 200_000;

fn load_a_long_history(database: &impl Database) {
    load(
        database,
        LONG,
        1_000_000,
        "CASE WHEN n < 100 THEN 'rare' ELSE 'shop' END",
        "CASE WHEN n < 100 THEN 'rare' ELSE 'usual' END",
    );
    let states = ["dead", "skipped", "superseded", "parked", "retrying", "ready", "running"];
    let states: Vec<String> =
        states.iter().enumerate().map(|(at, state)| format!("WHEN {at} THEN '{state}'")).collect();
    let second_of =
        if database_is_mysql(database) { "received_at DIV 1000000 % 7" } else { "received_at / 1000000 % 7" };
    for sql in [
        format!(
            "INSERT INTO oncehook.deliveries (event, route, state, attempt, run_at)
             SELECT id, 'orders', CASE WHEN received_at >= {} THEN 'succeeded' ELSE CASE {second_of} {} END END, 1, 9000000000000000
               FROM oncehook.events WHERE received_at > {}",
            second(400).0,
            states.join(" "),
            second(10).0
        ),
        // A second route, so that what ended is in the order of its events across routes.
        "INSERT INTO oncehook.deliveries (event, route, state, attempt, run_at)
         SELECT event, 'mails', state, 1, run_at FROM oncehook.deliveries WHERE state IN ('dead', 'skipped') AND route = 'orders'"
            .to_owned(),
        format!(
            "INSERT INTO oncehook.flags (event, flag, at) SELECT id, 'quarantined', 0 FROM oncehook.events WHERE received_at <= {}",
            second(5).0
        ),
        "INSERT INTO oncehook.totals (source, shard, events) VALUES ('shop', 0, 199901), ('rare', 0, 99)".to_owned(),
    ] {
        database.ask(&sql);
    }
}

/// What is looked for in the long history, and how many of it a page of 50 holds.
fn pages() -> Vec<(EventQuery, usize)> {
    let text = |text: &str| Some(text.to_owned());
    let status = |status| EventQuery { status: Some(status), ..Default::default() };
    let key = oncehook_verify::EventKey::from_parts(&[b"nothing"]);
    vec![
        (EventQuery { source: text("rare"), ..Default::default() }, 50),
        (EventQuery { source: text("nobody"), ..Default::default() }, 0),
        (EventQuery { kind: text("rare"), ..Default::default() }, 50),
        (EventQuery { entity: text("entity-3"), ..Default::default() }, 1),
        (EventQuery { key: Some(key), ..Default::default() }, 0),
        (status(EventStatus::Dead), 50),
        (status(EventStatus::Skipped), 50),
        (status(EventStatus::Superseded), 50),
        (status(EventStatus::Parked), 50),
        (status(EventStatus::Retrying), 50),
        (status(EventStatus::Ready), 50),
        (status(EventStatus::Running), 50),
        (status(EventStatus::Quarantined), 5),
        (status(EventStatus::Unrouted), 5),
        (EventQuery { source: text("shop"), ..Default::default() }, 50),
        (EventQuery { since: Some(second(100_000)), ..Default::default() }, 50),
        (EventQuery { until: Some(second(100_000)), ..Default::default() }, 50),
        (status(EventStatus::Succeeded), 50),
        (EventQuery::default(), 50),
    ]
}

/// One event a millisecond, two minutes long; one in ten thousand is odd.
fn load_a_crowd(database: &impl Database) {
    load(database, 120_000, 1_000, "CASE WHEN n % 10000 = 0 THEN 'rare' ELSE 'shop' END", "NULL");
    database.ask(
        "INSERT INTO oncehook.deliveries (event, route, state, attempt, run_at)
         SELECT id, 'orders', 'succeeded', 1, 0 FROM oncehook.events WHERE source = 'shop'",
    );
}

/// What is looked for in the crowd. A page holds twelve.
fn odd_pages() -> [(EventQuery, usize); 2] {
    [
        (EventQuery { source: Some("rare".to_owned()), ..Default::default() }, 12),
        (EventQuery { status: Some(EventStatus::Unrouted), ..Default::default() }, 12),
    ]
}

/// The steps that a server has made through its tables and indexes so far.
fn steps(database: &mysql::Database<'_>) -> u64 {
    let schema = if mysql::is_mariadb() { "information_schema" } else { "performance_schema" };
    let sql = format!(
        "SELECT CAST(SUM(VARIABLE_VALUE) AS UNSIGNED) FROM {schema}.global_status
          WHERE VARIABLE_NAME LIKE 'HANDLER_READ%'"
    );
    database.query(&sql).parse().unwrap()
}

/// Reads each page in few steps.
async fn reads_few_steps(database: &mysql::Database<'_>, pages: impl IntoIterator<Item = (EventQuery, usize)>) {
    let journal = database.open(Clock::system()).await;
    database.indexed(second(LONG + 1)).await;
    for (query, wanted) in pages {
        let before = steps(database);
        let page = journal.list(EventQuery { limit: 50, ..query.clone() }).await.unwrap();
        let read = steps(database) - before;
        assert_eq!(page.events.len(), wanted, "{query:?}");
        println!("{read} steps for {query:?}");
        assert!(read < 12_000, "{read} steps for {query:?}");
    }
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_a_rare_value_in_a_long_history_on_mysql_is_found_without_a_walk() {
    let server = mysql::Server::start(&[]);
    let database = server.database();
    MysqlJournal::migrate(&database.url()).await.unwrap();
    load_a_long_history(&database);
    reads_few_steps(&database, pages()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_one_event_in_a_crowd_on_mysql_is_found_without_looking_at_the_crowd() {
    let server = mysql::Server::start(&[]);
    let database = server.database();
    MysqlJournal::migrate(&database.url()).await.unwrap();
    load_a_crowd(&database);
    reads_few_steps(&database, odd_pages()).await;
}

/// How many rows of the events were read so far. Only what ended sessions report is counted for sure.
fn rows_read(database: &postgres::Database<'_>) -> i64 {
    let sql = "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_user_tables
                WHERE schemaname = 'oncehook' AND relname ~ '^events_'";
    database.query(sql).parse().unwrap()
}

/// Waits until the sessions of a closed journal have reported, and returns what was read.
async fn settled_rows_read(database: &postgres::Database<'_>) -> i64 {
    let mut last = -1;
    loop {
        let sessions = database.query("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'oncehook' AND datname = current_database()");
        let now = rows_read(database);
        if sessions == "0" && now == last {
            return now;
        }
        last = now;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Reads all pages, and at most this many rows of events for them.
async fn reads_few_rows(
    database: &postgres::Database<'_>,
    pages: impl IntoIterator<Item = (EventQuery, usize)>,
    most: i64,
) {
    database.query("ANALYZE oncehook.events; ANALYZE oncehook.deliveries");
    let journal = database.open(Clock::system()).await;
    database.indexed(second(LONG + 1)).await;
    journal.close().await;
    drop(journal);
    let before = settled_rows_read(database).await;
    let journal = database.open(Clock::system()).await;
    for (query, wanted) in pages {
        let page = journal.list(EventQuery { limit: 50, ..query.clone() }).await.unwrap();
        assert_eq!(page.events.len(), wanted, "{query:?}");
    }
    journal.close().await;
    drop(journal);
    let read = settled_rows_read(database).await - before;
    println!("{read} rows read");
    assert!(read < most, "{read} rows of events were read");
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_a_rare_value_in_a_long_history_on_postgres_is_found_without_a_walk() {
    let database = postgres::Server::shared().database();
    PostgresJournal::migrate(&database.url()).await.unwrap();
    load_a_long_history(&database);
    reads_few_rows(&database, pages(), 20_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_one_event_in_a_crowd_on_postgres_is_found_without_looking_at_the_crowd() {
    let database = postgres::Server::shared().database();
    PostgresJournal::migrate(&database.url()).await.unwrap();
    load_a_crowd(&database);
    reads_few_rows(&database, odd_pages(), 2_000).await;
}
