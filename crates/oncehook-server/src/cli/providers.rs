//! `oncehook providers`: the presets and their facts. Reads no configuration.
//!
//! Everything is computed from the presets, so nothing here can disagree with what the gateway does.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use oncehook_verify::{Confidence, Identifier, Integrity, MissingKey, Preset};
use serde_json::json;

use super::{Shared, Usage, print, print_json, text};
use crate::config::{Limits, did_you_mean};

#[derive(Debug, clap::Args)]
pub(super) struct Providers {
    /// Show everything about this one
    name: Option<String>,
    /// Write a page in Markdown about each provider into this directory
    #[arg(long, value_name = "DIR", conflicts_with = "name")]
    pages: Option<PathBuf>,
}

/// The provider that is no preset.
const CUSTOM: &str = "custom";

const CUSTOM_STORY: &str = "custom: a sender that has no preset
  It is described in oncehook.toml itself: [source.verify] says how it signs, `key` where the id of an event stands,
  and [source.identify] (if needed) where its type, time and entity are. `oncehook verify` tells why a request fails.";

/// To paste and to change. A test checks it.
const CUSTOM_BLOCK: &str = "[[source]]
name = \"ours\"
provider = \"custom\"
secrets = [\"env:CUSTOM_SECRET\"]
key = \"/id\"                     # a JSON pointer, \"header:NAME\", or \"digest\" (the body's own)
[source.verify]
algorithm = \"hmac-sha256\"       # hmac-sha1, hmac-sha512, ed25519, ecdsa-p256, rsa-sha256, token
key = \"utf8\"                    # how the secret's text becomes the key: utf8, hex, base64, pem
content = \"{body}\"              # what is signed, such as \"{ts}.{body}\"
signature = { header = \"x-signature\", encoding = \"hex\" }";

impl Providers {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        if let Some(directory) = &self.pages {
            write_pages(directory)?;
            return Ok(ExitCode::SUCCESS);
        }
        match (self.name, shared.json) {
            (None, false) => print(&overview()),
            (None, true) => print_json(&json!(Preset::all().iter().map(facts).collect::<Vec<_>>()).to_string()),
            (Some(name), false) if name == CUSTOM => print(&format!("{CUSTOM_STORY}\n\n{CUSTOM_BLOCK}")),
            (Some(name), true) if name == CUSTOM => {
                print_json(&json!({ "name": CUSTOM, "title": CUSTOM_STORY, "config": CUSTOM_BLOCK }).to_string());
            }
            (Some(name), false) => print(&story(named(&name)?)),
            (Some(name), true) => print_json(&facts(named(&name)?).to_string()),
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The preset of that name or alias, or an error that names the nearest.
pub(super) fn named(name: &str) -> anyhow::Result<&'static Preset> {
    Preset::named(name).ok_or_else(|| {
        let names = Preset::all().iter().map(|preset| preset.name.as_str());
        let meant = did_you_mean(name, names).map(|meant| format!(" {meant}")).unwrap_or_default();
        let name = text::shown(name, 64);
        Usage(format!("there is no preset `{name}`;{meant} `oncehook providers` lists them all")).into()
    })
}

fn write_pages(directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory).with_context(|| format!("make {}", directory.display()))?;
    let write = |name: &str, text: String| {
        let path = directory.join(format!("{name}.md"));
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    };
    write("README", index_page())?;
    Preset::all().iter().try_for_each(|preset| write(&preset.name, page(preset)))
}

fn overview() -> String {
    let header = ["NAME", "SIGNED", "KEY", "BATCH", "RETRIES", "HORIZON", "TIMEOUT", "CONFIDENCE"];
    let rows = Preset::all().iter().map(|preset| {
        vec![
            preset.name.clone(),
            signed(preset),
            if key_is_signed(preset) { "signed" } else { "unsigned" }.to_owned(),
            if preset.identify.is_batch() { "yes" } else { "no" }.to_owned(),
            if preset.retries { "yes" } else { "no" }.to_owned(),
            text::duration(preset.retry_horizon_secs),
            timeout(preset),
            confidence(preset),
        ]
    });
    text::table(&header, rows)
}

fn story(preset: &Preset) -> String {
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
    let lines = [
        ("aliases", aliases),
        ("signed", signed(preset)),
        ("signature in", preset.verify.signature_place()),
        ("key", key.to_owned()),
        ("retries", retries.to_owned()),
        ("horizon", format!("a copy may come up to {} later", text::duration(preset.retry_horizon_secs))),
        ("timeout", timeout(preset)),
        ("wants", wants(preset)),
        ("handshakes", handshakes(preset).to_owned()),
        ("batch", if preset.identify.is_batch() { "several events in one request" } else { "no" }.to_owned()),
        ("forwarded", forwarded(preset).join(", ")),
        ("largest body", largest_body(preset)),
        ("confidence", founded(preset).to_owned()),
        ("secret", preset.secret_hint.clone()),
        ("samples", sample_types(preset).join(", ")),
    ];
    let lines: Vec<_> = lines.iter().map(|(name, fact)| format!("  {name:<13} {fact}")).collect();
    let steps: Vec<_> = preset.setup.iter().map(|step| format!("  - {step}")).collect();
    let params: Vec<_> =
        preset.params.iter().map(|param| format!("  - params.{}: {}", param.name, param.hint)).collect();
    format!(
        "{} ({})\n{}\n\nAt the provider\n{}\n\nIn oncehook.toml\n{}",
        preset.title,
        preset.name,
        lines.join("\n"),
        [steps, params].concat().join("\n"),
        config_block(preset)
    )
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
        "signature_place": preset.verify.signature_place(),
        "batch": preset.identify.is_batch(),
        "needs_url": preset.verify.needs_url(),
        "fetches_keys": preset.verify.fetches_keys(),
        "params": preset.params.iter().map(|param| json!({ "name": param.name, "hint": param.hint, "optional": param.optional })).collect::<Vec<_>>(),
        "handshake": !preset.handshakes.is_empty(),
        "experimental": preset.experimental,
        "key_signed": key_is_signed(preset),
        "retries": preset.retries,
        "retry_horizon_seconds": preset.retry_horizon_secs,
        "timeout_seconds": preset.timeout_secs,
        "forwarded_headers": forwarded(preset),
        "max_body_bytes": preset.max_body_bytes,
        "ack_status": preset.ack.status,
        "confidence": preset.confidence.as_str(),
        "secret_hint": preset.secret_hint,
        "sample_type": preset.sample.kind,
        "sample_types": sample_types(preset),
        "config": config_block(preset),
    })
}

