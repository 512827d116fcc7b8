//! Events of an entity in every order: whatever comes first, the effects are those of the right order.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::{Cause, Claim, Failure, HandedEvent, RouteName, Settled, Settlement, Verdict};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Elsewhere, Expression, Guarded, Handler, OnMysql, OnPostgres, SqlHandler};
use oncehook::journal::memory::MemoryJournal;
use oncehook::journal::mysql::{MysqlElsewhere, MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresElsewhere, PostgresJournal, PostgresOptions};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Journal, JournalReader, Order, Retention, Verb, Who};
use oncehook::machine::{Machine, Misfit, Transition};
use oncehook::observe::Metrics;
use oncehook::ordering::{OnDead, Ordering, Parking};
use oncehook::retry::RetryPolicy;
use oncehook::route::{Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::journal::{NOW, append, event};
use oncehook_testkit::mysql;
use oncehook_testkit::postgres::Server;
use oncehook_testkit::random::{Random, scale};
use oncehook_verify::UnixMicros;

const STEPS: usize = 5;

fn name(name: &str) -> RouteName {
    RouteName::new(name).unwrap()
}

/// `new` to `s1` to `s2` and so on, by events `step1`, `step2`, …
fn machine() -> Arc<Machine> {
    let state = |step: usize| if step == 0 { "new".to_owned() } else { format!("s{step}") };
    let ways = (1..=STEPS).map(|step| Transition {
        on: format!("step{step}"),
        from: vec![state(step - 1)],
        to: state(step),
    });
    let states = (0..=STEPS).map(state).collect();
    Arc::new(Machine::new("steps", states, "new", ways.collect(), Misfit::Park).unwrap())
}

/// Where statements run, and how its engine writes parameters.
struct Place<'p>(Dialect, &'p dyn Fn(SqlHandler) -> Handler);

fn in_the_journal(statements: SqlHandler) -> Handler {
    Handler::Sql(Arc::new(statements))
}

fn sql(
    route: &str,
    requires: Option<&str>,
    ordering: Ordering,
    Place(dialect, handler_of): &Place<'_>,
) -> Route {
    let dialect = *dialect;
    let bind = ["entity", "step"].map(|name| {
        let from = if name == "entity" { "$entity" } else { "/step" };
        (name.to_owned(), Expression::parse(from).unwrap())
    });
    let bind = BTreeMap::from(bind);
    let statement = [format!("INSERT INTO effects (route, entity, step) VALUES ('{route}', :entity, :step)")];
    let handler = match requires {
        Some(requires) => SqlHandler::with_requirement(requires, &statement, &bind, dialect),
        None => SqlHandler::new(&statement, &bind, dialect),
    };
    let source = SourceName::new("shop").unwrap();
    let route = Route::new(name(route), source, handler_of(handler.unwrap()));
    Route { ordering, ..route }
}

/// Four ways of keeping the order, side by side on the same events.
fn routes(dialect: Dialect) -> Routes {
    routes_at(&Place(dialect, &in_the_journal))
}

fn routes_at(place: &Place<'_>) -> Routes {
    let parking = Parking { every: Duration::from_secs(1), ..Parking::default() };
    let after = "SELECT 1 FROM (SELECT 1 AS one) o WHERE :step = 1 OR EXISTS
                 (SELECT 1 FROM effects WHERE route = 'parked' AND entity = :entity AND step = :step - 1)";
    Routes::new(vec![
        sql("machine", None, Ordering { machine: Some(machine()), parking, ..Ordering::default() }, place),
        sql("parked", Some(after), Ordering { parking, ..Ordering::default() }, place),
        sql("newer", None, Ordering { newer_only: true, ..Ordering::default() }, place),
        sql("ordered", None, Ordering { by_entity: true, ..Ordering::default() }, place),
    ])
    .unwrap()
}

fn step(entity: &str, step: usize) -> NewEvent {
    NewEvent {
        kind: Some(format!("step{step}")),
        entity: Some(entity.to_owned()),
        version: Some(i64::try_from(step).unwrap()),
        by_entity: true,
        // The janitor is at work, and copies come late: their keys are to be known still.
        expires_at: UnixMicros(i64::MAX),
        routes: ["machine", "parked", "newer", "ordered"].map(name).into_iter().collect(),
        ..event(&format!("{entity}-{step}"), &format!("{{\"step\":{step}}}"))
    }
}

