//! `oncehook init`: a commented configuration and a secret, ready for `check` and `serve`.
//!
//! Promises: nothing that exists is overwritten without `--force`, and then only the configuration; a secret that exists
//! is never replaced. If either file is in the way, neither is written.
//!
//! Does not: make directories, or start anything.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};

use super::{Shared, print_json, random, say};
use crate::config::DEFAULT_FILE;

/// The secret's file, beside the configuration.
const SECRET_FILE: &str = "stripe.secret";

/// How the default configuration refers to it.
const SECRET_REFERENCE: &str = "\"file:stripe.secret\"";

#[derive(Debug, clap::Args)]
pub(super) struct Init {
    /// Overwrite the configuration; a secret that exists is kept
    #[arg(long)]
    force: bool,
}

impl Init {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let config = &shared.config;
        let secret = config.with_file_name(SECRET_FILE);
        let text = config_text(&secret)?;
        if !self.force {
            refuse_existing(&[config, &secret])?;
        }
        let made_secret = !is_there(&secret);
        if made_secret {
            write_secret(&secret).with_context(|| format!("write {}", secret.display()))?;
        }
        write_config(config, &text, self.force).with_context(|| format!("write {}", config.display()))?;
        if shared.json {
            print_json(&serde_json::json!({ "config": config, "secrets": [secret] }).to_string());
        } else {
            say(&next_steps(config, &secret, made_secret));
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn refuse_existing(paths: &[&PathBuf]) -> anyhow::Result<()> {
    match paths.iter().find(|path| is_there(path)) {
        None => Ok(()),
        Some(path) => bail!(
            "{} exists and is not overwritten; --force writes the configuration anew and keeps the secret",
            path.display()
        ),
    }
}

/// Also true for a link that leads nowhere.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// The default configuration with the path of its secret. Paths in it are relative to the working directory, as `config` is.
fn config_text(secret: &Path) -> anyhow::Result<String> {
    let path = secret.to_str().context("the path of the configuration is not UTF-8")?;
    let reference = toml::Value::String(format!("file:{path}")).to_string();
    Ok(DEFAULT_FILE.replacen(SECRET_REFERENCE, &reference, 1))
}

fn write_secret(path: &Path) -> anyhow::Result<()> {
    let secret = format!("whsec_{}\n", random::hex::<32>()?);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    Ok(file.write_all(secret.as_bytes())?)
}

fn write_config(path: &Path, text: &str, force: bool) -> anyhow::Result<()> {
    let mut options = OpenOptions::new();
    // A password may come to stand in it.
    options.write(true).mode(0o600);
    let mut file =
        if force { options.create(true).truncate(true).open(path)? } else { options.create_new(true).open(path)? };
    Ok(file.write_all(text.as_bytes())?)
}

fn next_steps(config: &Path, secret: &Path, made_secret: bool) -> String {
    let option =
        if config.as_os_str() == "oncehook.toml" { String::new() } else { format!(" --config {}", config.display()) };
    let (config, secret) = (config.display(), secret.display());
    let written = if made_secret {
        format!("wrote {config} and {secret} (a made-up secret; put Stripe's there for real events)")
    } else {
        format!("wrote {config}; kept {secret}")
    };
    format!(
        "{written}\nNext:\n  oncehook{option} serve\n  oncehook{option} send --source stripe    (from another terminal)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_secret_stands_beside_the_configuration() {
        for (config, reference) in [
            ("oncehook.toml", "secrets = [\"file:stripe.secret\"]"),
            ("etc/once.toml", "secrets = [\"file:etc/stripe.secret\"]"),
            ("/etc/o/c.toml", "secrets = [\"file:/etc/o/stripe.secret\"]"),
        ] {
            let text = config_text(&Path::new(config).with_file_name(SECRET_FILE)).unwrap();
            assert!(text.contains(reference), "{reference} is not in:\n{text}");
        }
    }

    #[test]
    fn a_path_with_quotes_stays_one_string() {
        let text = config_text(Path::new("it's \"here\"/stripe.secret")).unwrap();
        let parsed: toml::Table = text.parse().unwrap();
        let reference = parsed["source"][0]["secrets"][0].as_str().unwrap();
        assert_eq!(reference, "file:it's \"here\"/stripe.secret");
    }
}
