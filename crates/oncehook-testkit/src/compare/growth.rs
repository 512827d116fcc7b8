//! What a long history costs: the figures of `make bench-growth` (`bench/growth.json`), and what people read of them
//! (`bench/GROWTH.md` and its pictures).
//!
//! Promises: every round that was measured is kept, ratios are medians over rounds of a store with a history against one
//! without in the same round, and a goal that was not measured at its size is not met. Each journal's part is replaced as a
//! whole, so that one journal can be measured without the other.
//! Does not: measure anything (`effects growth` does).

use std::fmt::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::plot::{self, Series};
use super::report::{Machine, median};

/// The size that the goals are about.
const GOAL: usize = 10_000_000;

/// The name of the file of figures, and that of the report.
pub const FIGURES: &str = "growth.json";
const REPORT: &str = "GROWTH.md";

/// Everything that was measured.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Growth {
    /// One part for each journal.
    pub journals: Vec<Journal>,
}

/// What one journal did.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Journal {
    /// As the report names it.
    pub name: String,
    /// Where and when.
    pub machine: Machine,
    /// One for each size of the history, growing.
    pub steps: Vec<Step>,
    /// One for each size of a backlog, growing.
    pub backlogs: Vec<Backlog>,
    /// While old events are forgotten.
    pub forgetting: Option<Forgetting>,
}

/// A store with a history of one size.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Step {
    /// Events of the history.
    pub stored: usize,
    /// How long it took to load what this step added.
    pub load_seconds: f64,
    /// How long it took until the search index was complete after that.
    pub index_seconds: f64,
    /// From the start of the gateway to its being ready, each time, with this history.
    pub start_seconds: Vec<f64>,
    /// The same without one.
    pub empty_start_seconds: Vec<f64>,
    /// How fast events are accepted and take effect.
    pub rates: Vec<Rates>,
    /// Pages of the list, one for each filter.
    pub lists: Vec<List>,
    /// The share of processor time that the hypervisor gave to others meanwhile.
    pub stolen: f64,
}

/// Accepting and taking effect, with one kind of keys.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Rates {
    /// Whether the keys are scattered; otherwise they grow with time.
    pub random: bool,
    /// Accepts per second of the first run, which does not count: a journal that was just opened still reads its keys.
    #[serde(default)]
    pub first: Option<Pair>,
    /// Accepts per second, one pair for each round.
    pub accepts: Vec<Pair>,
    /// Effects per second (claim, statement, settlement), one pair for each round.
    pub effects: Vec<Pair>,
}

/// Two rates of one round.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Pair {
    /// Without a history.
    pub empty: f64,
    /// With it.
    pub stored: f64,
}

/// A page of the list with one filter.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct List {
    /// What is asked.
    pub filter: String,
    /// Events on the page, the same in both.
    pub found: usize,
    /// Milliseconds in a history of 10,000 events, the median.
    pub short_millis: f64,
    /// Milliseconds here.
    pub millis: f64,
}

/// A backlog that a gateway finds at its start and works off.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Backlog {
    /// How many events wait.
    pub waiting: usize,
    /// Effects per second over the whole of it.
    pub effects: f64,
    /// The most memory that the gateway had, in bytes.
    pub memory: f64,
}

/// Accepts per second, one pair of figures for each round.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Forgetting {
    /// While nothing is forgotten.
    pub without: Vec<f64>,
    /// While old events are forgotten.
    pub during: Vec<f64>,
    /// How many events were forgotten meanwhile.
    pub forgotten: usize,
}

impl Pair {
    fn ratio(&self) -> f64 {
        self.stored / self.empty
    }
}

impl Rates {
    fn ratios(&self) -> [f64; 2] {
        [&self.accepts, &self.effects].map(|pairs| median_of(pairs, Pair::ratio))
    }
}

impl List {
    fn ratio(&self) -> f64 {
        self.short_millis / self.millis
    }
}

impl Forgetting {
    fn ratio(&self) -> f64 {
        let ratios = self.without.iter().zip(&self.during).map(|(without, during)| during / without);
        median(ratios.collect())
    }
}

fn median_of(pairs: &[Pair], figure: impl Fn(&Pair) -> f64) -> f64 {
    if pairs.is_empty() { f64::NAN } else { median(pairs.iter().map(figure).collect()) }
}

