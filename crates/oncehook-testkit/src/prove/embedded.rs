//! The proof on the embedded journal: one process, its disk, and everything that can happen to them.
//!
//! Promises: whatever is odd on the way is taken down and told at the [end](Deployment::end), together with what was lost or doubled;
//! a process that does not start, stop or drain is odd, not a panic. [`spooling`](super::spooling) adds what happens to a spool.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncehook::planted::Bug;
use rusqlite::Connection;

use super::audit::{Facts, Tally, audit};
use super::coverage::Coverage;
use super::disk::{Calls, Disk, Keep, Shim};
use super::history::{History, Manners};
use super::tracer::{Log, Tracer};
use crate::gateway::{CONFIG, Gateway};
use crate::inbox::{Inbox, Mood};
use crate::random::Random;
use crate::shop::{self, ORDERS, SHIPMENTS, Shop};

/// Connections of the senders.
pub(super) const SENDERS: usize = 12;

/// Memory that a gateway may take (I7).
const MEMORY: u64 = 256 << 20;

/// How long a backlog may take (I6). The machine may be busy with other things.
pub(super) const DRAIN: Duration = Duration::from_secs(120);

/// Files and connections that a gateway may have open (I7).
const OPEN: usize = 400;

/// What the log of the journal may take on disk (I7).
const LOG: u64 = 256 << 20;

const EIO: i32 = 5;

/// The errors that calls fail with, and the counters of those that did.
const ERRORS: [(i32, &str, &str, &str); 2] = [
    (EIO, "EIO", "EIO at a call", "EIO injected by strace"),
    (28, "ENOSPC", "ENOSPC at a call", "ENOSPC injected by strace"),
];

/// What it looks for is in no event: every attempt is its last.
const HOPELESS: &str = r#"
[[route]]
name = "hopeless"
source = "stripe"
[route.sql]
statement = "INSERT INTO orders (key, payment) VALUES (:nothing, 'hopeless')"
bind = { nothing = "/data/there/is/no/such/thing" }
"#;

/// The places at which builds for tests can end, and after how many passings at most. Those of the spool and of other
/// databases are with their scenarios.
pub const POINTS: [(&str, u64); 8] = [
    ("before_insert", 30),
    ("after_insert", 30),
    ("after_commit", 30),
    ("after_sync", 30),
    ("in_handler", 60),
    ("after_effect", 60),
    ("in_follow_up", 60),
    ("before_settle", 20),
];

/// One shop, its senders, its disk, and what becomes of them.
pub struct Deployment<'p> {
    pub(super) shop: Shop,
    pub(super) inbox: Inbox,
    pub(super) disk: Disk,
    binary: PathBuf,
    bug: Option<Bug>,
    /// Without the shim: every call is the kernel's.
    bare: bool,
    /// With a route whose deliveries all die.
    hopeless: bool,
    pub(super) coverage: &'p Coverage,
    pub(super) odd: Vec<String>,
    /// What its senders did and heard.
    pub history: Arc<History>,
    /// Where all its chances come from.
    pub random: Random,
}

impl<'p> Deployment<'p> {
    /// A shop below `place`. `bug` needs a binary that can make it.
    pub async fn new(
        binary: &Path,
        place: &Path,
        shim: &Shim,
        coverage: &'p Coverage,
        manners: Manners,
        bug: Option<Bug>,
        seed: u64,
    ) -> Self {
        let inbox = Inbox::start().await;
        let routes = [ORDERS, SHIPMENTS, &shop::mails(&inbox)];
        // A mistake that invents a result is not to be found out by the statement that would use it.
        let routes = if bug == Some(Bug::MarkFirst) { &routes[..1] } else { &routes[..] };
        let shop = Shop::new(binary.to_str().unwrap(), place.to_str().unwrap(), routes);
        let disk = shim.disk(shop.path());
        Self {
            shop,
            inbox,
            disk,
            binary: binary.to_path_buf(),
            bug,
            bare: false,
            hopeless: false,
            coverage,
            odd: Vec::new(),
            history: History::new(manners),
            random: Random::new(seed),
        }
    }

