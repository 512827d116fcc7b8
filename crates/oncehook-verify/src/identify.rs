//! Which event is it? Key, type, time, entity and version, from a verified request.
//!
//! [`Identify`] says where these stand, as data. [`Identifier`] is the same compiled. It accepts only a
//! [`Verified`] request and never turns one away for the sake of form: what cannot be understood is marked for
//! quarantine, so that the sender's event is kept and a person can look at it. Only three things are
//! answered with an error; see [`Unidentified`].
//!
//! ```toml
//! key = "/id"                       # JSON pointer, "header:NAME", "form:NAME", "digest"; a list makes a composite key
//! type = ["header:x-event", "/action?"]   # joined with "."; "?" marks a part that may be absent
//! time = { from = "/created", unit = "s" }   # s | ms | rfc3339
//! entity = ["/project/id", "/id"]   # joined with ":"
//! version = "/data/version"         # a whole number that grows with every change of the entity
//! items = "/events"                 # the request is a batch: the array; pointers are then inside each item. A list
//!                                   # means all of them; "/entry/*/changes" looks into every element
//! container = "form:payload"        # the JSON stands in this field of a form
//! digest_if = ["/messages/1"]       # if one of these is there, the key would name only a part: the digest is the key
//! volatile = ["/attempt"]           # values that change between attempts, left out of the digest
//! once = "/signature/token"        # a signed value that the sender uses for one event only
//! ```
//!
//! `header:a|b` and `/a|/b` are alternatives: the first that is present is used. `json:/id` is the same as
//! `/id`. With `items`, headers still come from the request.
//!
//! Numbers and booleans stand for their literal text. Null, objects, arrays and empty strings count as
//! missing.

use std::{borrow::Cow, ops::Range};

use http::HeaderName;
use serde::Deserialize;
use smallvec::SmallVec;

use crate::{
    extract::{Batch, Elements, Extracted, Plan, Scalar, Slot},
    form::{self, Found},
    header::OneOrMany,
    key::{self, EventKey},
    place::{Part, Place, Source, TimeUnit, key_places},
    pointer::Pointer,
    request::Request,
    scheme::{Integrity, Scheme},
    setup::SetupError,
    time::UnixMicros,
    verifier::Verified,
    view::Container,
};

/// The most events taken from one request.
pub const MAX_BATCH_ITEMS: usize = 1_000;

/// The longest type or entity in bytes.
pub const MAX_NAME_BYTES: usize = 255;

/// Where an event's identity stands. Checked; see the module's text for the format.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "IdentifyText")]
pub struct Identify {
    /// Nothing: the digest is the key.
    key: Option<Vec<Place>>,
    kind: Vec<Place>,
    time: Option<TimePlace>,
    entity: Vec<Place>,
    version: Option<Place>,
    items: Option<Batch>,
    volatile: Vec<Pointer>,
    digest_if: Vec<Pointer>,
    once: Option<Place>,
    container: Option<Container>,
}

/// What happens to an event without a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingKey {
    /// The digest of the body is its key: byte-identical copies are one event.
    #[default]
    Digest,
    /// It is stored and waits for a person.
    Quarantine,
    /// The request is answered with 400.
    Reject,
}

/// What a request holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identified {
    /// One event: the whole body.
    One(Item),
    /// A batch of events, possibly none.
    Batch(Vec<Item>),
}

impl Identified {
    /// The events, however many.
    #[must_use]
    pub fn items(&self) -> &[Item] {
        match self {
            Self::One(item) => std::slice::from_ref(item),
            Self::Batch(items) => items,
        }
    }
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// What makes it unique within its source.
    pub key: EventKey,
    /// Its type, if the sender says one: at most 255 bytes, no control characters.
    pub kind: Option<String>,
    /// What it is about, if the sender says so: at most 255 bytes, no control characters.
    pub entity: Option<String>,
    /// When it happened, by the sender's word.
    pub occurred_at: Option<UnixMicros>,
    /// Which version of its entity it tells about, as the sender counts. What is no whole number of 64 bits is none.
    pub version: Option<i64>,
    /// SHA-256 of its bytes without the volatile values.
    pub digest: [u8; 32],
    /// SHA-256 of the value that its sender uses for one event only, if it has one.
    pub once: Option<[u8; 32]>,
    /// Its bytes within the request's body.
    pub body: Range<usize>,
    /// Why it must wait for a person, if it must.
    pub quarantine: Option<Quarantine>,
}

