//! What must be reached and what would be wonderful, and whether it was.

use super::load::Load;
use super::report::Report;
use super::stack::{Engine, Stack};

/// One line of the table.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Goal {
    /// What is measured.
    pub measure: &'static str,
    /// What came out; none if it was not measured.
    pub reached: Option<f64>,
    /// What must be reached.
    pub must: f64,
    /// What would be wonderful.
    pub moonshot: f64,
    /// Whether less is better.
    pub less_is_better: bool,
}

impl Goal {
    fn meets(&self, limit: f64) -> bool {
        self.reached
            .is_some_and(|reached| if self.less_is_better { reached <= limit } else { reached >= limit })
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
}

/// Every goal, judged by a run and by the last run of the growth benchmark.
pub(super) fn judge(report: &Report) -> Vec<Goal> {
    let ceiling = report.accepts(Stack::Ceiling, Load::Fresh).map(|accepts| accepts.rate);
    let accepts = |stack, load| report.accepts(stack, load).map(|accepts| accepts.rate);
    let effects = |stack| report.effects.iter().find(|effects| effects.stack == stack);
    let ratio = |a: Option<f64>, b: Option<f64>| Some(a? / b?);
    let tutorial = Stack::TUTORIAL;
    let ours = [Stack::SQLITE, Stack::POSTGRES, Stack::Gateway(Engine::Mariadb, false)];
    let best =
        |of: &dyn Fn(Stack) -> Option<f64>| ours.iter().filter_map(|stack| of(*stack)).reduce(f64::max);
    let storm = ours.iter().filter_map(|stack| accepts(*stack, Load::Storm)).reduce(f64::min);
    let more =
        |measure, reached, must, moonshot| Goal { measure, reached, must, moonshot, less_is_better: false };
    let less =
        |measure, reached, must, moonshot| Goal { measure, reached, must, moonshot, less_is_better: true };
    let p99 = report.latency.iter().find(|latency| latency.stack == Stack::SQLITE).map(|latency| latency.p99);
    let spike = report.spike.as_ref().map(|spike| if spike.refused == 0 { spike.p99 } else { f64::INFINITY });
    let growth = report.growth.as_ref();
    let postgres = effects(Stack::POSTGRES);
    vec![
        more(
            "durable accept / ceiling, SQLite",
            ratio(accepts(Stack::SQLITE, Load::Fresh), ceiling),
            0.55,
            0.75,
        ),
        more(
            "durable accept / ceiling, PostgreSQL",
            ratio(accepts(Stack::POSTGRES, Load::Fresh), ceiling),
            0.40,
            0.60,
        ),
        more("duplicate storm / ceiling (the worst of the journals)", ratio(storm, ceiling), 0.90, 0.95),
        more(
            "accepts/s against the tutorial stack (our best journal)",
            ratio(best(&|stack| accepts(stack, Load::Fresh)), accepts(tutorial, Load::Fresh)),
            20.0,
            30.0,
        ),
        more(
            "effects/s against the tutorial stack (our best journal)",
            ratio(
                best(&|stack| Some(effects(stack)?.drained)),
                effects(tutorial).map(|effects| effects.drained),
            ),
            25.0,
            40.0,
        ),
        more(
            "effects/s, PostgreSQL, against the same statements bare in equal batches",
            postgres.and_then(|effects| Some(effects.drained / effects.bare?)),
            0.5,
            0.7,
        ),
        more(
            "accept + effect together / ceiling, PostgreSQL",
            ratio(postgres.map(|effects| effects.sustained), ceiling),
            0.16,
            0.23,
        ),
        less("ack p99 at 10,000/s, SQLite, ms", p99, 25.0, 10.0),
        less("ack p99 in a 5× spike with nothing refused, SQLite, ms", spike, 200.0, 200.0),
        more(
            "rate at 10 million stored / rate at 0, time-ordered keys",
            growth.map(|growth| growth.ordered),
            0.9,
            0.95,
        ),
        more(
            "rate at 10 million stored / rate at 0, random keys",
            growth.map(|growth| growth.random),
            0.6,
            0.9,
        ),
        less("RSS idle, MB", report.memory.map(|(idle, _)| idle / 1e6), 40.0, 25.0),
        less("RSS under a 60 s spike, MB", report.memory.map(|(_, spike)| spike / 1e6), 256.0, 128.0),
    ]
}
