//! A disk that is full, under the journal and under the spool, and memory that stays bounded under a flood.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use oncehook_testkit::gateway::{CONFIG, Gateway, prepare};
use oncehook_testkit::promises::{Answers, Senders, assert_is_unavailable};
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::{Answer, Wire, ask};
use tokio::time::sleep;

use crate::kit::{Rig, not_ready_while_nothing_is_stored};

const BINARY: &str = env!("CARGO_BIN_EXE_oncehook");

/// A file system of a few megabytes in memory. Unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: PathBuf, size: &str) -> Self {
        std::fs::create_dir(&at).unwrap();
        let disk = Self(at);
        disk.run(&["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]);
        disk
    }

    fn resize(&self, size: &str) {
        self.run(&["-o", &format!("remount,size={size}")]);
    }

    fn run(&self, arguments: &[&str]) {
        let done = Command::new("mount").args(arguments).arg(&self.0).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "this test must be able to mount a tmpfs (run it as root): {said}");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: whoever still has a file open there is about to be killed by its own guard.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fault_5_r4_a_full_disk_is_503_until_there_is_room_again() {
    fill_the_disk(&["serve"]).await;
}

/// The room runs out while keys are merged into the ledger's table.
#[tokio::test(flavor = "multi_thread")]
async fn fault_5_r4_a_disk_that_fills_up_while_keys_are_merged_forgets_none() {
    fill_the_disk(&["serve", "--ledger-generation", "20"]).await;
}

/// What a full disk cuts short must not lock the provider out once there is room.
#[tokio::test(flavor = "multi_thread")]
async fn fault_5_fault_69_a_handover_on_a_full_disk_is_tried_again_when_there_is_room() {
    let source = "[[source]]\nname = \"asana\"\nprovider = \"asana\"\nhandover = \"disk/asana.pending\"\n";
    let rig = Rig::start("", source, &[]);
    let disk = SmallDisk::mount(rig.directory.path().join("disk"), "64k");
    let filler = disk.0.join("filler");
    assert!(std::fs::write(&filler, vec![0; 1 << 20]).is_err(), "the disk is not full");
    let hello = b"POST /webhooks/asana HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\
        x-hook-secret: b537207f20cbfa02357cf448134da559\r\ncontent-length: 0\r\n\r\n";
    rig.refused(hello, 503, "handover_failed").await;
    assert_eq!(std::fs::read_dir(&disk.0).unwrap().count(), 1, "nothing but the filler");
    std::fs::remove_file(&filler).unwrap();
    assert_eq!(rig.send(hello).await.status, 200);
    let pending = std::fs::read_to_string(disk.0.join("asana.pending")).unwrap();
    assert_eq!(pending, "b537207f20cbfa02357cf448134da559\n");
}

async fn fill_the_disk(arguments: &[&str]) {
    let start = |directory: &Path| {
        let mut command = Command::new(BINARY);
        command.args(arguments);
        Gateway::start_command(command, directory)
    };
    let mut random = Random::from_environment();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = SmallDisk::mount(directory.path().join("small"), "4m");
    prepare(directory.path(), &CONFIG.replace("sqlite://journal.db", "sqlite://small/journal.db"));
    let mut gateway = start(directory.path());
    assert_eq!(gateway.json("/readyz").await["durability"], "process-crash-only");

    // Until it is full, and then until it stays full: the last room may go bit by bit.
    let senders = Senders::new(1_000, 0);
    let mut wire = Wire::connect(gateway.ingress).await.unwrap();
    let (mut refused, mut in_a_row, mut red) = (0, 0, 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    while in_a_row < 100 {
        assert!(Instant::now() < deadline, "{} accepted on 4 MB, {refused} refused", senders.promises.len());
        let key = senders.key(&mut random);
        let answer = wire.ask(&senders.request(&key)).await.unwrap();
        if senders.promises.record(&key, &answer) {
            in_a_row = 0;
            continue;
        }
        assert_is_unavailable(&answer);
        refused += 1;
        in_a_row += 1;
        let ready = gateway.get("/readyz").await;
        if ready.status == 503 {
            red += 1;
            assert!(ready.json()["failing"].is_string() || ready.json()["ready"] == false, "{ready:?}");
        }
        sleep(Duration::from_millis(10)).await;
    }
    assert!(senders.promises.len() > 100, "it was full from the start");
    assert!(red > 50, "/readyz was red only {red} times of {refused}");
    let kept = senders.promises.check(&gateway).await;
    eprintln!("full: {kept:?}, refused {refused}, /readyz red {red} times");

    // Room comes back, and nobody has to do anything else.
    disk.resize("64m");
    let started = Instant::now();
    loop {
        let key = senders.key(&mut random);
        let answer = ask(gateway.ingress, &senders.request(&key)).await.unwrap();
        if senders.promises.record(&key, &answer) {
            break;
        }
        assert_is_unavailable(&answer);
        assert!(started.elapsed() < Duration::from_secs(5), "it does not resume:\n{}", gateway.log());
        sleep(Duration::from_millis(20)).await;
    }
    eprintln!("resumed {:?} after there was room", started.elapsed());
    let sending = senders.start(gateway.ingress, 8, &mut random);
    sleep(Duration::from_millis(500)).await;
    let heard = sending.finish().await;
    assert_eq!(heard.of(200), heard.statuses.values().sum::<u64>(), "{heard:?}");
    assert_eq!(gateway.get("/readyz").await.status, 200);

    gateway.kill();
    let mut gateway = start(directory.path());
    senders.check_some(gateway.ingress, &mut random, 50).await;
    senders.promises.check(&gateway).await;
    assert!(gateway.stop().success());
    let kept = senders.promises.check_file(&disk.0.join("journal.db"), |key| senders.body_of(key));
    eprintln!("after a crash: {kept:?}");
}

/// Another process has locked the journal's file, so the spool takes over, and its disk is small.
#[tokio::test(flavor = "multi_thread")]
async fn fault_5_r4_a_spool_on_a_full_disk_is_503_with_an_alarm_and_loses_nothing_that_it_took() {
    let mut random = Random::from_environment();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = SmallDisk::mount(directory.path().join("small"), "4m");
    let spool = "[spool]\npath = \"small/spool.db\"\nafter = \"200ms\"\n[[source]]";
    prepare(directory.path(), &(CONFIG.replace("[[source]]", spool) + "on_outage = \"spool\"\n"));
    let mut gateway = Gateway::start(Path::new(BINARY), directory.path());
    let other = rusqlite::Connection::open(directory.path().join("journal.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();

    let senders = Senders::new(1_000, 0);
    let mut told: HashMap<String, String> = HashMap::new();
    let mut take = |key: String, answer: &Answer| {
        let accepted = answer.status == 200;
        match accepted {
            true => drop(told.insert(key, answer.json()["event"].as_str().unwrap().to_owned())),
            false => assert_is_unavailable(answer),
        }
        accepted
    };
    let (mut in_a_row, deadline) = (0, Instant::now() + Duration::from_secs(120));
    while in_a_row < 50 {
        assert!(Instant::now() < deadline, "the disk does not fill up");
        let key = senders.key(&mut random);
        let answer = ask(gateway.ingress, &senders.request(&key)).await.unwrap();
        in_a_row = if take(key, &answer) { 0 } else { in_a_row + 1 };
    }
    // Everybody who looks can see it.
    let until = async |what: &str, seen: &dyn Fn(&Answer, &str) -> bool| {
        let begun = Instant::now();
        while !seen(&gateway.get("/readyz").await, &gateway.log()) {
            assert!(begun.elapsed() < Duration::from_secs(30), "{what}: {}", gateway.log());
            sleep(Duration::from_millis(50)).await;
        }
    };
    until("failing", &|ready, _| ready.json()["spool"]["failing"].is_string()).await;
    until("an alarm", &|ready, log| {
        ready.json()["spool"]["alarm"] == true && log.contains("the spool needs attention")
    })
    .await;
    assert_eq!(gateway.json("/api/stats").await["spool"]["alarm"], true);
    assert_eq!(gateway.metric("oncehook_spool_alarm").await, 1.0);

    // Room comes back: it takes events again; then the journal does, and has all of them.
    disk.resize("64m");
    let begun = Instant::now();
    loop {
        let key = senders.key(&mut random);
        let answer = ask(gateway.ingress, &senders.request(&key)).await.unwrap();
        if take(key, &answer) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not resume:\n{}", gateway.log());
        sleep(Duration::from_millis(20)).await;
    }
    gateway.kill();
    other.execute_batch("COMMIT").unwrap();
    drop(other);
    let mut gateway = Gateway::start(Path::new(BINARY), directory.path());
    let begun = Instant::now();
    while gateway.json("/readyz").await["spool"]["events"] != 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", gateway.log());
        sleep(Duration::from_millis(20)).await;
    }
    assert!(told.len() > 50, "it was full from the start: {}", told.len());
    for (key, id) in &told {
        assert_eq!(gateway.json(&format!("/api/events/{id}")).await["key"], key.as_str(), "{id}");
    }
    // One whose answer was an error may be there too, as ever; none is there twice.
    let mut keys: Vec<String> = gateway.events().await.iter().map(|event| event["key"].to_string()).collect();
    let stored = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), stored);
    assert!(gateway.stop().success());
    eprintln!("{} told, {stored} stored", told.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn r5_memory_stays_bounded_while_64_connections_push_5_kb_bodies() {
    const LIMIT: u64 = 256 << 20;
    let mut random = Random::from_environment();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    prepare(directory.path(), CONFIG);
    let mut gateway = Gateway::start(Path::new(BINARY), directory.path());
    let senders = Senders::new(5_000, 0);
    let sending = senders.start(gateway.ingress, 64, &mut random);
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(10) {
        sleep(Duration::from_millis(500)).await;
        let now = gateway.memory("VmRSS");
        assert!(now > 0 && now < LIMIT, "{} MB", now >> 20);
    }
    let heard: Answers = sending.finish().await;
    let most = gateway.memory("VmHWM");
    eprintln!("{heard:?}; at most {} MB", most >> 20);
    assert!(heard.of(200) > 5_000, "there was no load to speak of: {heard:?}");
    assert!(most > 0 && most < LIMIT, "{} MB", most >> 20);
    senders.promises.check(&gateway).await;
    assert!(gateway.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn r4_while_another_process_holds_the_file_the_gateway_is_not_ready_and_afterwards_it_is() {
    let directory = tempfile::tempdir().unwrap();
    prepare(directory.path(), CONFIG);
    let gateway = Gateway::start(Path::new(BINARY), directory.path());
    let senders = Senders::new(600, 0);
    senders.send_new(gateway.ingress, 10, 2).await;
    let other = rusqlite::Connection::open(directory.path().join("journal.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    not_ready_while_nothing_is_stored(&gateway, &senders, Duration::from_secs(10)).await;
    other.execute_batch("ROLLBACK").unwrap();
    let begun = Instant::now();
    while gateway.get("/readyz").await.status != 200 {
        assert!(begun.elapsed() < Duration::from_secs(30), "{}", gateway.log());
        sleep(Duration::from_millis(20)).await;
    }
    senders.send_new(gateway.ingress, 10, 2).await;
}
