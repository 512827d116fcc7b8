//! State machines of entities: which events may follow which, and what becomes of one that does not fit.
//!
//! Promises: a [`Machine`] value is consistent (every state that is named exists, no event has two ways out of one state).
//! Pure: it says what an event would do; the journal keeps the state and changes it in the effect's transaction.
//!
//! Does not: hold back an event that can never fit again. One that came too early may wait for its time; for one whose time is
//! over there is nothing to wait for, and `park` treats it as overtaken.

use std::collections::BTreeSet;

/// A machine. Only [`Machine::new`] makes one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Its states, in the order of the configuration.
    pub states: Vec<String>,
    /// The state of an entity of which nothing has happened yet.
    pub initial: String,
    /// Its transitions, in the order of the configuration.
    pub transitions: Vec<Transition>,
    /// What becomes of events that do not fit.
    pub misfit: Misfit,
}

/// What an event type does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    /// The type of the event.
    pub on: String,
    /// The states in which it fits.
    pub from: Vec<String>,
    /// The state after it.
    pub to: String,
}

words! {
    /// What becomes of an event that does not fit the state.
    #[derive(Default)]
    pub enum Misfit {
        /// It waits until it fits. If it never can, because the machine has passed the place, it is superseded.
        #[default]
        Park = "park",
        /// It is kept without an effect.
        Supersede = "supersede",
        /// It is dead, and a person looks at it.
        Dead = "dead",
    }
}

/// How an event and a state go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit<'m> {
    /// It leads to this state.
    Moves(&'m str),
    /// Not now, but from here a state can be reached in which it fits.
    Early,
    /// Not now, and never again. Also a type that the machine does not know.
    Late,
}

/// Why a machine is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MachineError {
    /// A state is named that is not in the list.
    #[error("`{0}` is not one of the states")]
    NoState(String),
    /// A state stands in the list twice.
    #[error("the state `{0}` stands in the list twice")]
    Twice(String),
    /// An event would lead out of one state in two ways.
    #[error("`{event}` leads from `{state}` to two places")]
    TwoWays {
        /// The type of the event.
        event: String,
        /// The state.
        state: String,
    },
}

impl Machine {
    /// Puts a machine together.
    pub fn new(
        name: &str,
        states: Vec<String>,
        initial: &str,
        transitions: Vec<Transition>,
        misfit: Misfit,
    ) -> Result<Self, MachineError> {
        let mut known = BTreeSet::new();
        if let Some(twice) = states.iter().find(|state| !known.insert(state.as_str())) {
            return Err(MachineError::Twice(twice.clone()));
        }
        let named = transitions.iter().flat_map(|way| [&way.to].into_iter().chain(&way.from)).map(String::as_str);
        if let Some(strange) = std::iter::once(initial).chain(named).find(|state| !known.contains(state)) {
            return Err(MachineError::NoState(strange.to_owned()));
        }
        let machine = Self { name: name.to_owned(), initial: initial.to_owned(), states, transitions, misfit };
        let mut ways = BTreeSet::new();
        let twice = machine.ways().find(|(from, way)| !ways.insert((*from, way.on.as_str())));
        let twice = twice.map(|(state, way)| MachineError::TwoWays { event: way.on.clone(), state: state.to_owned() });
        twice.map_or(Ok(machine), Err)
    }

    /// What an event of that type does in that state.
    pub fn fit(&self, state: &str, kind: Option<&str>) -> Fit<'_> {
        let of_kind = || self.ways().filter(|(_, way)| kind == Some(way.on.as_str()));
        if let Some((_, way)) = of_kind().find(|(from, _)| *from == state) {
            return Fit::Moves(&way.to);
        }
        let ahead = self.reachable_from(state);
        if of_kind().any(|(from, _)| ahead.contains(from)) { Fit::Early } else { Fit::Late }
    }

    /// States that no history leads to.
    pub fn unreachable(&self) -> Vec<&str> {
        let reached = self.reachable_from(&self.initial);
        self.states.iter().map(String::as_str).filter(|state| !reached.contains(state)).collect()
    }

    /// Whether some state has a way out for events of that type.
    pub fn knows(&self, kind: &str) -> bool {
        self.transitions.iter().any(|transition| transition.on == kind)
    }

    /// The states that can follow this one, itself included.
    fn reachable_from<'m>(&'m self, state: &'m str) -> BTreeSet<&'m str> {
        let mut reached = BTreeSet::from([state]);
        loop {
            let next = self.ways().find(|(from, way)| reached.contains(from) && !reached.contains(way.to.as_str()));
            let Some((_, way)) = next else { return reached };
            reached.insert(&way.to);
        }
    }

    /// As a Graphviz graph.
    pub fn to_graphviz(&self) -> String {
        let states = self.states.iter().map(|state| {
            let shape = if *state == self.initial { "doublecircle" } else { "circle" };
            format!("  {} [shape={shape}];\n", quoted(state))
        });
        let ways = self
            .ways()
            .map(|(from, way)| format!("  {} -> {} [label={}];\n", quoted(from), quoted(&way.to), quoted(&way.on)));
        let lines: String = states.chain(ways).collect();
        format!("digraph {} {{\n  rankdir=LR;\n{lines}}}\n", quoted(&self.name))
    }

    /// As a Mermaid state diagram.
    pub fn to_mermaid(&self) -> String {
        let id = |state: &str| {
            let place = self.states.iter().position(|known| known == state).unwrap_or_default();
            format!("s{place}")
        };
        let states = self.states.iter().map(|state| format!("  state {} as {}\n", quoted(state), id(state)));
        let ways = self.ways().map(|(from, way)| {
            // A colon or semicolon would end the label.
            format!("  {} --> {}: {}\n", id(from), id(&way.to), way.on.replace([':', ';', '\n'], " "))
        });
        let begin = format!("  [*] --> {}\n", id(&self.initial));
        let lines: String = states.chain([begin]).chain(ways).collect();
        format!("stateDiagram-v2\n{lines}")
    }

    fn ways(&self) -> impl Iterator<Item = (&str, &Transition)> {
        self.transitions.iter().flat_map(|way| way.from.iter().map(move |from| (from.as_str(), way)))
    }
}

