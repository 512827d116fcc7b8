//! What must be reached and what would be wonderful, and whether it was.

use super::load::Load;
use super::report::{Report, median};
use super::stack::{Engine, Stack};

/// One line of the table.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Goal {
    /// What is measured.
    pub measure: &'static str,
    /// What came out; none if it was not measured.
    pub reached: Option<f64>,
    /// The same of every round, where there are rounds.
    pub rounds: Vec<f64>,
    /// What must be reached.
    pub must: f64,
    /// What would be wonderful.
    pub moonshot: f64,
    /// Whether less is better.
    pub less_is_better: bool,
}

impl Goal {
    fn meets(&self, limit: f64) -> bool {
        self.reached.is_some_and(|reached| if self.less_is_better { reached <= limit } else { reached >= limit })
    }

    /// Whether the must is met.
    #[must_use]
    pub fn met(&self) -> bool {
        self.meets(self.must)
    }

    /// Whether the moonshot is met.
    #[must_use]
    pub fn moon(&self) -> bool {
        self.meets(self.moonshot)
    }

    /// For people: met or missed, and by how much.
    #[must_use]
    pub fn verdict(&self) -> String {
        match self.reached {
            None => "**missed**".to_owned(),
            Some(_) if self.moon() => "met, moonshot too".to_owned(),
            Some(_) if self.met() => "met".to_owned(),
            Some(reached) => {
                let short = (reached - self.must).abs() / self.must * 100.0;
                format!("**missed** by {:.2} ({short:.0} %)", (reached - self.must).abs())
            }
        }
    }
}

/// A figure and what it was in every round.
#[derive(Default)]
struct Figure {
    reached: Option<f64>,
    rounds: Vec<f64>,
}

impl Figure {
    fn of(reached: Option<f64>) -> Self {
        Self { reached, rounds: Vec::new() }
    }

    /// A part of another figure. Where both were measured in rounds, the median of what each round gave: a round is a few minutes, and the
    /// machine's speed drifts from one to the next.
    fn over(self, other: &Self) -> Self {
        let rounds: Vec<f64> = self.rounds.iter().zip(&other.rounds).map(|(part, whole)| part / whole).collect();
        let reached = if rounds.is_empty() {
            self.reached.zip(other.reached).map(|(part, whole)| part / whole)
        } else {
            Some(median(rounds.clone()))
        };
        Self { reached, rounds }
    }
}

