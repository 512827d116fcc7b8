//! `[[source]]`: who sends, how it is verified and identified, and what its callers wait for.
//!
//! Promises: every problem of a source is noted in its place; a source that is returned has none.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use http::HeaderName;
use oncehook::event::SourceName;
use oncehook::handler::Handler;
use oncehook::handler::http::may_be_forwarded;
use oncehook::route::Routes;
use oncehook_verify::{
    Ack, EventHeaders, Identifier, Identify, MissingKey, Preset, Scheme, Secret, Settings, SetupError, Verifier,
};

use super::{BODY_BYTES, BodyLimits, Limits, OnOutage, Rate, RateLimits, SourceConfig, WaitConfig, read_networks};
use crate::config::duration::parse_duration;
use crate::config::file::{Placed, Table};
use crate::config::near::{did_you_mean, is_near};
use crate::config::reference::secret_from_reference;

/// `wait` as it is written.
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "expected a time such as \"5s\", or { route = \"NAME\", up_to = \"5s\" }")]
enum Wait {
    UpTo(String),
    Route(WaitForRoute),
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct WaitForRoute {
    route: String,
    up_to: String,
}

/// A caller's own time-out is seldom longer, and whoever waits holds a place.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The provider that is written out in the configuration itself.
const CUSTOM: &str = "custom";

/// The provider that is no provider: any client, with a key in a header.
const ENDPOINT: &str = "idempotency-key";

/// A source's `wait` as it was written: the route, if one is named, and how long.
pub(super) type Awaited = toml::Spanned<(Option<String>, Duration)>;

/// What is known of all sources, also of those with problems.
#[derive(Default)]
pub(super) struct Named {
    /// Those whose name could be read.
    pub(super) sources: Vec<SourceName>,
    /// The presets that they name.
    pub(super) presets: Vec<&'static Preset>,
}

/// Every problem of a source is reported, so this goes on after the first.
pub(super) fn read_source(
    mut table: Table<'_, '_>,
    limits: &BodyLimits,
    named: &mut Named,
) -> (Option<SourceConfig>, Option<Awaited>) {
    let span = table.span();
    let wait = read_wait(&mut table);
    let endpoint = wait.is_none().then(|| toml::Spanned::new(span, (None, Duration::ZERO)));
    let source = read_source_itself(table, limits, named, wait.is_some());
    // An endpoint answers with a result whether it waits or not.
    let endpoint = endpoint.filter(|_| source.as_ref().is_some_and(|source| source.endpoint));
    (source, wait.or(endpoint))
}

fn read_source_itself(
    mut table: Table<'_, '_>,
    limits: &BodyLimits,
    named: &mut Named,
    waits: bool,
) -> Option<SourceConfig> {
    let span = table.span();
    let name = table.take_parsed("name", |name| SourceName::new(name).map_err(|error| error.to_string()));
    if let Some(name) = &name {
        if named.sources.contains(name.get_ref()) {
            table.problem(name.span(), format!("there are two sources named `{}`", name.get_ref()));
        }
        named.sources.push(name.get_ref().clone());
    }
    let provider = table.take_string("provider");
    let preset = provider.as_ref().and_then(|provider| Preset::named(provider.get_ref()));
    named.presets.extend(preset);
    let custom = provider.as_ref().is_some_and(|provider| provider.get_ref() == CUSTOM);
    // Of a provider that is not known it is not known what else it needs either.
    let known = preset.is_some() || custom;
    let handover = table.take_string("handover");
    let fetches_keys = preset.is_some_and(|preset| preset.verify.fetches_keys());
    let secrets = read_secrets(&mut table, preset, known && !fetches_keys && handover.is_none());
    let url = table.take_string("url");
    let params = read_params(&mut table);
    let tolerance = table.take_seconds("tolerance");
    let key = table.take_one_or_many("key");
    let endpoint = provider.as_ref().is_some_and(|provider| provider.get_ref() == ENDPOINT);
    let missing_key = table.take_typed::<MissingKey>("missing_key");
    if let Some(missing_key) = missing_key.as_ref().filter(|_| endpoint) {
        table.problem(missing_key.span(), "an endpoint needs a key with every request: no `missing_key` here");
    }
    let usual = if endpoint { MissingKey::Reject } else { MissingKey::default() };
    let missing_key = missing_key.map_or(usual, toml::Spanned::into_inner);
    let allow_ips = read_networks(&mut table, "allow_ips");
    let rate_limits =
        table.take_table_if_written("rate_limit", "`rate_limit`").map_or_else(RateLimits::default, read_rate_limits);
    let on_outage = table.take_parsed("on_outage", |word| match word {
        "retry" => Ok(OnOutage::Retry),
        "spool" => Ok(OnOutage::Spool),
        _ => Err("write \"retry\" or \"spool\"".to_owned()),
    });
    // Whoever never sends again must not be told to.
    let retries = preset.is_none_or(|preset| preset.retries);
    let usual = if retries { OnOutage::Retry } else { OnOutage::Spool };
    let on_outage = on_outage.map_or(usual, toml::Spanned::into_inner);
    let body_bytes = read_body_bytes(&mut table, preset, limits);
    let forward = table.take_strings("forward_headers");
    let verify = table.take_typed::<Scheme>("verify");
    let identify = table.take_typed::<Identify>("identify");

    if table.lacks("name") {
        table.problem(span.clone(), "a [[source]] needs a `name`");
    }
    let Some(provider) = provider else {
        if table.lacks("provider") {
            table.problem_with_help(
                span,
                "a [[source]] needs a `provider`",
                "a preset's name (`oncehook providers` lists them) or \"custom\" with a [source.verify] table",
            );
        }
        table.finish(&[]);
        return None;
    };
    if let Some(tolerance) = &tolerance
        && *tolerance.get_ref() == 0
    {
        table.problem(tolerance.span(), "a `tolerance` of zero would refuse every request");
    }
    let scheme = match (preset, verify) {
        (Some(_), Some(verify)) => {
            table.problem(verify.span(), "a [source.verify] table goes with provider = \"custom\" only");
            None
        }
        (Some(preset), None) => Some(preset.verify.clone()),
        (None, Some(verify)) if custom => Some(verify.into_inner()),
        (None, None) if custom => {
            if table.lacks("verify") {
                table.problem(span.clone(), "provider = \"custom\" needs a [source.verify] table");
            }
            None
        }
        (None, _) => {
            let names = Preset::all().iter().map(|preset| preset.name.as_str()).chain([CUSTOM]);
            let meant = did_you_mean(provider.get_ref(), names).map(|meant| meant + " ").unwrap_or_default();
            let help = "`oncehook providers` lists them all; \"custom\" takes a [source.verify] table";
            let problem = format!("there is no preset `{}`", provider.get_ref());
            table.problem_with_help(provider.span(), problem, &format!("{meant}{help}"));
            None
        }
    };
    let mut identify = identify
        .map(toml::Spanned::into_inner)
        .or_else(|| preset.map(|preset| preset.identify.clone()))
        .unwrap_or_default();
    if let Some(key) = key {
        match identify.clone().with_key(key.get_ref()) {
            Ok(changed) => identify = changed,
            Err(error) => table.problem(key.span(), format!("`key`: {error}")),
        }
    }
    let forward = forwarded(&table, preset, scheme.as_ref(), &identify, forward);
    let handshakes = preset.map(|preset| preset.handshakes.clone()).unwrap_or_default();
    if let Some(handover) = handover.as_ref().filter(|_| known && !handshakes.hands_over_secret()) {
        table.problem(handover.span(), "`handover` is for providers that hand over a secret by themselves");
    }
    if waits && preset.is_some_and(|preset| preset.ack != Ack::default()) {
        table.problem(provider.span(), "this provider insists on an answer of its own: no `wait` here");
    }
    let before = table.problems();
    check_params(&table, preset, scheme.as_ref(), &params);
    let params_are_right = table.problems() == before;
    let settings = Settings {
        tolerance_secs: tolerance.map(toml::Spanned::into_inner),
        url: url.map(toml::Spanned::into_inner),
        params: params.into_inner(),
    };
    let note = |error: SetupError| table.problem(span.clone(), error.to_string());
    let verifier = match &scheme {
        None => None,
        // It would say the same about them again.
        Some(_) if !params_are_right => None,
        Some(scheme) if !secrets.is_empty() || scheme.fetches_keys() => {
            Verifier::with(scheme, &secrets, settings.clone()).map_err(note).ok()
        }
        // Until the operator has confirmed the handed-over secret, nothing is accepted.
        Some(scheme) if handover.is_some() => Verifier::refusing(scheme, settings.clone()).map_err(note).ok(),
        Some(_) => None,
    };
    let identifier =
        scheme.as_ref().and_then(|scheme| Identifier::new(&identify, scheme, missing_key).map_err(note).ok());
    table.finish(&[]);
    Some(SourceConfig {
        name: name?.into_inner(),
        provider: provider.into_inner(),
        handshakes,
        ack: preset.map(|preset| preset.ack.clone()).unwrap_or_default(),
        scheme: scheme?,
        secrets,
        settings,
        handover: handover.map(|path| PathBuf::from(path.into_inner())),
        verifier: verifier?,
        identifier: identifier?,
        allow_ips,
        wait: None,
        endpoint,
        on_outage,
        body_bytes,
        forward,
        rate_limits,
    })
}

/// The largest body: what is written here, or for all sources, or else what the provider sends, within half of the memory for
/// bodies.
fn read_body_bytes(table: &mut Table<'_, '_>, preset: Option<&Preset>, limits: &BodyLimits) -> usize {
    let span = table.span();
    let written = table.take_number("body_bytes", BODY_BYTES).and_then(|bytes| usize::try_from(bytes).ok());
    if let Some(bytes) = written {
        if bytes > limits.in_flight_bytes {
            table.problem(span, "`body_bytes` is larger than `in_flight_bytes` in [server.limits]");
        }
        return bytes;
    }
    limits.written.unwrap_or_else(|| {
        let sent = preset.and_then(|preset| preset.max_body_bytes).unwrap_or_default();
        sent.min(limits.in_flight_bytes / 2).max(Limits::default().body_bytes)
    })
}

/// The headers that go along when an event is forwarded: those that the preset and the operator name, and those that
/// identify the event. Never one that carries the signature.
fn forwarded(
    table: &Table<'_, '_>,
    preset: Option<&Preset>,
    scheme: Option<&Scheme>,
    identify: &Identify,
    written: Option<Placed<Vec<Placed<String>>>>,
) -> EventHeaders {
    let mut headers = preset.map(|preset| preset.forward.clone()).unwrap_or_default();
    for name in identify.headers() {
        headers.add(name.clone());
    }
    for name in scheme.into_iter().flat_map(Scheme::signature_headers) {
        headers.remove(name);
    }
    for text in written.map(toml::Spanned::into_inner).unwrap_or_default() {
        let problem = match text.get_ref().parse::<HeaderName>() {
            Err(_) => "is not the name of a header",
            Ok(name) if scheme.is_some_and(|scheme| scheme.signature_headers().any(|known| *known == name)) => {
                "carries the signature, which must not leave the gateway"
            }
            Ok(name) if !may_be_forwarded(name.as_str()) => {
                "cannot be forwarded: it carries credentials, or oncehook decides about it"
            }
            Ok(name) => {
                headers.add(name);
                continue;
            }
        };
        table.problem(text.span(), format!("`forward_headers`: {:?} {problem}", text.get_ref()));
    }
    headers
}

/// The route that is meant, with the time. An unnamed one is the source's only one.
pub(super) fn find_awaited(source: &SourceName, wait: &Awaited, routes: &Routes) -> Result<WaitConfig, String> {
    let (name, up_to) = wait.get_ref();
    let route = match name {
        Some(name) => {
            let named = routes.get(name).filter(|route| route.source == *source);
            let own = routes.iter().filter(|route| route.source == *source).map(|route| route.name.as_str());
            let meant = || did_you_mean(name, own).map(|meant| format!("; {meant}")).unwrap_or_default();
            named
                .ok_or_else(|| format!("`wait` names the route `{name}`, which source `{source}` has not{}", meant()))?
        }
        None => {
            let mut first = routes.iter().filter(|route| route.source == *source && route.after.is_none());
            match (first.next(), first.next()) {
                (Some(only), None) => only,
                (None, _) => return Err(format!("source `{source}` has no route to wait for")),
                (Some(_), Some(_)) => {
                    return Err(format!(
                        "source `{source}` has several routes; say which one answers: wait = {{ route = \"NAME\", up_to = \"5s\" }}"
                    ));
                }
            }
        }
    };
    let mut root = route;
    while let Some(before) = root.after.as_ref().and_then(|before| routes.get(before.as_str())) {
        root = before;
    }
    if let Handler::Http(handler) = &route.handler {
        handler.keep_whole_answers();
    }
    Ok(WaitConfig { route: route.name.clone(), root: root.name.clone(), up_to: *up_to })
}

/// `wait`: how long, and perhaps for which route.
fn read_wait(table: &mut Table<'_, '_>) -> Option<Awaited> {
    let written = table.take_typed::<Wait>("wait")?;
    let span = written.span();
    let (route, up_to) = match written.into_inner() {
        Wait::UpTo(up_to) => (None, up_to),
        Wait::Route(wait) => (Some(wait.route), wait.up_to),
    };
    match parse_duration(&up_to) {
        Ok(up_to) if up_to.is_zero() => table.problem(span, "a `wait` must be longer than nothing"),
        Ok(up_to) if up_to > LONGEST_WAIT => {
            table.problem(span, format!("a `wait` must not be longer than {} s", LONGEST_WAIT.as_secs()));
        }
        Ok(up_to) => return Some(toml::Spanned::new(span, (route, up_to))),
        Err(message) => table.problem(span, format!("`wait`: {message}")),
    }
    None
}

fn read_rate_limits(mut table: Table<'_, '_>) -> RateLimits {
    let mut read = |per_second: &'static str, burst: &'static str| {
        let span = table.span();
        let rate = table.take_number(per_second, 1..=1_000_000);
        let at_once = table.take_number(burst, 1..=1_000_000);
        if table.lacks(per_second) && at_once.is_some() {
            table.problem(span, format!("`{burst}` goes with `{per_second}`"));
        }
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        rate.map(|rate| Rate { per_second: small(rate), burst: small(at_once.unwrap_or(rate)) })
    };
    let limits = RateLimits { source: read("per_second", "burst"), peer: read("peer_per_second", "peer_burst") };
    if limits == RateLimits::default() && table.lacks("per_second") && table.lacks("peer_per_second") {
        table.problem(table.span(), "`rate_limit` needs `per_second` or `peer_per_second`");
    }
    table.finish(&[]);
    limits
}

/// `params`: a value, or where it is kept.
fn read_params(table: &mut Table<'_, '_>) -> toml::Spanned<BTreeMap<String, String>> {
    let span = table.span();
    let Some(written) = table.take_typed::<BTreeMap<String, String>>("params") else {
        return toml::Spanned::new(span, BTreeMap::new());
    };
    let span = written.span();
    let mut params = BTreeMap::new();
    for (name, text) in written.into_inner() {
        let value = match text.split_once(':') {
            Some(("env" | "file", _)) => secret_from_reference(&text).map(|secret| secret.reveal().to_owned()),
            _ => Ok(text),
        };
        match value {
            Ok(value) => drop(params.insert(name, value)),
            Err(message) => table.problem(span.clone(), format!("`params.{name}`: {message}")),
        }
    }
    toml::Spanned::new(span, params)
}

/// Every value that the provider needs is there, and none that it does not know.
fn check_params(
    table: &Table<'_, '_>,
    preset: Option<&Preset>,
    scheme: Option<&Scheme>,
    params: &toml::Spanned<BTreeMap<String, String>>,
) {
    let Some(preset) = preset else { return };
    let needed = scheme.map(Scheme::params).unwrap_or_default();
    let known = || preset.params.iter().map(|param| param.name.as_str());
    for param in preset.params.iter().filter(|param| !param.optional && !needed.contains(&param.name.as_str())) {
        // One that is misspelt is told below, and one whose reference leads nowhere has been.
        let misspelt = |name: &String| !known().any(|known| known == name) && is_near(name, &param.name);
        if !table.has_problem_in(&params.span())
            && !params.get_ref().keys().any(|name| *name == param.name || misspelt(name))
        {
            let problem = format!("{} needs `params.{}`", preset.title, param.name);
            table.problem_with_help(params.span(), problem, &param.hint);
        }
    }
    for name in params.get_ref().keys().filter(|name| !known().any(|known| known == *name)) {
        let has = || format!("it has: {}", known().collect::<Vec<_>>().join(", "));
        let help = did_you_mean(name, known()).unwrap_or_else(has);
        table.problem_with_help(params.span(), format!("{} knows no `params.{name}`", preset.title), &help);
    }
}

fn read_secrets(table: &mut Table<'_, '_>, preset: Option<&Preset>, needed: bool) -> Vec<Secret> {
    let span = table.span();
    let Some(references) = table.take_strings("secrets") else {
        if !needed || !table.lacks("secrets") {
            return Vec::new();
        }
        table.problem_with_help(
            span,
            "a [[source]] needs `secrets`",
            "verification is never skipped; write secrets = [\"env:NAME\"]",
        );
        return Vec::new();
    };
    if references.get_ref().is_empty() && needed {
        table.problem(references.span(), "`secrets` is empty; verification is never skipped");
    }
    let mut secrets = Vec::new();
    for reference in references.into_inner() {
        match secret_from_reference(reference.get_ref()) {
            Ok(secret) if preset.is_some_and(|preset| is_api_key(preset, &secret)) => {
                let hint = preset.map(|preset| preset.secret_hint.as_str()).unwrap_or_default();
                table.problem_with_help(
                    reference.span(),
                    "this is a key of the provider's API, which signs no webhook: every request would be refused",
                    &format!("the secret is {hint}"),
                );
            }
            Ok(secret) => secrets.push(secret),
            Err(message) => table.problem(reference.span(), message),
        }
    }
    secrets
}

/// How the API keys of providers begin, where that is known and the signing secret never begins so. (Paystack, for one,
/// signs with its API key.)
const API_KEYS: &[(&str, &[&str])] = &[
    ("clerk", &["sk_", "pk_"]),
    ("github", &["ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"]),
    ("gitlab", &["glpat-"]),
    ("gitlab-signed", &["glpat-"]),
    ("linear", &["lin_api_"]),
    ("openai", &["sk-"]),
    ("paddle", &["pdl_live_apikey_", "pdl_sdbx_apikey_"]),
    ("replicate", &["r8_"]),
    ("resend", &["re_"]),
    ("sendgrid", &["SG."]),
    ("shopify", &["shpat_", "shpca_", "shppa_"]),
    ("slack", &["xoxb-", "xoxp-", "xoxe", "xapp-"]),
    ("stripe", &["sk_", "pk_", "rk_"]),
];

fn is_api_key(preset: &Preset, secret: &Secret) -> bool {
    let prefixes = API_KEYS.iter().find(|(name, _)| *name == preset.name).map(|(_, prefixes)| *prefixes);
    prefixes.unwrap_or_default().iter().any(|prefix| secret.reveal().starts_with(prefix))
}
