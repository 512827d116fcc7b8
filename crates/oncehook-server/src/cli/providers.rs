//! `oncehook providers`: the presets and their facts. Reads no configuration.
//!
//! Everything is computed from the presets, so nothing here can disagree with what the gateway does.

use std::process::ExitCode;

use anyhow::anyhow;
use oncehook_verify::{Confidence, Identifier, Integrity, MissingKey, Preset};
use serde_json::json;

use super::{Shared, print, text};

#[derive(Debug, clap::Args)]
pub(super) struct Providers {
    /// Show everything about this one
    name: Option<String>,
}

impl Providers {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        match (self.name, shared.json) {
            (None, false) => print(&overview()),
            (None, true) => print(&json!(Preset::all().iter().map(facts).collect::<Vec<_>>()).to_string()),
            (Some(name), false) => print(&story(named(&name)?)),
            (Some(name), true) => print(&facts(named(&name)?).to_string()),
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The preset of that name or alias, or an error that lists all names.
pub(super) fn named(name: &str) -> anyhow::Result<&'static Preset> {
    Preset::named(name).ok_or_else(|| {
        let names: Vec<_> = Preset::all().iter().map(|preset| preset.name.as_str()).collect();
        anyhow!("there is no preset `{}`; known: {}", text::shown(name, 64), names.join(", "))
    })
}

fn overview() -> String {
    let header = ["NAME", "SIGNED", "KEY", "RETRIES", "HORIZON", "TIMEOUT", "CONFIDENCE"];
    let rows = Preset::all().iter().map(|preset| {
        vec![
            preset.name.clone(),
            signed(preset),
            if key_is_signed(preset) { "signed" } else { "unsigned" }.to_owned(),
            if preset.retries { "yes" } else { "no" }.to_owned(),
            text::duration(preset.retry_horizon_secs),
            timeout(preset),
            preset.confidence.as_str().to_owned(),
        ]
    });
    text::table(&header, rows)
}

fn story(preset: &Preset) -> String {
    let headers: Vec<_> = preset.verify.signature_headers().map(|name| name.as_str()).collect();
    let aliases = if preset.aliases.is_empty() { "none".to_owned() } else { preset.aliases.join(", ") };
    let key = if key_is_signed(preset) {
        "signed: nobody can change it"
    } else {
        "not signed: whoever has captured a request can send it again under another key"
    };
    let retries = if preset.retries {
        "by itself"
    } else {
        "not by itself: while the gateway is away, events are lost until somebody resends them"
    };
    let confidence = match preset.confidence {
        Confidence::Sdk => "sdk: read in the provider's own code",
        Confidence::Docs => "docs: read in the provider's documentation",
        Confidence::ThirdParty => "third_party: read in somebody else's code",
    };
    let handshakes = if preset.handshakes.is_empty() { "none" } else { "answered by the gateway" };
    let lines = [
        ("aliases", aliases),
        ("signed", signed(preset)),
        ("signature in", headers.join(" or ")),
        ("key", key.to_owned()),
        ("retries", retries.to_owned()),
        ("horizon", format!("a copy may come up to {} later", text::duration(preset.retry_horizon_secs))),
        ("timeout", timeout(preset)),
        ("wants", format!("HTTP {}", preset.ack.status)),
        ("handshakes", handshakes.to_owned()),
        ("confidence", confidence.to_owned()),
        ("secret", preset.secret_hint.clone()),
    ];
    let lines: Vec<_> = lines.iter().map(|(name, fact)| format!("  {name:<13} {fact}")).collect();
    format!("{} ({})\n{}\n\n{}", preset.title, preset.name, lines.join("\n"), config_block(preset))
}

fn facts(preset: &Preset) -> serde_json::Value {
    let headers: Vec<_> = preset.verify.signature_headers().map(|name| name.as_str()).collect();
    json!({
        "name": preset.name,
        "title": preset.title,
        "aliases": preset.aliases,
        "integrity": preset.verify.integrity().as_str(),
        "tolerance_seconds": preset.verify.default_tolerance_secs(),
        "signature_headers": headers,
        "key_signed": key_is_signed(preset),
        "retries": preset.retries,
        "retry_horizon_seconds": preset.retry_horizon_secs,
        "timeout_seconds": preset.timeout_secs,
        "ack_status": preset.ack.status,
        "confidence": preset.confidence.as_str(),
        "secret_hint": preset.secret_hint,
        "sample_type": preset.sample.kind,
        "config": config_block(preset),
    })
}

/// What to put into the configuration.
fn config_block(preset: &Preset) -> String {
    let variable = preset.name.to_ascii_uppercase().replace('-', "_");
    let name = &preset.name;
    format!("[[source]]\nname = \"{name}\"\nprovider = \"{name}\"\nsecrets = [\"env:{variable}_SECRET\"]")
}

fn signed(preset: &Preset) -> String {
    let what = match preset.verify.integrity() {
        Integrity::Body => "body",
        Integrity::Fields => "some fields",
        Integrity::None => "nothing (token)",
    };
    match preset.verify.default_tolerance_secs() {
        Some(tolerance) => format!("{what}, time (±{tolerance} s)"),
        None => what.to_owned(),
    }
}

fn key_is_signed(preset: &Preset) -> bool {
    Identifier::new(&preset.identify, &preset.verify, MissingKey::default())
        .is_ok_and(|identifier| identifier.key_is_signed())
}

fn timeout(preset: &Preset) -> String {
    preset.timeout_secs.map_or_else(|| "unknown".to_owned(), text::duration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_listed_with_its_facts() {
        let overview = overview();
        for preset in Preset::all() {
            assert!(overview.contains(&preset.name), "{overview}");
            assert!(story(preset).contains(&preset.secret_hint));
        }
        let stripe = facts(named("stripe").unwrap());
        assert_eq!(stripe["key_signed"], true);
        assert_eq!(stripe["tolerance_seconds"], 300);
        assert_eq!(facts(named("github").unwrap())["key_signed"], false);
    }

    #[test]
    fn every_block_to_paste_is_toml() {
        for preset in Preset::all() {
            let block: toml::Table = config_block(preset).parse().unwrap();
            assert_eq!(block["source"][0]["provider"].as_str(), Some(preset.name.as_str()));
        }
        assert!(config_block(named("standardwebhooks").unwrap()).contains("env:STANDARD_WEBHOOKS_SECRET"));
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = named("strip\x1b").unwrap_err().to_string();
        assert!(error.contains("strip\\u{1b}") && error.contains("stripe, github"), "{error}");
    }
}
