//! Two nodes, one journal, one Redis, and whatever can happen between them: in every order that chance comes up
//! with, and in every order there is for a short story.
//!
//! A crash, a flush, a failover to a stale replica, a restore of the database from an earlier time, or mere time
//! may come between any two steps of journal and store (`model`). After each turn, every answer that was given must
//! name an event that is in the journal at that moment.
//!
//! A schedule of chance is made of a seed. The short story: one event is sent four times to two nodes, and one
//! fault comes at any point, or none. Left to itself the world goes on with the step that waits longest, and sends
//! the next copy when nothing waits. A turn in which something else happens (another step, the next copy already)
//! is a deviation; all schedules with a given number of deviations and at most one fault are played, one after the
//! other, none left out. What goes wrong in a protocol of this kind needs few deviations, and this finds it without
//! luck.

use std::collections::BTreeMap;
use std::time::Duration;

use oncehook_testkit::random::{Random, scale};

use super::model::{Node, Scene, Step};
use super::tests::{event, settle};
use super::*;

const NODES: usize = 2;

/// Turns of a schedule of chance.
const TURNS: usize = 120;

/// To which node the copies of the short story are sent.
const STORY: [usize; 4] = [0, 1, 0, 1];

/// What happens next.
#[derive(Debug, Clone, Copy)]
enum Turn {
    /// A node is sent an event of this key and digest.
    Send(usize, &'static str, u8),
    Step(usize),
    Connect(usize),
    Millis(u64),
    BackUp,
    /// The node ends and starts again. The flag: what was on its way still arrives.
    Crash(usize, bool),
    /// What was on the way of a node to and from Redis is not answered. The flag: it still arrives.
    Cut(usize, bool),
    Flush,
    FailOver,
    Restore,
}

/// What schedules came to, so that the tests can see that they were about something.
type Seen = BTreeMap<&'static str, usize>;

struct Play<'s> {
    scene: Scene,
    nodes: Vec<Node>,
    planted: bool,
    taken: Vec<Turn>,
    seen: &'s mut Seen,
}

impl<'s> Play<'s> {
    fn new(planted: bool, seen: &'s mut Seen) -> Self {
        let scene = Scene::default();
        let nodes = (0..NODES).map(|node| Node::start(node, &scene, planted)).collect();
        Self { scene, nodes, planted, taken: Vec::new(), seen }
    }

    fn see(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// Takes a turn, hears the answers that have come, and judges them. The error is an answer that was not true.
    async fn take(&mut self, turn: Turn) -> Result<(), String> {
        self.taken.push(turn);
        match turn {
            Turn::Send(node, key, digest) => self.nodes[node].send(event(key, digest)),
            Turn::Step(at) => drop(self.scene.go_on(at)),
            Turn::Connect(node) => self.nodes[node].connect(),
            Turn::Millis(millis) => tokio::time::advance(Duration::from_millis(millis)).await,
            Turn::BackUp => self.scene.lock().back_up(),
            Turn::Crash(node, late) => {
                self.see("crash");
                self.nodes[node].crash();
                self.scene.cut(|step| step.node == node, late);
                self.nodes[node] = Node::start(node, &self.scene, self.planted);
            }
            Turn::Cut(node, late) => self.scene.cut(|step| step.node == node && !step.to_journal, late),
            Turn::Flush => self.scene.lock().store.clear(),
            Turn::FailOver => self.scene.lock().fail_over(),
            Turn::Restore => {
                self.see("restore");
                self.scene.lock().restore();
                self.nodes.iter().for_each(|node| node.incarnation().doubt());
                self.scene.cut(|step| step.to_journal, false);
            }
        }
        settle().await;
        for node in 0..NODES {
            for (event, answer) in std::mem::take(&mut self.nodes[node].requests) {
                if !answer.is_finished() {
                    self.nodes[node].requests.push((event, answer));
                    continue;
                }
                match answer.await.unwrap() {
                    Ok(settled) => self.judge(&event, &settled)?,
                    Err(_) => self.see("error"),
                }
            }
        }
        Ok(())
    }

    /// An answer must be true at the moment it is given.
    fn judge(&mut self, event: &NewEvent, settled: &Settled) -> Result<(), String> {
        let (Appended { id, verdict, .. }, layer) = (settled.receipt[0], settled.layer);
        let committed = self.scene.lock().committed.get(&event.key).copied();
        let fault = match committed {
            None => "it is not in the journal",
            Some((first, _)) if first != id => "this is another event",
            Some((_, digest)) if (digest == event.digest) == (verdict == Verdict::Conflict) => {
                "its body says otherwise"
            }
            Some(_) => {
                self.see(layer.as_str());
                self.see(verdict.as_str());
                return Ok(());
            }
        };
        let (key, taken) = (event.key.display(), &self.taken);
        Err(format!("{key} was answered {verdict:?} from {layer:?}, but {fault}, after\n{taken:#?}"))
    }
}

/// All tasks of a schedule end with it.
impl Drop for Play<'_> {
    fn drop(&mut self) {
        self.nodes.iter_mut().for_each(Node::crash);
    }
}

