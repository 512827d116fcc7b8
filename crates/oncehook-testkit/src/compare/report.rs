//! What a run found, for people (a table, `bench/REPORT.md`) and for programs (`bench/report.json`).

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::Plan;
use super::goals::{self, Goal};
use super::growth::Growth;
use super::load::Load;
use super::obstacles::Obstacles;
use super::stack::Stack;
use super::throughput::SIZES;

/// Requests a second, and what each costs the whole deployment, databases included and the load generator not.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Accepts {
    pub(super) stack: Stack,
    pub(super) load: Load,
    pub(super) size: usize,
    pub(super) rate: f64,
    /// The rate of every round.
    pub(super) rounds: Vec<f64>,
    /// The rate of a ceiling that took turns with it, where one did; and that of every round.
    pub(super) ceiling: Option<f64>,
    pub(super) ceiling_rounds: Vec<f64>,
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) cpu_micros: f64,
    /// What a request cost the load generator.
    pub(super) generator_micros: f64,
    pub(super) written: f64,
    /// The most that the gateway's own process ever had; nothing of a peer.
    pub(super) gateway_memory: f64,
    pub(super) refused: u64,
    pub(super) stolen: f64,
}

/// Milliseconds from being due to the answer, at a fixed rate.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Latency {
    pub(super) stack: Stack,
    pub(super) rate: f64,
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) p999: f64,
    pub(super) max: f64,
    pub(super) stolen: f64,
}

/// A short time of five times the rate.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Spike {
    pub(super) stack: Stack,
    pub(super) rate: f64,
    pub(super) seconds: f64,
    pub(super) p99: f64,
    /// What every round is judged by.
    pub(super) rounds: Vec<f64>,
    pub(super) max: f64,
    pub(super) refused: u64,
    pub(super) stolen: f64,
}

impl Spike {
    /// The p99 if nothing was refused.
    pub(super) fn judged(&self) -> f64 {
        if self.refused == 0 { self.p99 } else { f64::INFINITY }
    }
}

/// Effects a second.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Effects {
    pub(super) stack: Stack,
    pub(super) drained: f64,
    pub(super) sustained: f64,
    pub(super) posted: Option<f64>,
    pub(super) bare: Option<f64>,
    /// Every round's figures.
    pub(super) drained_rounds: Vec<f64>,
    pub(super) sustained_rounds: Vec<f64>,
    pub(super) bare_rounds: Vec<f64>,
    pub(super) stolen: f64,
}

/// Where and when.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Machine {
    pub(super) processor: String,
    pub(super) cores: usize,
    pub(super) kernel: String,
    pub(super) commit: String,
    /// How long all of it took.
    pub seconds: u64,
    /// The share of processor time that the hypervisor gave to others.
    pub stolen: f64,
}

impl Machine {
    /// This one, and the commit that is checked out in a directory.
    #[must_use]
    pub fn here(repository: &Path) -> Self {
        let said = |program: &str, arguments: &[&str]| {
            let ran = Command::new(program).args(arguments).current_dir(repository).output();
            ran.map_or_else(|_| "unknown".to_owned(), |ran| String::from_utf8_lossy(&ran.stdout).trim().to_owned())
        };
        let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let processor = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Self {
            processor: processor.map_or_else(|| "unknown".to_owned(), |(_, name)| name.to_owned()),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: said("uname", &["-sr"]),
            commit: said("git", &["describe", "--always", "--dirty"]),
            seconds: 0,
            stolen: 0.0,
        }
    }
}

/// A run.
#[derive(Debug, Serialize)]
pub struct Report {
    pub(super) machine: Machine,
    pub(super) rounds: usize,
    pub(super) connections: usize,
    pub(super) accepts: Vec<Accepts>,
    pub(super) latency: Vec<Latency>,
    /// Every round of the rows whose latency is a goal, not the median alone.
    pub(super) latency_rounds: Vec<Latency>,
    /// The first is the goal's.
    pub(super) spikes: Vec<Spike>,
    /// Idle, and the most under load, in bytes.
    pub(super) memory: Option<(f64, f64)>,
    pub(super) effects: Vec<Effects>,
    #[serde(skip)]
    pub(super) growth: Growth,
    pub(super) goals: Vec<Goal>,
    #[serde(skip)]
    pub(super) obstacles: Obstacles,
}

