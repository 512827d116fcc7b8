//! A request as a scheme looks at it: headers, query, form fields and JSON values, each read at most once.
//!
//! A [`Field`] is the place of one value, as a scheme names it: `header:x-id`, `query:id`, `form:id`, `/data/id` or
//! `param:webhook_id`. A value that is there twice is never chosen from: the request is refused.

use std::{borrow::Cow, cell::OnceCell};

use http::header::CONTENT_TYPE;

use crate::{
    extract::{Extracted, Plan, Scalar, Slot},
    form::{self, Found, Pairs},
    header::HeaderNames,
    pointer::Pointer,
    rejection::Rejection,
    request::Request,
    settings::Settings,
};

/// The place of one value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Field {
    /// As the scheme wrote it, for messages.
    pub(crate) name: String,
    pub(crate) at: At,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum At {
    Header(HeaderNames),
    Query(String),
    Form(String),
    Json(Slot),
    Param(String),
}

/// What a body is wrapped in before it is JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Container {
    /// A field of an urlencoded form.
    Form(String),
    /// A field of an urlencoded form, in base64 with line breaks.
    FormBase64(String),
    /// A field of a multipart form.
    Multipart(String),
}

impl Container {
    /// `form:NAME`, `form-base64:NAME` or `multipart:NAME`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("form", name)) if !name.is_empty() => Ok(Self::Form(name.to_owned())),
            Some(("form-base64", name)) if !name.is_empty() => Ok(Self::FormBase64(name.to_owned())),
            Some(("multipart", name)) if !name.is_empty() => Ok(Self::Multipart(name.to_owned())),
            _ => Err(format!("`{text}` is no container: form:NAME, form-base64:NAME or multipart:NAME")),
        }
    }

    /// The text inside; nothing if the body is not wrapped so.
    pub(crate) fn open<'a>(&self, request: &Request<'a>) -> Option<Cow<'a, [u8]>> {
        let field = |name: &str| match form::find(&form::pairs(request.body)?, name) {
            Found::One(text) => Some(text.to_owned()),
            Found::Nothing | Found::Several => None,
        };
        match self {
            Self::Form(name) => field(name).map(|text| Cow::Owned(text.into_bytes())),
            Self::FormBase64(name) => {
                use base64::{Engine as _, prelude::BASE64_STANDARD};
                let packed: String = field(name)?.chars().filter(|c| !c.is_ascii_whitespace()).collect();
                BASE64_STANDARD.decode(packed).ok().map(Cow::Owned)
            }
            Self::Multipart(name) => {
                let kind = request.headers.get(CONTENT_TYPE)?.to_str().ok()?;
                form::multipart_field(request.body, kind, name).map(Cow::Borrowed)
            }
        }
    }
}

/// A request and what a scheme may read of it.
pub(crate) struct View<'a> {
    pub(crate) request: &'a Request<'a>,
    pub(crate) settings: &'a Settings,
    json: Extracted<'a>,
    form: OnceCell<Option<Pairs<'a>>>,
    query: OnceCell<Option<Pairs<'a>>>,
}

impl<'a> View<'a> {
    /// `document` is the JSON in which pointers are followed: the body, what is inside its container, or one item.
    pub(crate) fn new(request: &'a Request<'a>, settings: &'a Settings, plan: &Plan, document: &'a [u8]) -> Self {
        Self { request, settings, json: plan.walk(document), form: OnceCell::new(), query: OnceCell::new() }
    }

    /// The fields of the body, if it is a form.
    pub(crate) fn form(&self) -> Option<&Pairs<'a>> {
        self.form.get_or_init(|| form::pairs(self.request.body)).as_ref()
    }

    /// The fields of the query.
    pub(crate) fn query(&self) -> Option<&Pairs<'a>> {
        let query = || form::pairs(self.request.query().unwrap_or_default().as_bytes());
        self.query.get_or_init(query).as_ref()
    }

    /// The address that was called. A verifier whose scheme needs one is not built without it.
    pub(crate) fn url(&self) -> Cow<'a, str> {
        self.settings.called(self.request).unwrap_or_default()
    }

    /// The raw JSON of a value.
    pub(crate) fn raw(&self, slot: Slot) -> Option<&'a str> {
        self.json.raw(slot)
    }
}

impl Field {
    /// Reads a place; JSON pointers are added to the plan.
    pub(crate) fn parse(text: &str, plan: &mut Plan) -> Result<Self, String> {
        let pointer = text.strip_prefix("json:").or_else(|| text.starts_with('/').then_some(text));
        let at = if let Some(pointer) = pointer {
            let pointer = Pointer::parse(pointer)?;
            if pointer.is_root() {
                return Err("the whole document cannot be a value".to_owned());
            }
            At::Json(plan.add(&pointer)?)
        } else {
            match text.split_once(':') {
                Some(("header", names)) => At::Header(HeaderNames::parse(names.split('|'))?),
                Some(("query", name)) if !name.is_empty() => At::Query(name.to_owned()),
                Some(("form", name)) if !name.is_empty() => At::Form(name.to_owned()),
                Some(("param", name)) if !name.is_empty() => At::Param(name.to_owned()),
                _ => {
                    return Err(format!(
                        "`{text}` is no place: header:NAME, query:NAME, form:NAME, param:NAME or a JSON pointer"
                    ));
                }
            }
        };
        Ok(Self { name: text.to_owned(), at })
    }

    /// The value; a rejection if it is missing, empty or there twice.
    pub(crate) fn read<'v>(&self, view: &'v View<'_>) -> Result<Cow<'v, str>, Rejection> {
        let missing = || Rejection::MissingField { field: self.name.clone() };
        let ambiguous = || Rejection::AmbiguousField { field: self.name.clone() };
        let one = |pairs: Option<&'v Pairs<'_>>, name: &str| match pairs.map(|pairs| form::find(pairs, name)) {
            None | Some(Found::Nothing | Found::One("")) => Err(missing()),
            Some(Found::One(text)) => Ok(Cow::Borrowed(text)),
            Some(Found::Several) => Err(ambiguous()),
        };
        match &self.at {
            At::Header(names) => names.read(view.request.headers).map(Cow::Borrowed),
            At::Query(name) => one(view.query(), name),
            At::Form(name) => one(view.form(), name),
            At::Param(name) => {
                view.settings.params.get(name).map(|text| Cow::Borrowed(text.as_str())).ok_or_else(missing)
            }
            At::Json(_) if view.json.is_ambiguous() => Err(ambiguous()),
            At::Json(slot) => match view.json.scalar(*slot) {
                Scalar::Text(text) => Ok(text),
                Scalar::Missing => Err(missing()),
                Scalar::Unreadable => Err(ambiguous()),
            },
        }
    }
}
