//! The faults that must be survived: which test or scenario shows each, or why none does. `faults.txt` is the list.
//!
//! Promises: a fault that nothing shows, and of which no reason is given, is a problem; so is a test or a scenario that is named
//! and does not exist.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::scenario;

const LIST: &str = include_str!("faults.txt");

/// How many there are.
const COUNT: u32 = 57;

/// Reasons why nothing shows a fault begin with these.
const REASONS: [&str; 2] = ["not covered: ", "does not apply: "];

/// The table of the document, and what is wrong with it, for the sources below this directory.
#[must_use]
pub fn table(root: &Path) -> (String, Vec<String>) {
    let mut tests = BTreeSet::new();
    collect(&root.join("crates"), &mut tests);
    let scenarios: BTreeSet<&str> =
        scenario::all(100).iter().map(|scenario| scenario.name).chain(["simulation"]).collect();
    judge(LIST, &tests, &scenarios)
}

fn judge(list: &str, tests: &BTreeSet<String>, scenarios: &BTreeSet<&str>) -> (String, Vec<String>) {
    let mut by_fault: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for name in tests {
        for part in name.split("fault_").skip(1) {
            if let Ok(number) = part.split('_').next().unwrap_or_default().parse() {
                by_fault.entry(number).or_default().push(name);
            }
        }
    }
    let mut problems = Vec::new();
    let mut numbers = Vec::new();
    let mut table = String::from("| # | what happens | what shows that it is survived |\n| --- | --- | --- |\n");
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let parts: Vec<&str> = line.splitn(3, '|').map(str::trim).collect();
        let [number, title, said] = parts[..] else {
            problems.push(format!("this is no fault: {line}"));
            continue;
        };
        let Ok(number) = number.parse::<u32>() else {
            problems.push(format!("{number} is no number of a fault"));
            continue;
        };
        numbers.push(number);
        let named: Vec<&str> = said.split('`').skip(1).step_by(2).collect();
        for name in named.iter().filter(|name| !tests.contains(**name)) {
            problems.push(format!("fault {number} names `{name}`, which is no test"));
        }
        let played: Vec<&str> = said.split('"').skip(1).step_by(2).collect();
        for name in played.iter().filter(|name| !scenarios.contains(**name)) {
            problems.push(format!("fault {number} names \"{name}\", which is no scenario"));
        }
        let found = by_fault.get(&number).map_or(&[][..], Vec::as_slice);
        let excused = REASONS.iter().any(|reason| said.starts_with(reason));
        if found.is_empty() && named.is_empty() && played.is_empty() && !excused {
            problems.push(format!("nothing shows fault {number}, and no reason is given"));
        }
        let mut shown: Vec<String> =
            found.iter().filter(|name| !named.contains(name)).map(|name| format!("`{name}`")).collect();
        // What is found speaks for itself, whatever the reason was.
        if !said.is_empty() && (!excused || found.is_empty()) {
            shown.push(said.replace('"', "*"));
        }
        table.push_str(&format!("| {number} | {title} | {} |\n", shown.join(" ")));
    }
    if numbers != (1..=COUNT).collect::<Vec<_>>() {
        problems.push(format!("the faults are not 1 to {COUNT}: {numbers:?}"));
    }
    (table, problems)
}

/// The names of all functions below a directory that could be tests.
fn collect(directory: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let found = text.lines().filter_map(|line| line.split("fn ").nth(1)?.split(['(', '<']).next());
            names.extend(found.map(str::to_owned));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r47_every_fault_names_tests_and_scenarios_that_exist_or_a_reason() {
        let (table, problems) = table(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
        assert!(problems.is_empty(), "{problems:#?}");
        assert!(table.contains("`fault_2_a_cut_undoes_what_was_not_synced`"), "{table}");
    }

    #[test]
    fn r47_a_fault_that_nothing_shows_is_a_problem() {
        let tests = BTreeSet::from(["fault_1_it_happens".to_owned(), "other".to_owned()]);
        let check = |list: &str, expected: &[&str]| {
            let (table, problems) = judge(list, &tests, &BTreeSet::from(["kills"]));
            // The list is too short on purpose.
            let told: Vec<&String> = problems.iter().filter(|told| !told.contains("not 1 to")).collect();
            assert_eq!(told, expected, "{table}");
            table
        };
        let table = check("1 | a | \n# no\n2 | b | \"kills\" `other`\n3 | c | not covered: why", &[]);
        assert!(table.contains("| 1 | a | `fault_1_it_happens` |\n| 2 | b | *kills* `other` |\n| 3 | c | not"));
        check("2 | b |", &["nothing shows fault 2, and no reason is given"]);
        check("2 | b | because", &["nothing shows fault 2, and no reason is given"]);
        check("2 | b | `none`", &["fault 2 names `none`, which is no test"]);
        check("2 | b | \"cuts\"", &["fault 2 names \"cuts\", which is no scenario"]);
        assert!(!check("1 | a | does not apply: there is none", &[]).contains("does not apply"));
    }
}
