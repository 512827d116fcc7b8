//! `oncehook check`: reads the configuration and reports every problem at once; with `--database`, also the statements that do
//! not fit the tables.
//!
//! Does not: make or change anything, nor need the gateway to run or to be stopped.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use oncehook::glob::Glob;
use oncehook::route::Route;

use super::rehearsal::{self, Finding};
use super::{Shared, print_json, say, text};
use crate::config::{Config, Problems};

#[derive(Debug, clap::Args)]
pub(super) struct Check {
    /// Also try the statements of sql routes out on the tables as they are, in the journal's database and in others
    #[arg(long)]
    database: bool,
}

impl Check {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let checked = Config::load(&shared.config);
        let (findings, largest_body) = match &checked {
            Ok(config) if self.database => (look_into_database(config)?, rehearsal::largest_body(config)?),
            _ => (Vec::new(), usize::MAX),
        };
        let code = report(shared, checked, &findings, largest_body)?;
        Ok(if findings.is_empty() { code } else { ExitCode::FAILURE })
    }
}

fn look_into_database(config: &Config) -> anyhow::Result<Vec<Finding>> {
    let place = config.journal.shown();
    if let Some(path) = config.journal.path()
        && !path.exists()
    {
        bail!("{place} is not there yet; `oncehook migrate` makes it, and your own tables are yours to make");
    }
    rehearsal::findings(config).with_context(|| format!("look into {place}"))
}

fn report(
    shared: &Shared,
    checked: Result<Config, Problems>,
    findings: &[Finding],
    largest_body: usize,
) -> anyhow::Result<ExitCode> {
    match checked {
        Ok(config) if shared.json => {
            let sources: Vec<_> = config.sources.iter().map(|source| source.name.as_str()).collect();
            let routes: Vec<_> = config.routes.iter().map(|route| facts(route)).collect();
            let report = serde_json::json!({
                "ok": findings.is_empty(),
                "sources": sources,
                "routes": routes,
                "problems": findings,
                "warnings": doubts(&config, largest_body),
            });
            print_json(&report.to_string());
            Ok(ExitCode::SUCCESS)
        }
        Ok(config) => {
            let sources = count(config.sources.len(), "source");
            let routes = count(config.routes.iter().count(), "route");
            say(&format!("{} is fine: {sources}, {routes}", shared.config.display()));
            config.routes.iter().for_each(|route| say(&format!("  {}", line(route))));
            doubts(&config, largest_body).iter().for_each(|doubt| say(&format!("warning: {doubt}")));
            for Finding { route, statement, problem } in findings {
                let problem = text::shown(problem, 400);
                say(&format!("route {route}: statement {statement} would fail as the tables are now: {problem}"));
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(problems) if shared.json => {
            print_json(&serde_json::json!({ "ok": false, "problems": problems.list }).to_string());
            Ok(ExitCode::FAILURE)
        }
        Err(problems) => Err(problems.into()),
    }
}

/// What is allowed, but hardly meant. The journal stores bodies of at most `largest_body` bytes, if that is known.
fn doubts(config: &Config, largest_body: usize) -> Vec<String> {
    let mut doubts = rehearsal::small_sources(config, largest_body);
    for machine in &config.machines {
        let name = &machine.name;
        for state in machine.unreachable() {
            doubts.push(format!("machine {name}: nothing leads to the state `{state}`"));
        }
        let route =
            config.routes.iter().find(|route| route.ordering.machine.as_ref().is_some_and(|used| used.name == *name));
        let Some(route) = route else {
            doubts.push(format!("machine {name}: no route uses it"));
            continue;
        };
        let types = route.types.iter().map(Glob::as_str);
        for kind in types.filter(|kind| !kind.contains(['*', '?']) && !machine.knows(kind)) {
            doubts.push(format!("machine {name}: route {} takes `{kind}`, which has no transition", route.name));
        }
        for way in machine.transitions.iter().filter(|way| !route.takes(Some(&way.on))) {
            doubts.push(format!("machine {name}: route {} does not take `{}`", route.name, way.on));
        }
    }
    doubts
}

fn count(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// A route in a few words: what it takes, what it does with it.
pub(super) fn line(route: &Route) -> String {
    let types: Vec<_> = route.types.iter().map(Glob::as_str).collect();
    let takes = match &route.after {
        Some(after) => format!("after {after}"),
        None if types.is_empty() => format!("{} (all types)", route.source),
        None => format!("{} ({})", route.source, types.join(", ")),
    };
    let place = route.handler.database().map(|database| format!(" in {database}")).unwrap_or_default();
    format!("{}: {takes} to {}{place}", route.name, route.handler.kind())
}

fn facts(route: &Route) -> serde_json::Value {
    let mut facts = serde_json::json!({
        "name": route.name.as_str(),
        "source": route.source.as_str(),
        "types": route.types.iter().map(Glob::as_str).collect::<Vec<_>>(),
        "after": route.after.as_ref().map(oncehook::delivery::RouteName::as_str),
        "handler": route.handler.kind(),
    });
    if let (Some(facts), Some(database)) = (facts.as_object_mut(), route.handler.database()) {
        facts.insert("database".to_owned(), database.into());
    }
    facts
}