fn permutations(items: &[usize]) -> Vec<Vec<usize>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (place, first) in items.iter().enumerate() {
        let rest: Vec<usize> =
            items.iter().enumerate().filter(|(other, _)| *other != place).map(|(_, item)| *item).collect();
        for mut tail in permutations(&rest) {
            tail.insert(0, *first);
            all.push(tail);
        }
    }
    all
}

/// All permutations, one per entity, each event one to three times, in an order that keeps each entity's own.
fn everything(random: &mut Random) -> Vec<NewEvent> {
    let mut queues: Vec<(String, Vec<usize>)> = Vec::new();
    for (number, order) in permutations(&(1..=STEPS).collect::<Vec<_>>()).into_iter().enumerate() {
        let mut queue = Vec::new();
        for (place, step) in order.iter().enumerate() {
            queue.push(*step);
            // Copies come anywhere after the first.
            for _ in 0..random.below(3) {
                let again = order[random.below(place as u64 + 1) as usize];
                queue.push(again);
            }
        }
        queue.reverse();
        queues.push((format!("p{number:03}"), queue));
    }
    let mut events = Vec::new();
    while !queues.is_empty() {
        let chosen = random.below(queues.len() as u64) as usize;
        let (entity, queue) = &mut queues[chosen];
        match queue.pop() {
            Some(number) => events.push(step(entity, number)),
            None => drop(queues.swap_remove(chosen)),
        }
    }
    events
}

/// Four workers on those journals while the events come in; returns when nothing waits any more.
async fn work_through<J: Journal + Deliveries>(journals: &[Arc<J>], routes: &Routes, events: Vec<NewEvent>) {
    let century = Duration::from_secs(36_500 * 86_400);
    let retention = Retention { payload: century, dead: None, audit: century, batch: 100 };
    let workers: Vec<Worker> = (0..4)
        .map(|number| {
            let deliveries = Arc::clone(&journals[number % journals.len()]) as Arc<dyn Deliveries>;
            let (clock, metrics) = (Clock::system(), Arc::new(Metrics::new()));
            let lease = Duration::from_millis(600);
            Worker::start_with_lease(deliveries, routes, retention, clock, metrics, lease)
        })
        .collect();
    for (number, some) in events.chunks(20).enumerate() {
        append(&*journals[number % journals.len()], some.to_vec()).await;
    }
    let mut waiting = Vec::new();
    for _ in 0..3_000 {
        waiting = journals[0].backlog().await.unwrap();
        if waiting.iter().all(|route| route.waiting + route.running == 0) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for worker in workers {
        worker.stop().await;
    }
    assert!(waiting.iter().all(|route| route.waiting + route.running + route.dead == 0), "{waiting:?}");
}

/// `effects`: route, entity, step, in the order in which they happened.
fn judge(effects: &[(String, String, usize)]) {
    let mut steps: BTreeMap<(&str, &str), Vec<usize>> = BTreeMap::new();
    for (route, entity, step) in effects {
        steps.entry((route, entity)).or_default().push(*step);
    }
    let in_order: Vec<usize> = (1..=STEPS).collect();
    let entities = permutations(&in_order).len();
    for route in ["machine", "parked", "newer", "ordered"] {
        assert_eq!(steps.keys().filter(|(name, _)| *name == route).count(), entities, "{route}");
    }
    for ((route, entity), steps) in steps {
        match route {
            "machine" | "parked" => assert_eq!(steps, in_order, "{route} {entity}"),
            // Never back, and the last word is the newest.
            "newer" => {
                assert!(steps.is_sorted_by(|a, b| a < b), "{entity}: {steps:?}");
                assert_eq!(steps.last(), Some(&STEPS), "{entity}");
            }
            // Each once, in whatever order they came.
            _ => {
                let mut sorted = steps.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, in_order, "{entity}: {steps:?}");
            }
        }
    }
}