/// Why an event is stored but not processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Quarantine {
    /// It has no key, and the source says to wait then.
    MissingKey,
    /// A name on a wanted path occurs twice, or a wanted value cannot be read: parsers would disagree.
    AmbiguousJson,
    /// A header that identifies it came twice.
    AmbiguousHeader,
    /// A field of a form or query that identifies it came twice.
    AmbiguousField,
    /// Its type is over-long or holds control characters.
    UnusableType,
    /// Its entity is over-long or holds control characters.
    UnusableEntity,
    /// A value that its sender uses only once came before, with another event.
    SuspectedReplay,
}

impl Quarantine {
    /// A short name from a fixed set, for storage and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MissingKey => "missing_key",
            Self::AmbiguousJson => "ambiguous_json",
            Self::AmbiguousHeader => "ambiguous_header",
            Self::AmbiguousField => "ambiguous_field",
            Self::UnusableType => "unusable_type",
            Self::UnusableEntity => "unusable_entity",
            Self::SuspectedReplay => "suspected_replay",
        }
    }

    /// What it means, for people.
    #[must_use]
    pub const fn explain(self) -> &'static str {
        match self {
            Self::MissingKey => "it has no key, and the source holds such events",
            Self::AmbiguousJson => "parsers would read its JSON differently",
            Self::AmbiguousHeader => "a header that identifies it came twice",
            Self::AmbiguousField => "a field that identifies it came twice",
            Self::UnusableType => "its type is too long or holds control characters",
            Self::UnusableEntity => "its entity is too long or holds control characters",
            Self::SuspectedReplay => "a value that its sender uses only once came before with another event",
        }
    }

    /// What [`as_str`](Self::as_str) wrote.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [
            Self::MissingKey,
            Self::AmbiguousJson,
            Self::AmbiguousHeader,
            Self::AmbiguousField,
            Self::UnusableType,
            Self::UnusableEntity,
            Self::SuspectedReplay,
        ]
        .into_iter()
        .find(|reason| reason.as_str() == text)
    }
}

/// Why a genuine request is answered with 400.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unidentified {
    /// The event has no key, and the source says to reject it then.
    #[error("the event has no id")]
    MissingKey,
    /// More events in one request than are taken.
    #[error("the request holds more than {MAX_BATCH_ITEMS} events")]
    TooManyItems,
    /// The source is declared as a batch, and there is no array of events.
    #[error("the request holds no list of events")]
    NotABatch,
}

impl Unidentified {
    /// A short name from a fixed set, for metrics and logs.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::MissingKey => "missing_key",
            Self::TooManyItems => "too_many_items",
            Self::NotABatch => "not_a_batch",
        }
    }
}

/// An [`Identify`], compiled.
#[derive(Debug, Clone)]
pub struct Identifier {
    plan: Plan,
    items: Option<Batch>,
    container: Option<Container>,
    digest_if: Vec<Slot>,
    key: Option<Vec<Part>>,
    kind: Vec<Part>,
    time: Option<(Part, TimeUnit)>,
    entity: Vec<Part>,
    version: Option<Part>,
    volatile: Vec<Slot>,
    once: Option<Part>,
    missing_key: MissingKey,
    key_is_signed: bool,
}

/// The digest is the key; type, time and entity are unknown.
impl Default for Identify {
    fn default() -> Self {
        Self {
            key: None,
            kind: Vec::new(),
            time: None,
            entity: Vec::new(),
            version: None,
            items: None,
            volatile: Vec::new(),
            digest_if: Vec::new(),
            once: None,
            container: None,
        }
    }
}