/// What to put into the configuration.
fn config_block(preset: &Preset) -> String {
    let variable = preset.name.to_ascii_uppercase().replace('-', "_");
    let name = &preset.name;
    let mut lines = vec!["[[source]]".to_owned(), format!("name = \"{name}\""), format!("provider = \"{name}\"")];
    if !preset.verify.fetches_keys() {
        lines.push(format!("secrets = [\"env:{variable}_SECRET\"]"));
    }
    if preset.verify.needs_url() {
        lines.push(format!("url = \"https://gateway.example/webhooks/{name}\""));
    }
    if preset.handshakes.hands_over_secret() {
        lines.push(format!(
            "# handover = \"{name}.pending\" instead of secrets, until the provider has handed one over"
        ));
    }
    let params: Vec<String> = preset
        .params
        .iter()
        .filter(|param| param.name != "kid")
        .map(|param| match param.name.as_str() {
            "api_secret" => format!("{} = \"env:{variable}_API_SECRET\"", param.name),
            _ => format!("{} = \"{}\"", param.name, param.example),
        })
        .collect();
    if !params.is_empty() {
        lines.push(format!("params = {{ {} }}", params.join(", ")));
    }
    lines.join("\n")
}

/// One provider, for `docs/providers/`.
fn page(preset: &Preset) -> String {
    let mut page = format!(
        "# {}\n\n<!-- Made by `oncehook providers --pages docs/providers`; change the preset instead. -->\n\n",
        preset.title
    );
    if preset.experimental {
        page.push_str("**Experimental.** These facts were not confirmed by anything that was read. Try it before relying on it.\n\n");
    }
    page.push_str("## At the provider\n\n");
    for (index, step) in preset.setup.iter().enumerate() {
        page.push_str(&format!("{}. {step}\n", index + 1));
    }
    page.push_str(&format!("\nThe secret: {}.\n", preset.secret_hint));
    for param in &preset.params {
        let need = if param.optional { " (not always needed)" } else { "" };
        page.push_str(&format!("\n`params.{}`{need}: {}.\n", param.name, param.hint));
    }
    page.push_str(&format!("\n## In oncehook.toml\n\n```toml\n{}\n```\n\n", config_block(preset)));
    page.push_str("## Facts\n\n| | |\n| --- | --- |\n");
    let batch = if preset.identify.is_batch() {
        "one request can hold several events; each is kept and answered for itself"
    } else {
        "one event per request"
    };
    let retries =
        if preset.retries { "retries by itself" } else { "never retries: while the gateway is away, events are lost" };
    let key = if key_is_signed(preset) { "covered by the signature" } else { "not covered by the signature" };
    for (what, fact) in [
        ("signed", signed(preset)),
        ("signature in", format!("`{}`", preset.verify.signature_place().replace('|', "\\|"))),
        ("key of an event", key.to_owned()),
        ("events", batch.to_owned()),
        ("retries", format!("{retries}; a copy may come up to {} later", text::duration(preset.retry_horizon_secs))),
        ("waits for an answer", timeout(preset)),
        ("wants", wants(preset)),
        ("handshake", handshakes(preset).to_owned()),
        ("headers that are forwarded", in_code(&forwarded(preset))),
        ("largest body that is taken", largest_body(preset)),
        ("facts", founded(preset).to_owned()),
    ] {
        page.push_str(&format!("| {what} | {fact} |\n"));
    }
    page.push_str(&format!("\n## Try it\n\n{}", trial(preset)));
    page
}