/// A long line that waited for one that was under way goes on in batches, and not one by one.
async fn a_long_line_goes_on<J: Journal + Deliveries>(journal: &J, dialect: Dialect) {
    let ordering = Ordering { by_entity: true, ..Ordering::default() };
    let route = Arc::new(sql("ordered", None, ordering, &Place(dialect, &in_the_journal)));
    let events = (1..=600).map(|number| {
        let routes = [name("ordered")].into_iter().collect();
        NewEvent { routes, ..step("long", number) }
    });
    append(journal, events.collect::<Vec<_>>()).await;
    let head = journal.claim(Arc::clone(&route), 1, Duration::from_secs(60)).await.unwrap().remove(0);
    while journal.apply(Arc::clone(&route), 256).await.unwrap().more {}
    assert_eq!(journal.backlog().await.unwrap()[0].blocked, 599);
    let verdict = Verdict::Succeeded(None);
    let settlement = Settlement { fence: head.fence, verdict, followups: Vec::new() };
    assert_eq!(journal.settle(vec![settlement]).await.unwrap(), [Settled::Done]);
    let mut batches = 0;
    while !journal.backlog().await.unwrap().is_empty() {
        journal.apply(Arc::clone(&route), 256).await.unwrap();
        batches += 1;
        assert!(batches < 20, "{:?}", journal.backlog().await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_long_line_goes_on_in_batches_on_sqlite() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shop.db");
    let database = rusqlite::Connection::open(&path).unwrap();
    database.execute_batch("CREATE TABLE effects (route TEXT, entity TEXT, step INTEGER)").unwrap();
    let journal = SqliteJournal::open(&SqliteOptions::new(&path)).unwrap();
    a_long_line_goes_on(&journal, Dialect::Sqlite).await;
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_long_line_goes_on_in_batches_on_postgres() {
    let database = Server::shared().database();
    database.query("CREATE TABLE effects (route text, entity text, step integer)");
    let journal = PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap();
    a_long_line_goes_on(&journal, Dialect::Postgres).await;
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_long_line_goes_on_in_batches_on_mysql() {
    let database = mysql::Server::shared().database();
    database.query("CREATE TABLE effects (route varchar(32), entity varchar(32), step integer)");
    let journal = MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap();
    a_long_line_goes_on(&journal, Dialect::Mysql).await;
    journal.close().await;
}

/// Whoever is at the front of a line has been due for less long than all that are behind, who are more than one sees at once.
async fn a_front_that_is_due_last_is_found<J: Journal + Deliveries>(
    journal: &J,
    dialect: Dialect,
    put_off: impl Fn(&str),
) {
    let ordering = Ordering { by_entity: true, ..Ordering::default() };
    let route = Arc::new(sql("ordered", None, ordering, &Place(dialect, &in_the_journal)));
    let events: Vec<NewEvent> = (1..=300)
        .map(|number| NewEvent { routes: [name("ordered")].into_iter().collect(), ..step("long", number) })
        .collect();
    let first = events[0].key.clone();
    append(journal, events).await;
    put_off(first.display().as_ref());
    for _ in 0..10 {
        let claims = journal.claim(Arc::clone(&route), 16, Duration::from_secs(60)).await.unwrap();
        if let [claim] = claims.as_slice() {
            assert_eq!(claim.event.key, first);
            return;
        }
        assert!(claims.is_empty(), "{} at once", claims.len());
    }
    panic!("nobody finds it");
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_front_that_is_due_last_is_found_on_postgres() {
    let database = Server::shared().database();
    let journal = PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap();
    let put_off = |key: &str| {
        let changed = database.query(&format!(
            "UPDATE oncehook.deliveries SET run_at = oncehook.micros()
              WHERE event = (SELECT event FROM oncehook.keys WHERE key = '{key}') RETURNING route"
        ));
        assert_eq!(changed, "ordered");
    };
    a_front_that_is_due_last_is_found(&journal, Dialect::Postgres, put_off).await;
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_a_front_that_is_due_last_is_found_on_mysql() {
    let database = mysql::Server::shared().database();
    let journal = MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap();
    let put_off = |key: &str| {
        let changed = database.query(&format!(
            "UPDATE oncehook_deliveries SET run_at = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
              WHERE event = (SELECT event FROM oncehook_keys WHERE `key` = '{key}'); SELECT ROW_COUNT()"
        ));
        assert_eq!(changed, "1");
    };
    a_front_that_is_due_last_is_found(&journal, Dialect::Mysql, put_off).await;
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r24_r29_r30_all_permutations_on_sqlite_end_as_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shop.db");
    let database = rusqlite::Connection::open(&path).unwrap();
    let table = "CREATE TABLE effects (id INTEGER PRIMARY KEY, route TEXT, entity TEXT, step INTEGER)";
    database.execute_batch(table).unwrap();
    let journal = Arc::new(SqliteJournal::open(&SqliteOptions::new(&path)).unwrap());
    let events = everything(&mut Random::new(7));
    work_through(&[Arc::clone(&journal)], &routes(Dialect::Sqlite), events).await;
    journal.close().await;
    let mut statement = database.prepare("SELECT route, entity, step FROM effects ORDER BY id").unwrap();
    let rows = statement
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get::<_, u32>(2)? as usize)))
        .unwrap();
    judge(&rows.collect::<Result<Vec<_>, _>>().unwrap());
    let ended = "SELECT count(*) FROM oncehook_entities WHERE scope = 'machine:steps' AND state = 's5' AND version = 5";
    assert_eq!(database.query_row(ended, [], |row| row.get::<_, u32>(0)).unwrap(), 120);
}

/// On two nodes.
#[tokio::test(flavor = "multi_thread")]
async fn r13_r24_r29_r30_all_permutations_on_postgres_end_as_in_order() {
    let database = Server::shared().database();
    database.query("CREATE TABLE effects (id bigserial PRIMARY KEY, route text, entity text, step integer)");
    let mut nodes = Vec::new();
    for _ in 0..2 {
        nodes.push(Arc::new(PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap()));
    }
    work_through(&nodes, &routes(Dialect::Postgres), everything(&mut Random::new(11))).await;
    let listed = database
        .query("SELECT string_agg(route || ' ' || entity || ' ' || step, ',' ORDER BY id) FROM effects");
    judge(&read(&listed));
    let ended = "SELECT count(*) FROM oncehook.entities WHERE scope = 'machine:steps' AND state = 's5' AND version = 5";
    assert_eq!(database.query(ended), "120");
    for node in nodes {
        node.close().await;
    }
}

/// `route entity step,route entity step,…`
fn read(listed: &str) -> Vec<(String, String, usize)> {
    let effect = |row: &str| {
        let mut words = row.split(' ').map(str::to_owned);
        let (route, entity) = (words.next().unwrap(), words.next().unwrap());
        (route, entity, words.next().unwrap().parse().unwrap())
    };
    listed.split(',').map(effect).collect()
}

/// On two nodes.
#[tokio::test(flavor = "multi_thread")]
async fn r13_r24_r29_r30_all_permutations_on_mysql_end_as_in_order() {
    let database = mysql::Server::shared().database();
    database.query(
        "CREATE TABLE effects (id BIGINT AUTO_INCREMENT PRIMARY KEY, route VARCHAR(16), entity VARCHAR(16), step INT,
                               KEY (route, entity, step))",
    );
    let mut nodes = Vec::new();
    for _ in 0..2 {
        nodes.push(Arc::new(MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap()));
    }
    work_through(&nodes, &routes(Dialect::Mysql), everything(&mut Random::new(13))).await;
    judge(&read(&database.query(
        "SET SESSION group_concat_max_len = 1000000;
         SELECT GROUP_CONCAT(CONCAT(route, ' ', entity, ' ', step) ORDER BY id SEPARATOR ',') FROM effects",
    )));
    let ended = "SELECT COUNT(*) FROM oncehook_entities WHERE scope = 'machine:steps' AND state = 's5' AND version = 5";
    assert_eq!(database.query(ended), "120");
    for node in nodes {
        node.close().await;
    }
}

/// Effects, versions and states in another database, the journal in a file.
async fn all_permutations_elsewhere(dialect: Dialect, database: Arc<dyn Guarded>, seed: u64) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let journal = Arc::new(SqliteJournal::open(&SqliteOptions::new(&path)).unwrap());
    let elsewhere = |statements: SqlHandler| {
        let keep = Duration::from_secs(36_500 * 86_400);
        Handler::Elsewhere(Arc::new(Elsewhere { statements, database: Arc::clone(&database), keep }))
    };
    let routes = routes_at(&Place(dialect, &elsewhere));
    work_through(&[Arc::clone(&journal)], &routes, everything(&mut Random::new(seed))).await;
    journal.close().await;
    let file = rusqlite::Connection::open(&path).unwrap();
    let kept: u32 = file.query_row("SELECT count(*) FROM oncehook_entities", [], |row| row.get(0)).unwrap();
    assert_eq!(kept, 0, "the journal remembers what is to be remembered elsewhere");
}

#[tokio::test(flavor = "multi_thread")]
async fn r24_r29_r30_all_permutations_in_another_postgres_end_as_in_order() {
    let database = Server::shared().database();
    database.query("CREATE TABLE effects (id bigserial PRIMARY KEY, route text, entity text, step integer)");
    let elsewhere = Arc::new(PostgresElsewhere::new(&database.url()).unwrap());
    all_permutations_elsewhere(Dialect::Postgres, elsewhere, 17).await;
    let listed = database
        .query("SELECT string_agg(route || ' ' || entity || ' ' || step, ',' ORDER BY id) FROM effects");
    judge(&read(&listed));
    let ended = "SELECT count(*) FROM oncehook_guard.oncehook_applied_entities
                  WHERE scope = 'machine:steps' AND state = 's5' AND version = 5";
    assert_eq!(database.query(ended), "120");
}

#[tokio::test(flavor = "multi_thread")]
async fn r24_r29_r30_all_permutations_in_another_mariadb_end_as_in_order() {
    let database = mysql::Server::shared().database();
    database.query(
        "CREATE TABLE effects (id BIGINT AUTO_INCREMENT PRIMARY KEY, route VARCHAR(16), entity VARCHAR(16), step INT,
                               KEY (route, entity, step))",
    );
    let elsewhere = Arc::new(MysqlElsewhere::new(&database.url()).unwrap());
    all_permutations_elsewhere(Dialect::Mysql, elsewhere, 19).await;
    judge(&read(&database.query(
        "SET SESSION group_concat_max_len = 1000000;
         SELECT GROUP_CONCAT(CONCAT(route, ' ', entity, ' ', step) ORDER BY id SEPARATOR ',') FROM effects",
    )));
    let ended = "SELECT COUNT(*) FROM oncehook_applied_entities
                  WHERE scope = 'machine:steps' AND state = 's5' AND version = 5";
    assert_eq!(database.query(ended), "120");
}