impl Identify {
    /// Can one request hold several events?
    #[must_use]
    pub const fn is_batch(&self) -> bool {
        self.items.is_some()
    }

    /// The headers that an event's key, type, time, entity or version is read from.
    #[must_use]
    pub fn headers(&self) -> Vec<&HeaderName> {
        let time = self.time.as_ref().map(|time| &time.from);
        let places = self.key.iter().flatten().chain(&self.kind).chain(time).chain(&self.entity).chain(&self.version);
        places.flat_map(Place::headers).collect()
    }

    /// The same with another key: the places of its parts, or `["digest"]`.
    ///
    /// # Errors
    ///
    /// A place that cannot be read.
    pub fn with_key<S: AsRef<str>>(mut self, places: &[S]) -> Result<Self, SetupError> {
        let places: Vec<&str> = places.iter().map(AsRef::as_ref).collect();
        self.key = key_places(&places).map_err(SetupError::Identify)?;
        Ok(self)
    }
}

impl Identifier {
    /// Compiles the places.
    ///
    /// # Errors
    ///
    /// More wanted names than an identification can sensibly have.
    pub fn new(identify: &Identify, scheme: &Scheme, missing_key: MissingKey) -> Result<Self, SetupError> {
        compile(identify, scheme, missing_key).map_err(SetupError::Identify)
    }

    /// Does the signature cover the key? If not, whoever repeats a captured request can change its key, and
    /// only the sender's secrecy or a signed time stands against replays. Computed, not declared.
    #[must_use]
    pub const fn key_is_signed(&self) -> bool {
        self.key_is_signed
    }

    /// Should every event have a key in a place of its own? Then one whose key is the digest of its body lacks it.
    #[must_use]
    pub const fn wants_key(&self) -> bool {
        self.key.is_some() && self.digest_if.is_empty()
    }

    /// Says which event, or events, a request holds.
    ///
    /// # Errors
    ///
    /// See [`Unidentified`].
    pub fn identify(&self, verified: &Verified<'_>) -> Result<Identified, Unidentified> {
        let request = verified.request();
        let body = request.body;
        let Some(batch) = &self.items else {
            let inside = self.container.as_ref().and_then(|container| container.open(request));
            let document = inside.as_deref().unwrap_or(body);
            return self.item(request, document, 0..body.len()).map(Identified::One);
        };
        let elements = match batch.elements(body, MAX_BATCH_ITEMS) {
            Elements::Found(elements) => elements,
            Elements::TooMany => return Err(Unidentified::TooManyItems),
            Elements::NotAnArray => return Err(Unidentified::NotABatch),
            // Which list is meant is unclear, so the request is kept whole for a person to look at.
            Elements::Ambiguous => {
                return Ok(Identified::One(Item::unclear(body, Quarantine::AmbiguousJson)));
            }
        };
        let mut items = Vec::with_capacity(elements.len());
        for element in elements {
            let bytes = element.get().as_bytes();
            // Elements are borrowed from the body, so the difference of the addresses is the offset.
            let start = (bytes.as_ptr() as usize).saturating_sub(body.as_ptr() as usize);
            items.push(self.item(request, bytes, start..start + bytes.len())?);
        }
        Ok(Identified::Batch(items))
    }

