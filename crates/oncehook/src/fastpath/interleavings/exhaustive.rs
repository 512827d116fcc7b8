//! Every order of a short story: one event is sent four times to two nodes, and one fault comes at any point, or none.
//!
//! Left to itself the world goes on with the step that waits longest, and sends the next copy when nothing waits. A turn in
//! which something else happens (another step, the next copy already) is a deviation; all schedules with so many deviations
//! and at most one fault are played, one after the other, none left out. What goes wrong in a protocol of this kind
//! needs few deviations, and this finds it without luck.

use super::*;

/// To which node the copies are sent.
const STORY: [usize; 4] = [0, 1, 0, 1];

/// Turns that may differ from the usual course.
const DEVIATIONS: usize = 1;

/// What can go wrong, once.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The node ends and starts again. What was on its way may still arrive.
    Crash {
        node: usize,
        arrives: bool,
    },
    /// What was on the way to and from Redis is not answered.
    CutFromRedis {
        node: usize,
        arrives: bool,
    },
    Flush,
    /// Redis is what it was at the beginning: a replica that was behind takes over.
    Failover,
    /// The database is what it was at the beginning.
    Restore,
}

fn faults() -> impl Iterator<Item = Fault> {
    let nodes = (0..NODES).flat_map(|node| [false, true].map(|arrives| (node, arrives)));
    nodes.flat_map(|(node, arrives)| [Fault::Crash { node, arrives }, Fault::CutFromRedis { node, arrives }]).chain([
        Fault::Flush,
        Fault::Failover,
        Fault::Restore,
    ])
}

/// One turn.
#[derive(Debug, Clone, Copy)]
enum Turn {
    Step(usize),
    Send(usize),
    Connect(usize),
    Fault(Fault),
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
        while let Some((choice, of)) = self.taken.pop() {
            if choice + 1 < of {
                self.taken.push((choice + 1, of));
                return true;
            }
        }
        false
    }
}

/// Plays the schedule of a path. The error is an answer that was not true.
async fn play(path: &mut Path, deviations: usize, planted: bool, seen: &mut Seen) -> Result<(), String> {
    let world = World::new();
    let mut nodes: Vec<Node> = (0..NODES).map(|number| Node::start(number, &world, planted)).collect();
    finish_steps(&world).await;
    {
        let mut world = lock(&world);
        world.old_store = world.store.clone();
    }
    let (mut sent, mut left, mut fault_left) = (0, deviations, true);
    let mut said = Vec::new();
    loop {
        // The usual turn stands first.
        let waiting = lock(&world).steps.len();
        let mut turns: Vec<Turn> = (0..waiting).map(Turn::Step).collect();
        turns.extend(nodes.iter().position(|node| !node.is_connected()).map(Turn::Connect));
        turns.extend(STORY.get(sent).copied().map(Turn::Send));
        if left == 0 {
            turns.truncate(1);
        }
        let Some(usual) = turns.first().copied() else { break };
        let usual_turns = turns.len();
        turns.extend(faults().filter(|_| fault_left).map(Turn::Fault));
        let choice = path.choose(turns.len());
        left -= usize::from((1..usual_turns).contains(&choice));
        let turn = turns.get(choice).copied().unwrap_or(usual);
        said.push(format!("{turn:?}"));
        match turn {
            Turn::Step(at) => go_on(&world, at),
            Turn::Send(node) => {
                sent += 1;
                nodes[node].send(event("evt_1", 1));
            }
            Turn::Connect(node) => nodes[node].connect(&world),
            Turn::Fault(fault) => {
                fault_left = false;
                strike(&world, &mut nodes, fault, planted, seen).await;
            }
        }
        settle().await;
        if let Err(fault) = hear(&world, &mut nodes, seen).await {
            return Err(format!("{fault}, after\n{}", said.join("\n")));
        }
    }
    nodes.iter_mut().for_each(Node::crash);
    settle().await;
    Ok(())
}

async fn strike(world: &Shared, nodes: &mut [Node], fault: Fault, planted: bool, seen: &mut Seen) {
    match fault {
        Fault::Crash { node, arrives } => {
            seen.crashes += 1;
            nodes[node].crash();
            cut(world, |step| step.node == node, arrives);
            nodes[node] = Node::start(node, world, planted);
        }
        Fault::CutFromRedis { node, arrives } => {
            cut(world, |step| step.node == node && !step.to_journal, arrives);
            // It looks for Redis again after a rest.
            settle().await;
            tokio::time::advance(Duration::from_millis(150)).await;
        }
        Fault::Flush => lock(world).store.clear(),
        Fault::Failover => {
            let mut world = lock(world);
            world.store = world.old_store.clone();
        }
        Fault::Restore => {
            seen.restores += 1;
            restore(world, nodes);
        }
    }
}

/// Until nothing waits: nodes have read the keys that came last and found Redis.
async fn finish_steps(world: &Shared) {
    settle().await;
    while !lock(world).steps.is_empty() {
        go_on(world, 0);
        settle().await;
    }
}

fn deviations() -> usize {
    #[expect(clippy::disallowed_methods, reason = "how long a test looks is for whoever runs it to say")]
    let wanted = std::env::var("ONCEHOOK_TEST_DEVIATIONS").ok().and_then(|wanted| wanted.parse().ok());
    wanted.unwrap_or(DEVIATIONS)
}

#[tokio::test(start_paused = true)]
async fn r17_every_schedule_of_a_short_story_with_one_fault_answers_the_truth() {
    let (mut path, mut seen, mut schedules) = (Path::default(), Seen::default(), 0_u64);
    loop {
        schedules += 1;
        if let Err(fault) = play(&mut path, deviations(), false, &mut seen).await {
            panic!("schedule {schedules}: {fault}");
        }
        if !path.advance() {
            break;
        }
    }
    println!("{schedules} schedules, {} deviations: {seen:?}", deviations());
    let Seen { journal, memory, redis, errors, restores, crashes, .. } = seen;
    for met in [journal, memory, redis, errors, restores, crashes] {
        assert!(met > 40, "{seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn r17_the_short_story_finds_out_facts_that_are_written_before_the_commit() {
    let (mut path, mut seen, mut schedules) = (Path::default(), Seen::default(), 0_u64);
    loop {
        schedules += 1;
        if let Err(fault) = play(&mut path, deviations(), true, &mut seen).await {
            assert!(fault.contains("from Redis"), "{fault}");
            println!("schedule {schedules}: {fault}");
            return;
        }
        assert!(path.advance(), "the planted mistake was not found in {schedules} schedules");
    }
}