impl Growth {
    /// The figures in a directory; none if there are none that can be read.
    #[must_use]
    pub fn read(directory: &Path) -> Self {
        let json = std::fs::read(directory.join(FIGURES)).ok();
        json.and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default()
    }

    /// Takes a journal's part in, instead of what there was of it.
    pub fn replace(&mut self, journal: Journal) {
        self.journals.retain(|other| other.name != journal.name);
        self.journals.push(journal);
    }

    /// The least of what is left of the speed, over journals, accepts and effects, at the size of the goals.
    #[must_use]
    pub fn kept(&self, random: bool) -> Option<f64> {
        let steps = self.at_goal()?;
        let rates = steps.iter().flat_map(|step| &step.rates).filter(|rates| rates.random == random);
        rates.flat_map(Rates::ratios).reduce(f64::min)
    }

    /// The same of the lists.
    #[must_use]
    pub fn lists_kept(&self) -> Option<f64> {
        self.at_goal()?.iter().flat_map(|step| &step.lists).map(List::ratio).reduce(f64::min)
    }

    /// Each journal at the size of the goals; none if one did not get there.
    fn at_goal(&self) -> Option<Vec<&Step>> {
        self.journals.iter().map(|journal| journal.steps.iter().find(|step| step.stored >= GOAL)).collect()
    }

    /// Leaves figures, report and pictures in a directory.
    pub fn save(&self, directory: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(directory)?;
        std::fs::write(directory.join(FIGURES), serde_json::to_vec_pretty(self)?)?;
        let mut text = self.to_markdown();
        for (title, file, picture) in self.pictures() {
            std::fs::write(directory.join(file), picture)?;
            text.push_str(&format!("\n![{title}]({file})\n"));
        }
        std::fs::write(directory.join(REPORT), text)?;
        Ok(())
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
        writeln!(
            text,
            "# A long history\n\n\
             Written by `make bench-growth`. A history is loaded with SQL, spread over the last days, with 200-byte bodies and \
             scattered keys; each rate\nis measured in turns with a store that has none, medians of the rounds. In one process, \
             without HTTP; lists, start-up, backlog and memory are of the real gateway.\n"
        )?;
        for journal in &self.journals {
            journal.write(text)?;
        }
        self.write_goals(text)
    }

    fn write_goals(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "## Goals at 10 million\n\n| measure (the worst of the journals) | reached | must | |\n| --- | ---: | ---: | --- |"
        )?;
        for (measure, reached, must) in [
            ("accepts and effects / without a history, time-ordered keys", self.kept(false), 0.9),
            ("accepts and effects / without a history, random keys", self.kept(true), 0.6),
            ("each single filter of the list / at 10,000 events", self.lists_kept(), 0.7),
        ] {
            let (said, verdict) = match reached {
                None => ("not measured".to_owned(), "**missed**".to_owned()),
                Some(reached) if reached >= must => (format!("{reached:.2}"), "met".to_owned()),
                Some(reached) => (format!("{reached:.2}"), format!("**missed** by {:.2}", must - reached)),
            };
            writeln!(text, "| {measure} | {said} | ≥ {must} | {verdict} |")?;
        }
        Ok(())
    }

    fn pictures(&self) -> Vec<(&'static str, &'static str, String)> {
        let rates = |of: fn(&Rates) -> &Vec<Pair>| -> Vec<Series> {
            let kinds = [(false, "time-ordered keys"), (true, "random keys")];
            let each = self.journals.iter().flat_map(|journal| kinds.map(|kind| (journal, kind)));
            each.map(|(journal, (random, kind))| {
                let rates = journal
                    .steps
                    .iter()
                    .filter_map(|step| Some((step.stored, step.rates.iter().find(|rates| rates.random == random)?)));
                let mut points: Vec<(f64, f64)> = Vec::new();
                for (stored, rates) in rates {
                    if points.is_empty() {
                        points.push((0.0, median_of(of(rates), |pair| pair.empty)));
                    }
                    points.push((stored as f64 / 1e6, median_of(of(rates), |pair| pair.stored)));
                }
                Series { name: format!("{}, {kind}", journal.name), points }
            })
            .collect()
        };
        let of_journals = |points: &dyn Fn(&Journal) -> Vec<(f64, f64)>| -> Vec<Series> {
            let each = self.journals.iter();
            each.map(|journal| Series { name: journal.name.clone(), points: points(journal) }).collect()
        };
        let start = of_journals(&|journal| {
            let steps = journal.steps.iter().filter(|step| !step.start_seconds.is_empty());
            steps.map(|step| (step.stored as f64 / 1e6, median(step.start_seconds.clone()))).collect()
        });
        let memory = of_journals(&|journal| {
            journal.backlogs.iter().map(|row| (row.waiting as f64 / 1e6, row.memory / 1e6)).collect()
        });
        let lists = self.journals.iter().filter_map(|journal| Some((journal, journal.steps.last()?)));
        let lists: Vec<(String, f64)> = lists
            .flat_map(|(journal, step)| {
                step.lists.iter().map(move |list| {
                    (format!("{}, {} stored: {}", journal.name, millions(step.stored), list.filter), list.ratio())
                })
            })
            .collect();
        let stored = "million events stored";
        vec![
            (
                "Accepts per second",
                "growth-accepts.svg",
                plot::lines("Accepts per second", stored, &rates(|rates| &rates.accepts)),
            ),
            (
                "Effects per second",
                "growth-effects.svg",
                plot::lines("Effects per second", stored, &rates(|rates| &rates.effects)),
            ),
            ("Lists", "growth-lists.svg", plot::bars("Speed of a page against 10,000 events", &lists, 2)),
            ("Start-up", "growth-start.svg", plot::lines("Seconds until the gateway is ready", stored, &start)),
            ("Memory", "growth-memory.svg", plot::lines("The gateway's memory, MB", "million events waiting", &memory)),
        ]
    }
}