    /// `document` is the JSON of the event, `body` the bytes that are kept. They differ only inside a container.
    fn item(&self, request: &Request<'_>, document: &[u8], body: Range<usize>) -> Result<Item, Unidentified> {
        let json = self.plan.walk(document);
        let kept = request.body.get(body.clone()).unwrap_or(document);
        let digest = if self.container.is_some() { key::digest(kept) } else { self.digest(document, &json) };
        let mut view = View {
            request,
            document,
            json: &json,
            digest: &digest,
            trouble: json.is_ambiguous().then_some(Quarantine::AmbiguousJson),
        };
        let is_partial = self.digest_if.iter().any(|slot| json.raw(*slot).is_some());
        let own_key = self.key.as_ref().filter(|_| !is_partial);
        let key_parts = match own_key {
            None => None,
            Some(parts) => view.bytes(parts),
        };
        let kind = view.name(&self.kind, ".");
        let entity = view.name(&self.entity, ":");
        let occurred_at = self.time.as_ref().and_then(|(part, unit)| unit.parse(&view.text(part)?));

        let version = self.version.as_ref().and_then(|part| view.text(part)?.parse().ok());
        let once = self.once.as_ref().and_then(|part| view.find(part)).map(|bytes| key::digest(&bytes));

        // An event that parsers may read differently stays out of the ids of the others.
        let by_id = key_parts.filter(|_| view.trouble.is_none());
        let mut quarantine = view.trouble;
        let key = match (&by_id, own_key) {
            (Some(parts), _) => {
                let parts: SmallVec<[&[u8]; 4]> = parts.iter().map(AsRef::as_ref).collect();
                EventKey::from_parts(&parts)
            }
            (None, Some(_)) if quarantine.is_none() => {
                match self.missing_key {
                    MissingKey::Digest => {}
                    MissingKey::Quarantine => quarantine = Some(Quarantine::MissingKey),
                    MissingKey::Reject => return Err(Unidentified::MissingKey),
                }
                EventKey::of_digest(&digest)
            }
            (None, _) => EventKey::of_digest(&digest),
        };
        let mut usable = |name: Name, otherwise: Quarantine| match name {
            Name::Absent => None,
            Name::Text(text) if is_storable(&text) => Some(text),
            Name::Text(_) | Name::Unusable => {
                quarantine.get_or_insert(otherwise);
                None
            }
        };
        let kind = usable(kind, Quarantine::UnusableType);
        let entity = usable(entity, Quarantine::UnusableEntity);
        Ok(Item { key, kind, entity, occurred_at, version, digest, once, body, quarantine })
    }

    /// The digest of an item without its volatile values.
    fn digest(&self, bytes: &[u8], json: &Extracted<'_>) -> [u8; 32] {
        let mut cuts: SmallVec<[Range<usize>; 4]> = SmallVec::new();
        for slot in &self.volatile {
            if let Some(raw) = json.raw(*slot) {
                let start = (raw.as_ptr() as usize).saturating_sub(bytes.as_ptr() as usize);
                cuts.push(start..start + raw.len());
            }
        }
        if cuts.is_empty() {
            return key::digest(bytes);
        }
        cuts.sort_unstable_by_key(|cut| cut.start);
        let mut kept: SmallVec<[&[u8]; 8]> = SmallVec::new();
        let mut from = 0;
        for cut in cuts {
            kept.extend(bytes.get(from..cut.start));
            from = from.max(cut.end);
        }
        kept.extend(bytes.get(from..));
        key::digest_of(&kept)
    }
}

impl Item {
    /// A whole body that cannot be told apart into events.
    fn unclear(body: &[u8], quarantine: Quarantine) -> Self {
        let digest = key::digest(body);
        Self {
            key: EventKey::of_digest(&digest),
            kind: None,
            entity: None,
            occurred_at: None,
            version: None,
            digest,
            once: None,
            body: 0..body.len(),
            quarantine: Some(quarantine),
        }
    }
}

/// A type or an entity: nothing there, a text, or bytes that are no text.
enum Name {
    Absent,
    Text(String),
    Unusable,
}

/// Short enough, and nothing that could disturb a terminal, a log line or a text column.
fn is_storable(name: &str) -> bool {
    name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control)
}

/// The request and the wanted values of one item, side by side.
struct View<'v, 'de> {
    request: &'v Request<'v>,
    document: &'v [u8],
    json: &'v Extracted<'de>,
    digest: &'v [u8; 32],
    /// The first reason found why the values cannot be trusted to mean one thing.
    trouble: Option<Quarantine>,
}