impl Report {
    pub(super) fn new(plan: &Plan) -> Self {
        Self {
            machine: Machine::here(&plan.repository),
            rounds: plan.rounds,
            connections: plan.connections,
            accepts: Vec::new(),
            latency: Vec::new(),
            latency_rounds: Vec::new(),
            spikes: Vec::new(),
            memory: None,
            effects: Vec::new(),
            growth: Growth::read(&plan.repository.join("bench")),
            goals: Vec::new(),
            obstacles: Obstacles::read(&plan.repository),
        }
    }

    pub(super) fn accepts(&self, stack: Stack, load: Load) -> Option<&Accepts> {
        self.accepts.iter().find(|accepts| accepts.stack == stack && accepts.load == load && accepts.size == SIZES[0])
    }

    pub(super) fn judge(&mut self) {
        self.goals = goals::judge(self);
    }

    /// As Markdown.
    #[must_use]
    pub fn to_markdown(&self) -> String {
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, text: &mut String) -> std::fmt::Result {
        let machine = &self.machine;
        writeln!(text, "# Benchmark report\n")?;
        writeln!(
            text,
            "Written by `make bench` at commit {}: {}, {} cores, {}, {} s in all, {:.1} % of the time stolen by the\n\
             hypervisor. {} connections, medians of {} rounds (5 KB bodies: one round), load generator on the same cores.\n",
            machine.commit,
            machine.processor,
            machine.cores,
            machine.kernel,
            machine.seconds,
            machine.stolen * 100.0,
            self.connections,
            self.rounds
        )?;
        for size in SIZES {
            self.write_accepts(text, size)?;
        }
        self.write_latency(text)?;
        self.write_effects(text)?;
        self.write_goals(text)
    }

    fn write_accepts(&self, text: &mut String, size: usize) -> std::fmt::Result {
        let ceiling = self.accepts.iter().find(|row| row.stack == Stack::Ceiling && row.size == size);
        let ceiling = ceiling.map_or(f64::NAN, |row| row.rate);
        writeln!(text, "## Accepting, {size}-byte bodies, as fast as answers come\n")?;
        writeln!(
            text,
            "| stack | load | accepts/s | of the ceiling | p50 ms | p99 ms | CPU µs/request | bytes written/request | gateway MB | stolen % |"
        )?;
        writeln!(text, "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")?;
        for row in self.accepts.iter().filter(|row| row.size == size) {
            let refused = if row.refused > 0 { format!(" ({} refused)", row.refused) } else { String::new() };
            let memory = match row.gateway_memory {
                none if none <= 0.0 => "–".to_owned(),
                bytes => format!("{:.0}", bytes / 1e6),
            };
            writeln!(
                text,
                "| {} | {} | {:.0}{refused} | {:.2} | {:.1} | {:.1} | {:.1} | {:.0} | {memory} | {:.1} |",
                row.stack.name(),
                row.load.name(),
                row.rate,
                row.rate / row.ceiling.unwrap_or(ceiling),
                row.p50,
                row.p99,
                row.cpu_micros,
                row.written,
                row.stolen * 100.0
            )?;
        }
        writeln!(
            text,
            "\nCPU and bytes are of the whole deployment: gateway, database, Redis, workers; memory is the most that the gateway's \
             own process had. Storms took turns with a ceiling of their own, and are a part of that."
        )?;
        if let Some(ceiling) = self.accepts.iter().find(|row| row.stack == Stack::Ceiling && row.size == size) {
            writeln!(
                text,
                "A request costs the ceiling {:.1} µs of CPU, and the load generator {:.1} µs beside it on the same cores.",
                ceiling.cpu_micros, ceiling.generator_micros
            )?;
        }
        writeln!(text)
    }