    /// Every event has a delivery that dies, too, from the next start on.
    #[must_use]
    pub fn with_a_hopeless_route(mut self) -> Self {
        let routes = [ORDERS, SHIPMENTS, &shop::mails(&self.inbox), HOPELESS];
        self.shop.configure(CONFIG, &routes);
        self.hopeless = true;
        self
    }

    pub(super) fn start(&mut self, environment: &[(&str, String)]) -> Option<Gateway> {
        let mut command = Command::new(&self.binary);
        // Keys are always on their way into the ledger's table; a lease is short enough to freeze past it.
        command.args(["serve", "--lease", "1500"]);
        // The ledger would notice two events with one key when it merges them; the scenario has to do it before.
        if !matches!(self.bug, Some(Bug::ShortMemory | Bug::SelectThenInsert)) {
            command.args(["--ledger-generation", "200"]);
        }
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        if let Some(bug) = self.bug {
            command.env("ONCEHOOK_PLANTED", bug.as_str());
        }
        if !self.bare {
            self.disk.hold(&mut command);
        }
        match Gateway::try_start(command, self.shop.path()) {
            Ok(gateway) => Some(gateway),
            Err(log) => {
                self.odd.push(format!("the gateway does not start: {}", log.lines().last().unwrap_or("")));
                None
            }
        }
    }

    pub(super) async fn load(&mut self, millis: u64) {
        tokio::time::sleep(Duration::from_millis(40 + self.random.below(millis))).await;
    }

    /// Kills under load, so many times.
    pub async fn kills(&mut self, count: usize) {
        for _ in 0..count {
            let Some(mut gateway) = self.start(&[]) else { return };
            let sending = self.history.send(&[gateway.ingress], SENDERS, &mut self.random);
            self.load(120).await;
            gateway.kill();
            self.coverage.add("kills", 1);
            sending.finish().await;
        }
    }

    /// Kills at a named place, so many times. Needs a binary with crash points.
    pub async fn kills_at(&mut self, point: &'static str, passings: u64, count: usize) {
        for _ in 0..count {
            let passing = 1 + self.random.below(passings);
            let armed = [("ONCEHOOK_CRASH_POINT", format!("{point}:{passing}"))];
            let Some(mut gateway) = self.start(&armed) else { return };
            let sending = self.history.send(&[gateway.ingress], SENDERS, &mut self.random);
            self.died_at(&mut gateway, point);
            sending.finish().await;
        }
    }

    /// Waits until it has been killed where it should be.
    pub(super) fn died_at(&mut self, gateway: &mut Gateway, point: &str) {
        let ended = tokio::task::block_in_place(|| gateway.ended_within(Duration::from_secs(60)));
        match ended {
            Some(status) if status.signal() == Some(9) => self.coverage.add("kills at crash points", 1),
            Some(status) => self.odd.push(format!("{point}: it ended with {status} and was not killed")),
            None => {
                self.odd.push(format!("{point}: it did not come there in 60 s"));
                gateway.kill();
            }
        }
    }

    /// Cuts the power under load, so many times, in all three ways.
    pub async fn cuts(&mut self, count: usize) {
        for number in 0..count {
            let Some(mut gateway) = self.start(&[]) else { return };
            let sending = self.history.send(&[gateway.ingress], SENDERS, &mut self.random);
            self.load(120).await;
            gateway.kill();
            sending.finish().await;
            let keep = [Keep::Nothing, Keep::Some, Keep::Torn][number % 3];
            self.cut(keep);
        }
    }

