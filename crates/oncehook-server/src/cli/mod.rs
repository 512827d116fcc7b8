//! The command line. One file per command; data on stdout, talk on stderr, exit codes that scripts can use:
//! 0 done, 1 it failed or something is wrong, 2 the command line is wrong. An order for many events is done if each of them
//! was carried out or found nothing to do; it has failed if one could not be, or if it was cancelled.

mod bulk;
mod check;
mod client;
mod events;
mod filter;
mod init;
mod machine;
mod migrate;
mod order;
mod pause;
mod providers;
mod random;
mod rehearsal;
mod request;
mod send;
mod serve;
mod show;
mod source;
mod storm;
mod tail;
mod tally;
mod text;
mod verify;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

use crate::config::{Config, Problems};

/// Receives webhooks so that each one takes effect exactly once.
#[derive(Debug, Parser)]
#[command(name = "oncehook", version, about = ABOUT, long_about = LONG_ABOUT, max_term_width = 100,
          after_help = EXIT_CODES)]
struct Cli {
    #[command(flatten)]
    shared: Shared,
    #[command(subcommand)]
    command: Command,
}

const ABOUT: &str = "Receives webhooks so that each one takes effect exactly once.";

const LONG_ABOUT: &str = "Receives webhooks so that each one takes effect exactly once.

Providers such as Stripe, GitHub and Shopify send the same event again until they get an answer. oncehook stands \
between them and your code: it checks the signature, stores each event once in a database (SQLite, PostgreSQL, MariaDB \
or MySQL), answers, and then runs what you configured for it, as SQL in that database or as a request to your service, \
with retries, in order where you want it, and with every step on record.

Begin with `oncehook init`, then `oncehook serve`, and from another terminal `oncehook send --source stripe`.";

const EXIT_CODES: &str = "Exit codes: 0 done; 1 it failed, or something is wrong; 2 the command line is wrong.";

/// Options of every command.
#[derive(Debug, Clone, clap::Args)]
struct Shared {
    /// The configuration file
    #[arg(long, global = true, default_value = "oncehook.toml", value_name = "PATH")]
    config: PathBuf,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write a commented configuration and a secret to start with
    Init(init::Init),
    /// Check the configuration and report every problem
    Check(check::Check),
    /// Run the gateway
    Serve(serve::Serve),
    /// Make the journal's tables, then stop
    Migrate,
    /// Sign a webhook like a provider and send it, once or many times
    Send(send::Send),
    /// Test any webhook endpoint: does each event take effect once, however it is delivered?
    Storm(storm::Storm),
    /// Check a saved request and explain why its signature fails
    Verify(verify::Verify),
    /// List events of the running gateway
    Events(events::Events),
    /// Show one event of the running gateway with its whole story
    Show(show::Show),
    /// Try what failed again, now: one event, or all that a filter finds
    Retry(order::Retry),
    /// Offer events again: to routes that are new to them, and what failed; --force runs them again altogether
    Replay(order::Replay),
    /// Give up what is pending or dead of an event
    Skip(order::Plain),
    /// Let a quarantined event go to its handlers
    Release(order::Plain),
    /// Stop handling the events of a source or a route; accepting goes on
    Pause(pause::Pause),
    /// Handle them again
    Resume(pause::Resume),
    /// Print events as they come in
    Tail(tail::Tail),
    /// Print a state machine of the configuration as text or as a picture
    Machine(machine::ShowMachine),
    /// List the providers that are known
    Providers(providers::Providers),
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let shared = &cli.shared;
    let outcome = match cli.command {
        Command::Init(command) => command.run(shared),
        Command::Check(command) => command.run(shared),
        Command::Serve(command) => command.run(shared),
        Command::Migrate => migrate::run(shared),
        Command::Send(command) => command.run(shared),
        Command::Storm(command) => command.run(shared),
        Command::Verify(command) => command.run(shared),
        Command::Events(command) => command.run(shared),
        Command::Show(command) => command.run(shared),
        Command::Retry(command) => command.run(shared),
        Command::Replay(command) => command.run(shared),
        Command::Skip(command) => command.run(shared, "skip"),
        Command::Release(command) => command.run(shared, "release"),
        Command::Pause(command) => command.run(shared),
        Command::Resume(command) => command.run(shared),
        Command::Tail(command) => command.run(shared),
        Command::Machine(command) => command.run(shared),
        Command::Providers(command) => command.run(shared),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            say(&failure(&error));
            if error.is::<Usage>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

/// Something on the command line is wrong, as far as only the configuration or the gateway can tell.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

/// The text of a failed command. Problems of a configuration file speak for themselves.
fn failure(error: &anyhow::Error) -> String {
    match error.downcast_ref::<Problems>() {
        Some(problems) => problems.to_string(),
        None => format!("error: {error:#}"),
    }
}

impl Shared {
    /// The checked configuration.
    fn load(&self) -> anyhow::Result<Config> {
        Ok(Config::load(&self.config)?)
    }
}

/// Waits for one thing, where there is no runtime yet.
fn wait<T>(work: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    Ok(runtime.context("start the runtime")?.block_on(work))
}

/// Data, for the next program or a person's eyes. A closed pipe ends the output, not with a panic.
fn print(text: &str) {
    use std::io::Write as _;
    let mut stdout = std::io::stdout().lock();
    // Whoever read us has seen enough.
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

/// Data as JSON. It may hold what strangers sent, and a terminal must not obey it.
fn print_json(json: &str) {
    print(&text::harmless_json(json));
}

/// Talk, for a person.
fn say(text: &str) {
    use std::io::Write as _;
    // Nobody may be listening.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