impl<'v> View<'v, '_> {
    /// The bytes of one part: the first alternative that is present.
    fn find(&mut self, part: &Part) -> Option<Cow<'v, [u8]>> {
        for source in &part.sources {
            match source {
                Source::Header(name) => {
                    let mut values = self.request.headers.get_all(name).iter();
                    let Some(value) = values.next() else { continue };
                    if values.next().is_some() {
                        self.trouble.get_or_insert(Quarantine::AmbiguousHeader);
                        return None;
                    }
                    // Present but empty is missing. Looking further would let an unsigned name stand in for
                    // a signed one.
                    return (!value.is_empty()).then(|| Cow::Borrowed(value.as_bytes()));
                }
                Source::Form(name) | Source::Query(name) => {
                    let is_form = matches!(source, Source::Form(_));
                    let text =
                        if is_form { self.request.body } else { self.request.query().unwrap_or_default().as_bytes() };
                    let Some(pairs) = form::pairs(text) else { continue };
                    match form::find(&pairs, name) {
                        Found::Nothing | Found::One("") => {}
                        Found::One(text) => return Some(Cow::Owned(text.as_bytes().to_vec())),
                        Found::Several => {
                            self.trouble.get_or_insert(Quarantine::AmbiguousField);
                            return None;
                        }
                    }
                }
                Source::Xml(name) => {
                    if let Some(text) = xml_text(self.document, name) {
                        return Some(Cow::Borrowed(text));
                    }
                }
                Source::Digest => return Some(Cow::Owned(hex::encode(self.digest).into_bytes())),
                Source::Json(slot) => match self.json.scalar(*slot) {
                    Scalar::Text(Cow::Borrowed(text)) => return Some(Cow::Borrowed(text.as_bytes())),
                    Scalar::Text(Cow::Owned(text)) => return Some(Cow::Owned(text.into_bytes())),
                    Scalar::Missing => {}
                    Scalar::Unreadable => {
                        self.trouble.get_or_insert(Quarantine::AmbiguousJson);
                        return None;
                    }
                },
            }
        }
        None
    }

    /// All parts of a key, or nothing if one is missing.
    fn bytes(&mut self, parts: &[Part]) -> Option<SmallVec<[Cow<'v, [u8]>; 4]>> {
        parts.iter().map(|part| self.find(part)).collect()
    }

    /// The parts of a name, joined. An optional part may be absent; without a required one there is no name.
    fn name(&mut self, parts: &[Part], separator: &str) -> Name {
        let mut name = String::new();
        for part in parts {
            let Some(found) = self.find(part) else {
                if part.optional {
                    continue;
                }
                return Name::Absent;
            };
            let Ok(text) = std::str::from_utf8(&found) else { return Name::Unusable };
            if !name.is_empty() {
                name.push_str(separator);
            }
            name.push_str(text);
        }
        if name.is_empty() { Name::Absent } else { Name::Text(name) }
    }

    fn text(&mut self, part: &Part) -> Option<String> {
        String::from_utf8(self.find(part)?.into_owned()).ok()
    }
}

/// The text of the first element of that name, if it is short and holds nothing but text. Enough for the plain XML that
/// Braintree sends; not a parser.
fn xml_text<'d>(document: &'d [u8], name: &str) -> Option<&'d [u8]> {
    let text = std::str::from_utf8(document).ok()?;
    let mut rest = text;
    let inside = loop {
        let (_, after) = rest.split_once('<')?;
        rest = after;
        if let Some(tag) = after.strip_prefix(name).filter(|tag| tag.starts_with(['>', ' '])) {
            break tag.split_once('>')?.1;
        }
    };
    let (value, _) = inside.split_once('<')?;
    (!value.is_empty() && !value.contains('&')).then_some(value.as_bytes())
}

