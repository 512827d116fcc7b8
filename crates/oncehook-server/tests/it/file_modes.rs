//! Nobody but the gateway's own user can read, write or lock a file that it makes.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use oncehook_testkit::gateway::{CONFIG, Gateway, prepare};
use oncehook_testkit::promises::Senders;
use oncehook_testkit::random::Random;
use oncehook_testkit::sender::{ask, post};

const BINARY: &str = env!("CARGO_BIN_EXE_oncehook");

/// Every file below a directory with its mode.
fn modes(directory: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![directory.to_path_buf()];
    while let Some(place) = waiting.pop() {
        for entry in std::fs::read_dir(place).unwrap() {
            let path = entry.unwrap().path();
            let meta = std::fs::symlink_metadata(&path).unwrap();
            if meta.is_dir() {
                waiting.push(path.clone());
            }
            let name = path.strip_prefix(directory).unwrap().display().to_string();
            found.insert(name, format!("{:o}", meta.permissions().mode() & 0o777));
        }
    }
    found
}

/// A program with the usual umask of a login shell.
fn with_usual_umask(arguments: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("umask 022; exec {BINARY} {arguments}")]);
    command
}

const JOURNAL: [&str; 4] = ["journal.db", "journal.db-wal", "journal.db-shm", "journal.db.lock"];
const SPOOL: [&str; 4] = ["spool.db", "spool.db-wal", "spool.db-shm", "spool.db.lock"];

#[tokio::test(flavor = "multi_thread")]
async fn every_file_that_the_gateway_makes_is_its_users_own() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let asana = "[[source]]\nname = \"asana\"\nprovider = \"asana\"\nhandover = \"asana.pending\"\n";
    let spool = "[spool]\npath = \"spool.db\"\n[[source]]";
    let config = CONFIG.replace("[[source]]", spool) + "on_outage = \"spool\"\n" + asana;
    prepare(directory.path(), &config);
    let written = modes(directory.path());
    let mut gateway = Gateway::start_command(with_usual_umask("serve"), directory.path());
    let secret = [("x-hook-secret".to_owned(), b"b537207f20cbfa02357cf448134da559".to_vec())];
    assert_eq!(ask(gateway.ingress, &post("/webhooks/asana", &secret, b"")).await.unwrap().status, 200);
    let (senders, mut random) = (Senders::new(300, 0), Random::from_environment());
    let key = senders.key(&mut random);
    assert_eq!(ask(gateway.ingress, &senders.request(&key)).await.unwrap().status, 200);
    let made = || {
        let mut made = modes(directory.path());
        made.retain(|name, _| !written.contains_key(name));
        made
    };
    let running = made();
    for name in JOURNAL.iter().chain(&SPOOL).chain(&["asana.pending"]) {
        assert!(running.contains_key(*name), "{name} is not among {running:?}");
    }
    assert!(running.values().all(|mode| *mode == "600"), "{running:?}");
    gateway.kill();

    // As an earlier release has left them: made narrow, and said.
    for name in running.keys() {
        std::fs::set_permissions(directory.path().join(name), PermissionsExt::from_mode(0o644)).unwrap();
    }
    let mut gateway = Gateway::start_command(with_usual_umask("serve"), directory.path());
    let tightened = made();
    let (journal, others): (Vec<_>, Vec<_>) =
        tightened.iter().partition(|(name, _)| name.starts_with("journal") || name.starts_with("spool"));
    assert!(journal.iter().all(|(_, mode)| **mode == "600"), "{tightened:?}");
    assert_eq!(others.len(), 1, "{others:?}");
    assert!(gateway.log().contains("could be read by other users"), "{}", gateway.log());
    assert!(gateway.stop().success());

    // What `init` and `migrate` make.
    for (place, arguments) in [("init", "init"), ("migrate", "--config ../oncehook.toml migrate")] {
        let place = directory.path().join(place);
        std::fs::create_dir(&place).unwrap();
        if arguments != "init" {
            std::fs::copy(directory.path().join("stripe.secret"), place.join("stripe.secret")).unwrap();
        }
        let before = modes(&place);
        let ran = with_usual_umask(arguments).current_dir(&place).output().unwrap();
        assert!(ran.status.success(), "{arguments}: {}", String::from_utf8_lossy(&ran.stderr));
        let mut made = modes(&place);
        made.retain(|name, _| !before.contains_key(name));
        assert!(!made.is_empty() && made.values().all(|mode| *mode == "600"), "{arguments}: {made:?}");
    }
}

/// Anybody who may write the folder can take the database file away; the gateway says so and goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_every_user_may_write_is_told() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    prepare(directory.path(), CONFIG);
    for (mode, told) in [(0o755, false), (0o777, true), (0o1777, false)] {
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(mode)).unwrap();
        let mut gateway = Gateway::start(Path::new(BINARY), directory.path());
        assert_eq!(gateway.log().contains("every user may write"), told, "{mode:o}: {}", gateway.log());
        gateway.kill();
    }
}