/// Lets such steps happen, one after the other, until none waits.
async fn go_on_with(scene: &Scene, which: impl Fn(&Step) -> bool) {
    settle().await;
    while let Some(at) = { scene.lock().steps.iter().position(&which) } {
        scene.go_on(at);
        settle().await;
    }
}

/// Lets processes that have just started find Redis, as they nearly always do.
async fn find_redis(scene: &Scene) {
    go_on_with(scene, |step| !step.to_journal).await;
}

/// Plays the schedule of a seed.
async fn play_seed(seed: u64, planted: bool, seen: &mut Seen) -> Result<(), String> {
    let mut dice = Random::new(seed);
    let mut play = Play::new(planted, seen);
    find_redis(&play.scene).await;
    for _ in 0..TURNS {
        let (what, node) = (dice.below(100), *dice.pick(&[0, 1]));
        let turn = match what {
            0..=24 => {
                let key = dice.pick(&["evt_1", "evt_2", "evt_3", "evt_4"]);
                Turn::Send(node, key, if dice.below(8) == 0 { 2 } else { 1 })
            }
            25..=84 => match play.scene.lock().steps.len() as u64 {
                0 => Turn::Millis(0),
                // Half of the time the one that waits longest, or hardly anything would ever be finished.
                waiting => Turn::Step(if dice.below(2) == 0 { 0 } else { dice.below(waiting) as usize }),
            },
            85..=87 => Turn::Flush,
            88..=89 => Turn::FailOver,
            90..=91 => Turn::BackUp,
            92..=93 => Turn::Crash(node, dice.below(2) == 0),
            94..=95 => Turn::Restore,
            96..=97 => Turn::Cut(node, dice.below(2) == 0),
            _ => Turn::Millis(*dice.pick(&[2, 4, 150, 2_500])),
        };
        play.take(turn).await?;
        if matches!(turn, Turn::Crash(..)) {
            find_redis(&play.scene).await;
            // What was answered meanwhile is heard before anything else happens.
            play.take(Turn::Millis(0)).await?;
        }
        // A node that lost the database finds it again at some time.
        if play.nodes[node].incarnation().era().is_none() && dice.below(3) == 0 {
            play.take(Turn::Connect(node)).await?;
        }
    }
    Ok(())
}

/// What can go wrong in the short story, once.
fn faults() -> impl Iterator<Item = Turn> {
    let nodes = (0..NODES).flat_map(|node| [false, true].map(|late| (node, late)));
    nodes.flat_map(|(node, late)| [Turn::Crash(node, late), Turn::Cut(node, late)]).chain([
        Turn::Flush,
        Turn::FailOver,
        Turn::Restore,
    ])
}

/// A path through the tree of schedules: which turn was taken at each point, of how many.
#[derive(Default)]
struct Path {
    taken: Vec<(usize, usize)>,
    at: usize,
}

