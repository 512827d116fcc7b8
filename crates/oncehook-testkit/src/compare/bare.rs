//! The limit for effects: the user's statement and nothing else, in batches as large as the worker's, over as many
//! connections as the worker uses, each batch one durable transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use rusqlite::Connection;

use super::stack::{Engine, effect, orders_table};
use super::{Plan, family};
use crate::{mysql, postgres};

/// The worker's batch.
const BATCH: usize = 256;

/// Connections of the worker to a server.
const CONNECTIONS: usize = 2;

/// Statements per second.
pub(super) async fn rate(engine: Engine, plan: &Plan, count: usize) -> anyhow::Result<f64> {
    family::settle();
    match engine {
        Engine::Sqlite => on_sqlite(plan, count),
        Engine::Postgres => on_postgres(count).await,
        Engine::Mariadb => on_mariadb(count).await,
    }
}

fn on_sqlite(plan: &Plan, count: usize) -> anyhow::Result<f64> {
    let directory = tempfile::tempdir_in(&plan.scratch)?;
    let mut connection = Connection::open(directory.path().join("bare.db"))?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "cache_size", -65_536)?;
    connection.execute_batch(orders_table(Engine::Sqlite))?;
    let begun = Instant::now();
    for first in (0..count).step_by(BATCH) {
        let transaction = connection.transaction()?;
        for number in first..(first + BATCH).min(count) {
            transaction.prepare_cached(effect(Engine::Sqlite))?.execute(rusqlite::named_params! {
                ":payment": format!("pi_{number}"),
                ":amount": 1999,
            })?;
        }
        transaction.commit()?;
    }
    Ok(count as f64 / begun.elapsed().as_secs_f64())
}

/// The next batch of numbers that nobody has taken.
fn next(taken: &AtomicUsize, count: usize) -> Option<std::ops::Range<usize>> {
    let first = taken.fetch_add(BATCH, Ordering::Relaxed);
    (first < count).then(|| first..(first + BATCH).min(count))
}

async fn on_postgres(count: usize) -> anyhow::Result<f64> {
    let database = postgres::Server::shared().database();
    database.query(orders_table(Engine::Postgres));
    let statement = effect(Engine::Postgres).replace(":payment", "$1").replace(":amount", "$2");
    let taken = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for _ in 0..CONNECTIONS {
        let (client, connection) = tokio_postgres::connect(&database.url(), tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        let (statement, taken) = (client.prepare(&statement).await?, Arc::clone(&taken));
        tasks.push(async move {
            while let Some(batch) = next(&taken, count) {
                client.batch_execute("BEGIN").await?;
                let payments: Vec<String> = batch.map(|number| format!("pi_{number}")).collect();
                // Sent without waiting in between, as the worker does.
                let sent = payments.iter().map(|payment| {
                    let (client, statement) = (&client, &statement);
                    async move { client.execute(statement, &[payment, &1999_i64]).await }
                });
                futures_util::future::try_join_all(sent).await?;
                client.batch_execute("COMMIT").await?;
            }
            Ok::<_, tokio_postgres::Error>(())
        });
    }
    let begun = Instant::now();
    futures_util::future::try_join_all(tasks).await?;
    Ok(count as f64 / begun.elapsed().as_secs_f64())
}

async fn on_mariadb(count: usize) -> anyhow::Result<f64> {
    use mysql_async::prelude::Queryable as _;
    let database = mysql::Server::shared().database();
    database.query(orders_table(Engine::Mariadb));
    let statement = effect(Engine::Mariadb).replace(":payment", "?").replace(":amount", "?");
    let taken = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut connection = mysql_async::Conn::from_url(database.url()).await?;
        let (statement, taken) = (connection.prep(&statement).await?, Arc::clone(&taken));
        tasks.push(async move {
            while let Some(batch) = next(&taken, count) {
                connection.query_drop("BEGIN").await?;
                for number in batch {
                    connection.exec_drop(&statement, (format!("pi_{number}"), 1999)).await?;
                }
                connection.query_drop("COMMIT").await?;
            }
            Ok::<_, mysql_async::Error>(())
        });
    }
    let begun = Instant::now();
    futures_util::future::try_join_all(tasks).await?;
    Ok(count as f64 / begun.elapsed().as_secs_f64())
}
