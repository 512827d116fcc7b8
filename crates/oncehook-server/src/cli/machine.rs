//! `oncehook machine`: a state machine of the configuration, as text or as a picture. Reads the configuration only.

use std::process::ExitCode;

use anyhow::anyhow;
use oncehook::machine::Machine;
use serde_json::json;

use super::{Shared, Usage, print, print_json, text};
use crate::config::{Config, did_you_mean};

#[derive(Debug, clap::Args)]
pub(super) struct ShowMachine {
    /// Which one; all of them without it
    name: Option<String>,
    /// How it is drawn
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Format {
    /// One line per transition
    Text,
    /// A graph for `dot`
    Graphviz,
    /// A state diagram
    Mermaid,
}

impl ShowMachine {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let config = Config::load(&shared.config)?;
        let wanted = |machine: &Machine| self.name.as_deref().is_none_or(|name| machine.name == name);
        let machines: Vec<&Machine> =
            config.machines.iter().map(AsRef::as_ref).filter(|machine| wanted(machine)).collect();
        if machines.is_empty() {
            return Err(match &self.name {
                Some(name) => {
                    let known = config.machines.iter().map(|machine| machine.name.as_str());
                    let meant = did_you_mean(name, known).map(|meant| format!("; {meant}")).unwrap_or_default();
                    let name = text::shown(name, 64);
                    Usage(format!("there is no machine `{name}` in the configuration{meant}")).into()
                }
                None => anyhow!("there is no [[machine]] in the configuration"),
            });
        }
        if shared.json {
            print_json(&json!(machines.into_iter().map(facts).collect::<Vec<_>>()).to_string());
            return Ok(ExitCode::SUCCESS);
        }
        for machine in machines {
            let drawn = match self.format {
                Format::Text => machine.to_string(),
                Format::Graphviz => machine.to_graphviz(),
                Format::Mermaid => machine.to_mermaid(),
            };
            print(drawn.trim_end());
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn facts(machine: &Machine) -> serde_json::Value {
    let ways = machine.transitions.iter();
    json!({
        "name": machine.name,
        "states": machine.states,
        "initial": machine.initial,
        "misfit": machine.misfit.as_str(),
        "transitions": ways.map(|way| json!({ "on": way.on, "from": way.from, "to": way.to })).collect::<Vec<_>>(),
        "unreachable": machine.unreachable(),
    })
}