impl Path {
    /// The next choice: what the path says, or the usual turn where it is new.
    fn choose(&mut self, of: usize) -> usize {
        if self.at == self.taken.len() {
            self.taken.push((0, of));
        }
        let (choice, known) = self.taken[self.at];
        assert_eq!(known, of, "the same turns lead to the same world");
        self.at += 1;
        choice
    }

    /// Goes on to the next schedule; `false` after the last.
    fn advance(&mut self) -> bool {
        self.at = 0;
        while self.taken.pop_if(|(choice, of)| *choice + 1 == *of).is_some() {}
        self.taken.last_mut().map(|(choice, _)| *choice += 1).is_some()
    }
}

/// Plays the schedule of a path through the short story.
async fn play_path(path: &mut Path, deviations: usize, planted: bool, seen: &mut Seen) -> Result<(), String> {
    let mut play = Play::new(planted, seen);
    // Nodes read the keys that came last and find Redis.
    go_on_with(&play.scene, |_| true).await;
    play.scene.lock().back_up();
    let (mut sent, mut left, mut fault_left) = (0, deviations, true);
    loop {
        // The usual turn stands first.
        let mut turns: Vec<Turn> = (0..play.scene.lock().steps.len()).map(Turn::Step).collect();
        turns.extend(play.nodes.iter().position(|node| node.incarnation().era().is_none()).map(Turn::Connect));
        turns.extend(STORY.get(sent).map(|node| Turn::Send(*node, "evt_1", 1)));
        if left == 0 {
            turns.truncate(1);
        }
        let usual = turns.len();
        if usual == 0 {
            return Ok(());
        }
        turns.extend(faults().filter(|_| fault_left));
        let choice = path.choose(turns.len());
        let turn = turns[choice];
        left -= usize::from((1..usual).contains(&choice));
        fault_left &= choice < usual;
        sent += usize::from(matches!(turn, Turn::Send(..)));
        play.take(turn).await?;
        if matches!(turn, Turn::Cut(..)) {
            // It looks for Redis again after a rest.
            play.take(Turn::Millis(150)).await?;
        }
    }
}

/// Plays schedules of chance.
async fn by_chance(planted: bool) -> Result<Seen, String> {
    let mut seen = Seen::new();
    for seed in 0..1_000 * scale() as u64 {
        play_seed(seed, planted, &mut seen).await.map_err(|fault| format!("seed {seed}: {fault}"))?;
        *seen.entry("schedule").or_default() += 1;
    }
    Ok(seen)
}

/// Plays every schedule of the short story.
async fn all_of_the_story(planted: bool) -> Result<Seen, String> {
    #[expect(clippy::disallowed_methods, reason = "a test's size is no configuration of the gateway")]
    let deviations = std::env::var("ONCEHOOK_TEST_DEVIATIONS").map_or(1, |wanted| wanted.parse().unwrap());
    let (mut path, mut seen) = (Path::default(), Seen::new());
    loop {
        play_path(&mut path, deviations, planted, &mut seen).await?;
        *seen.entry("schedule").or_default() += 1;
        if !path.advance() {
            return Ok(seen);
        }
    }
}

/// No answer was false, and all of this was met, and often. With the planted mistake, a false answer is found.
async fn check(play: impl AsyncFn(bool) -> Result<Seen, String>, met: &[&str]) {
    let seen = play(false).await.unwrap_or_else(|fault| panic!("{fault}"));
    println!("{seen:?}");
    for what in met {
        assert!(seen.get(what).is_some_and(|times| *times > 40), "{what}: {seen:?}");
    }
    let fault = play(true).await.expect_err("the planted mistake was not found");
    assert!(fault.contains("from Redis"), "{fault}");
}

#[tokio::test(start_paused = true)]
async fn r17_no_schedule_answers_for_an_event_that_is_not_durable() {
    check(by_chance, &["journal", "memory", "redis", "conflict", "error", "restore", "crash"]).await;
}

#[tokio::test(start_paused = true)]
async fn r17_every_schedule_of_a_short_story_with_one_fault_answers_the_truth() {
    check(all_of_the_story, &["journal", "memory", "redis", "error", "restore", "crash"]).await;
}
