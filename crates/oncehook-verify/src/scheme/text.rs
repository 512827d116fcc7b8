//! A scheme as it is written, and the checks by which it becomes a [`Scheme`].
//!
//! Promises: what contradicts itself, or would not protect what it seems to, is refused with the reason.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{Algorithm, DEFAULT_TOLERANCE_SECS, KeyRule, Location, Scheme, TimestampRule, Unit};
use crate::{
    challenge::ChallengeShape,
    encoding::{Encoding, KeyEncoding},
    extract::{Plan, Slot},
    fetch::{FetchRule, HostRule},
    grammar::{Grammar, Tagged},
    header::{HeaderNames, OneOrMany},
    jws::JwsRule,
    pointer::Pointer,
    setup::SetupError,
    template::{Part, Template},
    view::{At, Container, Field},
};

/// A scheme as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SchemeText {
    algorithm: Option<Algorithm>,
    key: Option<KeyEncoding>,
    #[serde(default)]
    keys: Vec<KeyRule>,
    signature: SignatureText,
    content: Option<String>,
    timestamp: Option<TimestampText>,
    id: Option<IdText>,
    jws: Option<JwsRule>,
    fetch: Option<FetchText>,
    #[serde(default)]
    require: BTreeMap<String, String>,
    container: Option<String>,
    each: Option<String>,
    challenge: Option<ChallengeShape>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SignatureText {
    header: Option<HeaderNames>,
    headers: Option<OneOrMany>,
    repeated: Option<String>,
    field: Option<String>,
    kind: Option<String>,
    #[serde(default = "raw_grammar")]
    grammar: Grammar,
    encoding: Option<Encoding>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimestampText {
    header: Option<HeaderNames>,
    field: Option<String>,
    unit: Unit,
    tolerance: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct IdText {
    header: HeaderNames,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FetchText {
    certificate: Option<String>,
    #[serde(default)]
    hosts: Vec<HostRule>,
    common_name: Option<String>,
    key_set: Option<String>,
    key_by_id: Option<String>,
}

const fn raw_grammar() -> Grammar {
    Grammar::Raw
}

impl TryFrom<SchemeText> for Scheme {
    type Error = SetupError;

    fn try_from(text: SchemeText) -> Result<Self, SetupError> {
        checked(text).map_err(SetupError::Scheme)
    }
}

fn checked(text: SchemeText) -> Result<Scheme, String> {
    let mut plan = Plan::new();
    let grammar = text.signature.grammar.clone();
    let encoding = text.signature.encoding;
    grammar.check()?;
    text.challenge.iter().try_for_each(ChallengeShape::check)?;
    let kind = text.signature.kind.as_deref().map(|kind| Field::parse(kind, &mut plan)).transpose()?;
    let has_kind = kind.is_some();
    let signature = location(text.signature, &mut plan)?;
    let fetch = text.fetch.map(|fetch| fetch_rule(fetch, &mut plan)).transpose()?;
    let content = text.content.as_deref().map(|content| Template::parse(content, &mut plan)).transpose()?;
    let timestamp = text.timestamp.map(|timestamp| timestamp_rule(timestamp, &mut plan)).transpose()?;
    let container = text.container.as_deref().map(Container::parse).transpose()?;
    let each = text.each.as_deref().map(list_plan).transpose()?;
    let require = text
        .require
        .into_iter()
        .map(|(place, wanted)| Ok((Field::parse(&place, &mut plan)?, wanted)))
        .collect::<Result<Vec<_>, String>>()?;
    let id = text.id.map(|id| id.header);
    let signed_pointers = signed_pointers(text.content.as_deref().unwrap_or_default());
    let scheme = |keys: Vec<KeyRule>| Scheme {
        keys,
        signature,
        grammar: grammar.clone(),
        encoding,
        content,
        timestamp,
        id,
        jws: text.jws.clone(),
        fetch,
        kind,
        require,
        container,
        each,
        challenge: text.challenge,
        plan,
        signed_pointers,
    };
    if let Some(jws) = &text.jws {
        jws.check()?;
        if text.algorithm.is_some() || !text.keys.is_empty() {
            return Err("a jws table says its own algorithms: remove algorithm and keys".to_owned());
        }
        let key = text.key.unwrap_or(KeyEncoding::Utf8);
        let rules = jws.algorithms.iter().map(|algorithm| KeyRule::plain(algorithm.algorithm(), key, ""));
        let scheme = scheme(rules.collect());
        if scheme.content.is_some() || scheme.timestamp.is_some() || scheme.id.is_some() || encoding.is_some() {
            return Err(
                "a token signs what its claims say: remove content, timestamp, id and signature.encoding".to_owned()
            );
        }
        return Ok(scheme);
    }
    let keys = key_rules(text.algorithm, text.key, text.keys, &grammar, has_kind)?;
    let scheme = scheme(keys);
    check_parts(&scheme)?;
    Ok(scheme)
}

/// The pointers in the text of a template.
fn signed_pointers(content: &str) -> Vec<Pointer> {
    let names = content.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let pointers =
        names.filter_map(|name| name.strip_prefix("json:").or_else(|| name.starts_with('/').then_some(name)));
    pointers.filter_map(|pointer| Pointer::parse(pointer.trim_end_matches('?')).ok()).collect()
}

fn list_plan(pointer: &str) -> Result<(Plan, Slot), String> {
    let mut plan = Plan::new();
    let slot = plan.add(&Pointer::parse(pointer)?)?;
    Ok((plan, slot))
}

fn location(text: SignatureText, plan: &mut Plan) -> Result<Location, String> {
    match (text.header, text.headers, text.repeated, text.field) {
        (Some(names), None, None, None) => Ok(Location::Header(names)),
        (None, Some(list), None, None) => {
            let names = HeaderNames::parse(list.as_slice().iter().map(String::as_str))?;
            Ok(Location::Headers(names.iter().cloned().collect()))
        }
        (None, None, Some(name), None) => Ok(Location::Repeated(HeaderNames::parse([name.as_str()])?.first().clone())),
        (None, None, None, Some(field)) => Ok(Location::Field(Field::parse(&field, plan)?)),
        _ => Err("signature needs one of header, headers, repeated and field".to_owned()),
    }
}

fn timestamp_rule(text: TimestampText, plan: &mut Plan) -> Result<TimestampRule, String> {
    let field = match (text.header, text.field) {
        (Some(_), Some(_)) => {
            return Err("timestamp.header and timestamp.field exclude each other".to_owned());
        }
        (Some(names), None) => Some(Field { name: format!("header:{}", names.first()), at: At::Header(names) }),
        (None, field) => field.as_deref().map(|field| Field::parse(field, plan)).transpose()?,
    };
    let tolerance_secs = text.tolerance.unwrap_or(DEFAULT_TOLERANCE_SECS);
    Ok(TimestampRule { field, unit: text.unit, tolerance_secs })
}

fn fetch_rule(text: FetchText, plan: &mut Plan) -> Result<FetchRule, String> {
    let fixed = |url: String| match url.starts_with("https://") {
        true => Ok(url),
        false => Err("fetch: keys are fetched over https only".to_owned()),
    };
    match (text.certificate, text.key_set, text.key_by_id) {
        (Some(_), None, None) if text.hosts.is_empty() => Err("fetch.hosts is missing".to_owned()),
        (Some(from), None, None) => {
            text.hosts.iter().try_for_each(HostRule::check)?;
            let from = Field::parse(&from, plan)?;
            Ok(FetchRule::Certificate { from, hosts: text.hosts, common_name: text.common_name })
        }
        (None, Some(url), None) => Ok(FetchRule::KeySet { url: fixed(url)? }),
        (None, None, Some(url)) => Ok(FetchRule::KeyById { url: fixed(url)? }),
        _ => Err("fetch needs one of certificate, key_set and key_by_id".to_owned()),
    }
}

/// What must hold between the parts of a scheme that is not a signed token.
fn check_parts(scheme: &Scheme) -> Result<(), String> {
    let keys = &scheme.keys;
    if keys.iter().any(|rule| rule.algorithm == Algorithm::Token) {
        // A token proves that the sender knows it and nothing more; pretending otherwise is the mistake.
        if scheme.content.is_some() || scheme.timestamp.is_some() || scheme.id.is_some() {
            return Err("a token signs nothing: remove content, timestamp and id".to_owned());
        }
        if keys.iter().any(|rule| rule.algorithm != Algorithm::Token || rule.key != KeyEncoding::Utf8) {
            return Err(
                "a token is compared as text: key must be \"utf8\", and no other algorithm beside it".to_owned()
            );
        }
        return Ok(());
    }
    if scheme.encoding.is_none() {
        return Err("signature.encoding is missing: hex, base64 or base64url".to_owned());
    }
    let content = scheme.content.as_ref().ok_or("content is missing: what is signed, such as \"{body}\"")?;
    if scheme.each.is_some() && content.covers_body() {
        return Err("each item is signed for itself, so content cannot hold {body}".to_owned());
    }
    check_timestamp(scheme, content)?;
    match (content.contains(&Part::Id), scheme.id.is_some()) {
        (true, false) => Err("content holds {id}, but there is no id = { header = … }".to_owned()),
        (false, true) => Err("id is read but content does not hold {id}".to_owned()),
        _ => Ok(()),
    }
}

fn check_timestamp(scheme: &Scheme, content: &Template) -> Result<(), String> {
    let grammar = &scheme.grammar;
    let named = content.contains(&Part::Timestamp);
    let Some(timestamp) = &scheme.timestamp else {
        return if named {
            Err("content holds {ts}, but there is no timestamp = { … }".to_owned())
        } else if grammar.carries_timestamp() {
            Err("signature.grammar names a timestamp, but there is no timestamp = { … }".to_owned())
        } else {
            Ok(())
        };
    };
    let special = content.parts().any(|part| matches!(part, Part::Special(special) if special.covers_time()));
    let inside = timestamp.field.as_ref().is_some_and(|field| match &field.at {
        At::Json(_) => {
            let itself = |part: &Part| matches!(part, Part::Field(signed, false) if signed.at == field.at);
            content.covers_body() || content.parts().any(itself)
        }
        at @ At::Form(_) => scheme.signs_field(at),
        _ => false,
    });
    if !named && !special && !inside {
        return Err(
            "timestamp is set, but content does not hold {ts}: an unsigned timestamp protects nothing".to_owned()
        );
    }
    match (timestamp.field.is_some(), grammar.carries_timestamp()) {
        (true, true) => {
            Err("the timestamp is in the signature header and in a place of its own: choose one".to_owned())
        }
        (false, false) => Err("timestamp.header is missing, and the signature header does not carry one".to_owned()),
        _ => Ok(()),
    }
}

fn key_rules(
    algorithm: Option<Algorithm>,
    key: Option<KeyEncoding>,
    keys: Vec<KeyRule>,
    grammar: &Grammar,
    has_kind: bool,
) -> Result<Vec<KeyRule>, String> {
    let accepted = match grammar {
        Grammar::Tagged(Tagged { accept, .. }) => Some(accept.as_deref()),
        _ if has_kind => Some(None),
        _ => None,
    };
    if keys.is_empty() {
        let algorithm = algorithm.ok_or("algorithm is missing (or keys, for several kinds of secrets)")?;
        let key = match (algorithm, key) {
            (_, Some(key)) => key,
            (Algorithm::Token, None) => KeyEncoding::Utf8,
            (_, None) => return Err("key is missing: utf8, hex, base64, sha1 or pem".to_owned()),
        };
        let tag = match accepted {
            None => "",
            Some(Some(tag)) if !tag.is_empty() => tag,
            Some(_) => return Err("signature.grammar.tagged needs accept = \"…\"".to_owned()),
        };
        return Ok(vec![KeyRule::plain(algorithm, key, tag)]);
    }
    if algorithm.is_some() || key.is_some() {
        return Err("keys replaces algorithm and key: use one or the other".to_owned());
    }
    if accepted == Some(None) {
        if keys.iter().any(|rule| rule.tag.is_empty()) {
            return Err("each of keys needs a tag, because the signature header is tagged".to_owned());
        }
    } else if accepted.is_some() {
        return Err("signature.grammar.tagged.accept and keys[].tag say the same thing: use the tags".to_owned());
    } else if keys.iter().any(|rule| !rule.tag.is_empty()) {
        return Err("keys[].tag needs a tagged signature header".to_owned());
    }
    let open = keys.iter().filter(|rule| rule.prefix.is_empty() || rule.optional_prefix).count();
    if open > 1 && !has_kind {
        return Err("only one of keys may do without a prefix".to_owned());
    }
    Ok(keys)
}