/// How to send a sample of this provider.
fn trial(preset: &Preset) -> String {
    let name = &preset.name;
    if name == "paddle-classic" {
        return "Signatures with SHA-1 are checked but no longer made: send a test alert from Paddle.\n".to_owned();
    }
    let half = preset.verify.fetches_keys() || ["discord", "telnyx", "sendgrid", "wise"].contains(&name.as_str());
    let secret = if half { " --secret file:private-key.pem" } else { "" };
    let mut text = format!(
        "```sh\noncehook serve &\noncehook send --source {name}{secret}          # `{}`, signed as the provider does\n",
        preset.sample.kind
    );
    for kind in preset.sample.other.keys() {
        text.push_str(&format!("oncehook send --source {name}{secret} --type {kind}\n"));
    }
    text.push_str(&format!(
        "oncehook verify --source {name} --request saved.http   # why a saved request is refused\n```\n"
    ));
    if half {
        text.push_str("\nTo sign, the private half of the key is needed; the gateway must then know the public half of the same key.\n");
    }
    text
}

fn index_page() -> String {
    let mut page = format!(
        "# Providers\n\n<!-- Made by `oncehook providers --pages docs/providers`. -->\n\n{} presets. `oncehook providers NAME` shows the same.\n\n| provider | preset | signed | batch | facts from |\n| --- | --- | --- | --- | --- |\n",
        Preset::all().len()
    );
    for preset in Preset::all() {
        let batch = if preset.identify.is_batch() { "yes" } else { "" };
        page.push_str(&format!(
            "| [{}]({}.md) | `{}` | {} | {batch} | {} |\n",
            preset.title,
            preset.name,
            preset.name,
            signed(preset),
            confidence(preset)
        ));
    }
    page
}

fn confidence(preset: &Preset) -> String {
    match preset.experimental {
        true => format!("{} (experimental)", preset.confidence.as_str()),
        false => preset.confidence.as_str().to_owned(),
    }
}

