//! `oncehook send`: signs a webhook like its provider and posts it, once or many times.
//!
//! Promises: all copies of one event have the same body, byte for byte, and a fresh time and signature each, as a
//! provider's retries do. The exit code is 0 only if every request got a 2xx.
//!
//! Does not: retry. A request that gets no answer is counted as one.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use indicatif::ProgressBar;
use oncehook::clock::Clock;
use oncehook_verify::{Rejection, Request, Sample, Settings, Signer, UnixMicros, Verifier};
use reqwest::Url;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::bulk::progress_style;
use super::client::{cause, http_client, reachable, read_answer};
use super::request::{parse_header, read_input};
use super::source::{Chosen, SourceArgs};
use super::tally::{Answer, Tally};
use super::{Shared, print, print_json, random, say, text};

/// The most requests of one invocation; each costs a few bytes of memory here.
const MAX_REQUESTS: u64 = 10_000_000;

/// How much of an answer is read.
const MAX_ANSWER_BYTES: usize = 256 << 10;

/// From this many requests on there is a progress bar.
const LONG: u64 = 100;

#[derive(Debug, clap::Args)]
pub(super) struct Send {
    #[command(flatten)]
    source: SourceArgs,
    /// Where to send [default: the source on the configured gateway]
    #[arg(long)]
    url: Option<Url>,
    /// The event's id; with --events a number is added [default: a fresh one]
    #[arg(long, value_name = "ID")]
    key: Option<String>,
    /// The event's type [default: the sample's]
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// A file with the body to send instead of the provider's sample; - for standard input
    #[arg(long, value_name = "FILE")]
    body: Option<PathBuf>,
    /// A header to add or replace, as 'Name: value'; may be repeated. A signature given so is sent as it is
    #[arg(long, value_name = "HEADER", value_parser = parse_header)]
    header: Vec<(HeaderName, HeaderValue)>,
    /// Send each event this often
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=MAX_REQUESTS))]
    times: u64,
    /// Send this many different events
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=MAX_REQUESTS))]
    events: u64,
    /// Send over this many connections at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4096))]
    concurrency: u16,
    /// Print the requests as they would be sent, and send nothing
    #[arg(long)]
    print: bool,
}

