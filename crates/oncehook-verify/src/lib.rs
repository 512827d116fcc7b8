//! Is this webhook genuine, and which event is it?
//!
//! Everything here is pure: headers, raw bytes, secrets and a time go in; a verdict comes out. The crate
//! opens no socket, reads no clock, no file and no environment variable, and keeps no state between calls.
//!
//! The way through the crate, in reading order:
//!
//! 1. A [`Preset`] is a provider as data: how it signs ([`Scheme`]), where the event's id, type, time and
//!    entity are ([`Identify`]), and which handshakes it performs ([`Handshakes`]). An own provider is
//!    described with the same tables.
//! 2. A [`Verifier`] is a scheme with its secrets prepared. It takes a [`Request`] and returns a
//!    [`Verified`] request or a named [`Rejection`].
//! 3. An [`Identifier`] accepts only a `Verified` request and returns the event or events in it
//!    ([`Item`]), each with an [`EventKey`].
//! 4. A [`Signer`] is the same scheme the other way round, for tests and for sending.
//! 5. [`explain()`] tells a person why a request was refused.
//!
//! ```
//! use oncehook_verify::{Identifier, MissingKey, Preset, Request, Secret, UnixMicros, Verifier};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let stripe = Preset::named("stripe").ok_or("unknown provider")?;
//! let secrets = [Secret::new("whsec_test_secret")?];
//! let verifier = Verifier::new(&stripe.verify, &secrets, None)?;
//! let identifier = Identifier::new(&stripe.identify, &stripe.verify, MissingKey::Digest)?;
//!
//! let mut headers = http::HeaderMap::new();
//! headers.insert(
//!     "stripe-signature",
//!     "t=1700000000,v1=7a99ab077e2eec1a7af80131867af854fca86be409951c51f8a9d0414748f16f".parse()?,
//! );
//! let body = br#"{"id":"evt_1","type":"demo.created","data":{"object":{"id":"obj_1"}}}"#;
//! let request = Request { method: "POST", path: "/webhooks/stripe", headers: &headers, body };
//!
//! let verified = verifier.verify(&request, UnixMicros::from_secs(1_700_000_001))?;
//! let identified = identifier.identify(&verified)?;
//! for item in identified.items() {
//!     assert_eq!(item.key.as_bytes(), b"evt_1");
//!     assert_eq!(item.kind.as_deref(), Some("demo.created"));
//!     assert_eq!(item.entity.as_deref(), Some("obj_1"));
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # The contract
//!
//! - The signature is checked over the bytes as they arrived. Nothing is decoded, parsed or tried in a
//!   second form first.
//! - Which algorithm is used follows from the configured secret and never from the request.
//! - Signatures are decoded, their length is checked, and they are compared in constant time. Every secret
//!   is tried against every signature, so two secrets can overlap during a rotation.
//! - The age of a request is judged after its signature. "Too old" therefore means: genuine, but old.
//! - A source without a usable secret does not load. There is no way to switch verification off.
//! - Headers, signature lists, keys, names and batches all have a limit.
//! - No error text holds a secret, an expected signature, or bytes that the sender chose.
//! - An event never gets an empty key. A key that is missing is handled by a declared policy
//!   ([`MissingKey`]).

mod asymmetric;
mod certificate;
mod challenge;
mod encoding;
mod explain;
mod extract;
mod fetch;
mod form;
mod forward;
mod grammar;
mod handshake;
mod header;
mod hmac;
mod identify;
mod jws;
mod key;
mod picker;
mod place;
mod pointer;
mod preset;
mod rejection;
mod request;
mod scheme;
mod secret;
mod settings;
mod setup;
mod sign;
mod special;
mod template;
mod time;
mod verifier;
mod view;

pub use explain::{Explanation, Facts, explain, explain_with};
pub use fetch::{FetchedKey, KeyError, KeyRequest};
pub use forward::EventHeaders;
pub use handshake::{Action, Handshakes, Reply};
pub use identify::{
    Identified, Identifier, Identify, Item, MAX_BATCH_ITEMS, MAX_NAME_BYTES, MissingKey, Quarantine, Unidentified,
};
pub use key::{EventKey, MAX_KEY_BYTES, digest};
pub use picker::{Ambiguous, Picker};
pub use preset::{Ack, Confidence, OtherSample, Param, Preset, Sample, SampleError};
pub use rejection::Rejection;
pub use request::Request;
pub use scheme::{DEFAULT_TOLERANCE_SECS, Integrity, Scheme};
pub use secret::{Secret, SecretError};
pub use settings::Settings;
pub use setup::SetupError;
pub use sign::{Signed, Signer};
pub use time::UnixMicros;
pub use verifier::{Verified, Verifier};
