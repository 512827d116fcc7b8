//! `oncehook storm`: sends genuine events to any webhook endpoint, each many times and in the ways that providers do, and finds out
//! whether each took effect once.
//!
//! Promises: it begins with one plain event, and judges nothing before that one has been acknowledged and counted once; the
//! exit code is 0 only if every hazard was stood. Everything it sends carries an id of this run.
//!
//! Does not: clean up after itself, or wait for real retry schedules: profiles are made short, and a memory of keys that lasts
//! a day must be judged by its setting.

mod attempt;
mod count;
mod event;
mod hazard;
mod profile;
mod report;
mod script;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use indicatif::{ProgressBar, ProgressStyle};
use reqwest::Url;
use tokio::time::{Instant, sleep};

use self::attempt::Sender;
use self::count::{CountArgs, Counter};
use self::event::{Event, Maker};
use self::hazard::Hazard;
use self::report::{Finding, Tally, Verdict, judge_each, judge_sum};
use self::script::{Heard, Pace, Script, deliver};
use super::source::SourceArgs;
use super::{Shared, print, print_json, providers, say};
use crate::config::parse_duration;

/// How often effects are counted while they are awaited.
const LOOK: Duration = Duration::from_millis(200);

#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(super) struct Storm {
    #[command(flatten)]
    source: SourceArgs,
    /// The endpoint [default: the source on the configured gateway]
    #[arg(long)]
    url: Option<Url>,
    #[command(flatten)]
    count: CountArgs,
    /// Events for each hazard
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    events: u16,
    /// Copies of each event
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(2..=256))]
    copies: u16,
    /// Only these, parted by commas [default: all but schedule, which --profile adds]
    #[arg(long = "hazards", value_name = "NAMES", value_delimiter = ',')]
    hazards: Vec<Hazard>,
    /// Also deliver by the retry schedule of this provider, made short
    #[arg(long, value_name = "PROVIDER")]
    profile: Option<String>,
    /// How long the whole schedule of the profile takes here
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration, requires = "profile")]
    within: Duration,
    /// The type of the events [default: the sample's]
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Make all events of the reordering about this entity
    #[arg(long, value_name = "ID")]
    entity: Option<String>,
    /// How long a sender waits before it tries again
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    pause: Duration,
    /// How long a sender waits for an answer before it takes it for lost (slow answer)
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    timeout: Duration,
    /// How much later the same bytes come again (replay)
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
    replay_after: Duration,
    /// How long effects may take to show
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = parse_duration)]
    patience: Duration,
    /// How long the count must stay as it is to be believed
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    quiet: Duration,
    /// Also write a JUnit file
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

const AFTER: &str =
    "Example: oncehook storm --provider stripe --secret env:STRIPE_SECRET --url http://127.0.0.1:3000/hook \\
           --count-sql \"SELECT count(*) FROM orders WHERE event = '{key}'\" --database sqlite://shop.db

Exit codes: 0 every event took effect once; 1 some did not, or it could not be told; 2 the command line is wrong.";