fn millions(count: usize) -> String {
    format!("{} M", count as f64 / 1e6)
}

impl Journal {
    fn write(&self, text: &mut String) -> std::fmt::Result {
        let machine = &self.machine;
        writeln!(
            text,
            "## {}\n\nAt commit {}: {}, {} cores, {}, {} s in all, {:.1} % of the time stolen by the hypervisor.\n",
            self.name,
            machine.commit,
            machine.processor,
            machine.cores,
            machine.kernel,
            machine.seconds,
            machine.stolen * 100.0
        )?;
        self.write_rates(text)?;
        self.write_lists(text)?;
        self.write_starts(text)?;
        if !self.backlogs.is_empty() {
            writeln!(text, "| waiting | effects/s over the whole of it | most memory, MB |\n| ---: | ---: | ---: |")?;
            for row in &self.backlogs {
                writeln!(text, "| {} | {:.0} | {:.0} |", row.waiting, row.effects, row.memory / 1e6)?;
            }
            writeln!(text)?;
        }
        if let Some(forgetting) = &self.forgetting {
            writeln!(
                text,
                "While {} events were forgotten: {:.0} accepts/s instead of {:.0}, {:.2} of the speed.\n",
                forgetting.forgotten,
                median(forgetting.during.clone()),
                median(forgetting.without.clone()),
                forgetting.ratio()
            )?;
        }
        Ok(())
    }

