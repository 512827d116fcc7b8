//! The bare limit: the same statements without a journal, in batches of the same size, on as many connections.
//!
//! Promises: the same engine settings, the same statement, the same number of rows in a transaction; on a server the
//! statements of a batch are on their way before the first is answered, as the journal does it.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Instant;

use anyhow::Context as _;
use tokio_postgres::NoTls;

use super::store::{Engine, INSERT, Store};
use super::{BATCH, LANES, Measured, rate};

/// The user's statement and nothing else.
pub async fn effects(engine: Engine, count: usize) -> anyhow::Result<Measured> {
    let store = Store::new(engine)?;
    let (before, started) = (store.cost()?, Instant::now());
    match &store {
        Store::Mysql(_) => anyhow::bail!("only `growth` is measured on MariaDB"),
        Store::Sqlite(_) => embedded(&store, count)?,
        Store::Postgres(database) => {
            let lanes = (0..LANES).map(|lane| tokio::spawn(pipelined(database.url(), lane, count)));
            for lane in lanes.collect::<Vec<_>>() {
                lane.await??;
            }
        }
    }
    Ok(Measured { rate: rate(count, started), cost: store.cost()?.each(before, count) })
}

fn embedded(store: &Store, count: usize) -> anyhow::Result<()> {
    let mut connection = store.file()?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "cache_size", -65_536)?;
    for first in (0..count).step_by(BATCH) {
        let transaction = connection.transaction()?;
        for number in first..(first + BATCH).min(count) {
            transaction.prepare_cached(INSERT)?.execute(rusqlite::named_params! {
                ":payment": format!("pi_{number:012}"),
                ":amount": i64::try_from(number)?,
                ":key": format!("evt_{number:016x}"),
            })?;
        }
        transaction.commit()?;
    }
    Ok(())
}

async fn connect(url: &str) -> anyhow::Result<tokio_postgres::Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    // It ends with its client, or with an error that the next statement reports.
    tokio::spawn(connection);
    Ok(client)
}

/// Every `LANES`-th batch.
async fn pipelined(url: String, lane: usize, count: usize) -> anyhow::Result<()> {
    let client = connect(&url).await?;
    let text = INSERT.replace(":payment", "$1").replace(":amount", "$2").replace(":key", "$3");
    let statement = client.prepare(&text).await?;
    let batch = BATCH / LANES;
    for first in (lane * batch..count).step_by(BATCH) {
        let numbers = first..(first + batch).min(count);
        client.batch_execute("BEGIN").await?;
        let queries = numbers.map(|number| {
            let (client, statement) = (&client, &statement);
            async move {
                let (payment, key) = (format!("pi_{number:012}"), format!("evt_{number:016x}"));
                client.query(statement, &[&payment, &i64::try_from(number).unwrap_or(0), &key]).await
            }
        });
        in_order(queries.collect()).await?;
        client.batch_execute("COMMIT").await?;
    }
    Ok(())
}

/// Starts all in order, then waits for each.
async fn in_order<T, E>(queries: Vec<impl Future<Output = Result<T, E>>>) -> Result<(), E> {
    let mut running: Vec<Pin<Box<_>>> = queries.into_iter().map(Box::pin).collect();
    let mut done: Vec<Option<Result<T, E>>> = running.iter().map(|_| None).collect();
    poll_fn(|context| {
        for (query, done) in running.iter_mut().zip(&mut done) {
            if let Poll::Ready(answer) = query.as_mut().poll(context) {
                *done = Some(answer);
            }
        }
        Poll::Ready(())
    })
    .await;
    for (query, done) in running.into_iter().zip(done) {
        match done {
            Some(answer) => answer?,
            None => query.await?,
        };
    }
    Ok(())
}

/// Rows of the same size into one table with an index on their ids, a statement for each batch: what storing bodies costs
/// a server without keys, queue and counts.
pub async fn accepts(count: usize) -> anyhow::Result<Measured> {
    let store = Store::new(Engine::Postgres)?;
    store.run("CREATE TABLE bodies (id bigint PRIMARY KEY, headers bytea NOT NULL, body bytea NOT NULL)")?;
    let Store::Postgres(database) = &store else { anyhow::bail!("not a server") };
    let (before, started) = (store.cost()?, Instant::now());
    let lanes = (0..LANES).map(|lane| tokio::spawn(rows(database.url(), lane, count)));
    for lane in lanes.collect::<Vec<_>>() {
        lane.await??;
    }
    Ok(Measured { rate: rate(count, started), cost: store.cost()?.each(before, count) })
}

async fn rows(url: String, lane: usize, count: usize) -> anyhow::Result<()> {
    let client = connect(&url).await?;
    let sql = "INSERT INTO bodies SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::bytea[])";
    let statement = client.prepare(sql).await?;
    let batch = BATCH / LANES;
    let (headers, body) = (vec![b'h'; 32], vec![b'x'; 1_024]);
    for first in (lane * batch..count).step_by(BATCH) {
        let ids: Vec<i64> = (first..(first + batch).min(count)).map(|id| id as i64).collect();
        let (headers, bodies) = (vec![&headers; ids.len()], vec![&body; ids.len()]);
        client.execute(&statement, &[&ids, &headers, &bodies]).await.context("a bare insert")?;
    }
    Ok(())
}