impl Storm {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("start the runtime")?;
        let (json, junit) = (shared.json, self.junit.clone());
        let (findings, url, exact) = runtime.block_on(self.blow(shared))?;
        if let Some(path) = junit {
            std::fs::write(&path, report::junit(&findings)).with_context(|| format!("write {}", path.display()))?;
        }
        match json {
            true => print_json(&report::json(&findings, url.as_str(), exact).to_string()),
            false => print(&report::lines(&findings)),
        }
        let judged = findings.iter().any(|finding| !matches!(finding.verdict, Verdict::Skipped(_)));
        let stood = judged && !findings.iter().any(Finding::is_bad);
        Ok(if stood { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// One hazard after the other.
    async fn blow(self, shared: &Shared) -> anyhow::Result<(Vec<Finding>, Url, bool)> {
        let mut hazards = if self.hazards.is_empty() { Hazard::USUAL.to_vec() } else { self.hazards };
        let mut schedule = Vec::new();
        if let Some(name) = &self.profile {
            schedule = profile::schedule(providers::named(name)?, self.within);
            hazards.push(Hazard::Schedule);
        } else if hazards.contains(&Hazard::Schedule) {
            bail!("the hazard `schedule` needs --profile");
        }
        hazards.sort_unstable();
        hazards.dedup();
        let maker = Maker::new(self.source.choose(shared)?, self.url, self.kind)?;
        let url = maker.url().clone();
        let counting = Counting { counter: Counter::new(self.count)?, patience: self.patience, quiet: self.quiet };
        let exact = counting.counter.is_exact();
        let pace = Pace {
            copies: self.copies.into(),
            pause: self.pause,
            timeout: self.timeout,
            replay_after: self.replay_after,
            schedule,
        };
        let sender = Sender::new(url.scheme() == "https", self.copies.into())?;
        let progress = progress_bar(u64::from(self.events) * hazards.len() as u64);
        say(&format!("{} to {url}", maker.shown()));
        if !exact {
            say("effects are counted as a sum: with {key} in the question each event is judged by itself");
        }
        let script = Arc::new(Script { maker, sender, pace, progress });
        rehearse(&script, &counting).await?;
        let mut findings = Vec::new();
        for hazard in hazards {
            script.progress.set_message(hazard.title());
            let entity = self.entity.as_deref().filter(|_| hazard == Hazard::Reordered);
            let events: Vec<Event> = (0..self.events)
                .map(|number| script.maker.event(hazard.name(), number.into(), entity))
                .collect::<anyhow::Result<_>>()?;
            findings.push(face(&script, &counting, hazard, events).await?);
        }
        script.progress.finish_and_clear();
        Ok((findings, url, exact))
    }
}

/// One plain delivery: whoever cannot count that cannot be judged.
async fn rehearse(script: &Arc<Script>, counting: &Counting) -> anyhow::Result<()> {
    let event = script.maker.event("first", 0, None)?;
    let before = counting.counter.count(event.key()).await?;
    let ending = script.sender.whole(script.maker.sign(&event, event::Age::Now)?).await;
    if !ending.is_acknowledged() {
        bail!("one plain event was not acknowledged ({ending:?}), so nothing can be told; are URL and secret right?");
    }
    let heard = [Heard { key: event.key().to_owned(), endings: vec![ending] }];
    let effects = counting.settle(&heard, &[before]).await?;
    match effects.as_slice() {
        [1] => Ok(()),
        [effects] => bail!(
            "one plain event was acknowledged, and {effects} effects of it were counted instead of 1; does the question count the right thing?"
        ),
        _ => bail!("the count of one event has {} numbers", effects.len()),
    }
}

/// One hazard: deliver, wait, count, judge.
async fn face(
    script: &Arc<Script>,
    counting: &Counting,
    hazard: Hazard,
    events: Vec<Event>,
) -> anyhow::Result<Finding> {
    let (began, count) = (Instant::now(), events.len());
    let finding =
        |verdict, effects, heard| Finding { hazard, verdict, events: count, effects, heard, took: began.elapsed() };
    if hazard == Hazard::Conflict && events.iter().any(|event| script.maker.changed(event).is_none()) {
        script.progress.inc(count as u64);
        let why = "events of this provider have no id apart from their body, so another body is another event";
        return Ok(finding(Verdict::Skipped(why.to_owned()), 0, Tally::default()));
    }
    let before = match (counting.counter.is_exact(), events.first()) {
        (false, Some(first)) => vec![counting.counter.count(first.key()).await?],
        // Their ids are new.
        _ => vec![0; count],
    };
    let heard = deliver(script, hazard, events).await?;
    let effects = counting.settle(&heard, &before).await?;
    let verdict = match counting.counter.is_exact() {
        true => judge_each(&heard, &effects),
        false => judge_sum(&heard, effects.iter().sum()),
    };
    Ok(finding(verdict, effects.iter().sum(), Tally::of(&heard)))
}

/// Counts until the count can be believed.
struct Counting {
    counter: Counter,
    patience: Duration,
    quiet: Duration,
}

impl Counting {
    /// Effects since `before`: of each event, or the sum of all. Waits for those of acknowledged events, and then whether
    /// more come.
    async fn settle(&self, heard: &[Heard], before: &[i64]) -> anyhow::Result<Vec<i64>> {
        let exact = self.counter.is_exact();
        let deadline = Instant::now() + self.patience;
        let (mut last, mut since) = (Vec::new(), Instant::now());
        loop {
            let effects = self.ask(heard, before).await?;
            if effects != last {
                since = Instant::now();
            }
            let complete = if exact {
                heard.iter().zip(&effects).all(|(heard, count)| *count > 0 || !heard.is_acknowledged())
            } else {
                let acknowledged = heard.iter().filter(|heard| heard.is_acknowledged()).count();
                effects.iter().sum::<i64>() >= acknowledged as i64
            };
            let quiet = since.elapsed() >= self.quiet;
            if quiet && complete || Instant::now() >= deadline {
                return Ok(effects);
            }
            last = effects;
            sleep(LOOK).await;
        }
    }

    async fn ask(&self, heard: &[Heard], before: &[i64]) -> anyhow::Result<Vec<i64>> {
        let keys = if self.counter.is_exact() { heard } else { heard.get(..1).unwrap_or_default() };
        let mut effects = Vec::with_capacity(keys.len());
        for (heard, before) in keys.iter().zip(before) {
            effects.push(self.counter.count(&heard.key).await? - before);
        }
        Ok(effects)
    }
}

/// Shows itself on a terminal only.
fn progress_bar(total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:15} {wide_bar} {pos}/{len}");
    ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
