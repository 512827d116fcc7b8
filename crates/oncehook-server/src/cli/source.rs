//! Which source or provider a command is about: from the configuration, or from options alone.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{anyhow, bail};
use oncehook_verify::{Handshakes, Identifier, MissingKey, Preset, Scheme, Secret, Settings};

use super::client::no_source;
use super::{Shared, providers};
use crate::config::{Config, SourceConfig, secret_from_reference};

/// Options that choose a source.
#[derive(Debug, clap::Args)]
pub(super) struct SourceArgs {
    /// A source of the configuration; its only one if neither this nor --provider is given
    #[arg(long, value_name = "NAME", conflicts_with = "provider")]
    source: Option<String>,
    /// A preset, without any configuration
    #[arg(long, value_name = "NAME")]
    provider: Option<String>,
    /// The secret, as env:NAME or file:PATH; instead of the source's own
    #[arg(long = "secret", value_name = "REF")]
    secrets: Vec<String>,
    /// A value of the provider, as NAME=VALUE, such as webhook_id=…; may be repeated
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = parse_param)]
    params: Vec<(String, String)>,
    /// The address that the provider calls, where it signs it [default: the source's `url`, or where it is sent]
    #[arg(long, value_name = "URL")]
    public_url: Option<String>,
}

fn parse_param(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("a value is written as NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// A source, as far as commands need it.
pub(super) struct Chosen {
    /// The source's name, or the preset's.
    pub(super) name: String,
    /// Nothing for a custom source.
    pub(super) preset: Option<&'static Preset>,
    pub(super) scheme: Scheme,
    pub(super) secrets: Vec<Secret>,
    /// Whether the secrets were given as options.
    pub(super) secrets_given: bool,
    pub(super) settings: Settings,
    pub(super) identifier: Identifier,
    pub(super) handshakes: Handshakes,
    /// Where the gateway listens, if the configuration was read.
    pub(super) ingress: Option<SocketAddr>,
}

impl SourceArgs {
    /// Reads the configuration only if no provider is given.
    pub(super) fn choose(&self, shared: &Shared) -> anyhow::Result<Chosen> {
        let secrets = self
            .secrets
            .iter()
            .map(|reference| secret_from_reference(reference).map_err(|problem| anyhow!("--secret: {problem}")))
            .collect::<Result<Vec<_>, _>>()?;
        let mut chosen = match &self.provider {
            Some(provider) => from_preset(providers::named(provider)?, secrets)?,
            None => {
                let config = shared.load()?;
                let ingress = config.server.ingress;
                from_source(find(config, self.source.as_deref())?, ingress, secrets)
            }
        };
        chosen.settings.params.extend(self.params.iter().cloned());
        if let Some(url) = &self.public_url {
            chosen.settings.url = Some(url.clone());
        }
        Ok(chosen)
    }
}

/// A preset and nothing else.
pub(super) fn from_preset(preset: &'static Preset, secrets: Vec<Secret>) -> anyhow::Result<Chosen> {
    Ok(Chosen {
        name: preset.name.clone(),
        preset: Some(preset),
        scheme: preset.verify.clone(),
        secrets,
        secrets_given: true,
        settings: Settings { params: examples(preset), ..Settings::default() },
        identifier: Identifier::new(&preset.identify, &preset.verify, MissingKey::default())?,
        handshakes: preset.handshakes.clone(),
        ingress: None,
    })
}

fn from_source(source: SourceConfig, ingress: SocketAddr, secrets: Vec<Secret>) -> Chosen {
    let secrets_given = !secrets.is_empty();
    let preset = Preset::named(&source.provider);
    let mut settings = source.settings;
    // What only signing needs has a value to try things out with.
    for (name, example) in preset.map(examples).unwrap_or_default() {
        settings.params.entry(name).or_insert(example);
    }
    Chosen {
        name: source.name.to_string(),
        preset,
        scheme: source.scheme,
        secrets: if secrets_given { secrets } else { source.secrets },
        secrets_given,
        settings,
        identifier: source.identifier,
        handshakes: source.handshakes,
        ingress: Some(ingress),
    }
}

/// Values to try things out with.
fn examples(preset: &Preset) -> BTreeMap<String, String> {
    preset.params.iter().map(|param| (param.name.clone(), param.example.clone())).collect()
}

/// The source of that name; without a name, the only one.
fn find(config: Config, name: Option<&str>) -> anyhow::Result<SourceConfig> {
    let names: Vec<_> = config.sources.iter().map(|source| source.name.to_string()).collect();
    let mut sources = config.sources.into_iter();
    match name {
        Some(name) => sources.find(|source| source.name.as_str() == name).ok_or_else(|| no_source(name, &names).into()),
        None => match (sources.next(), sources.next()) {
            (Some(only), None) => Ok(only),
            _ => {
                bail!("the configuration has several sources; choose one with --source: {}", names.join(", "))
            }
        },
    }
}