/// What has become of an event in a random history.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Waits,
    Runs,
    Parked,
    Done,
    Dead,
    Gone,
}

/// A random history in a journal, against the rules said once more, as plainly as can be. Each seed has a route, entities and
/// a time of its own, so that many can be in one journal.
async fn random_history<J: Journal + Deliveries + JournalReader>(journal: &J, clock: &Clock, seed: u64) {
    let mut random = Random::new(seed);
    let orders = format!("orders{seed}");
    let ordering = Ordering {
        by_entity: random.below(2) == 0,
        newer_only: random.below(2) == 0,
        on_dead: if random.below(2) == 0 { OnDead::Block } else { OnDead::Continue },
        machine: (random.below(3) == 0).then(machine),
        ..Ordering::default()
    };
    let nothing = |_: &rusqlite::Connection, _: &HandedEvent| panic!("nobody runs it");
    let source = SourceName::new("shop").unwrap();
    let retry = RetryPolicy { max_attempts: 100, ..RetryPolicy::default() };
    let route = Route::new(name(&orders), source, Handler::Function(Arc::new(nothing)));
    let route = Arc::new(Route { ordering: ordering.clone(), retry, ..route });
    let said = format!("seed {seed}, {ordering:?}");

    let mut now = i64::try_from(seed).unwrap() * 3_600_000_000;
    let mut fates: HashMap<oncehook::event::EventId, (String, i64, Fate)> = HashMap::new();
    let mut newest: HashMap<String, i64> = HashMap::new();
    let mut reached: HashMap<String, usize> = HashMap::new();
    let mut running: Vec<Claim> = Vec::new();
    for round in 0..60 {
        now += i64::try_from(random.below(3)).unwrap() * 700_000;
        clock.set(UnixMicros(NOW.0 + now));
        match random.below(5) {
            0 | 1 if round < 30 => {
                let entity = format!("{}{seed}", random.pick(&["a", "b"]));
                let number = 1 + random.below(STEPS as u64) as usize;
                let new = NewEvent {
                    kind: Some(format!("step{number}")),
                    entity: Some(entity.clone()),
                    version: Some(number as i64),
                    by_entity: true,
                    occurred_at: None,
                    routes: [name(&orders)].into_iter().collect(),
                    expires_at: UnixMicros(i64::MAX),
                    ..event(&format!("{seed}-{round}"), "{}")
                };
                let id = append(journal, [new]).await[0].id;
                fates.insert(id, (entity, number as i64, Fate::Waits));
            }
            _ if !running.is_empty() && random.below(2) == 0 => {
                let claim = running.swap_remove(random.below(running.len() as u64) as usize);
                let failure = Failure::retry(Cause::Destination, "no");
                let (fate, verdict) = match random.below(6) {
                    0 => (Fate::Waits, Verdict::RetryAt(UnixMicros(NOW.0 + now + 500_000), failure)),
                    1 => (Fate::Dead, Verdict::Dead(failure)),
                    2 => (Fate::Parked, Verdict::Parked(UnixMicros(i64::MAX - 1), Failure::defer("later"))),
                    _ => (Fate::Done, Verdict::Succeeded(None)),
                };
                let id = claim.fence.delivery.event;
                let settlement = Settlement { fence: claim.fence, verdict, followups: Vec::new() };
                assert_eq!(journal.settle(vec![settlement]).await.unwrap(), [Settled::Done], "{said}");
                let (entity, version, _) = fates[&id].clone();
                fates.get_mut(&id).unwrap().2 = fate;
                if fate == Fate::Done {
                    let newest = newest.entry(entity.clone()).or_insert(version);
                    *newest = (*newest).max(version);
                    if ordering.machine.is_some() {
                        reached.insert(entity.clone(), version as usize);
                    }
                    // Success wakes what is parked.
                    let woken = fates
                        .values_mut()
                        .filter(|(other, _, fate)| *other == entity && *fate == Fate::Parked);
                    woken.for_each(|(_, _, fate)| *fate = Fate::Waits);
                }
            }
            _ => {
                let waiting = fates.iter().filter(|(_, (.., fate))| *fate == Fate::Waits);
                let before: Vec<_> = waiting.map(|(id, fate)| (*id, fate.clone())).collect();
                let limit = 1 + random.below(3) as usize;
                let claims =
                    journal.claim(Arc::clone(&route), limit, Duration::from_secs(9_000)).await.unwrap();
                for (id, (entity, version, fate)) in before {
                    let story = journal.show(id).await.unwrap().unwrap();
                    let state = story.event.deliveries[0].state.clone();
                    if fate == Fate::Waits && state == "superseded" {
                        let late = ordering.machine.is_some();
                        let old = ordering.newer_only
                            && newest.get(&entity).is_some_and(|newest| version < *newest);
                        assert!(late || old, "{said}: superseded although it is as new as anything");
                        fates.get_mut(&id).unwrap().2 = Fate::Gone;
                    }
                    if fate == Fate::Waits && state == "parked" {
                        assert!(ordering.machine.is_some(), "{said}: parked by nobody");
                        fates.get_mut(&id).unwrap().2 = Fate::Parked;
                    }
                }
                for claim in claims {
                    let id = claim.fence.delivery.event;
                    let (entity, version, fate) = fates[&id].clone();
                    assert_eq!(fate, Fate::Waits, "{said}: {id} was not there to be taken");
                    let others = || fates.iter().filter(|(other, (of, ..))| **other != id && *of == entity);
                    let alone = others().all(|(_, (.., fate))| *fate != Fate::Runs);
                    assert!(alone || !ordering.is_serial(), "{said}: two at once");
                    if ordering.by_entity {
                        let before = |(other, (_, number, fate)): (&_, &(String, i64, Fate))| {
                            let dead = *fate == Fate::Dead && ordering.on_dead == OnDead::Block;
                            (dead || *fate == Fate::Waits) && (*number, *other) < (version, id)
                        };
                        assert!(!others().any(before), "{said}: {id} has overtaken somebody");
                    }
                    if ordering.newer_only {
                        assert!(
                            newest.get(&entity).is_none_or(|newest| version >= *newest),
                            "{said}: too old"
                        );
                    }
                    if ordering.machine.is_some() {
                        let state = reached.get(&entity).copied().unwrap_or(0);
                        assert_eq!(version as usize, state + 1, "{said}: it does not fit");
                        assert_eq!(claim.event.state, Some(format!("s{version}")), "{said}");
                    }
                    fates.get_mut(&id).unwrap().2 = Fate::Runs;
                    running.push(claim);
                }
            }
        }
    }
    // Nothing is stuck: whatever waits comes to its end once everything succeeds.
    for _ in 0..2 * fates.len() + 5 {
        now += 10_000_000;
        clock.set(UnixMicros(NOW.0 + now));
        let dead: Vec<_> =
            fates.iter().filter(|(_, (.., fate))| *fate == Fate::Dead).map(|(id, _)| *id).collect();
        for event in dead {
            let who = Who { name: "ada".to_owned(), reason: None };
            let skip = Order { event, verb: Verb::Skip, route: None, who, wanting: Vec::new(), attempts: 5 };
            journal.order(skip).await.unwrap();
            fates.get_mut(&event).unwrap().2 = Fate::Gone;
        }
        running.extend(journal.claim(Arc::clone(&route), 9, Duration::from_secs(9_000)).await.unwrap());
        let done = running.drain(..).map(|claim| Settlement {
            fence: claim.fence,
            verdict: Verdict::Succeeded(None),
            followups: Vec::new(),
        });
        journal.settle(done.collect()).await.unwrap();
    }
    let mut left = journal.backlog().await.unwrap();
    left.retain(|route| route.route == orders);
    let parked = |route: &oncehook::journal::Backlog| route.oldest.is_none() && route.blocked == 0;
    assert!(left.iter().all(|route| route.running == 0 && parked(route)), "{said}: {left:?}");
}