    fn write_latency(&self, text: &mut String) -> std::fmt::Result {
        writeln!(text, "## Acknowledging at a fixed rate\n\nTimes count from when a request was due.\n")?;
        writeln!(text, "| stack | offered/s | p50 ms | p99 ms | p99.9 ms | max ms | stolen % |")?;
        writeln!(text, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |")?;
        for row in &self.latency {
            writeln!(
                text,
                "| {} | {:.0} | {:.2} | {:.2} | {:.2} | {:.2} | {:.1} |",
                row.stack.name(),
                row.rate,
                row.p50,
                row.p99,
                row.p999,
                row.max,
                row.stolen * 100.0
            )?;
        }
        let rounds = |stack| {
            let rows = self.latency_rounds.iter().filter(|row| row.stack == stack);
            rows.map(|row| format!("{:.1} ({:.1} % stolen)", row.p99, row.stolen * 100.0))
                .collect::<Vec<_>>()
                .join(", ")
        };
        writeln!(
            text,
            "\nEvery round's p99 in ms: SQLite {}; ceiling {}.",
            rounds(Stack::SQLITE),
            rounds(Stack::Ceiling)
        )?;
        writeln!(text, "\nFive times as much at once, after a steady 10,000/s, over 1,024 connections:\n")?;
        writeln!(text, "| stack | offered/s | for s | p99 ms | every round | max ms | refused | stolen % |")?;
        writeln!(text, "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |")?;
        for row in &self.spikes {
            let rounds: Vec<String> = row.rounds.iter().map(|p99| format!("{p99:.0}")).collect();
            writeln!(
                text,
                "| {} | {:.0} | {:.1} | {:.1} | {} | {:.1} | {} | {:.1} |",
                row.stack.name(),
                row.rate,
                row.seconds,
                row.p99,
                rounds.join(", "),
                row.max,
                row.refused,
                row.stolen * 100.0
            )?;
        }
        if let Some((idle, most)) = self.memory {
            writeln!(
                text,
                "\nThe gateway's memory on SQLite: {:.0} MB idle, {:.0} MB at most while 64 connections push 5 KB bodies for a minute.",
                idle / 1e6,
                most / 1e6
            )?;
        }
        writeln!(text)
    }

    fn write_effects(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "## Taking effect\n\nOne order per event, by a SQL handler; over HTTP: posted to a receiver that answers at once.\n"
        )?;
        writeln!(
            text,
            "| stack | from a backlog/s | of bare | accepting and applying/s | posted over HTTP/s | bare statements/s | stolen % |"
        )?;
        writeln!(text, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |")?;
        for row in &self.effects {
            let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.0}"));
            let of_bare = row.bare.map_or_else(|| "–".to_owned(), |bare| format!("{:.2}", row.drained / bare));
            writeln!(
                text,
                "| {} | {:.0} | {of_bare} | {:.0} | {} | {} | {:.1} |",
                row.stack.name(),
                row.drained,
                row.sustained,
                number(row.posted),
                number(row.bare),
                row.stolen * 100.0
            )?;
        }
        writeln!(text)
    }

    fn write_goals(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "## Goals\n\n| measure | must | measured | every round | | moonshot |\n| --- | ---: | ---: | --- | --- | ---: |"
        )?;
        for goal in &self.goals {
            let sign = if goal.less_is_better { "≤" } else { "≥" };
            let reached = goal.reached.map_or_else(|| "not measured".to_owned(), |reached| format!("{reached:.2}"));
            let rounds: Vec<String> = goal.rounds.iter().map(|round| format!("{round:.2}")).collect();
            writeln!(
                text,
                "| {} | {sign} {} | {reached} | {} | {} | {sign} {} |",
                goal.measure,
                goal.must,
                rounds.join(", "),
                goal.verdict(),
                goal.moonshot
            )?;
        }
        let missed: Vec<&Goal> = self.goals.iter().filter(|goal| !goal.met()).collect();
        if !missed.is_empty() {
            writeln!(text, "\nWhat is in the way, as docs/PERFORMANCE.md has it:\n")?;
        }
        for goal in missed {
            let way = self.obstacles.of(goal.measure).unwrap_or("nothing is written down yet.");
            writeln!(text, "- {}: {way}", goal.measure)?;
        }
        writeln!(text, "\n{}", self.verdict())
    }

    /// The last two lines.
    #[must_use]
    pub fn verdict(&self) -> String {
        let count = |holds: fn(&Goal) -> bool| self.goals.iter().filter(|goal| holds(goal)).count();
        let all = self.goals.len();
        format!("moonshots: {} of {all} met\ngoals: {} of {all} met", count(Goal::moon), count(Goal::met))
    }

    /// Leaves report, figures and plots in a directory.
    pub fn save(&self, directory: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(directory)?;
        let plots = super::plot::save(self, directory)?;
        let mut text = self.to_markdown();
        for (title, file) in plots {
            text.push_str(&format!("\n![{title}]({file})\n"));
        }
        std::fs::write(directory.join("REPORT.md"), text)?;
        std::fs::write(directory.join("report.json"), serde_json::to_vec_pretty(self)?)?;
        Ok(())
    }
}

/// The value in the middle.
pub(super) fn median(values: Vec<f64>) -> f64 {
    median_by(values, |value| *value)
}

/// The measurement in the middle.
pub(super) fn median_by<T>(mut values: Vec<T>, figure: impl Fn(&T) -> f64) -> T {
    values.sort_by(|a, b| figure(a).total_cmp(&figure(b)));
    let middle = values.len() / 2;
    values.swap_remove(middle)
}
