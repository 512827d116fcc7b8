//! The embedded journal beside somebody who is in its way: another process that writes, a handler that never ends.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook::delivery::{Failure, HandedEvent, RouteName};
use oncehook::event::{NewEvent, SourceName};
use oncehook::handler::Handler;
use oncehook::journal::sqlite::{SqliteJournal, SqliteOptions};
use oncehook::journal::{AppendError, Deliveries, Journal, Pausable, Pause, Who};
use oncehook::route::Route;
use oncehook_testkit::journal::{append, event, try_append};

fn path_in(directory: &tempfile::TempDir) -> std::path::PathBuf {
    directory.path().join("journal.db")
}

fn foreign_writer(path: &Path) -> rusqlite::Connection {
    let other = rusqlite::Connection::open(path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    other
}

/// The wait that is promised, and slack for a busy machine. Without the promise it was 4 to 7 seconds.
const PROMISED: Duration = Duration::from_millis(3_500);

#[tokio::test(flavor = "multi_thread")]
async fn fault_9_beside_a_foreign_write_lock_every_sender_is_refused_in_two_seconds_and_workers_do_not_add_to_it() {
    let directory = tempfile::tempdir().unwrap();
    let journal = Arc::new(SqliteJournal::open(&SqliteOptions::new(path_in(&directory))).unwrap());
    append(&*journal, [event("before", "{}")]).await;
    let other = foreign_writer(&path_in(&directory));
    let begun = Instant::now();
    // Lanes and operators ask the same thread all the time.
    let workers: Vec<_> = (0..6)
        .map(|number| {
            let journal = Arc::clone(&journal);
            tokio::spawn(async move {
                while begun.elapsed() < Duration::from_secs(5) {
                    let pause = Pause { what: Pausable::Route(format!("route-{number}")), paused: true };
                    let who = Who { name: "ada".to_owned(), reason: None };
                    let _ = journal.set_paused(pause, who).await;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        })
        .collect();
    let mut senders = Vec::new();
    for number in 0..50 {
        let journal = Arc::clone(&journal);
        senders.push(tokio::spawn(async move {
            let sent = Instant::now();
            let answer = try_append(&*journal, [event(&format!("evt_{number}"), "{}")]).await;
            (sent.elapsed(), answer)
        }));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut slowest = Duration::ZERO;
    for sender in senders {
        let (took, answer) = sender.await.unwrap();
        assert!(matches!(answer, Err(AppendError::Unavailable(_))), "{answer:?}");
        slowest = slowest.max(took);
    }
    assert!(slowest < PROMISED, "a sender waited for {slowest:?}");
    for worker in workers {
        worker.await.unwrap();
    }
    // A short wait is no reason to refuse.
    let short = Arc::clone(&journal);
    let sent = tokio::spawn(async move { try_append(&*short, [event("after", "{}")]).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    other.execute_batch("COMMIT").unwrap();
    assert!(sent.await.unwrap().is_ok());
    journal.close().await;
}

/// A handler on the writer's thread that does not end, and the queue in front of it is full.
#[test]
fn a_self_test_and_a_close_beside_a_stuck_writer_leave_no_thread_behind() {
    let directory = tempfile::tempdir().unwrap();
    let options = SqliteOptions { queue_limit: 4, ..SqliteOptions::new(path_in(&directory)) };
    let journal = Arc::new(SqliteJournal::open(&options).unwrap());
    let (stuck, is_stuck) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let gates = std::sync::Mutex::new((stuck, released));
    let handler = move |_: &rusqlite::Connection, _: &HandedEvent| -> Result<Option<serde_json::Value>, Failure> {
        let (stuck, released) = &*gates.lock().unwrap();
        stuck.send(()).unwrap();
        let _ = released.recv();
        Ok(None)
    };
    let name = RouteName::new("slow").unwrap();
    let shop = SourceName::new("shop").unwrap();
    let route = Arc::new(Route::new(name.clone(), shop, Handler::Function(Arc::new(handler))));

    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let routed = NewEvent { routes: [name].into_iter().collect(), ..event("evt_1", "{}") };
        append(&*journal, [routed]).await;
        let claims = journal.claim(Arc::clone(&route), 1, Duration::from_secs(60)).await.unwrap();
        assert_eq!(claims.len(), 1);
        let calling = Arc::clone(&journal);
        tokio::spawn(async move { calling.call(route, claims).await });
        tokio::task::spawn_blocking(move || is_stuck.recv().unwrap()).await.unwrap();
        while journal.submit([event("more", "{}")].into_iter().collect()).is_ok() {}
        for _ in 0..3 {
            let verdict = tokio::time::timeout(Duration::from_millis(100), journal.self_test()).await;
            assert!(verdict.is_err(), "{verdict:?}");
        }
        let closed = tokio::time::timeout(Duration::from_millis(100), journal.close()).await;
        assert!(closed.is_err());
    });
    let (dropped, is_dropped) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(runtime);
        dropped.send(()).unwrap();
    });
    let ended = is_dropped.recv_timeout(Duration::from_secs(10));
    drop(release);
    assert!(ended.is_ok(), "the runtime waits for threads that wait for the writer");
}
