//! `[[machine]]`: states of an entity, and the events that lead from one to the next.
//!
//! Promises: a machine that was read is consistent, and every problem is noted in its place.
//! Does not: say which route uses it; a route names its machine, and a machine has one route at most.

use std::sync::Arc;

use oncehook::delivery::RouteName;
use oncehook::machine::{Machine, Misfit, Transition};
use toml::Spanned;

use super::file::Table;

/// The machines that could be read.
pub(super) struct Machines {
    pub(super) list: Vec<Arc<Machine>>,
    /// Whether that is all of them. Otherwise one that is not in the list may still be declared.
    pub(super) complete: bool,
}

/// Reads all machines.
pub(super) fn read_machines(tables: Vec<Table<'_, '_>>) -> Machines {
    let mut list: Vec<Arc<Machine>> = Vec::new();
    let mut complete = true;
    for mut table in tables {
        match read_machine(&mut table) {
            Some(machine) if list.iter().any(|known| known.name == machine.name) => {
                table.problem(table.span(), format!("there are two machines named `{}`", machine.name));
                complete = false;
            }
            Some(machine) => list.push(Arc::new(machine)),
            None => complete = false,
        }
        table.finish(&[]);
    }
    Machines { list, complete }
}

fn read_machine(table: &mut Table<'_, '_>) -> Option<Machine> {
    let span = table.span();
    let name = table.take_parsed("name", |name| match RouteName::new(name) {
        Ok(name) => Ok(name),
        Err(_) => Err("a machine's name has 1 to 64 characters of a-z, 0-9, '-' and '_'".to_owned()),
    });
    let states = table.take_strings("states");
    let initial = table.take_string("initial");
    let misfit = table.take_parsed("misfit", |word| {
        Misfit::parse(word).ok_or_else(|| format!("{word:?} is none of \"park\", \"supersede\" and \"dead\""))
    });
    let transitions = table.take_tables("transitions", "a transition");
    let count = transitions.len();
    let ways: Vec<Transition> = transitions.into_iter().filter_map(read_transition).collect();
    for key in ["name", "states", "initial"] {
        if table.lacks(key) {
            table.problem(span.clone(), format!("a [[machine]] needs `{key}`"));
        }
    }
    if count == 0 && table.lacks("transitions") {
        table.problem_with_help(
            span.clone(),
            "a [[machine]] needs `transitions`",
            "transitions = [{ on = \"payout.created\", from = \"new\", to = \"pending\" }]",
        );
    }
    let (name, states, initial) = (name?, states?, initial?);
    if count == 0 || ways.len() < count {
        return None;
    }
    let listed = states.get_ref().iter().map(|state| state.get_ref().clone()).collect();
    let misfit = misfit.map_or(Misfit::default(), Spanned::into_inner);
    match Machine::new(name.get_ref().as_str(), listed, initial.get_ref(), ways, misfit) {
        Ok(machine) => Some(machine),
        Err(error) => {
            table.problem(states.span(), error.to_string());
            None
        }
    }
}

fn read_transition(mut table: Table<'_, '_>) -> Option<Transition> {
    let on = table.take_string("on");
    let from = table.take_one_or_many("from");
    let to = table.take_string("to");
    if ["on", "from", "to"].into_iter().any(|key| table.lacks(key)) {
        table.problem(table.span(), "a transition needs `on`, `from` and `to`");
    }
    table.finish(&[]);
    Some(Transition { on: on?.into_inner(), from: from?.into_inner(), to: to?.into_inner() })
}
