//! Lists on MariaDB: the search index that is filled behind the accepts finds what a walk finds, and spares the walk.

use std::time::{Duration, Instant};

use oncehook::clock::Clock;
use oncehook::event::{EventIds, NewEvent, SourceName};
use oncehook::handler::Dialect;
use oncehook::journal::memory::MemoryJournal;
use oncehook::journal::mysql::{MysqlJournal, MysqlOptions};
use oncehook::journal::{Deliveries, EventQuery, EventStatus, Journal, JournalReader, Retention};
use oncehook_testkit::journal::{NOW, append, event};
use oncehook_testkit::mysql::{Database, Server};
use oncehook_verify::UnixMicros;

use crate::lists::{fill, filters, keys, mixed, orders, second, work};

/// The millisecond of an id, in SQL.
const MILLIS: &str = "CAST(CONV(HEX(LEFT(id, 6)), 16, 10) AS UNSIGNED)";

/// Waits until everything up to this time is marked that there is.
async fn marked(database: &Database<'_>, to: UnixMicros) {
    let begun = Instant::now();
    let open = format!(
        "SELECT COUNT(*) FROM oncehook_events WHERE {MILLIS} <= {} AND id > (SELECT last FROM oncehook_marked)",
        to.0 / 1_000
    );
    while database.query(&open) != "0" {
        assert!(begun.elapsed() < Duration::from_secs(120), "nothing is marked");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn opened(database: &Database<'_>, clock: &Clock) -> MysqlJournal {
    let options = MysqlOptions { clock: clock.clone(), ..MysqlOptions::new(database.url()) };
    MysqlJournal::open(&options).await.unwrap()
}

/// Both find the same, page by page, by every filter.
async fn agree(journal: &MysqlJournal, reference: &MemoryJournal, when: &str) {
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

/// Marks of spans without events, and ends of events that are gone.
fn left_over(database: &Database<'_>) -> String {
    database.query(&format!(
        "SELECT (SELECT COUNT(*) FROM oncehook_marks WHERE span NOT IN (SELECT {MILLIS} DIV 4096 FROM oncehook_events)),
                (SELECT COUNT(*) FROM oncehook_ends WHERE event NOT IN (SELECT id FROM oncehook_events))"
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_lists_on_mysql_find_with_the_index_what_the_reference_finds() {
    let database = Server::shared().database();
    let clock = Clock::manual(NOW);
    let reference = MemoryJournal::with_clock(clock.clone());
    let journal = opened(&database, &clock).await;
    fill(&reference).await;
    fill(&journal).await;
    work(&reference, orders(Dialect::Mysql), 60).await;
    work(&journal, orders(Dialect::Mysql), 60).await;
    agree(&journal, &reference, "before anything is marked").await;
    clock.set(second(100));
    marked(&database, second(60)).await;
    agree(&journal, &reference, "half of it marked").await;
    clock.set(second(3_600));
    marked(&database, second(3_500)).await;
    agree(&journal, &reference, "all of it marked").await;
    // Stored when its span is marked already.
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
    assert_eq!(left_over(&database), "0|0");
    assert!(database.query("SELECT COUNT(*) FROM oncehook_ends").parse::<u32>().unwrap() > 0);
    // Into a span that was emptied.
    append(&reference, [late("later")]).await;
    append(&journal, [late("later")]).await;
    assert_eq!(keys(&journal, &entity).await.len(), 1);
    agree(&journal, &reference, "with one that came to an emptied span").await;
    journal.close().await;
}

/// Random numbers that are the same for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_lists_of_random_histories_on_mysql_are_those_of_the_reference() {
    for seed in 1..=4 {
        let database = Server::shared().database();
        let clock = Clock::manual(NOW);
        let reference = MemoryJournal::with_clock(clock.clone());
        let journal = opened(&database, &clock).await;
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
                    work(&reference, orders(Dialect::Mysql), many).await;
                    work(&journal, orders(Dialect::Mysql), many).await;
                }
                7 => {
                    let age = Duration::from_secs(100 + dice.roll(200));
                    forget(&reference, age).await;
                    forget(&journal, age).await;
                }
                8 => marked(&database, second(now - 35)).await,
                _ => {}
            }
            clock.set(second(now));
            if number % 20 == 0 {
                agree(&journal, &reference, &format!("seed {seed}, event {number}")).await;
            }
        }
        journal.close().await;
    }
}

/// One that is stored, but whose commit takes longer than anything should, is not left out.
#[tokio::test(flavor = "multi_thread")]
async fn r34_an_event_on_mysql_whose_commit_hangs_is_waited_for_before_its_span_is_marked() {
    let database = Server::shared().database();
    let clock = Clock::manual(NOW);
    let journal = opened(&database, &clock).await;
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
        let asleep = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO = 'SELECT SLEEP(3)' AND DB = DATABASE()";
        while database.query(asleep) == "0" {
            std::thread::sleep(Duration::from_millis(20));
        }
        clock.set(second(3_600));
    });
    marked(&database, second(20)).await;
    let entity = EventQuery { entity: Some("slow".to_owned()), ..Default::default() };
    assert_eq!(keys(&journal, &entity).await.len(), 1);
    journal.close().await;
}

