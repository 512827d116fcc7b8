//! Why a request is not genuine, by name.
//!
//! Each reason has a short code from a fixed set, fit for a metric label, and a sentence for people. Neither
//! holds a secret, a signature, or text that the sender chose: header names come from the scheme, and
//! the ages come from a timestamp whose signature has already been checked.

use http::HeaderName;

/// The reason a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// A header that the scheme needs is not there.
    #[error("the header {header} is missing")]
    MissingHeader {
        /// The header, as the scheme names it first.
        header: HeaderName,
    },
    /// A header that the scheme reads came more than once; which one was signed is anybody's guess.
    #[error("the header {header} is present more than once")]
    DuplicateHeader {
        /// The repeated header.
        header: HeaderName,
    },
    /// A header that the scheme reads holds something other than printable ASCII, or is not of the form
    /// that the scheme defines.
    #[error("the header {header} is malformed")]
    MalformedHeader {
        /// The malformed header.
        header: HeaderName,
    },
    /// A header that the scheme reads is longer than any genuine one.
    #[error("the header {header} is too long")]
    HeaderTooLong {
        /// The over-long header.
        header: HeaderName,
    },
    /// The signature header lists more entries than any genuine one.
    #[error("the signature header has too many entries")]
    TooManySignatures,
    /// No entry of the signature header is of a kind that the configured secrets can check.
    #[error("the signature header holds no signature of a kind this source accepts")]
    NoKnownSignature,
    /// No signature has the right length and encoding.
    #[error("the signature has the wrong length or encoding")]
    MalformedSignature,
    /// Well-formed, but not made with any of the configured secrets over these bytes.
    #[error("the signature does not match")]
    SignatureMismatch,
    /// The scheme signs a time and the request has none.
    #[error("the timestamp is missing")]
    MissingTimestamp,
    /// The time is not a plain number in the scheme's unit.
    #[error("the timestamp is malformed")]
    MalformedTimestamp,
    /// Genuine, but signed too long ago.
    #[error("the request is genuine but was signed {age_secs} s ago; {tolerance_secs} s are allowed")]
    TooOld {
        /// Seconds between signing and now.
        age_secs: u64,
        /// Seconds allowed.
        tolerance_secs: u64,
    },
    /// Genuine, but signed in the future: one of the two clocks is wrong.
    #[error("the request is genuine but was signed {ahead_secs} s in the future; {tolerance_secs} s are allowed")]
    InFuture {
        /// Seconds between now and signing.
        ahead_secs: u64,
        /// Seconds allowed.
        tolerance_secs: u64,
    },
    /// A value that the scheme reads is not there.
    #[error("{field} is missing")]
    MissingField {
        /// The place, as the scheme names it.
        field: String,
    },
    /// A value that the scheme reads is there twice, or cannot be read in one way only.
    #[error("{field} is there more than once, or cannot be read")]
    AmbiguousField {
        /// The place, as the scheme names it.
        field: String,
    },
    /// A value that must be the configured one is another.
    #[error("{field} is not the one this source is configured for")]
    WrongField {
        /// The place, as the scheme names it.
        field: String,
    },
    /// The token is not a signed token of three parts.
    #[error("the token is malformed")]
    MalformedToken,
    /// The token is genuine, but made for somebody or something else.
    #[error("the token is genuine, but its claim {claim} does not fit")]
    ClaimMismatch {
        /// The claim's name, as the scheme names it.
        claim: String,
    },
    /// A hash of the body is signed, and the body has another one.
    #[error("the body does not have the hash that was signed")]
    BodyHashMismatch,
    /// The request does not say which key signed it, or no such key could be had.
    #[error("the key that signed the request is not known")]
    KeyUnknown,
    /// The request names an address for its key that is not the sender's.
    #[error("the request names an address for its key at which its sender keeps no keys")]
    KeyUrlRefused,
    /// The id contains the character that ends it in the signed text, so the signature could stand for two
    /// different requests.
    #[error("the message id contains the separator of the signed text")]
    IdAmbiguous,
    /// The signed content has the shape of a handshake's challenge. The gateway signs challenges for anybody who asks, so
    /// a good signature would prove nothing.
    #[error("the signed content could be a handshake's challenge, which anybody can have signed")]
    ChallengeContent,
}

impl Rejection {
    /// All codes, for whoever registers metrics in advance.
    pub const CODES: [&'static str; 22] = [
        "missing_header",
        "duplicate_header",
        "malformed_header",
        "header_too_long",
        "too_many_signatures",
        "no_known_signature",
        "malformed_signature",
        "signature_mismatch",
        "missing_timestamp",
        "malformed_timestamp",
        "too_old",
        "in_future",
        "missing_field",
        "ambiguous_field",
        "wrong_field",
        "malformed_token",
        "claim_mismatch",
        "body_hash_mismatch",
        "key_unknown",
        "key_url_refused",
        "id_ambiguous",
        "challenge_content",
    ];

    /// A short name from a fixed set, for metrics and logs.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::MissingHeader { .. } => "missing_header",
            Self::DuplicateHeader { .. } => "duplicate_header",
            Self::MalformedHeader { .. } => "malformed_header",
            Self::HeaderTooLong { .. } => "header_too_long",
            Self::TooManySignatures => "too_many_signatures",
            Self::NoKnownSignature => "no_known_signature",
            Self::MalformedSignature => "malformed_signature",
            Self::SignatureMismatch => "signature_mismatch",
            Self::MissingTimestamp => "missing_timestamp",
            Self::MalformedTimestamp => "malformed_timestamp",
            Self::TooOld { .. } => "too_old",
            Self::InFuture { .. } => "in_future",
            Self::MissingField { .. } => "missing_field",
            Self::AmbiguousField { .. } => "ambiguous_field",
            Self::WrongField { .. } => "wrong_field",
            Self::MalformedToken => "malformed_token",
            Self::ClaimMismatch { .. } => "claim_mismatch",
            Self::BodyHashMismatch => "body_hash_mismatch",
            Self::KeyUnknown => "key_unknown",
            Self::KeyUrlRefused => "key_url_refused",
            Self::IdAmbiguous => "id_ambiguous",
            Self::ChallengeContent => "challenge_content",
        }
    }

    /// Is a value simply not there?
    pub(crate) const fn is_missing(&self) -> bool {
        matches!(self, Self::MissingField { .. } | Self::MissingHeader { .. })
    }

    /// Did the signature itself match? True for requests that are genuine but outside the tolerance.
    #[must_use]
    pub const fn is_genuine(&self) -> bool {
        matches!(self, Self::TooOld { .. } | Self::InFuture { .. })
    }
}
