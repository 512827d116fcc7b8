//! What a proof came to, as the last line of its output and as `docs/PROOF.md`.
//!
//! Promises: the page says what was seen in this run and nothing else; its first part, which is the same for every run, stands in
//! `PROOF.head.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use oncehook::planted::Bug;

use super::audit::Tally;
use super::planted::Search;

/// One row of the figures.
#[derive(Debug, Default)]
pub struct Row {
    /// The scenario.
    pub name: String,
    /// What happened, how often.
    pub rounds: String,
    /// What came of it.
    pub tally: Tally,
    /// Its own seed.
    pub seed: u64,
    /// How long it took.
    pub took: Duration,
}

impl Row {
    /// The row for people at a terminal, and what was odd.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let Tally { acked, lost, doubled, conflicted, dead, odd, examples, .. } = &self.tally;
        let row = format!(
            "{:46} {:>18}: acked {acked} lost {lost} doubled {doubled} conflicted {conflicted} dead {dead}, seed {}, {:.0} s",
            self.name,
            self.rounds,
            self.seed,
            self.took.as_secs_f64()
        );
        let odd = odd.iter().take(5).map(|odd| format!("  odd: {odd}"));
        let examples = examples.iter().take(10).map(|example| format!("  {example}"));
        std::iter::once(row).chain(odd).chain(examples).collect()
    }
}

/// Simulated histories.
#[derive(Debug, Default)]
pub struct Simulated {
    /// How many there were.
    pub played: u64,
    /// How many were the same the second time.
    pub repeated: u64,
    /// What each was.
    pub hashes: Vec<String>,
}

/// All that is known at the end.
#[derive(Debug, Default)]
pub struct Report {
    /// The seed of all seeds.
    pub seed: u64,
    /// How long it took, without building.
    pub took: Duration,
    /// The scenarios.
    pub rows: Vec<Row>,
    /// The planted mistakes.
    pub searches: Vec<Search>,
    /// How often rare things happened.
    pub coverage: BTreeMap<&'static str, u64>,
    /// The simulation.
    pub histories: Simulated,
    /// The table of faults.
    pub faults: String,
}

impl Report {
    /// Everything together.
    #[must_use]
    pub fn total(&self) -> Tally {
        let mut total = Tally::default();
        self.rows.iter().for_each(|row| total.add(&row.tally));
        total
    }

    /// The last line. Each mistake counts once for each journal that made it, and is caught there if everyone who looked for it
    /// has found it.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut sought: BTreeMap<_, bool> = BTreeMap::new();
        for search in &self.searches {
            *sought.entry((search.journal, search.bug.map(Bug::as_str))).or_insert(true) &= search.is_caught();
        }
        let caught = sought.values().filter(|caught| **caught).count();
        let total = self.total();
        format!(
            "prove: acked {} lost {} doubled {} planted {caught}/{} seeds {}",
            total.acked,
            total.lost,
            total.doubled,
            sought.len(),
            self.histories.played
        )
    }

    /// The page.
    #[must_use]
    pub fn document(&self) -> String {
        let mut text = include_str!("PROOF.head.md").to_owned();
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let _ = writeln!(
            text,
            "## The latest run\n\n{}, {cores} cores, {} MB of memory, {:.0} minutes without building, seed {}.\n\n```\n{}\n```\n",
            processor(),
            memory_megabytes(),
            self.took.as_secs_f64() / 60.0,
            self.seed,
            self.summary()
        );
        text.push_str("| scenario | rounds | acked | lost | doubled | conflicted | dead | seed | seconds |\n| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
        for Row { name, rounds, tally, seed, took } in &self.rows {
            let Tally { acked, lost, doubled, conflicted, dead, .. } = tally;
            let _ = writeln!(
                text,
                "| {name} | {rounds} | {acked} | {lost} | {doubled} | {conflicted} | {dead} | {seed} | {:.0} |",
                took.as_secs_f64()
            );
        }
        text.push_str("\nDead are the deliveries of a route that can never succeed, one for each event; elsewhere nothing may be dead.\n");
        text.push_str("\n### Planted mistakes\n\n| mistake | journal | scenario | noticed | lost | doubled |\n| --- | --- | --- | --- | ---: | ---: |\n");
        for search in &self.searches {
            let name = search.bug.map_or("", Bug::as_str);
            let noticed = if search.is_caught() { "yes" } else { "NO" };
            let Tally { lost, doubled, .. } = &search.tally;
            let Search { journal, scenario, .. } = search;
            let _ = writeln!(text, "| {name} | {journal} | {scenario} | {noticed} | {lost} | {doubled} |");
        }
        text.push_str("\n### Rare things, and how often they happened\n\n| what | times |\n| --- | ---: |\n");
        for (what, count) in &self.coverage {
            let _ = writeln!(text, "| {what} | {count} |");
        }
        let Simulated { played, repeated, hashes } = &self.histories;
        let first: Vec<String> = hashes.iter().take(5).map(|hash| format!("`{hash}`")).collect();
        let all = oncehook_verify::digest(hashes.concat().as_bytes());
        let _ = writeln!(
            text,
            "\n### Histories\n\n{played} simulated histories, each played twice; {repeated} were the same the second time. The first have the hashes {}; all together have `{}`.\n",
            first.join(", "),
            hex::encode(&all[..8])
        );
        text.push_str("## Faults\n\n");
        text.push_str(&self.faults);
        text
    }
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or_else(|| "an unknown processor".to_owned(), |(_, name)| name.trim().to_owned())
}

fn memory_megabytes() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total =
        info.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().split(' ').next()?.parse::<u64>().ok());
    total.unwrap_or(0) / 1_024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r47_the_last_line_counts_a_mistake_only_if_all_who_looked_have_found_it() {
        let search = |bug, journal, doubled| {
            let tally = Tally { doubled, ..Tally::default() };
            Search { bug: Some(bug), journal, scenario: "races", tally }
        };
        let row = |acked, lost| Row { tally: Tally { acked, lost, ..Tally::default() }, ..Row::default() };
        let mut report = Report {
            rows: vec![row(40, 0), row(2, 1)],
            searches: vec![
                search(Bug::NoFence, "SQLite", 1),
                search(Bug::ShortMemory, "SQLite", 3),
                search(Bug::NoFence, "SQLite", 2),
                search(Bug::NoFence, "MariaDB", 2),
            ],
            histories: Simulated { played: 7, ..Simulated::default() },
            ..Report::default()
        };
        assert_eq!(report.summary(), "prove: acked 42 lost 1 doubled 0 planted 3/3 seeds 7");
        report.searches[2].tally.doubled = 0;
        assert_eq!(report.summary(), "prove: acked 42 lost 1 doubled 0 planted 2/3 seeds 7");
        let page = report.document();
        assert!(page.contains("| no-fence | SQLite | races | NO | 0 | 0 |"), "{page}");
    }
}
