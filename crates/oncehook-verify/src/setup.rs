//! Errors made by the operator, found before the first request is taken.

/// Why a scheme, an identification or a set of secrets cannot be used. The text names the field, never a
/// secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The description of the signature contradicts itself.
    #[error("verify: {0}")]
    Scheme(String),
    /// The description of the event's identity cannot be read.
    #[error("identify: {0}")]
    Identify(String),
    /// The description of a handshake cannot be read.
    #[error("handshake: {0}")]
    Handshake(String),
    /// A source without secrets would accept everything, so it accepts nothing.
    #[error("no secret is configured")]
    NoSecrets,
    /// The scheme checks with keys that its sender publishes; a secret would be for something else.
    #[error("this scheme fetches its keys from the sender; remove the secrets")]
    NeedlessSecrets,
    /// The scheme signs the address that is called.
    #[error("this scheme signs the address that is called: set `url` to it, exactly as it was entered at the sender")]
    MissingUrl,
    /// The address cannot be one.
    #[error("`url`: {0}")]
    BadUrl(&'static str),
    /// A value that the scheme needs is not set.
    #[error("this scheme needs `params.{0}`")]
    MissingParam(String),
    /// A secret that cannot become a key of this scheme.
    #[error("secret {position} cannot be used: {problem}")]
    BadSecret {
        /// Which one, counted from 1.
        position: usize,
        /// What is wrong with it, without any of its text.
        problem: &'static str,
    },
    /// A tolerance was set, but the scheme signs no time it could be applied to.
    #[error("a tolerance is set, but this scheme signs no timestamp, so it would protect nothing")]
    ToleranceWithoutTimestamp,
    /// The request to be signed lacks something the scheme signs, or holds something it cannot carry.
    #[error("cannot sign: {0}")]
    CannotSign(String),
}