/// For people: one line per way.
impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "machine {}: begins in {}, misfits: {}", self.name, self.initial, self.misfit.as_str())?;
        let widest = self.states.iter().map(|state| state.chars().count()).max().unwrap_or(0);
        for (from, transition) in self.ways() {
            writeln!(f, "  {from:widest$}  --{}-->  {}", transition.on, transition.to)?;
        }
        Ok(())
    }
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(on: &str, from: &[&str], to: &str) -> Transition {
        let from = from.iter().map(|state| (*state).to_owned()).collect();
        Transition { on: on.to_owned(), from, to: to.to_owned() }
    }

    fn machine(states: &[&str], transitions: Vec<Transition>) -> Result<Machine, MachineError> {
        let states = states.iter().map(|state| (*state).to_owned()).collect();
        Machine::new("payout", states, "new", transitions, Misfit::Park)
    }

    fn payout() -> Machine {
        let transitions = vec![
            way("created", &["new"], "pending"),
            way("processing", &["pending"], "processing"),
            way("completed", &["processing"], "completed"),
            way("failed", &["pending", "processing"], "failed"),
        ];
        machine(&["new", "pending", "processing", "completed", "failed"], transitions).unwrap()
    }

    #[test]
    fn r31_an_event_fits_comes_early_or_comes_late() {
        let payout = payout();
        assert_eq!(payout.fit("new", Some("created")), Fit::Moves("pending"));
        assert_eq!(payout.fit("processing", Some("failed")), Fit::Moves("failed"));
        assert_eq!(payout.fit("new", Some("completed")), Fit::Early);
        assert_eq!(payout.fit("completed", Some("completed")), Fit::Late);
        assert_eq!(payout.fit("failed", Some("completed")), Fit::Late);
        assert_eq!(payout.fit("new", Some("renamed")), Fit::Late);
        assert_eq!(payout.fit("new", None), Fit::Late);
        // In a circle nothing is ever late.
        let door = machine(&["new", "open"], vec![way("open", &["new"], "open"), way("shut", &["open"], "new")]);
        assert_eq!(door.unwrap().fit("open", Some("open")), Fit::Early);
    }

    #[test]
    fn r31_machines_that_contradict_themselves_are_refused() {
        let error = |states: &[&str], ways| machine(states, ways).unwrap_err().to_string();
        assert!(error(&["old"], vec![]).contains("`new` is not one"));
        assert!(error(&["new", "new"], vec![]).contains("twice"));
        assert!(error(&["new"], vec![way("go", &["new"], "there")]).contains("`there`"));
        assert!(error(&["new"], vec![way("go", &["here"], "new")]).contains("`here`"));
        let two = vec![way("go", &["new"], "a"), way("go", &["new"], "b")];
        assert!(error(&["new", "a", "b"], two).contains("two places"));
    }

    #[test]
    fn r31_states_that_nothing_leads_to_are_found() {
        assert_eq!(payout().unreachable(), [""; 0]);
        let lost = machine(&["new", "a", "b"], vec![way("go", &["b"], "a")]).unwrap();
        assert_eq!(lost.unreachable(), ["a", "b"]);
        assert!(lost.knows("go") && !lost.knows("stop"));
    }

    #[test]
    fn r31_pictures_hold_every_way() {
        let payout = payout();
        let graph = payout.to_graphviz();
        assert!(graph.contains("\"pending\" -> \"failed\" [label=\"failed\"];"), "{graph}");
        assert!(graph.contains("\"new\" [shape=doublecircle];"), "{graph}");
        let mermaid = payout.to_mermaid();
        assert!(mermaid.contains("[*] --> s0\n") && mermaid.contains("s2 --> s3: completed\n"), "{mermaid}");
        let text = payout.to_string();
        assert!(text.contains("processing  --completed-->  completed\n"), "{text}");
        assert_eq!(text.lines().count(), 6);
    }
}
