//! Orders for many events: what a filter finds is shown first, then somebody says yes, then the gateway does it while
//! this watches.
//!
//! Promises: nothing is ordered before it was counted and agreed to, by a person at a terminal or by `--yes`, and then only
//! what was counted: if the filter finds another number in the end, it is shown again. Ctrl-C cancels the rest.
//!
//! Does not: give the orders itself. The gateway does, and goes on if this program is killed.

use std::io::{BufRead as _, IsTerminal as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::client::{Client, Json, is_refused_for};
use super::filter::Filter;
use super::{Shared, print, print_json, say, text};

/// How often the gateway is asked how far it is.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// How often it is counted anew for `--yes` because events came to the filter or left it meanwhile.
const COUNTS: u32 = 5;

/// Options of orders for many events.
#[derive(Debug, clap::Args)]
pub(super) struct Pacing {
    /// Only say what would be done; changes nothing
    #[arg(long)]
    pub(super) dry_run: bool,
    /// With a filter: do not ask
    #[arg(long)]
    yes: bool,
    /// With a filter: events per second
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rate: u32,
}

/// What to do with each event.
pub(super) struct Bulk {
    pub(super) verb: &'static str,
    pub(super) epoch: Option<u32>,
    pub(super) route: Option<String>,
    pub(super) reason: Option<String>,
}

/// What a filter finds, as the API gives it.
#[derive(Deserialize)]
struct Survey {
    matched: u64,
    complete: bool,
    statuses: std::collections::BTreeMap<String, u64>,
    events: Vec<String>,
    until: String,
}

#[derive(Deserialize)]
struct Started {
    replay: String,
}

/// How far it is, as the API gives it.
#[derive(Deserialize, Serialize)]
struct Progress {
    state: String,
    matched: u64,
    done: u64,
    changed: u64,
    failed: u64,
    errors: Vec<Trouble>,
}

#[derive(Deserialize, Serialize)]
struct Trouble {
    event: Option<String>,
    error: String,
}

impl Bulk {
    pub(super) fn run(
        self,
        client: &Client,
        shared: &Shared,
        filter: &Filter,
        pacing: &Pacing,
    ) -> anyhow::Result<ExitCode> {
        filter.check(client)?;
        let mut counts = 0;
        let (replay, matched) = loop {
            let found = client.post("/api/replays", &self.order(filter, pacing, None))?;
            let survey: Survey = found.read()?;
            if pacing.dry_run {
                match shared.json {
                    true => print_json(found.text()),
                    false => print(&self.question(&survey)),
                }
                return Ok(ExitCode::SUCCESS);
            }
            if survey.matched == 0 && survey.complete {
                let nothing = Progress::nothing();
                match shared.json {
                    true => print_json(&serde_json::to_string(&nothing)?),
                    false => print(&nothing.lines().join("\n")),
                }
                return Ok(ExitCode::SUCCESS);
            }
            say(&self.question(&survey));
            if !pacing.yes && !agreed()? {
                say("nothing was done");
                return Ok(ExitCode::FAILURE);
            }
            counts += 1;
            match client.post("/api/replays", &self.order(filter, pacing, Some(&survey))) {
                Ok(started) => {
                    let Started { replay } = started.read()?;
                    break (replay, survey.matched);
                }
                Err(error) if is_refused_for(&error, "expect") && (!pacing.yes || counts < COUNTS) => {
                    say(&format!("{error:#}"));
                }
                Err(error) => return Err(error),
            }
        };
        let answer = watch(client, &replay, matched)?;
        let progress: Progress = answer.read()?;
        if shared.json {
            print_json(answer.text());
        } else {
            print(&progress.lines().join("\n"));
        }
        let fine = progress.state == "done" && progress.failed == 0;
        Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// The order for what a survey has found; without one, the order to make it.
    fn order(&self, filter: &Filter, pacing: &Pacing, survey: Option<&Survey>) -> Value {
        let conditions = filter.conditions();
        let given = conditions.iter().filter_map(|(name, value)| Some(((*name).to_owned(), (*value)?.into())));
        let mut filter: Map<String, Value> = given.collect();
        if let Some(survey) = survey {
            filter.insert("until".to_owned(), survey.until.as_str().into());
        }
        json!({
            "filter": filter,
            "verb": self.verb,
            "epoch": self.epoch,
            "route": self.route,
            "reason": self.reason,
            "rate": pacing.rate,
            "dry_run": survey.is_none(),
            // Of what could not be counted to its end, nobody knows how much there should be.
            "expect": survey.filter(|survey| survey.complete).map(|survey| survey.matched),
        })
    }

    fn question(&self, survey: &Survey) -> String {
        let statuses: Vec<_> = survey.statuses.iter().map(|(status, count)| format!("{count} {status}")).collect();
        let at_least = if survey.complete { "" } else { "at least " };
        let events = if survey.matched == 1 { "event" } else { "events" };
        let mut lines = vec![format!("{}: {at_least}{} {events}", self.verb, survey.matched)];
        if !statuses.is_empty() {
            lines.push(format!("  {}", statuses.join(", ")));
        }
        lines.extend(survey.events.iter().map(|event| format!("  {event}")));
        if survey.matched > survey.events.len() as u64 {
            lines.push("  …".to_owned());
        }
        text::shown_lines(&lines.join("\n"), 4_000)
    }
}

impl Progress {
    /// Of a replay that need not begin.
    fn nothing() -> Self {
        Self { state: "done".to_owned(), matched: 0, done: 0, changed: 0, failed: 0, errors: Vec::new() }
    }

    fn lines(&self) -> Vec<String> {
        let Self { state, matched, done, changed, failed, .. } = self;
        let unchanged = done.saturating_sub(*changed).saturating_sub(*failed);
        let mut lines = vec![format!(
            "{}: {matched} found, {changed} changed, {unchanged} left as they were, {failed} failed",
            text::shown(state, 20)
        )];
        lines.extend(self.errors.iter().map(|trouble| {
            let event = trouble.event.as_deref().unwrap_or("-");
            text::shown(&format!("  {event} {}", trouble.error), 400)
        }));
        lines
    }
}

/// Asks the person at the terminal. Without one, nobody can agree.
fn agreed() -> anyhow::Result<bool> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        bail!("there is no terminal to ask at; add --yes to go on, or --dry-run to only look");
    }
    say("Go on? [y/N]");
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// How far, how fast and how long still. A rate is a whole number: nobody reads more, and it does not flicker.
pub(super) fn progress_style() -> ProgressStyle {
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {rate} {eta}");
    let rate = |state: &ProgressState, line: &mut dyn std::fmt::Write| {
        // There is nobody to tell if a line cannot be written.
        let _ = line.write_str(&whole_rate(state.per_sec()));
    };
    style.unwrap_or_else(|_| ProgressStyle::default_bar()).with_key("rate", rate)
}

fn whole_rate(per_second: f64) -> String {
    format!("{per_second:.0}/s")
}

/// Follows a replay to its end.
fn watch(client: &Client, replay: &str, total: u64) -> anyhow::Result<Json> {
    let path = format!("/api/replays/{replay}");
    // Shows itself on a terminal only.
    let bar = ProgressBar::new(total).with_style(progress_style());
    loop {
        let answer = client.get_json(&path, &[])?;
        let progress: Progress = answer.read()?;
        bar.set_length(total.max(progress.matched));
        bar.set_position(progress.done);
        if progress.state != "running" {
            bar.finish_and_clear();
            return Ok(answer);
        }
        if client.wait(ASK_EVERY) {
            client.delete(&path)?;
            bar.suspend(|| say("cancelling; orders that were given stay given"));
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn rates_have_no_decimals() {
        assert_eq!(super::whole_rate(1_234.567_8), "1235/s");
        assert_eq!(super::whole_rate(0.2), "0/s");
    }
}
