//! Which source or provider a command is about: from the configuration, or from options alone.

use std::net::SocketAddr;

use anyhow::{anyhow, bail};
use oncehook_verify::{Handshakes, Identifier, MissingKey, Preset, Scheme, Secret};

use super::providers;
use super::{Shared, text};
use crate::config::{Config, SourceConfig, secret_from_reference};

/// Options that choose a source.
#[derive(Debug, clap::Args)]
pub(super) struct SourceArgs {
    /// A source of the configuration; its only one if neither this nor --provider is given
    #[arg(long, value_name = "NAME", conflicts_with = "provider")]
    source: Option<String>,
    /// A preset, without any configuration
    #[arg(long, value_name = "NAME", requires = "secrets")]
    provider: Option<String>,
    /// The secret, as env:NAME or file:PATH; instead of the source's own
    #[arg(long = "secret", value_name = "REF")]
    secrets: Vec<String>,
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
    pub(super) tolerance: Option<u64>,
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
            .map(|reference| {
                secret_from_reference(reference).map_err(|problem| anyhow!("--secret: {problem}"))
            })
            .collect::<Result<Vec<_>, _>>()?;
        match &self.provider {
            Some(provider) => from_preset(providers::named(provider)?, secrets),
            None => {
                let config = shared.load()?;
                let ingress = config.server.ingress;
                Ok(from_source(find(config, self.source.as_deref())?, ingress, secrets))
            }
        }
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
        tolerance: None,
        identifier: Identifier::new(&preset.identify, &preset.verify, MissingKey::default())?,
        handshakes: preset.handshakes.clone(),
        ingress: None,
    })
}

fn from_source(source: SourceConfig, ingress: SocketAddr, secrets: Vec<Secret>) -> Chosen {
    let secrets_given = !secrets.is_empty();
    Chosen {
        name: source.name.to_string(),
        preset: Preset::named(&source.provider),
        scheme: source.scheme,
        secrets: if secrets_given { secrets } else { source.secrets },
        secrets_given,
        tolerance: source.tolerance,
        identifier: source.identifier,
        handshakes: source.handshakes,
        ingress: Some(ingress),
    }
}

/// The source of that name; without a name, the only one.
fn find(config: Config, name: Option<&str>) -> anyhow::Result<SourceConfig> {
    let names: Vec<_> = config.sources.iter().map(|source| source.name.to_string()).collect();
    let names = names.join(", ");
    let mut sources = config.sources.into_iter();
    match name {
        Some(name) => sources.find(|source| source.name.as_str() == name).ok_or_else(|| {
            anyhow!("there is no source `{}`; the configuration has: {names}", text::shown(name, 64))
        }),
        None => match (sources.next(), sources.next()) {
            (Some(only), None) => Ok(only),
            _ => bail!("the configuration has several sources; choose one with --source: {names}"),
        },
    }
}