#[tokio::test]
async fn r13_r29_random_histories_of_entities_keep_the_rules() {
    for seed in 1..=10_000 {
        let clock = Clock::manual(NOW);
        random_history(&MemoryJournal::with_clock(clock.clone()), &clock, seed).await;
    }
}

/// Histories in each of the databases. `ONCEHOOK_TEST_SCALE=10` makes it some hundreds.
fn some() -> std::ops::RangeInclusive<u64> {
    1..=30 * scale() as u64
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r29_random_histories_of_entities_on_sqlite_keep_the_rules() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Clock::manual(NOW);
    let options =
        SqliteOptions { clock: clock.clone(), ..SqliteOptions::new(directory.path().join("shop.db")) };
    let journal = SqliteJournal::open(&options).unwrap();
    for seed in some() {
        random_history(&journal, &clock, seed).await;
    }
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r29_random_histories_of_entities_on_postgres_keep_the_rules() {
    let database = Server::shared().database();
    let clock = Clock::manual(NOW);
    let options = PostgresOptions { clock: clock.clone(), ..PostgresOptions::new(database.url()) };
    let journal = PostgresJournal::open(&options).await.unwrap();
    for seed in some() {
        random_history(&journal, &clock, seed).await;
    }
    journal.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r29_random_histories_of_entities_on_mysql_keep_the_rules() {
    let database = mysql::Server::shared().database();
    let clock = Clock::manual(NOW);
    let options = MysqlOptions { clock: clock.clone(), ..MysqlOptions::new(database.url()) };
    let journal = MysqlJournal::open(&options).await.unwrap();
    for seed in some() {
        random_history(&journal, &clock, seed).await;
    }
    journal.close().await;
}

/// A function that fails now and then, on two nodes: those behind it wait, and each takes effect once, in the order of the line.
async fn functions_keep_the_order<J: Journal + Deliveries>(nodes: &[Arc<J>], handler: Handler) {
    let route = Route::new(name("orders"), SourceName::new("shop").unwrap(), handler);
    let retry =
        RetryPolicy { max_attempts: 100, base: Duration::from_millis(1), cap: Duration::from_millis(20) };
    let ordering = Ordering { by_entity: true, newer_only: true, ..Ordering::default() };
    let routes = Routes::new(vec![Route { ordering, retry, ..route }]).unwrap();
    let events = (1..=STEPS).flat_map(|number| {
        (0..12).map(move |entity| NewEvent {
            routes: [name("orders")].into_iter().collect(),
            ..step(&format!("e{entity}"), number)
        })
    });
    work_through(nodes, &routes, events.collect()).await;
    for node in nodes {
        node.close().await;
    }
}

/// Now and then something goes wrong after the statement.
fn now_and_then(call: u64) -> Result<Option<serde_json::Value>, Failure> {
    match call % 7 {
        3 => Err(Failure::retry(Cause::Handler, "not this time")),
        5 => panic!("out of order"),
        _ => Ok(None),
    }
}

/// Twelve entities, each with all of its steps in order.
fn judge_steps(listed: &str) {
    let mut steps: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (_, entity, step) in read(listed) {
        steps.entry(entity).or_default().push(step);
    }
    assert_eq!(steps.len(), 12);
    for (entity, steps) in steps {
        assert_eq!(steps, (1..=STEPS).collect::<Vec<_>>(), "{entity}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r14_functions_on_postgres_keep_the_order_of_their_entities() {
    let database = Server::shared().database();
    database.query("CREATE TABLE effects (id bigserial PRIMARY KEY, entity text, step integer)");
    let calls = Arc::new(AtomicU64::new(0));
    let function = OnPostgres::new(move |database, event| {
        let call = calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        Box::pin(async move {
            let step = i32::try_from(event.version.unwrap()).unwrap();
            let insert = "INSERT INTO effects (entity, step) VALUES ($1, $2)";
            database.execute(insert, &[&event.entity, &step]).await?;
            now_and_then(call)
        })
    });
    let mut nodes = Vec::new();
    for _ in 0..2 {
        nodes.push(Arc::new(PostgresJournal::open(&PostgresOptions::new(database.url())).await.unwrap()));
    }
    functions_keep_the_order(&nodes, Handler::Function(Arc::new(function))).await;
    judge_steps(
        &database
            .query("SELECT string_agg('orders ' || entity || ' ' || step, ',' ORDER BY id) FROM effects"),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn r13_r14_functions_on_mysql_keep_the_order_of_their_entities() {
    let database = mysql::Server::shared().database();
    database
        .query("CREATE TABLE effects (id BIGINT AUTO_INCREMENT PRIMARY KEY, entity VARCHAR(16), step INT)");
    let calls = Arc::new(AtomicU64::new(0));
    let function = OnMysql::new(move |database, event| {
        let call = calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        Box::pin(async move {
            let row = [event.entity.clone().into(), event.version.unwrap().into()];
            database.execute("INSERT INTO effects (entity, step) VALUES (?, ?)", &row).await?;
            now_and_then(call)
        })
    });
    let mut nodes = Vec::new();
    for _ in 0..2 {
        nodes.push(Arc::new(MysqlJournal::open(&MysqlOptions::new(database.url())).await.unwrap()));
    }
    functions_keep_the_order(&nodes, Handler::Function(Arc::new(function))).await;
    let listed = "SELECT GROUP_CONCAT('orders ', entity, ' ', step ORDER BY id) FROM effects";
    judge_steps(&database.query(listed));
}
