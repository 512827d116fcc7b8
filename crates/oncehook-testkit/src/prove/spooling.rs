//! The proof for a spool: somebody else locks the journal's file, so events are spooled and answered; then they are drained, and
//! somewhere on the way the process ends or the power is cut.
//!
//! Promises: an id that the spool has given out is the stored event's id, or another name of it; the [audit](super::audit) asks the
//! journal which. Bodies are never changed here: a spool does not know yet what the journal will say of them.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::disk::Keep;
use super::embedded::{DRAIN, Deployment, SENDERS};
use super::history::Sending;
use crate::gateway::{CONFIG, Gateway};
use crate::leash;
use crate::shop::{self, ORDERS, SHIPMENTS};

/// The places of the spool at which builds for tests can end, and after how many passings at most.
pub const POINTS: [(&str, u64); 5] = [("spooling", 4), ("spooled", 4), ("drained", 1), ("aliased", 1), ("cleared", 1)];

/// An outage, and those who send meanwhile.
struct Outage {
    lock: Lock,
    sending: Sending,
}

impl Outage {
    async fn end(self) {
        drop(self.lock);
        self.sending.finish().await;
    }
}

/// A process that locks the journal's file. It is killed in the end: one that closed the file in good order would write into it what
/// the disk of the gateway does not have.
struct Lock(Child);

impl Lock {
    fn take(file: &Path) -> Self {
        const PROGRAM: &str = r#"
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
database.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(600)
"#;
        let mut command = Command::new("python3");
        command.args(["-c", PROGRAM]).arg(file).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        leash::hold(process.id());
        let mut said = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut said).unwrap();
        let lock = Self(process);
        assert_eq!(said, "locked\n", "the journal's file cannot be locked");
        lock
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        leash::release(self.0.id());
    }
}

impl Deployment<'_> {
    /// Gives the shop a spool, from its next start on.
    pub fn with_spool(self) -> Self {
        let base = CONFIG.replace("[[source]]", "[spool]\nafter = \"100ms\"\n[[source]]");
        let base = base + "on_outage = \"spool\"\n";
        self.shop.configure(&base, &[ORDERS, SHIPMENTS, &shop::mails(&self.inbox)]);
        self
    }

    /// Kills at a named place while events are spooled or drained, so many times. Needs a binary with crash points.
    pub async fn spool_kills_at(&mut self, point: &'static str, passings: u64, count: usize) {
        for _ in 0..count {
            let passing = 1 + self.random.below(passings);
            let armed = [("ONCEHOOK_CRASH_POINT", format!("{point}:{passing}"))];
            let Some(mut gateway) = self.start(&armed) else { return };
            let outage = self.outage(&gateway).await;
            if matches!(point, "spooling" | "spooled") {
                self.died_at(&mut gateway, point);
                outage.end().await;
            } else {
                outage.end().await;
                self.died_at(&mut gateway, point);
            }
        }
    }

    /// Cuts the power while events are spooled, or while they are drained, so many times, in all three ways.
    pub async fn spool_cuts(&mut self, count: usize) {
        for number in 0..count {
            let Some(mut gateway) = self.start(&[]) else { return };
            let outage = self.outage(&gateway).await;
            if self.random.below(2) == 0 {
                gateway.kill();
                outage.end().await;
            } else {
                outage.end().await;
                tokio::time::sleep(Duration::from_millis(self.random.below(40))).await;
                gateway.kill();
            }
            self.cut([Keep::Nothing, Keep::Some, Keep::Torn][number % 3]);
        }
    }

    /// Load while the journal's file is locked by somebody else, who has not let go yet.
    async fn outage(&mut self, gateway: &Gateway) -> Outage {
        let lock = tokio::task::block_in_place(|| Lock::take(&self.shop.file()));
        let sending = self.history.send(&[gateway.ingress], SENDERS, &mut self.random);
        tokio::time::sleep(Duration::from_millis(200)).await;
        self.load(600).await;
        if let Ok(answer) = crate::sender::get(gateway.admin, "/readyz").await {
            self.coverage.add("events spooled", answer.json()["spool"]["events"].as_u64().unwrap_or(0));
        }
        Outage { lock, sending }
    }

    /// Starts it once more and waits until the spool is empty; what is left is the [end](Self::end)'s.
    pub async fn empty_the_spool(&mut self) {
        let Some(mut gateway) = self.start(&[]) else { return };
        let end = Instant::now() + DRAIN;
        loop {
            let answer = crate::sender::get(gateway.admin, "/readyz").await;
            let left = answer.ok().and_then(|answer| answer.json()["spool"]["events"].as_u64());
            if left == Some(0) {
                break;
            }
            if Instant::now() > end {
                self.odd.push(format!("{left:?} events are still spooled after {} s", DRAIN.as_secs()));
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.drain(&gateway).await;
        gateway.kill();
        let aliases = "SELECT count(*) FROM oncehook_spool_aliases";
        let aliases = self.shop.count(aliases).unsigned_abs();
        self.coverage.add("ids of spooled events that others had", aliases);
    }
}
