//! Where secrets come from: `env:NAME` or `file:PATH`. Never from the configuration file itself, which gets copied,
//! committed and printed.

use oncehook_verify::Secret;

/// Reads the secret that a reference names. The error never holds the secret's text.
pub fn secret_from_reference(reference: &str) -> Result<Secret, String> {
    let text = if let Some(name) = reference.strip_prefix("env:") {
        environment(name)?
    } else if let Some(path) = reference.strip_prefix("file:") {
        std::fs::read_to_string(path).map_err(|error| format!("the secret file {path} cannot be read: {error}"))?
    } else {
        return Err("a secret is written as \"env:NAME\" or \"file:PATH\", never as plain text here".to_owned());
    };
    Secret::new(text).map_err(|error| format!("the secret of {reference}: {error}"))
}

#[expect(clippy::disallowed_methods, reason = "this is the door for the environment")]
fn environment(name: &str) -> Result<String, String> {
    std::env::var(name).map_err(|error| match error {
        std::env::VarError::NotPresent => format!("the environment variable {name} is not set"),
        std::env::VarError::NotUnicode(_) => format!("the environment variable {name} is not UTF-8"),
    })
}
