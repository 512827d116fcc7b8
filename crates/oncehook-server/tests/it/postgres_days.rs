//! The gateway ends right after it has dropped a day of events, before it has swept behind it.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use oncehook::journal::postgres::PostgresJournal;
use oncehook_testkit::days::{self, DAY, FEW, planted};
use oncehook_testkit::gateway::{Gateway, now, prepare};
use oncehook_testkit::postgres::Server;
use oncehook_testkit::random::Random;

use crate::kit::BINARY;
use crate::postgres::CONFIG;

/// Ends it at a place so many times, each time with another old day. What was dead is kept, everything else is swept by the
/// last process.
pub(crate) async fn kill_at(point: &str, kills: i64) {
    let mut random = Random::from_environment();
    let database = Server::shared().database();
    database.query(crate::postgres::SHOP);
    PostgresJournal::migrate(&database.url()).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    prepare(directory.path(), CONFIG);
    let serve = || {
        let mut command = Command::new(BINARY);
        command.arg("serve").env("SHOP_DATABASE", database.url());
        command
    };
    database.query(days::believe_clock());
    let today = now().0 / DAY;
    let old: Vec<(i64, i64)> =
        (0..kills).map(|kill| (today - 40 - kill, 1 + random.below(FEW.unsigned_abs()).cast_signed())).collect();
    for (day, dead) in &old {
        database.query(&days::make(*day));
        database.query(&days::plant(*day, FEW + 5));
        let dead = planted(*day, *dead);
        database.query(&format!(
            "UPDATE oncehook.deliveries SET state = 'dead', error = 'no', cause = 'handler' WHERE event = '{dead}'"
        ));
    }
    for kill in 1..=kills {
        let mut command = serve();
        command.env("ONCEHOOK_CRASH_POINT", format!("{point}:1"));
        let mut gateway = Gateway::start_command(command, directory.path());
        let status = tokio::task::block_in_place(|| gateway.wait(Duration::from_secs(60)));
        assert_eq!(status.signal(), Some(9), "{}", gateway.log());
        let kept = kill + (kills - kill) * (FEW + 5);
        assert_eq!(database.query("SELECT count(*) FROM oncehook.events"), kept.to_string());
        assert!(database.query(&days::left_over()).contains(&format!("sweeps|{kill}")));
    }
    let mut gateway = Gateway::start_command(serve(), directory.path());
    let begun = Instant::now();
    while !database.query(&days::left_over()).is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(120), "{}", database.query(&days::left_over()));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    for (day, dead) in &old {
        let event = gateway.json(&format!("/api/events/{}", planted(*day, *dead))).await;
        assert_eq!(event["status"], "dead", "{event}");
    }
    assert!(gateway.stop().success());
}