fn founded(preset: &Preset) -> &'static str {
    match preset.confidence {
        Confidence::Sdk => "sdk: read in the provider's own code",
        Confidence::Docs => "docs: read in the provider's documentation",
        Confidence::ThirdParty => "third_party: read in somebody else's code",
        Confidence::Memory => {
            "memory: EXPERIMENTAL, not confirmed by anything that was read; try it before relying on it"
        }
    }
}

fn handshakes(preset: &Preset) -> &'static str {
    match (preset.handshakes.is_empty(), preset.handshakes.hands_over_secret()) {
        (true, _) => "none",
        (false, false) => "answered by the gateway",
        (false, true) => "hands over a secret, which waits in a file until you confirm it",
    }
}

/// The headers that go along when an event is forwarded.
fn forwarded(preset: &Preset) -> Vec<String> {
    std::iter::once("content-type".to_owned()).chain(preset.forward.entries()).collect()
}

fn in_code(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" ")
}

/// What a source takes if nothing else is configured.
fn largest_body(preset: &Preset) -> String {
    format!("{} MiB", preset.max_body_bytes.unwrap_or(Limits::default().body_bytes) >> 20)
}

fn wants(preset: &Preset) -> String {
    match &preset.ack.body {
        Some(body) if !body.is_empty() => format!("HTTP {} with `{body}`", preset.ack.status),
        _ => format!("HTTP {}", preset.ack.status),
    }
}

fn signed(preset: &Preset) -> String {
    let what = match preset.verify.integrity() {
        Integrity::Body => "body",
        Integrity::Fields => "some fields",
        Integrity::None if preset.verify.fetches_keys() => "nothing (signed token)",
        Integrity::None => "nothing (token)",
    };
    match preset.verify.default_tolerance_secs() {
        Some(tolerance) => format!("{what}, time (±{})", text::duration(tolerance)),
        None => what.to_owned(),
    }
}

/// The types of events of which there is a sample, that of `send` without `--type` first.
fn sample_types(preset: &Preset) -> Vec<&str> {
    std::iter::once(&preset.sample.kind).chain(preset.sample.other.keys()).map(String::as_str).collect()
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
            assert!(preset.setup.iter().all(|step| story(preset).contains(step)));
            assert!(preset.params.iter().all(|param| story(preset).contains(&param.hint)));
        }
        let stripe = facts(named("stripe").unwrap());
        assert_eq!(stripe["key_signed"], true);
        assert_eq!(stripe["tolerance_seconds"], 300);
        assert_eq!(stripe["sample_types"][0], stripe["sample_type"]);
        assert!(story(named("stripe").unwrap()).contains("payment_intent.succeeded, charge.refunded"));
        assert_eq!(facts(named("github").unwrap())["key_signed"], false);
    }

    /// `oncehook providers --pages docs/providers` brings them up to date.
    #[test]
    fn r45_the_pages_of_all_providers_are_up_to_date() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/providers");
        let read = |name: &str| std::fs::read_to_string(directory.join(format!("{name}.md"))).unwrap_or_default();
        assert_eq!(read("README"), index_page());
        for preset in Preset::all() {
            assert_eq!(read(&preset.name), page(preset), "{}", preset.name);
        }
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), Preset::all().len() + 1, "no page too many");
    }

    #[test]
    fn what_is_uncertain_says_so() {
        for preset in Preset::all() {
            let experimental = preset.confidence == Confidence::Memory;
            assert_eq!(story(preset).contains("EXPERIMENTAL"), experimental, "{}", preset.name);
            assert_eq!(facts(preset)["experimental"], experimental, "{}", preset.name);
        }
        assert!(overview().contains("memory (experimental)"));
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
    fn an_unknown_name_names_the_nearest() {
        let error = named("strip\x1b").unwrap_err().to_string();
        assert!(error.contains("strip\\u{1b}") && error.contains("did you mean `stripe`?"), "{error}");
        assert!(named("ü").unwrap_err().to_string().contains("`oncehook providers` lists them all"));
    }
}
