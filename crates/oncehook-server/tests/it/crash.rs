//! The gateway is killed, stopped, hung up on and lied to by its disk; nothing that it acknowledged may be lost.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncehook_testkit::gateway::{CONFIG, Gateway, prepare};
use oncehook_testkit::promises::{Answers, Senders, assert_is_unavailable};
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::{Wire, ask};
use tempfile::TempDir;
use tokio::time::sleep;

const BINARY: &str = env!("CARGO_BIN_EXE_oncehook");

pub(crate) fn prepared() -> TempDir {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    prepare(directory.path(), CONFIG);
    directory
}

pub(crate) fn start(directory: &TempDir) -> Gateway {
    Gateway::start(Path::new(BINARY), directory.path())
}

/// The last word on a journal: over the API, then in the file, every promise and every byte.
async fn settle(directory: &TempDir, mut gateway: Gateway, senders: &Senders) {
    let kept = senders.promises.check(&gateway).await;
    let stats = gateway.json("/api/stats").await;
    assert_eq!(stats["events"], kept.stored, "the count of events and their list differ");
    assert_eq!(stats["conflicts"], 0, "{stats}");
    for event in gateway.events().await.iter().step_by(1 + kept.stored / 200) {
        let body = gateway.get(&format!("/api/events/{}/body", event["id"].as_str().unwrap())).await;
        assert!(body.body == senders.body_of(event["key"].as_str().unwrap()), "{event}: other bytes");
    }
    assert!(gateway.stop().success());
    let kept = senders.promises.check_file(&directory.path().join("journal.db"), |key| senders.body_of(key));
    eprintln!("{kept:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_1_r12_kill_9_under_load_50_times_loses_nothing() {
    kill_under_load(50, start).await;
}

/// Keys are always on their way into the ledger's table, so a kill falls between any two of them, and every start merges.
#[tokio::test(flavor = "multi_thread")]
async fn fault_1_r12_kill_9_while_keys_are_merged_loses_nothing() {
    let directory = kill_under_load(30, |directory| start_with_generation(directory, 100)).await;
    let file = rusqlite::Connection::open(directory.path().join("journal.db")).unwrap();
    let merged: i64 = file.query_row("SELECT count(*) FROM oncehook_keys", [], |row| row.get(0)).unwrap();
    assert!(merged > 500, "only {merged} keys were ever merged");
}

fn start_with_generation(directory: &TempDir, keys: usize) -> Gateway {
    let mut command = Command::new(BINARY);
    command.args(["serve", "--ledger-generation", &keys.to_string()]);
    Gateway::start_command(command, directory.path())
}

async fn kill_under_load(kills: usize, start: impl Fn(&TempDir) -> Gateway) -> TempDir {
    let mut random = Random::from_environment();
    let directory = prepared();
    let senders = Senders::new(600, 30);
    let mut heard = Answers::default();
    for kill in 1..=kills {
        let mut gateway = start(&directory);
        senders.check_some(gateway.ingress, &mut random, 10).await;
        let stats = gateway.json("/api/stats").await;
        let promised = senders.promises.len() as u64;
        assert!(stats["events"].as_u64().unwrap() >= promised, "kill {kill}: {promised} promised, {stats}");
        let sending = senders.start(gateway.ingress, 16, &mut random);
        sleep(Duration::from_millis(50 + random.below(250))).await;
        gateway.kill();
        heard.add(sending.finish().await);
    }
    eprintln!("{kills} kills: {heard:?}");
    assert!(heard.of(200) > 1_000 && heard.cut > 50, "there was no load to speak of: {heard:?}");
    settle(&directory, start(&directory), &senders).await;
    directory
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_counts_of_duplicates_survive_a_graceful_restart_exactly() {
    let mut random = Random::from_environment();
    let directory = prepared();
    let senders = Senders::new(300, 0);
    let keys: Vec<String> = (0..50).map(|_| senders.key(&mut random)).collect();
    let mut sent: HashMap<String, u64> = HashMap::new();
    for _ in 0..3 {
        let mut gateway = start(&directory);
        let mut wire = Wire::connect(gateway.ingress).await.unwrap();
        for _ in 0..300 {
            let key = random.pick(&keys);
            let answer = wire.ask(&senders.request(key)).await.unwrap();
            assert!(senders.promises.record(key, &answer), "{answer:?}");
            *sent.entry(key.clone()).or_default() += 1;
        }
        // At once, so that the last counts are still in memory only.
        assert!(gateway.stop().success());
        let gateway = start(&directory);
        let events = gateway.events().await;
        assert_eq!(events.len(), sent.len());
        for event in events {
            assert_eq!(event["duplicates"], sent[event["key"].as_str().unwrap()] - 1, "{event}");
        }
        let stats = gateway.json("/api/stats").await;
        assert_eq!(stats["duplicates"], sent.values().sum::<u64>() - sent.len() as u64, "{stats}");
    }
}

/// What one client of fault 13 does.
enum HangUp {
    /// Sends a part and goes.
    Part,
    /// Sends everything and does not wait for the answer.
    Whole,
    /// Waits for the answer.
    Never,
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_13_10000_clients_that_hang_up_leave_nothing_half_done() {
    const CLIENTS: u64 = 10_000;
    let mut random = Random::from_environment();
    let directory = prepared();
    let gateway = start(&directory);
    let senders = Senders::new(3_000, 20);
    // Keys of which at least one request left this process whole.
    let whole: Arc<Mutex<HashSet<String>>> = Arc::default();
    let clients: Vec<_> = (0..64)
        .map(|_| {
            let (senders, whole, address) = (Arc::clone(&senders), Arc::clone(&whole), gateway.ingress);
            let mut random = Random::new(random.next());
            tokio::spawn(async move {
                for _ in 0..CLIENTS.div_ceil(64) {
                    let key = senders.key(&mut random);
                    let request = senders.request(&key);
                    let way = match random.below(10) {
                        0..4 => HangUp::Part,
                        4..9 => HangUp::Whole,
                        _ => HangUp::Never,
                    };
                    let sent = match way {
                        HangUp::Part => &request[..random.below(request.len() as u64) as usize],
                        HangUp::Whole | HangUp::Never => {
                            whole.lock().unwrap().insert(key.clone());
                            &request
                        }
                    };
                    let mut wire = Wire::connect(address).await.unwrap();
                    wire.send(sent).await.unwrap();
                    if let HangUp::Never = way {
                        let answer = wire.answer().await.unwrap();
                        assert!(senders.promises.record(&key, &answer), "{answer:?}");
                        continue;
                    }
                    match random.below(3) {
                        0 => {}
                        1 => tokio::task::yield_now().await,
                        _ => sleep(Duration::from_micros(random.below(2_000))).await,
                    }
                    if random.below(2) == 0 {
                        wire.reset().unwrap();
                    }
                }
            })
        })
        .collect();
    for client in clients {
        client.await.unwrap();
    }

    let started = Instant::now();
    senders.check_some(gateway.ingress, &mut random, 20).await;
    assert!(started.elapsed() < Duration::from_secs(5), "20 answers took {:?}", started.elapsed());
    for gauge in ["oncehook_in_flight", "oncehook_connections", "oncehook_journal_queue"] {
        let deadline = Instant::now() + Duration::from_secs(5);
        while gateway.metric(gauge).await != 0.0 {
            let left = gateway.metric(gauge).await;
            assert!(Instant::now() < deadline, "{gauge} is {left} though nobody is there any more");
            sleep(Duration::from_millis(20)).await;
        }
    }
    let whole = whole.lock().unwrap().clone();
    let stored: HashSet<String> =
        gateway.events().await.iter().map(|event| event["key"].as_str().unwrap().to_owned()).collect();
    eprintln!("{} keys sent whole, {} stored, {} promised", whole.len(), stored.len(), senders.promises.len());
    assert!(stored.is_subset(&whole), "stored from a part: {:?}", stored.difference(&whole).next());
    assert!(stored.len() > senders.promises.len(), "nobody hung up between the append and its answer");
    settle(&directory, gateway, &senders).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_16_sigterm_under_load_loses_nothing_and_ends_in_time() {
    let mut random = Random::from_environment();
    let directory = prepared();
    let senders = Senders::new(600, 10);
    for round in 0..4 {
        let mut gateway = start(&directory);
        senders.check_some(gateway.ingress, &mut random, 5).await;
        let sending = senders.start(gateway.ingress, 16, &mut random);
        let mut idle = Wire::connect(gateway.ingress).await.unwrap();
        senders.check_some(gateway.ingress, &mut random, 1).await;
        // In the last round somebody never finishes its request; it may not hold up the end for ever.
        let mut lazy = Wire::connect(gateway.ingress).await.unwrap();
        let request = senders.request(&senders.key(&mut random));
        lazy.send(if round == 3 { &request[..request.len() - 1] } else { &[] }).await.unwrap();
        sleep(Duration::from_millis(200 + random.below(200))).await;
        let started = Instant::now();
        gateway.signal("TERM");
        if round % 2 == 1 {
            sleep(Duration::from_millis(random.below(20))).await;
            // It may have ended already.
            let _ = Command::new("kill").arg(gateway.pid().to_string()).stderr(Stdio::null()).status();
        }
        let status = gateway.wait(Duration::from_secs(13));
        assert_eq!(status.code(), Some(0), "round {round}: {}", gateway.log());
        assert!(idle.is_closed().await);
        let heard = sending.finish().await;
        eprintln!("round {round}: ended after {:?}, {heard:?}", started.elapsed());
        assert!(heard.of(200) > 50, "there was no load to speak of: {heard:?}");
    }
    settle(&directory, start(&directory), &senders).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_8_a_second_process_on_the_same_file_is_refused() {
    let mut random = Random::from_environment();
    let directory = prepared();
    let gateway = start(&directory);
    let senders = Senders::new(600, 0);
    let sending = senders.start(gateway.ingress, 2, &mut random);
    for command in ["serve", "migrate"] {
        let mut second = Command::new(BINARY);
        second.arg(command).current_dir(directory.path()).stderr(Stdio::piped()).stdout(Stdio::null());
        let mut second = Guarded(second.spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(20);
        let status = loop {
            if let Some(status) = second.0.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "a second {command} goes on");
            sleep(Duration::from_millis(10)).await;
        };
        let mut said = String::new();
        std::io::Read::read_to_string(&mut second.0.stderr.take().unwrap(), &mut said).unwrap();
        assert!(!status.success(), "{command}: {said}");
        assert!(said.contains("journal.db.lock") && said.contains("in use"), "{command}: {said}");
    }
    let before = senders.promises.len();
    sleep(Duration::from_millis(200)).await;
    let heard = sending.finish().await;
    assert!(senders.promises.len() > before, "the first stopped accepting: {heard:?}");
    assert_eq!(heard.of(200), heard.statuses.values().sum::<u64>(), "the first was disturbed: {heard:?}");
    assert_eq!(heard.cut, 0, "the first was disturbed: {heard:?}");
    settle(&directory, gateway, &senders).await;
}

/// A child that does not outlive its test.
struct Guarded(Child);

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// strace, attached to a running gateway and making its syncs fail.
struct Syncs {
    strace: Guarded,
    log: Arc<Mutex<Vec<String>>>,
}

impl Syncs {
    /// From now on syncs fail with EIO: all of them, or those that `when` names (strace's words).
    fn fail(gateway: &Gateway, when: &str) -> Self {
        let inject = format!("inject=fsync,fdatasync:error=EIO{when}");
        let mut command = Command::new("strace");
        command.args(["-f", "-e", "trace=fsync,fdatasync", "-e", &inject, "-p", &gateway.pid().to_string()]);
        let spawned = command.stderr(Stdio::piped()).stdout(Stdio::null()).stdin(Stdio::null()).spawn();
        let mut strace = Guarded(spawned.expect("this test needs strace (apt-get install strace)"));
        let log = Arc::new(Mutex::new(Vec::new()));
        let lines = BufReader::new(strace.0.stderr.take().unwrap()).lines();
        let sink = Arc::clone(&log);
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| sink.lock().unwrap().push(line)));
        let syncs = Self { strace, log };
        let threads = std::fs::read_dir(format!("/proc/{}/task", gateway.pid())).unwrap().count();
        let deadline = Instant::now() + Duration::from_secs(10);
        while syncs.lines("attached") == 0 || syncs.traced(gateway) < threads {
            assert!(Instant::now() < deadline, "strace did not attach:\n{}", syncs.log.lock().unwrap().join("\n"));
            std::thread::sleep(Duration::from_millis(5));
        }
        syncs
    }

    /// How many lines of strace's log contain a word.
    fn lines(&self, word: &str) -> usize {
        self.log.lock().unwrap().iter().filter(|line| line.contains(word)).count()
    }

    /// How many threads of the gateway have a tracer.
    fn traced(&self, gateway: &Gateway) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", gateway.pid())).unwrap();
        tasks
            .filter(|task| {
                let status = task.as_ref().map(|task| task.path().join("status"));
                let status = status.map(|path| std::fs::read_to_string(path).unwrap_or_default());
                status.is_ok_and(|status| !status.contains("TracerPid:\t0"))
            })
            .count()
    }

    /// Lets go of the gateway. Returns how many syncs have failed.
    fn heal(mut self) -> usize {
        assert!(Command::new("kill").args(["-INT", &self.strace.0.id().to_string()]).status().unwrap().success());
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.strace.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "strace does not let go");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.lines("INJECTED")
    }
}

/// A crash cannot show a missing sync, because the kernel keeps what was written. The order of the system calls can:
/// between the last write to the log and the answer there must be a sync of the log.
#[tokio::test(flavor = "multi_thread")]
async fn r3_nothing_is_answered_before_its_log_is_synced() {
    let directory = prepared();
    let gateway = start(&directory);
    let senders = Senders::new(600, 0);
    let mut random = Random::from_environment();
    let trace = directory.path().join("trace");
    let mut command = Command::new("strace");
    command.args(["-f", "-y", "-s", "16", "-e", "trace=pwrite64,fdatasync,fsync,writev,sendto,write", "-o"]);
    command.arg(&trace).args(["-p", &gateway.pid().to_string()]).stderr(Stdio::piped()).stdin(Stdio::null());
    let mut strace = Guarded(command.spawn().expect("this test needs strace (apt-get install strace)"));
    let mut attached = BufReader::new(strace.0.stderr.take().unwrap());
    attached.read_line(&mut String::new()).unwrap();
    sleep(Duration::from_millis(500)).await;
    for _ in 0..50 {
        let key = senders.key(&mut random);
        let answer = ask(gateway.ingress, &senders.request(&key)).await.unwrap();
        assert!(senders.promises.record(&key, &answer));
    }
    assert!(Command::new("kill").args(["-INT", &strace.0.id().to_string()]).status().unwrap().success());
    strace.0.wait().unwrap();

    let text = std::fs::read_to_string(trace).unwrap();
    let (mut unsynced, mut writes, mut answers) = (false, 0, 0);
    // Threads whose sync of the log is under way. (The database file is synced too, and that proves nothing.)
    let mut syncing = HashSet::new();
    for line in text.lines() {
        let thread = line.split_whitespace().next().unwrap();
        if line.contains("pwrite64(") && line.contains("journal.db-wal") {
            unsynced = true;
            writes += 1;
        } else if line.contains("sync(") && line.contains("journal.db-wal>") && line.contains("<unfinished") {
            syncing.insert(thread);
        } else if line.contains("sync(") && line.contains("journal.db-wal>")
            || line.contains("sync resumed>") && syncing.remove(thread)
        {
            unsynced &= !line.trim_end().ends_with("= 0");
        } else if line.contains("\"HTTP/1.1 200") {
            answers += 1;
            assert!(!unsynced, "answered before the sync: {line}");
        }
    }
    assert!(writes >= 50 && answers >= 50, "{writes} writes and {answers} answers were seen");
}

/// Waits until `/readyz` has a status.
async fn wait_for_readyz(gateway: &Gateway, status: u16) -> Duration {
    let started = Instant::now();
    while gateway.get("/readyz").await.status != status {
        assert!(started.elapsed() < Duration::from_secs(10), "/readyz is not {status}:\n{}", gateway.log());
        sleep(Duration::from_millis(10)).await;
    }
    started.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_3_r4_a_failing_sync_is_never_acknowledged_and_heals_by_itself() {
    let mut random = Random::from_environment();
    let directory = prepared();
    let mut gateway = start(&directory);
    let senders = Senders::new(600, 0);
    let new = |random: &mut Random| senders.key(random);

    // Every sync fails: nothing new is acknowledged, and the gateway says so.
    let key = new(&mut random);
    let answer = ask(gateway.ingress, &senders.request(&key)).await.unwrap();
    assert!(senders.promises.record(&key, &answer));
    let syncs = Syncs::fail(&gateway, "");
    for _ in 0..20 {
        let key = new(&mut random);
        let started = Instant::now();
        let answer = ask(gateway.ingress, &senders.request(&key)).await.unwrap();
        assert_is_unavailable(&answer);
        assert!(started.elapsed() < Duration::from_secs(2), "R4: at once, not after {:?}", started.elapsed());
        sleep(Duration::from_millis(50)).await;
    }
    let sending = senders.start(gateway.ingress, 8, &mut random);
    let red = wait_for_readyz(&gateway, 503).await;
    sleep(Duration::from_millis(500)).await;
    let heard = sending.finish().await;
    assert_eq!(heard.of(200), 0, "acknowledged without a sync: {heard:?}");
    let failed = syncs.heal();
    assert!(failed > 0, "no sync has failed: the test is blind");
    let green = wait_for_readyz(&gateway, 200).await;
    let key = new(&mut random);
    let answer = ask(gateway.ingress, &senders.request(&key)).await.unwrap();
    assert!(senders.promises.record(&key, &answer), "{answer:?}");
    eprintln!("{failed} syncs failed; red after {red:?}, green {green:?} after the disk; refused: {heard:?}");

    // One sync in the middle of a load fails, several times over; the journal comes back while senders go on.
    let sending = senders.start(gateway.ingress, 8, &mut random);
    let mut failed = 0;
    for _ in 0..5 {
        sleep(Duration::from_millis(100)).await;
        let syncs = Syncs::fail(&gateway, &format!(":when={}", 1 + random.below(20)));
        let deadline = Instant::now() + Duration::from_secs(10);
        while syncs.lines("INJECTED") == 0 {
            assert!(Instant::now() < deadline, "no sync came: {}", gateway.log());
            sleep(Duration::from_millis(5)).await;
        }
        wait_for_readyz(&gateway, 200).await;
        failed += syncs.heal();
    }
    let heard = sending.finish().await;
    eprintln!("{failed} single syncs failed under load: {heard:?}");
    assert!(heard.of(200) > 100 && heard.of(503) > 0 && heard.cut == 0, "{heard:?}");
    assert!(heard.slowest < Duration::from_secs(5), "{heard:?}");

    // What was acknowledged is there now, and after a crash.
    senders.promises.check(&gateway).await;
    gateway.kill();
    settle(&directory, start(&directory), &senders).await;
}
