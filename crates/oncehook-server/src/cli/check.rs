//! `oncehook check`: reads the configuration and reports every problem at once.

use std::process::ExitCode;

use oncehook::glob::Glob;
use oncehook::route::Route;

use super::{Shared, print, say};
use crate::config::Config;

pub(super) fn run(shared: &Shared) -> anyhow::Result<ExitCode> {
    match Config::load(&shared.config) {
        Ok(config) if shared.json => {
            let sources: Vec<_> = config.sources.iter().map(|source| source.name.as_str()).collect();
            let routes: Vec<_> = config.routes.iter().map(|route| facts(route)).collect();
            let report =
                serde_json::json!({ "ok": true, "sources": sources, "routes": routes, "problems": [] });
            print(&report.to_string());
            Ok(ExitCode::SUCCESS)
        }
        Ok(config) => {
            let sources = count(config.sources.len(), "source");
            let routes = count(config.routes.iter().count(), "route");
            say(&format!("{} is fine: {sources}, {routes}", shared.config.display()));
            config.routes.iter().for_each(|route| say(&format!("  {}", line(route))));
            Ok(ExitCode::SUCCESS)
        }
        Err(problems) if shared.json => {
            print(&serde_json::json!({ "ok": false, "problems": problems.list }).to_string());
            Ok(ExitCode::FAILURE)
        }
        Err(problems) => Err(problems.into()),
    }
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
    format!("{}: {takes} to {}", route.name, route.handler.kind())
}

fn facts(route: &Route) -> serde_json::Value {
    serde_json::json!({
        "name": route.name.as_str(),
        "source": route.source.as_str(),
        "types": route.types.iter().map(Glob::as_str).collect::<Vec<_>>(),
        "after": route.after.as_ref().map(oncehook::delivery::RouteName::as_str),
        "handler": route.handler.kind(),
    })
}
