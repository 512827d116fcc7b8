//! Events of an entity in every order: whatever comes first, the effects are those of the right order.
//!
//! Here: all permutations of an entity's events, on every journal. Long lines, random histories and functions have files of their own.

mod functions;
mod histories;
mod lines;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncehook::clock::Clock;
use oncehook::delivery::RouteName;
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::{Dialect, Elsewhere, Expression, Guarded, Handler, SqlHandler};
use oncehook::journal::mysql::{MysqlElsewhere, MysqlJournal, MysqlOptions};
use oncehook::journal::postgres::{PostgresElsewhere, PostgresJournal, PostgresOptions};
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{Deliveries, Journal, Retention};
use oncehook::machine::{Machine, Misfit, Transition};
use oncehook::observe::Metrics;
use oncehook::ordering::{Ordering, Parking};
use oncehook::route::{Route, Routes};
use oncehook::worker::Worker;
use oncehook_testkit::journal::{append, event};
use oncehook_testkit::mysql;
use oncehook_testkit::postgres::Server;
use oncehook_testkit::random::Random;
use oncehook_verify::UnixMicros;

const STEPS: usize = 5;

fn name(name: &str) -> RouteName {
    RouteName::new(name).unwrap()
}

/// `new` to `s1` to `s2` and so on, by events `step1`, `step2`, …
fn machine() -> Arc<Machine> {
    let state = |step: usize| if step == 0 { "new".to_owned() } else { format!("s{step}") };
    let ways =
        (1..=STEPS).map(|step| Transition { on: format!("step{step}"), from: vec![state(step - 1)], to: state(step) });
    let states = (0..=STEPS).map(state).collect();
    Arc::new(Machine::new("steps", states, "new", ways.collect(), Misfit::Park).unwrap())
}

/// Where statements run, and how its engine writes parameters.
struct Place<'p>(Dialect, &'p dyn Fn(SqlHandler) -> Handler);

fn in_the_journal(statements: SqlHandler) -> Handler {
    Handler::Sql(Arc::new(statements))
}

fn sql(route: &str, requires: Option<&str>, ordering: Ordering, Place(dialect, handler_of): &Place<'_>) -> Route {
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
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get::<_, u32>(2)? as usize))).unwrap();
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
    let listed =
        database.query("SELECT string_agg(route || ' ' || entity || ' ' || step, ',' ORDER BY id) FROM effects");
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
    let listed =
        database.query("SELECT string_agg(route || ' ' || entity || ' ' || step, ',' ORDER BY id) FROM effects");
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