/// Every goal, judged by a run and by the last run of the growth benchmark.
pub(super) fn judge(report: &Report) -> Vec<Goal> {
    let accepts = |stack, load| {
        let row = report.accepts(stack, load);
        row.map_or_else(Figure::default, |row| Figure { reached: Some(row.rate), rounds: row.rounds.clone() })
    };
    let effects = |stack| report.effects.iter().find(|effects| effects.stack == stack);
    let drained = |stack| {
        let row = effects(stack);
        row.map_or_else(Figure::default, |row| Figure {
            reached: Some(row.drained),
            rounds: row.drained_rounds.clone(),
        })
    };
    let ceiling = accepts(Stack::Ceiling, Load::Fresh);
    let ours = || [Stack::SQLITE, Stack::POSTGRES, Stack::Gateway(Engine::Mariadb, false)].into_iter();
    let known = |figure: &Figure| figure.reached.is_some();
    let least = |a: Figure, b: Figure| if a.reached <= b.reached { a } else { b };
    let most = |a: Figure, b: Figure| if a.reached >= b.reached { a } else { b };
    // Each beside the ceiling that took turns with it.
    let storm = |stack| {
        let row = report.accepts(stack, Load::Storm)?;
        let ceiling = Figure { reached: row.ceiling, rounds: row.ceiling_rounds.clone() };
        Some(accepts(stack, Load::Storm).over(&ceiling))
    };
    let storm = ours().filter_map(storm).filter(known).reduce(least).unwrap_or_default();
    let accepted = ours().map(|stack| accepts(stack, Load::Fresh)).filter(known).reduce(most).unwrap_or_default();
    let applied = ours().map(drained).filter(known).reduce(most).unwrap_or_default();
    let postgres = effects(Stack::POSTGRES);
    let bare =
        postgres.map_or_else(Figure::default, |row| Figure { reached: row.bare, rounds: row.bare_rounds.clone() });
    let sustained = postgres.map_or_else(Figure::default, |row| Figure {
        reached: Some(row.sustained),
        rounds: row.sustained_rounds.clone(),
    });
    let latency = report.latency.iter().find(|latency| latency.stack == Stack::SQLITE);
    let rounds = report.latency_rounds.iter().filter(|latency| latency.stack == Stack::SQLITE);
    let p99 =
        Figure { reached: latency.map(|latency| latency.p99), rounds: rounds.map(|latency| latency.p99).collect() };
    let spike = report
        .spikes
        .first()
        .map_or_else(Figure::default, |spike| Figure { reached: Some(spike.judged()), rounds: spike.rounds.clone() });
    let memory = |of: fn((f64, f64)) -> f64| Figure::of(report.memory.map(|memory| of(memory) / 1e6));
    let more = |measure, figure: Figure, must, moonshot| Goal {
        measure,
        reached: figure.reached,
        rounds: figure.rounds,
        must,
        moonshot,
        less_is_better: false,
    };
    let less = |measure, figure, must, moonshot| Goal { less_is_better: true, ..more(measure, figure, must, moonshot) };
    let [
        sqlite_accept,
        postgres_accept,
        storm_kept,
        accepts_won,
        effects_won,
        of_bare,
        together,
        p99_at,
        p99_spike,
        ordered,
        random,
        idle,
        pressed,
    ] = MEASURES;
    vec![
        more(sqlite_accept, accepts(Stack::SQLITE, Load::Fresh).over(&ceiling), 0.55, 0.75),
        more(postgres_accept, accepts(Stack::POSTGRES, Load::Fresh).over(&ceiling), 0.40, 0.60),
        more(storm_kept, storm, 0.90, 0.95),
        more(accepts_won, accepted.over(&accepts(Stack::TUTORIAL, Load::Fresh)), 20.0, 30.0),
        more(effects_won, applied.over(&drained(Stack::TUTORIAL)), 25.0, 40.0),
        more(of_bare, drained(Stack::POSTGRES).over(&bare), 0.5, 0.7),
        more(together, sustained.over(&ceiling), 0.16, 0.23),
        less(p99_at, p99, 25.0, 10.0),
        less(p99_spike, spike, 200.0, 200.0),
        more(ordered, Figure::of(report.growth.kept(false)), 0.9, 0.95),
        more(random, Figure::of(report.growth.kept(true)), 0.6, 0.9),
        less(idle, memory(|(idle, _)| idle), 40.0, 25.0),
        less(pressed, memory(|(_, pressed)| pressed), 256.0, 128.0),
    ]
}

/// What is measured, in the order of the table. docs/PERFORMANCE.md calls them the same where it says what is in the way.
pub(super) const MEASURES: [&str; 13] = [
    "durable accept / ceiling, SQLite",
    "durable accept / ceiling, PostgreSQL",
    "duplicate storm / ceiling (the worst of the journals)",
    "accepts/s against the tutorial stack (our best journal)",
    "effects/s against the tutorial stack (our best journal)",
    "effects/s, PostgreSQL, against the same statements bare in equal batches",
    "accept + effect together / ceiling, PostgreSQL",
    "ack p99 at 10,000/s, SQLite, ms",
    "ack p99 in a 5× spike with nothing refused, SQLite, ms",
    "rate at 10 million stored / rate at 0, time-ordered keys",
    "rate at 10 million stored / rate at 0, random keys",
    "RSS idle, MB",
    "RSS under a 60 s spike, MB",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn goal(reached: Option<f64>, less_is_better: bool) -> Goal {
        Goal {
            measure: "x",
            reached,
            rounds: Vec::new(),
            must: 0.5,
            moonshot: if less_is_better { 0.25 } else { 0.75 },
            less_is_better,
        }
    }

    #[test]
    fn a_goal_says_by_how_much_it_was_missed() {
        assert_eq!(goal(Some(0.4), false).verdict(), "**missed** by 0.10 (20 %)");
        assert_eq!(goal(Some(0.6), true).verdict(), "**missed** by 0.10 (20 %)");
        assert_eq!(goal(None, false).verdict(), "**missed**");
        assert_eq!(goal(Some(0.6), false).verdict(), "met");
        assert_eq!(goal(Some(0.2), true).verdict(), "met, moonshot too");
    }

    #[test]
    fn rounds_are_compared_with_the_same_round() {
        let part = Figure { reached: Some(3.0), rounds: vec![2.0, 3.0] };
        let whole = Figure { reached: Some(6.0), rounds: vec![8.0, 6.0] };
        let ratio = part.over(&whole);
        assert_eq!((ratio.reached, ratio.rounds), (Some(0.5), vec![0.25, 0.5]));
    }
}