    /// Cuts the power of a gateway that is dead already.
    pub(super) fn cut(&mut self, keep: Keep) {
        let undone = self.disk.cut(keep, &mut self.random);
        self.coverage.add("power cuts", 1);
        self.coverage.add("power cuts that undid writes", u64::from(undone.unsynced > undone.kept));
        self.coverage.note("power cuts that kept some writes", u64::from(undone.kept > 0));
        self.coverage.add("writes undone", (undone.unsynced - undone.kept) as u64);
        self.coverage.add("torn pages", undone.torn.into());
    }

    /// Lets every write and every sync of one ingest with its effects fail once, with each error. After EIO, and after what was
    /// promised next, the power is cut: what a failed sync left in memory is gone then. Of the calls only
    /// every `step`th, from a random one on. Returns how many calls there are.
    pub async fn every_call(&mut self, step: u64) -> u64 {
        let Some(mut gateway) = self.start(&[]) else { return 0 };
        // What starting leaves to do is done by then.
        self.one(&gateway).await;
        self.disk.count(Calls::All);
        self.one(&gateway).await;
        let calls = self.disk.heal().0;
        let first = 1 + self.random.below(step);
        for call in (first.cast_signed()..=calls).step_by(step as usize) {
            for (errno, _, name, _) in ERRORS {
                self.disk.fail(Calls::All, errno, call, 1);
                self.one(&gateway).await;
                // One event may need fewer calls than the first one did; the next one takes the failure.
                for _ in 0..20 {
                    if self.disk.failed() > 0 {
                        break;
                    }
                    self.one(&gateway).await;
                }
                self.coverage.add(name, self.disk.heal().1.unsigned_abs());
                if errno == EIO {
                    let again = gateway.log().matches("the journal stores again").count();
                    self.coverage.add("journal reopened after a failed call", again as u64);
                    gateway.kill();
                    self.cut(Keep::Nothing);
                    let Some(next) = self.start(&[]) else { return 0 };
                    gateway = next;
                    self.one(&gateway).await;
                }
            }
        }
        gateway.kill();
        calls.unsigned_abs()
    }

    /// The same with the kernel's own calls: strace lets the first write of each thread fail, then the second one, and so on, until
    /// no thread makes that many for one event; then the syncs. Of them only every `step`th. Returns how many calls there are.
    pub async fn every_call_traced(&mut self, step: u64) -> u64 {
        self.bare = true;
        let Some(mut gateway) = self.start(&[]) else { return 0 };
        self.one(&gateway).await;
        let log = Log::new(self.shop.path());
        let files = [self.shop.file(), self.shop.path().join("journal.db-wal")];
        let counting = Tracer::attach(&gateway, &files, None, &log);
        self.one(&gateway).await;
        let calls = counting.detach().calls;
        for (call, count) in &calls {
            for number in (1 + self.random.below(step.min(*count))..=*count).step_by(step as usize) {
                for (_, error, _, name) in ERRORS {
                    let tracer = Tracer::attach(&gateway, &files, Some((error, call, number)), &log);
                    self.one(&gateway).await;
                    for _ in 0..20 {
                        if log.read().injected > 0 {
                            break;
                        }
                        self.one(&gateway).await;
                    }
                    let injected = tracer.detach().injected;
                    if injected == 0 {
                        self.odd.push(format!("{error} at {call} {number} never came about"));
                    }
                    self.coverage.add(name, injected);
                    // Now that nothing fails any more it stores, and does what was left.
                    self.one(&gateway).await;
                }
            }
        }
        gateway.kill();
        calls.values().sum()
    }

    /// One new event, until it is promised and has taken effect.
    async fn one(&mut self, gateway: &Gateway) {
        let key = self.history.new_key();
        if !self.history.insist(gateway.ingress, &key, DRAIN).await {
            self.odd.push(format!("{key} is not accepted although nothing fails any more"));
        }
        self.drain(gateway).await;
    }