fn compile(identify: &Identify, scheme: &Scheme, missing_key: MissingKey) -> Result<Identifier, String> {
    let mut plan = Plan::new();
    let mut parts = |places: &[Place]| -> Result<Vec<Part>, String> {
        places.iter().map(|place| place.compile(&mut plan)).collect()
    };
    let key = identify.key.as_deref().map(&mut parts).transpose()?;
    let kind = parts(&identify.kind)?;
    let entity = parts(&identify.entity)?;
    let time = match &identify.time {
        None => None,
        Some(time) => Some((time.from.compile(&mut plan)?, time.unit)),
    };
    let version = identify.version.as_ref().map(|place| place.compile(&mut plan)).transpose()?;
    let volatile = identify.volatile.iter().map(|pointer| plan.add(pointer)).collect::<Result<_, _>>()?;
    let digest_if = identify.digest_if.iter().map(|pointer| plan.add(pointer)).collect::<Result<_, _>>()?;
    // A value that anybody can change says nothing.
    if identify.once.as_ref().is_some_and(|place| !place.is_signed(scheme)) {
        return Err("once: the signature must cover it".to_owned());
    }
    let once = identify.once.as_ref().map(|place| place.compile(&mut plan)).transpose()?;
    let key_is_signed = match &identify.key {
        None => scheme.integrity() == Integrity::Body,
        Some(places) => places.iter().all(|place| place.is_signed(scheme)),
    };
    Ok(Identifier {
        plan,
        items: identify.items.clone(),
        container: identify.container.clone(),
        digest_if,
        key,
        kind,
        time,
        entity,
        version,
        volatile,
        once,
        missing_key,
        key_is_signed,
    })
}

#[derive(Debug, Clone)]
struct TimePlace {
    from: Place,
    unit: TimeUnit,
}

/// An identification as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct IdentifyText {
    key: Option<OneOrMany>,
    r#type: Option<OneOrMany>,
    time: Option<TimeText>,
    entity: Option<OneOrMany>,
    version: Option<String>,
    items: Option<OneOrMany>,
    #[serde(default)]
    volatile: Vec<String>,
    #[serde(default)]
    digest_if: Vec<String>,
    once: Option<String>,
    container: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeText {
    from: String,
    unit: TimeUnit,
}

impl TryFrom<IdentifyText> for Identify {
    type Error = SetupError;

    fn try_from(text: IdentifyText) -> Result<Self, SetupError> {
        checked(&text).map_err(SetupError::Identify)
    }
}

fn checked(text: &IdentifyText) -> Result<Identify, String> {
    let places = |list: &Option<OneOrMany>| -> Result<Vec<Place>, String> {
        list.iter().flat_map(OneOrMany::as_slice).map(|place| Place::parse(place)).collect()
    };
    let key = match &text.key {
        None => None,
        Some(list) => key_places(&list.as_slice().iter().map(String::as_str).collect::<Vec<_>>())?,
    };
    let time = match &text.time {
        None => None,
        Some(time) => Some(TimePlace { from: Place::parse(&time.from)?, unit: time.unit }),
    };
    let pointer = |text: &String| Pointer::parse(text.strip_prefix("json:").unwrap_or(text));
    let items: Option<Vec<&str>> =
        text.items.as_ref().map(|items| items.as_slice().iter().map(String::as_str).collect());
    let container = text.container.as_deref().map(Container::parse).transpose()?;
    if container.is_some() && items.is_some() {
        return Err("items inside a container are not looked for".to_owned());
    }
    if text.once.is_some() && items.is_some() {
        return Err("once is for one event, and items makes several of a request".to_owned());
    }
    let volatile = text.volatile.iter().map(pointer).collect::<Result<Vec<_>, _>>()?;
    if volatile.iter().any(Pointer::is_root) {
        return Err("volatile: without the whole document there is no digest".to_owned());
    }
    Ok(Identify {
        key,
        kind: places(&text.r#type)?,
        time,
        entity: places(&text.entity)?,
        version: text.version.as_deref().map(Place::parse).transpose()?,
        items: items.as_deref().map(Batch::parse).transpose()?,
        volatile,
        digest_if: text.digest_if.iter().map(pointer).collect::<Result<_, _>>()?,
        once: text.once.as_deref().map(Place::parse).transpose()?,
        container,
    })
}