impl Send {
    pub(super) fn run(self, shared: &Shared) -> anyhow::Result<ExitCode> {
        let chosen = self.source.choose(shared)?;
        let connections = self.concurrency;
        let only_print = self.print;
        let plan = Plan::new(self, &chosen)?;
        if let (Some(kind), Some(preset)) = (plan.kind_without_sample(), chosen.preset) {
            let (kind, name) = (text::shown(kind, 64), &preset.name);
            say(&format!(
                "there is no sample of `{kind}`: it gets the body of `{}`; `oncehook providers {name}` lists the samples",
                preset.sample.kind
            ));
        }
        if only_print {
            for index in 0..plan.total {
                print_raw(&plan.request(index)?)?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let total = plan.total;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("start the runtime")?;
        let started = Instant::now();
        let Sent { mut tally, last } = runtime.block_on(send(plan, connections))?;
        let elapsed = started.elapsed();
        match last {
            _ if shared.json => print_json(&tally.json(elapsed).to_string()),
            Some(only) if total == 1 => print(&only.lines()),
            _ => print(&tally.lines(elapsed)),
        }
        Ok(if tally.is_success(total) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Makes every request of one invocation.
struct Plan {
    url: Url,
    settings: Settings,
    signer: Signer,
    sample: Sample,
    kind: Option<String>,
    key: String,
    /// Instead of the sample's.
    body: Option<Bytes>,
    headers: Vec<(HeaderName, HeaderValue)>,
    events: u64,
    times: u64,
    total: u64,
    clock: Clock,
    /// Stands in all bodies, so that the copies of an event are the same.
    occurred: UnixMicros,
}

/// When events with a given key happened: 2026-01-01.
const NAMED_EVENTS_OCCURRED: UnixMicros = UnixMicros(1_767_225_600_000_000);

/// One request, ready to be sent.
#[derive(Clone)]
pub(super) struct Ready {
    pub(super) url: Url,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// One event, before it is signed.
#[derive(Clone)]
pub(super) struct Unsigned {
    pub(super) id: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// Signs an event at a moment. A header that was given stays as it is, a signature too.
pub(super) fn sign(
    signer: &Signer,
    url: &Url,
    event: Unsigned,
    given: &[(HeaderName, HeaderValue)],
    now: UnixMicros,
) -> anyhow::Result<Ready> {
    let path = path_of(url);
    let request = Request { method: "POST", path: &path, headers: &event.headers, body: &event.body };
    let signed = signer.sign_whole(&request, &event.id, now)?;
    let Unsigned { mut headers, body, .. } = event;
    for (name, value) in signed.headers {
        let is_given = given.iter().any(|(given, _)| *given == name);
        if !is_given {
            headers.insert(name, value);
        }
    }
    let mut url = url.clone();
    if let Some(added) = signed.query {
        url.set_query(Some(&url.query().map_or_else(|| added.clone(), |query| format!("{query}&{added}"))));
    }
    Ok(Ready { url, headers, body: signed.body.map_or(body, Bytes::from) })
}

impl Plan {
    /// Fails if the first request cannot be made, so that nothing is sent in vain.
    fn new(options: Send, chosen: &Chosen) -> anyhow::Result<Self> {
        let total = options.times.checked_mul(options.events).filter(|total| *total <= MAX_REQUESTS);
        let clock = Clock::system();
        // Whoever names a key means one event, today and tomorrow: its body must not change with the clock.
        let occurred = if options.key.is_some() { NAMED_EVENTS_OCCURRED } else { clock.now() };
        let sample = chosen.preset.map_or_else(plain_sample, |preset| preset.sample.clone());
        let mut url = target(options.url, chosen, options.print)?;
        if let (Some(query), None) = (&sample.query, url.query()) {
            url.set_query(Some(query));
        }
        // Whoever signs the address signs the one it calls, unless the source is known under another.
        let mut settings = chosen.settings.clone();
        settings.url.get_or_insert_with(|| url.as_str().to_owned());
        let plan = Self {
            signer: signer(chosen, &settings)?,
            url,
            settings,
            sample,
            kind: options.kind,
            key: options.key.map_or_else(|| random::hex::<12>().map(|hex| format!("evt_{hex}")), Ok)?,
            body: options.body.as_deref().map(read_input).transpose()?.map(Bytes::from),
            headers: options.header,
            events: options.events,
            times: options.times,
            total: total.with_context(|| format!("these are more than {MAX_REQUESTS} requests"))?,
            occurred,
            clock,
        };
        let first = plan.request(0)?;
        if !chosen.secrets_given {
            plan.check_own_secret(chosen, &first)?;
        }
        Ok(plan)
    }

    /// The wanted type, if only the body of another type can be sent for it.
    fn kind_without_sample(&self) -> Option<&str> {
        let kind = self.kind.as_deref().filter(|_| self.body.is_none())?;
        (kind != self.sample.kind && !self.sample.other.contains_key(kind)).then_some(kind)
    }

    /// One request. Copies of an event follow each other, so that with several connections they race.
    fn request(&self, index: u64) -> anyhow::Result<Ready> {
        let event = self.unsigned(index / self.times)?;
        sign(&self.signer, &self.url, event, &self.headers, self.clock.now())
    }

    fn unsigned(&self, number: u64) -> anyhow::Result<Unsigned> {
        let id = if self.events == 1 { self.key.clone() } else { format!("{}_{}", self.key, number + 1) };
        let (mut headers, body) = self.sample.render(&id, self.kind.as_deref(), self.occurred)?;
        headers.entry(header::CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
        for (name, _) in &self.headers {
            headers.remove(name);
        }
        for (name, value) in &self.headers {
            headers.append(name.clone(), value.clone());
        }
        Ok(Unsigned { id, headers, body: self.body.clone().unwrap_or_else(|| body.into()) })
    }

    /// A source holds what verifies. Where that is a public key it may look like a private one, but what it signs is
    /// refused.
    fn check_own_secret(&self, chosen: &Chosen, ready: &Ready) -> anyhow::Result<()> {
        let verifier = Verifier::with(&chosen.scheme, &chosen.secrets, self.settings.clone())?;
        let path = path_of(&ready.url);
        let request = Request { method: "POST", path: &path, headers: &ready.headers, body: &ready.body };
        match verifier.verify(&request, self.clock.now()) {
            Err(Rejection::SignatureMismatch) => Err(needs_private_key(chosen)),
            _ => Ok(()),
        }
    }

    async fn exchange(&self, http: &reqwest::Client, index: u64) -> anyhow::Result<Exchange> {
        let Ready { url, headers, body } = self.request(index)?;
        let started = Instant::now();
        let answer = post(http, url, headers, body).await;
        Ok(Exchange { answer, took: started.elapsed() })
    }
}

/// One request and what came of it.
struct Exchange {
    answer: Result<Answer, reqwest::Error>,
    took: Duration,
}

/// All that came of all requests.
struct Sent {
    tally: Tally,
    last: Option<Answer>,
}

/// Sends everything and counts what comes back. Stops at once if nobody is there from the start; a gateway that goes away
/// later is counted, because that may be what is being tried out.
async fn send(plan: Plan, connections: u16) -> anyhow::Result<Sent> {
    let http = http_client(plan.url.scheme() == "https", connections.into())?;
    let url = plan.url.clone();
    let progress = progress_bar(plan.total);
    let (plan, next) = (Arc::new(plan), Arc::new(AtomicU64::new(0)));
    let (results, mut exchanges) = mpsc::channel(1_024);
    let mut workers = JoinSet::new();
    for _ in 0..u64::from(connections).min(plan.total) {
        workers.spawn(work(Arc::clone(&plan), http.clone(), Arc::clone(&next), results.clone()));
    }
    drop(results);

    let mut sent = Sent { tally: Tally::default(), last: None };
    while let Some(exchange) = exchanges.recv().await {
        let Exchange { answer, took } = exchange?;
        match answer {
            Ok(answer) => {
                sent.tally.answer(&answer, took);
                sent.last = Some(answer);
            }
            Err(error) if error.is_connect() && !sent.tally.has_answers() => {
                return Err(nobody_there(&url, &error));
            }
            Err(error) => sent.tally.error(cause(&error)),
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    while let Some(worker) = workers.join_next().await {
        worker.context("a sender failed")?;
    }
    Ok(sent)
}

/// One connection's worth of requests. Ends when all are taken or nobody counts any more.
async fn work(
    plan: Arc<Plan>,
    http: reqwest::Client,
    next: Arc<AtomicU64>,
    results: mpsc::Sender<anyhow::Result<Exchange>>,
) {
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        if index >= plan.total || results.send(plan.exchange(&http, index).await).await.is_err() {
            return;
        }
    }
}

pub(super) async fn post(
    http: &reqwest::Client,
    url: Url,
    headers: HeaderMap,
    body: impl Into<reqwest::Body>,
) -> Result<Answer, reqwest::Error> {
    let response = http.post(url).headers(headers).body(body).send().await?;
    let (status, headers) = (response.status(), response.headers().clone());
    let (body, _) = read_answer(response, MAX_ANSWER_BYTES).await?;
    Ok(Answer { status, headers, body })
}

/// Path and query, as they go over the wire.
pub(super) fn path_of(url: &Url) -> String {
    url.query().map_or_else(|| url.path().to_owned(), |query| format!("{}?{query}", url.path()))
}

/// A request as raw HTTP, exactly as `oncehook verify --request` reads it.
fn print_raw(ready: &Ready) -> anyhow::Result<()> {
    use std::io::Write as _;
    let mut raw = format!("POST {} HTTP/1.1\r\n", path_of(&ready.url)).into_bytes();
    let name = ready.url.host_str().unwrap_or_default();
    let host = ready.url.port().map_or_else(|| name.to_owned(), |port| format!("{name}:{port}"));
    raw.extend_from_slice(format!("host: {host}\r\ncontent-length: {}\r\n", ready.body.len()).as_bytes());
    for (name, value) in &ready.headers {
        raw.extend_from_slice(name.as_str().as_bytes());
        raw.extend_from_slice(b": ");
        raw.extend_from_slice(value.as_bytes());
        raw.extend_from_slice(b"\r\n");
    }
    raw.extend_from_slice(b"\r\n");
    raw.extend_from_slice(&ready.body);
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&raw).and_then(|()| stdout.flush()).context("write the request")
}

pub(super) fn target(url: Option<Url>, chosen: &Chosen, only_print: bool) -> anyhow::Result<Url> {
    match (url, chosen.ingress) {
        (Some(url), _) if matches!(url.scheme(), "http" | "https") => Ok(url),
        (Some(_), _) => bail!("--url must begin with http:// or https://"),
        (None, Some(ingress)) => {
            let url = format!("http://{}/webhooks/{}", reachable(ingress), chosen.name);
            Url::parse(&url).with_context(|| format!("make a URL of {url}"))
        }
        (None, None) if only_print => {
            let url = chosen
                .settings
                .url
                .clone()
                .unwrap_or_else(|| format!("http://127.0.0.1:8080/webhooks/{}", chosen.name));
            Url::parse(&url).with_context(|| format!("make a URL of {url}"))
        }
        (None, None) => {
            bail!("--provider needs --url, such as --url http://127.0.0.1:8080/webhooks/{}", chosen.name)
        }
    }
}

/// The first secret that can sign. A given one must; among a source's own there may be public keys.
pub(super) fn signer(chosen: &Chosen, settings: &Settings) -> anyhow::Result<Signer> {
    if chosen.secrets_given {
        let secret = chosen
            .secrets
            .first()
            .context("there is no secret to sign with; give one with --secret env:NAME or file:PATH")?;
        return Ok(Signer::with(&chosen.scheme, secret, settings.clone())?);
    }
    let mut signers =
        chosen.secrets.iter().filter_map(|secret| Signer::with(&chosen.scheme, secret, settings.clone()).ok());
    signers.next().ok_or_else(|| needs_private_key(chosen))
}

fn needs_private_key(chosen: &Chosen) -> anyhow::Error {
    anyhow!(
        "the secret of source `{}` is a public key, which only checks signatures; give the private key with --secret env:NAME or file:PATH",
        chosen.name
    )
}

fn nobody_there(url: &Url, error: &reqwest::Error) -> anyhow::Error {
    anyhow!("nobody answers at {url}: {}; is the gateway running? `oncehook serve` starts it", cause(error))
}

/// For sources that have no preset and hence no sample.
pub(super) fn plain_sample() -> Sample {
    Sample {
        kind: "sample.created".to_owned(),
        headers: BTreeMap::new(),
        body: r#"{"id":"$id","type":"$kind","created":$secs,"data":{"id":"sample_$id"}}"#.to_owned(),
        form: false,
        query: None,
        other: BTreeMap::new(),
    }
}

/// Shows itself on a terminal only.
fn progress_bar(total: u64) -> ProgressBar {
    if total <= LONG {
        return ProgressBar::hidden();
    }
    ProgressBar::new(total).with_style(progress_style())
}

#[cfg(test)]
mod tests {
    use oncehook_verify::{Preset, Secret};

    use super::super::source::from_preset;
    use super::*;

    /// The first test of RFC 8032.
    const SEED: &str = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
    const PUBLIC: &str = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";

    #[derive(clap::Parser)]
    struct Wrapper {
        #[command(flatten)]
        send: Send,
    }

    fn chosen(preset: &str, secret: &str) -> Chosen {
        from_preset(Preset::named(preset).unwrap(), vec![Secret::new(secret).unwrap()]).unwrap()
    }

    fn plan(chosen: &Chosen, options: &[&str]) -> anyhow::Result<Plan> {
        let words = ["send", "--url", "http://127.0.0.1:1/webhooks/x"].iter().chain(options);
        Plan::new(<Wrapper as clap::Parser>::try_parse_from(words)?.send, chosen)
    }

    fn verifies(plan: &Plan, chosen: &Chosen, index: u64) -> bool {
        let Ready { url, headers, body } = plan.request(index).unwrap();
        let verifier = Verifier::with(&chosen.scheme, &chosen.secrets, plan.settings.clone()).unwrap();
        let path = path_of(&url);
        let request = Request { method: "POST", path: &path, headers: &headers, body: &body };
        verifier.verify(&request, plan.clock.now()).is_ok()
    }

    /// All but those whose secret is one half of a key; they have their own tests.
    #[test]
    fn r45_every_preset_with_a_shared_secret_signs_what_it_verifies() {
        let halves = ["discord", "telnyx", "sendgrid", "wise", "paddle-classic"];
        let mut signed = 0;
        for preset in Preset::all()
            .iter()
            .filter(|preset| !halves.contains(&preset.name.as_str()) && !preset.verify.fetches_keys())
        {
            let secret = match preset.name.as_str() {
                "adyen" | "adyen-platform" | "onfleet" => {
                    "DFB1EB5485895CFA84146406857104ABB4CBCABDC8AAF103A624C8F6A3EAAB00"
                }
                _ => "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            };
            let chosen = chosen(&preset.name, secret);
            assert!(verifies(&plan(&chosen, &[]).unwrap(), &chosen, 0), "{}", preset.name);
            signed += 1;
        }
        assert!(signed > 95, "{signed}");
    }

    #[test]
    fn copies_are_the_same_and_events_differ() {
        let plan = plan(&chosen("stripe", "s3cr3t"), &["--key", "evt_7", "--events", "2", "--times", "3"]).unwrap();
        let bodies: Vec<_> = (0..plan.total).map(|index| plan.request(index).unwrap().body).collect();
        assert_eq!(bodies.len(), 6);
        assert!(bodies[..3].iter().all(|body| *body == bodies[0]) && bodies[3..].iter().all(|body| *body == bodies[3]));
        assert!(bodies[0].starts_with(br#"{"id":"evt_7_1""#) && bodies[3].starts_with(br#"{"id":"evt_7_2""#));
    }

    #[test]
    fn own_headers_and_signatures_win() {
        let chosen = chosen("github", "s3cr3t");
        let options = ["--header", "X-GitHub-Event: push", "--header", "X-Hub-Signature-256: sha256=00", "--key", "k"];
        let Ready { headers, .. } = plan(&chosen, &options).unwrap().request(0).unwrap();
        assert_eq!(headers["x-github-event"], "push");
        assert_eq!(headers["x-hub-signature-256"], "sha256=00");
        assert_eq!(headers["x-github-delivery"], "k");
    }

    #[test]
    fn a_public_key_is_not_taken_for_a_private_one() {
        for (preset, public) in
            [("discord", PUBLIC), ("standard-webhooks", "whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=")]
        {
            let configured = Chosen { secrets_given: false, ..chosen(preset, public) };
            let Err(error) = plan(&configured, &[]) else { panic!("{preset} signed with a public key") };
            assert!(format!("{error:#}").contains("give the private key with --secret"), "{error:#}");
        }
        assert!(plan(&chosen("discord", SEED), &[]).is_ok());
    }

    #[test]
    fn a_provider_without_a_configuration_needs_a_url() {
        let error = target(None, &chosen("stripe", "s3cr3t"), false).unwrap_err().to_string();
        assert!(error.contains("--url http://127.0.0.1:8080/webhooks/stripe"), "{error}");
        assert!(target(Some("ftp://x/".parse().unwrap()), &chosen("stripe", "s3cr3t"), false).is_err());
    }
}