    /// Freezes the process for longer than its leases while requests are under way at the destination, so many times.
    pub async fn freezes(&mut self, count: usize) {
        for _ in 0..count {
            let Some(mut gateway) = self.start(&[]) else { return };
            let sending = self.history.send(&[gateway.ingress], 4, &mut self.random);
            self.inbox.set(Mood::Hesitant);
            let before = self.inbox.arrivals();
            let end = Instant::now() + Duration::from_secs(20);
            while self.inbox.arrivals() == before && Instant::now() < end {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            gateway.signal("STOP");
            tokio::time::sleep(Duration::from_millis(2_500)).await;
            self.inbox.set(Mood::Well);
            gateway.signal("CONT");
            self.load(500).await;
            gateway.kill();
            sending.finish().await;
            self.coverage.add("freezes past a lease", 1);
        }
    }

    /// Moves the wall clock under load: an hour and a day, ahead and back.
    pub async fn clock_jumps(&mut self) {
        let Some(mut gateway) = self.start(&[]) else { return };
        for seconds in [3_600, 0, -3_600, 86_400, -86_400, 0] {
            // Requests that are under way at the jump would be signed with the time before it.
            self.disk.shift_clock(seconds);
            self.history.shift(seconds);
            let sending = self.history.send(&[gateway.ingress], 4, &mut self.random);
            self.load(300).await;
            sending.finish().await;
            self.coverage.add("clock jumps", 1);
            self.drain(&gateway).await;
        }
        gateway.kill();
    }

    /// Many copies of each of so many new events, all at the same moment.
    pub async fn races(&mut self, events: usize, copies: usize) {
        let Some(gateway) = self.start(&[]) else { return };
        for _ in 0..events {
            self.history.race(&[gateway.ingress], copies).await;
            self.coverage.add("races", 1);
        }
        self.drain(&gateway).await;
        self.look(&gateway).await;
    }

    /// Load and nothing else, for a while.
    pub async fn calm(&mut self, time: Duration) {
        let Some(gateway) = self.start(&[]) else { return };
        let sending = self.history.send(&[gateway.ingress], SENDERS, &mut self.random);
        tokio::time::sleep(time).await;
        sending.finish().await;
        self.drain(&gateway).await;
        self.look(&gateway).await;
    }

    /// Waits until nothing is pending (I6).
    pub(super) async fn drain(&mut self, gateway: &Gateway) {
        let end = Instant::now() + DRAIN;
        loop {
            // While its disk fails it does not tell.
            let Ok(answer) = crate::sender::get(gateway.admin, "/api/routes").await else {
                self.odd.push("it is gone before all is done".to_owned());
                return;
            };
            let routes = answer.json();
            let routes = routes["routes"].as_array().cloned().unwrap_or_default();
            let pending: u64 = routes
                .iter()
                .flat_map(|route| ["waiting", "running"].map(|field| route["backlog"][field].as_u64().unwrap_or(1)))
                .sum();
            if pending == 0 && !routes.is_empty() {
                return;
            }
            if Instant::now() > end {
                self.odd.push(format!("{pending} deliveries are still pending after {} s", DRAIN.as_secs()));
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// What can be seen from outside while it runs.
    async fn look(&mut self, gateway: &Gateway) {
        let most = gateway.memory("VmHWM");
        if most > MEMORY {
            self.odd.push(format!("it took {} MB of memory", most >> 20));
        }
        let open = std::fs::read_dir(format!("/proc/{}/fd", gateway.pid())).map_or(0, Iterator::count);
        if open > OPEN {
            self.odd.push(format!("it has {open} files and connections open"));
        }
        let log = self.shop.path().join("journal.db-wal").metadata().map_or(0, |log| log.len());
        if log > LOG {
            self.odd.push(format!("the journal's log takes {} MB", log >> 20));
        }
    }

    /// Starts it once more, lets it finish, stops it, and compares. `restart` is left out where a mistake would keep it from
    /// starting, which would be noticed for the wrong reason.
    pub async fn end(mut self, restart: bool) -> Tally {
        self.inbox.set(Mood::Well);
        self.disk.shift_clock(0);
        self.history.shift(0);
        if restart && let Some(mut gateway) = self.start(&[]) {
            self.drain(&gateway).await;
            self.look(&gateway).await;
            if !gateway.stop().success() {
                self.odd.push("it does not stop in good order".to_owned());
            }
        }
        let heard = self.history.heard();
        let facts = self.facts();
        self.coverage.add("duplicates answered", heard.duplicates);
        self.coverage.note("conflicts answered", heard.conflicts);
        self.coverage.add("senders that hung up", heard.hung_up);
        self.coverage.note("answers cut off", heard.cut);
        self.coverage.note("answers 503", heard.refused);
        let mut tally = audit(&heard, &facts);
        tally.odd.append(&mut self.odd);
        tally
    }

    fn facts(&mut self) -> Facts {
        let database = self.shop.database();
        let sound: String = database.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        if sound != "ok" {
            self.odd.push(format!("SQLite finds the file damaged: {sound}"));
        }
        let mut facts = Facts { hopeless: self.hopeless, ..Facts::default() };
        let mut events = database.prepare("SELECT CAST(key AS TEXT), id, body FROM oncehook_events").unwrap();
        let mut rows = events.query([]).unwrap();
        while let Some(row) = rows.next().unwrap() {
            let (key, id, body): (String, [u8; 16], Vec<u8>) =
                (row.get(0).unwrap(), row.get(1).unwrap(), row.get(2).unwrap());
            let id = oncehook::event::EventId::from_bytes(id).to_string();
            facts.events.push((key, id, oncehook_verify::digest(&body)));
        }
        facts.effects.insert("orders", texts(&database, "SELECT key FROM orders"));
        if self.bug != Some(Bug::MarkFirst) {
            facts.effects.insert("shipments", texts(&database, "SELECT key FROM shipments"));
            facts.effects.insert("mails", self.inbox.applied());
        }
        let mut states = database.prepare("SELECT state, count(*) FROM oncehook_deliveries GROUP BY state").unwrap();
        facts.states = states
            .query_map([], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?.unsigned_abs())))
            .unwrap()
            .collect::<Result<BTreeMap<_, _>, _>>()
            .unwrap();
        let number =
            |sql: &str| -> u64 { database.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap().unsigned_abs() };
        facts.unexplained = number(
            "SELECT count(*) FROM oncehook_deliveries WHERE state = 'dead' AND (error IS NULL OR cause IS NULL)",
        );
        let dead = facts.states.get("dead").copied().unwrap_or(0);
        self.coverage.note("dead deliveries with a reason", dead - facts.unexplained.min(dead));
        self.coverage.note(
            "attempts that ended with their process",
            number("SELECT count(*) FROM oncehook_attempts WHERE outcome = 'lost'"),
        );
        self.coverage.add("keys merged into the ledger's table", number("SELECT count(*) FROM oncehook_keys"));
        for (what, layer) in
            [("duplicates that memory knew", "memory"), ("duplicates that the journal knew", "journal")]
        {
            let sql = format!("SELECT coalesce(sum({layer}), 0) FROM oncehook_duplicates");
            self.coverage.note(what, number(&sql));
        }
        let aliases = "SELECT a.alias, e.id FROM oncehook_spool_aliases a JOIN oncehook_events e ON e.seq = a.event";
        let mut aliases = database.prepare(aliases).unwrap();
        let id = |bytes: [u8; 16]| oncehook::event::EventId::from_bytes(bytes).to_string();
        facts.aliases = aliases
            .query_map([], |row| Ok((id(row.get(0)?), id(row.get(1)?))))
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap();
        facts
    }
}

fn texts(database: &Connection, sql: &str) -> Vec<String> {
    let mut statement = database.prepare(sql).unwrap();
    statement.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
}