    fn write_rates(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "| stored | keys | accepts/s | of empty | every round | first run, not counted | effects/s | of empty | every round | stolen % |\n\
             | ---: | --- | ---: | ---: | --- | ---: | ---: | ---: | --- | ---: |"
        )?;
        for (step, rates) in self.steps.iter().flat_map(|step| step.rates.iter().map(move |rates| (step, rates))) {
            let keys = if rates.random { "random" } else { "time-ordered" };
            let rounds =
                |pairs: &[Pair]| pairs.iter().map(|pair| format!("{:.2}", pair.ratio())).collect::<Vec<_>>().join(", ");
            let [accepts, effects] = rates.ratios();
            let first = rates.first.map_or_else(|| "–".to_owned(), |first| format!("{:.2}", first.ratio()));
            writeln!(
                text,
                "| {} | {keys} | {:.0} | {accepts:.2} | {} | {first} | {:.0} | {effects:.2} | {} | {:.1} |",
                millions(step.stored),
                median_of(&rates.accepts, |pair| pair.stored),
                rounds(&rates.accepts),
                median_of(&rates.effects, |pair| pair.stored),
                rounds(&rates.effects),
                step.stolen * 100.0
            )?;
        }
        writeln!(text)
    }

    fn write_lists(&self, text: &mut String) -> std::fmt::Result {
        let sizes: Vec<String> =
            self.steps.iter().map(|step| format!(" ms at {} | of the speed |", millions(step.stored))).collect();
        writeln!(text, "| page of the list by | events | ms at 10,000 |{}", sizes.concat())?;
        writeln!(text, "| --- | ---: | ---: |{}", " ---: | ---: |".repeat(sizes.len()))?;
        let Some(first) = self.steps.first() else { return writeln!(text) };
        for (row, list) in first.lists.iter().enumerate() {
            write!(text, "| {} | {} | {:.2} |", list.filter, list.found, list.short_millis)?;
            for list in self.steps.iter().filter_map(|step| step.lists.get(row)) {
                write!(text, " {:.2} | {:.2} |", list.millis, list.ratio())?;
            }
            writeln!(text)?;
        }
        writeln!(text)
    }

    fn write_starts(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "| stored | seconds to load what was added | then to index | gateway ready after s | without a history |\n\
             | ---: | ---: | ---: | ---: | ---: |"
        )?;
        for step in &self.steps {
            let seconds = |times: &[f64]| if times.is_empty() { f64::NAN } else { median(times.to_vec()) };
            writeln!(
                text,
                "| {} | {:.0} | {:.0} | {:.2} | {:.2} |",
                millions(step.stored),
                step.load_seconds,
                step.index_seconds,
                seconds(&step.start_seconds),
                seconds(&step.empty_start_seconds)
            )?;
        }
        writeln!(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(name: &str, stored: usize, ratio: f64) -> Journal {
        let pair = |ratio| Pair { empty: 1_000.0, stored: 1_000.0 * ratio };
        let rates = |random, ratio: f64| Rates {
            random,
            first: Some(pair(0.5)),
            accepts: vec![pair(0.1), pair(ratio), pair(9.0)],
            effects: vec![pair(1.0)],
        };
        let list = List { filter: "type".to_owned(), found: 50, short_millis: 1.0, millis: 1.0 / ratio };
        let step = Step {
            stored,
            rates: vec![rates(false, ratio), rates(true, ratio / 2.0)],
            lists: vec![list],
            ..Step::default()
        };
        Journal { name: name.to_owned(), steps: vec![step], ..Journal::default() }
    }

    #[test]
    fn a_goal_is_judged_by_the_worst_journal_and_only_at_ten_million() {
        let mut growth = Growth::default();
        assert_eq!(growth.kept(false), None);
        growth.replace(measured("SQLite", GOAL, 0.95));
        growth.replace(measured("PostgreSQL", GOAL, 0.8));
        assert_eq!(growth.kept(false).map(|kept| (kept * 100.0).round()), Some(80.0));
        assert_eq!(growth.kept(true).map(|kept| (kept * 100.0).round()), Some(40.0));
        assert_eq!(growth.lists_kept().map(|kept| (kept * 100.0).round()), Some(80.0));
        growth.replace(measured("PostgreSQL", GOAL, 1.0));
        assert_eq!(growth.kept(false).map(|kept| (kept * 100.0).round()), Some(95.0));
        growth.replace(measured("PostgreSQL", GOAL / 2, 1.0));
        assert_eq!(growth.kept(false), None);
    }

    #[test]
    fn what_is_saved_is_read_back_and_says_what_was_missed() {
        let directory = tempfile::tempdir().unwrap();
        let mut growth = Growth::default();
        growth.replace(measured("SQLite", GOAL, 0.85));
        growth.save(directory.path()).unwrap();
        let again = Growth::read(directory.path());
        assert_eq!(again.to_markdown(), growth.to_markdown());
        let text = std::fs::read_to_string(directory.path().join("GROWTH.md")).unwrap();
        assert!(text.contains("| 0.85 | ≥ 0.9 | **missed** by 0.05 |"), "{text}");
        assert!(text.contains("| each single filter of the list / at 10,000 events | 0.85 | ≥ 0.7 | met |"), "{text}");
        let picture = std::fs::read_to_string(directory.path().join("growth-accepts.svg")).unwrap();
        assert!(picture.contains("SQLite, random keys"), "{picture}");
    }
}
