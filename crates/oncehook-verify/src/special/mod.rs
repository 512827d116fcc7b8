//! Signed texts that a template cannot describe: what a few providers build by rules of their own.
//!
//! Each file is one provider and one pure function from a request to the bytes that were signed. Keys, places,
//! encodings and times stay data, also for these providers.

mod contentful;
mod hook0;
mod hubspot;
mod php;
mod plivo;
mod qsh;
mod sns;
mod twilio;

use crate::{
    rejection::Rejection,
    template::Filling,
    view::{Field, View},
};

pub(crate) use qsh::query_hash;

/// The most headers that a sender may list as signed.
const MAX_SIGNED_HEADERS: usize = 64;

/// A signed text by rules of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    /// Contentful: method, path, listed headers, body.
    Contentful,
    /// Hook0 (Coinbase CDP): time, listed headers, body.
    Hook0,
    /// HubSpot: the address with some characters decoded.
    HubspotUrl,
    /// Paddle Classic: the form as PHP would serialise it.
    Php,
    /// Plivo: the address with a sorted query, then the sorted form.
    Plivo,
    /// Amazon SNS: names and values of fixed fields.
    Sns,
    /// Twilio: the address, then the sorted form, or nothing if the address carries the body's hash.
    Twilio,
}

impl Special {
    /// The parameter by which Twilio ties a body to the address.
    pub(crate) const BODY_HASH: &str = twilio::BODY_HASH;

    pub(crate) fn named(name: &str) -> Result<Self, String> {
        Ok(match name {
            "contentful" => Self::Contentful,
            "hook0" => Self::Hook0,
            "hubspot-url" => Self::HubspotUrl,
            "php" => Self::Php,
            "plivo" => Self::Plivo,
            "sns" => Self::Sns,
            "twilio" => Self::Twilio,
            _ => return Err(format!("content: there is no special text `{name}`")),
        })
    }

    /// Is every byte of the body in it?
    pub(crate) const fn covers_body(self) -> bool {
        matches!(self, Self::Contentful | Self::Hook0)
    }

    /// Is the configured address in it?
    pub(crate) const fn needs_url(self) -> bool {
        matches!(self, Self::Contentful | Self::HubspotUrl | Self::Plivo | Self::Twilio)
    }

    /// Is the signed time in it?
    pub(crate) const fn covers_time(self) -> bool {
        matches!(self, Self::Contentful | Self::Hook0 | Self::Sns)
    }

    /// The signed bytes.
    pub(crate) fn build(self, filling: &Filling<'_, '_>) -> Result<Vec<u8>, Rejection> {
        match self {
            Self::Contentful => contentful::canonical(filling),
            Self::Hook0 => hook0::payload(filling),
            Self::HubspotUrl => Ok(hubspot::decoded(&filling.view.url()).into_bytes()),
            Self::Php => php::serialized(filling.view),
            Self::Plivo => plivo::canonical(filling.view),
            Self::Sns => sns::string_to_sign(filling.view.request.body),
            Self::Twilio => twilio::signed_text(filling.view),
        }
    }
}

/// Every field of the form: sorted by name, values of one name sorted and each counted once, written without anything
/// between them.
pub(crate) fn sorted_form(view: &View<'_>) -> Result<Vec<u8>, Rejection> {
    let mut pairs: Vec<(&str, &str)> = form(view)?;
    pairs.sort_unstable();
    pairs.dedup();
    Ok(pairs.iter().flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()]).flatten().copied().collect())
}

/// The fields of the body as text.
fn form<'v>(view: &'v View<'_>) -> Result<Vec<(&'v str, &'v str)>, Rejection> {
    let pairs = view.form().ok_or_else(|| Rejection::MissingField { field: "form".to_owned() })?;
    Ok(pairs.iter().map(|(name, value)| (name.as_ref(), value.as_ref())).collect())
}

/// The value of a header that the sender lists as signed; it must be there exactly once.
fn listed_header<'v>(view: &'v View<'_>, name: &str) -> Result<&'v str, Rejection> {
    let unusable = || Rejection::AmbiguousField { field: "the list of signed headers".to_owned() };
    let name = http::HeaderName::from_bytes(name.as_bytes()).map_err(|_| unusable())?;
    crate::header::read_one(&name, view.request.headers)
}

/// The CRC-32 of IEEE 802.3, as zip and PNG use it.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut index = 0;
        while index < 256 {
            let mut value = index as u32;
            let mut bit = 0;
            while bit < 8 {
                value = if value & 1 == 1 { 0xedb8_8320 ^ (value >> 1) } else { value >> 1 };
                bit += 1;
            }
            #[expect(clippy::indexing_slicing, reason = "computed when the crate is compiled; the index is below 256")]
            {
                table[index] = value;
            }
            index += 1;
        }
        table
    };
    let step = |crc: u32, byte: &u8| {
        let at = usize::from((crc as u8) ^ byte);
        TABLE.get(at).copied().unwrap_or_default() ^ (crc >> 8)
    };
    !bytes.iter().fold(u32::MAX, step)
}

/// Reads a header by name, as part of a special text.
fn header<'v>(view: &'v View<'_>, name: &'static str) -> Result<std::borrow::Cow<'v, str>, Rejection> {
    let at =
        crate::header::HeaderNames::parse([name]).map_err(|_| Rejection::MissingField { field: name.to_owned() })?;
    Field { name: name.to_owned(), at: crate::view::At::Header(at) }.read(view).map(|text| text.into_owned().into())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_crc_is_the_usual_one() {
        assert_eq!(super::crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(super::crc32(b""), 0);
    }
}