/// The steps that a server has made through its tables and indexes so far.
fn read(database: &Database<'_>) -> u64 {
    let sql = "SELECT CAST(SUM(VARIABLE_VALUE) AS UNSIGNED) FROM information_schema.GLOBAL_STATUS
                WHERE VARIABLE_NAME LIKE 'HANDLER_READ%'";
    database.query(sql).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_a_rare_value_in_a_long_history_on_mysql_is_found_without_a_walk() {
    let server = Server::start(&[]);
    let database = server.database();
    MysqlJournal::migrate(&database.url()).await.unwrap();
    // One event a second, long ago; the odd ones are the oldest.
    database.query(&format!(
        "INSERT INTO oncehook_events (id, source, `key`, key_signed, type, entity, received_at, integrity, digest, size, headers, body)
         SELECT UNHEX(CONCAT(LPAD(HEX(at DIV 1000), 12, '0'), '70008000000000000000')), IF(n < 100, 'rare', 'shop'), CONCAT('evt_', n), 1,
                IF(n < 100, 'rare', 'usual'), CONCAT('entity-', n), at, 'body', REPEAT('x', 32), 0, '', ''
           FROM (SELECT seq AS n, {} + seq * 1000000 AS at FROM seq_1_to_200000) t;
         INSERT INTO oncehook_deliveries (event, route, state, attempt, run_at)
         SELECT id, 'orders', CASE WHEN received_at >= {} THEN 'succeeded'
                                   ELSE ELT(received_at DIV 1000000 % 7 + 1, 'dead', 'skipped', 'superseded', 'parked', 'retrying', 'ready', 'running') END,
                1, 9000000000000000
           FROM oncehook_events WHERE received_at > {};
         INSERT INTO oncehook_ends (state, event) SELECT CONVERT(state USING ascii), event FROM oncehook_deliveries
          WHERE state IN ('dead', 'skipped', 'superseded');
         INSERT INTO oncehook_flags (event, flag, at) SELECT id, 'quarantined', 0 FROM oncehook_events WHERE received_at <= {};
         INSERT INTO oncehook_totals (source, shard, events) VALUES ('shop', 0, 199901), ('rare', 0, 99)",
        NOW.0,
        second(400).0,
        second(10).0,
        second(5).0,
    ));
    let journal = MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap();
    marked(&database, second(200_001)).await;
    let text = |text: &str| Some(text.to_owned());
    let status = |status| EventQuery { status: Some(status), ..Default::default() };
    let key = oncehook_verify::EventKey::from_parts(&[b"nothing"]);
    for (query, wanted) in [
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
    ] {
        let before = read(&database);
        let page = journal.list(EventQuery { limit: 50, ..query.clone() }).await.unwrap();
        let read = read(&database) - before;
        assert_eq!(page.events.len(), wanted, "{query:?}");
        println!("{read} steps for {query:?}");
        assert!(read < 12_000, "{read} steps among 200,000 events for {query:?}");
    }
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r34_one_event_in_a_crowd_on_mysql_is_found_without_looking_at_the_crowd() {
    let server = Server::start(&[]);
    let database = server.database();
    MysqlJournal::migrate(&database.url()).await.unwrap();
    // One event a millisecond, two minutes long; one in ten thousand is odd.
    database.query(&format!(
        "INSERT INTO oncehook_events (id, source, `key`, key_signed, received_at, integrity, digest, size, headers, body)
         SELECT UNHEX(CONCAT(LPAD(HEX(at DIV 1000), 12, '0'), '70008000000000000000')), IF(n % 10000 = 0, 'rare', 'shop'),
                CONCAT('evt_', n), 1, at, 'body', REPEAT('x', 32), 0, '', ''
           FROM (SELECT seq AS n, {} + seq * 1000 AS at FROM seq_1_to_120000) t;
         INSERT INTO oncehook_deliveries (event, route, state, attempt, run_at)
         SELECT id, 'orders', 'succeeded', 1, 0 FROM oncehook_events WHERE source = 'shop'",
        NOW.0
    ));
    let journal = MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap();
    marked(&database, second(121)).await;
    for query in [
        EventQuery { source: Some("rare".to_owned()), ..Default::default() },
        EventQuery { status: Some(EventStatus::Unrouted), ..Default::default() },
    ] {
        let before = read(&database);
        let page = journal.list(EventQuery { limit: 50, ..query.clone() }).await.unwrap();
        let read = read(&database) - before;
        assert_eq!(page.events.len(), 12, "{query:?}");
        // Twelve moments of 128 milliseconds hold 1,536 events, and twelve spans 49,152.
        assert!(read < 12_000, "{read} steps among 120,000 events for {query:?}");
    }
    journal.close().await;
}
