//! What the program uses: the configuration after all checks. A value of these types cannot be wrong in itself.

mod source;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use oncehook::delivery::RouteName;
use oncehook::event::SourceName;
use oncehook::fastpath::RedisAddress;
use oncehook::handler::Handler;
use oncehook::journal::open::Location;
use oncehook::machine::Machine;
use oncehook::route::Routes;
use oncehook_verify::{Ack, EventHeaders, Handshakes, Identifier, Preset, Scheme, Secret, Settings, Verifier};

use self::source::{Named, find_awaited, read_source};
use super::duration::parse_seconds;
use super::file::{File, Table};
use super::machine::read_machines;
use super::problem::Problems;
use super::reference::secret_from_reference;
use super::route::{Ground, read_routes};

/// A whole, checked configuration.
#[derive(Debug)]
pub struct Config {
    /// `[server]`
    pub server: ServerConfig,
    /// `[journal]`
    pub journal: Location,
    /// `[spool]`
    pub spool: SpoolConfig,
    /// `dedup.window`: how long a key is remembered, from its first receipt.
    pub dedup_window: Duration,
    /// `dedup.redis`: where nodes share what they know of keys. It may hold a password.
    pub dedup_redis: Option<RedisAddress>,
    /// `retention.payload`: how long bodies are kept.
    pub retention_payload: Duration,
    /// `retention.dead`: how long dead letters are kept; `None` keeps them for ever.
    pub retention_dead: Option<Duration>,
    /// `retention.audit`: how long orders of operators are remembered.
    pub retention_audit: Duration,
    /// `[[source]]`
    pub sources: Vec<SourceConfig>,
    /// `[[route]]`
    pub routes: Routes,
    /// `[[machine]]`
    pub machines: Vec<Arc<Machine>>,
}

/// `[server]`
#[derive(Debug)]
pub struct ServerConfig {
    /// Where providers deliver.
    pub ingress: SocketAddr,
    /// Where operators look.
    pub admin: SocketAddr,
    /// What operators must show.
    pub admin_token: Option<Secret>,
    /// Names, beside the address itself, under which the admin listener may be asked for.
    pub admin_hosts: Vec<String>,
    /// Peers whose `X-Forwarded-For` is believed.
    pub trusted_proxies: Vec<IpNet>,
    /// `[server.limits]`
    pub limits: Limits,
}

/// `[server.limits]`: nothing is unbounded.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Largest body in bytes; 413 beyond. What a source's own limit is, unless it or its provider says otherwise.
    pub body_bytes: usize,
    /// A request's head must arrive within this time; an idle connection is closed after it.
    pub head: Duration,
    /// A request's body must arrive within this time.
    pub body: Duration,
    /// An answer must be taken within this time; the connection is closed beyond.
    pub write: Duration,
    /// The journal must answer within this time; 503 beyond.
    pub commit: Duration,
    /// Open connections.
    pub connections: usize,
    /// Requests being answered; 503 beyond.
    pub in_flight: usize,
    /// Bytes of bodies held in memory; 503 beyond.
    pub in_flight_bytes: usize,
    /// Callers waiting for a result; 202 beyond.
    pub waiting: usize,
}

/// `[spool]`: where events wait while the journal is away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpoolConfig {
    /// The file.
    pub path: PathBuf,
    /// At most so many events; 503 beyond.
    pub max_events: u64,
    /// At most so many bytes of them; 503 beyond.
    pub max_bytes: u64,
    /// How long the journal may take before the spool takes over.
    pub after: Duration,
    /// Somebody should look if an event has waited for so long.
    pub alarm: Duration,
}

/// `on_outage`: what becomes of an event while the journal is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnOutage {
    /// It is answered 503, and the provider sends it again.
    Retry,
    /// The spool takes it.
    Spool,
}

/// So many at once, and so many a second in the long run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// In the long run.
    pub per_second: u32,
    /// At once.
    pub burst: u32,
}

/// `rate_limit`: 429 beyond.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Genuine requests of the source.
    pub source: Option<Rate>,
    /// Requests of one address.
    pub peer: Option<Rate>,
}

/// `[[source]]`
pub struct SourceConfig {
    /// Its name, also in its URL.
    pub name: SourceName,
    /// The preset's name, or `custom`.
    pub provider: String,
    /// How requests are signed.
    pub scheme: Scheme,
    /// The secrets, for `send` and `verify`.
    pub secrets: Vec<Secret>,
    /// Tolerance, public address and values, as far as they are set.
    pub settings: Settings,
    /// Where a secret that the provider hands over waits to be confirmed.
    pub handover: Option<PathBuf>,
    /// Checks requests.
    pub verifier: Verifier,
    /// Finds out which event it is.
    pub identifier: Identifier,
    /// Answers a provider's handshakes.
    pub handshakes: Handshakes,
    /// The answer to an accepted event.
    pub ack: Ack,
    /// Only these addresses may deliver; empty means all.
    pub allow_ips: Vec<IpNet>,
    /// Whose result the answer carries, if it waits for one.
    pub wait: Option<WaitConfig>,
    /// Whether it is an ordinary endpoint that becomes idempotent (`provider = "idempotency-key"`).
    pub endpoint: bool,
    /// What becomes of its events while the journal is away.
    pub on_outage: OnOutage,
    /// Largest body in bytes; 413 beyond.
    pub body_bytes: usize,
    /// The provider's headers that go along when an event is forwarded.
    pub forward: EventHeaders,
    /// `rate_limit`; none if it is not written.
    pub rate_limits: RateLimits,
}

/// `wait` of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitConfig {
    /// The route whose delivery is waited for.
    pub route: RouteName,
    /// The route that must want the event for that to come about: the same, or the one that it follows.
    pub root: RouteName,
    /// For how long; zero only looks.
    pub up_to: Duration,
}

impl std::fmt::Debug for SourceConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SourceConfig")
            .field("name", &self.name)
            .field("provider", &self.provider)
            .finish_non_exhaustive()
    }
}

const DAY: u64 = 86_400;

/// What a limit of bodies may be.
const BODY_BYTES: std::ops::RangeInclusive<u64> = 1..=64 << 20;

/// What the limit of a source's bodies is made from.
struct BodyLimits {
    /// `body_bytes` in `[server.limits]`, if the operator wrote it. Then no provider raises it.
    written: Option<usize>,
    in_flight_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 1 << 20,
            head: Duration::from_secs(15),
            body: Duration::from_secs(15),
            write: Duration::from_secs(15),
            commit: Duration::from_secs(10),
            connections: 10_000,
            in_flight: 4_096,
            in_flight_bytes: 64 << 20,
            waiting: 2_048,
        }
    }
}

impl Config {
    /// Reads and checks a file. Reads the secrets it refers to; touches nothing else.
    pub fn load(path: &Path) -> Result<Self, Problems> {
        let shown = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| Problems::unreadable(&shown, &error))?;
        Self::parse(&shown, &text)
    }

    /// Checks a text. `path` is for messages.
    pub fn parse(path: &str, text: &str) -> Result<Self, Problems> {
        let file = File::new(text);
        let config = read(&file);
        match (config, file.into_problems()) {
            (Some(config), problems) if problems.is_empty() => Ok(config),
            (_, problems) => Err(Problems::new(path, text, problems)),
        }
    }

    /// Whether a source needs the spool.
    #[must_use]
    pub fn needs_spool(&self) -> bool {
        self.sources.iter().any(|source| source.on_outage == OnOutage::Spool)
    }

    /// The source of that name.
    #[must_use]
    pub fn source(&self, name: &str) -> Option<&SourceConfig> {
        self.sources.iter().find(|source| source.name.as_str() == name)
    }
}

fn read(file: &File<'_>) -> Option<Config> {
    let mut root = file.root()?;
    let (server, body_limits) = read_server(root.take_table("server", "[server]"));
    let before = file.problems();
    let journal = read_journal(root.take_table("journal", "[journal]"), before);
    // A misspelt [journal] is not the usual one either.
    let journal = journal.filter(|_| root.wrote("journal") || root.lacks("journal"));
    let spool = read_spool(root.take_table("spool", "[spool]"), journal.as_ref());

    let before = file.problems();
    let mut dedup = root.take_table("dedup", "[dedup]");
    let window = dedup.take_seconds("window");
    let window_is_right = file.problems() == before;
    let window_span = window.as_ref().map_or(0..0, |window| window.span());
    let window = window.map_or(35 * DAY, toml::Spanned::into_inner);
    let redis = dedup.take_parsed("redis", |url| {
        if url.starts_with("env:") || url.starts_with("file:") {
            return secret_from_reference(url).and_then(|url| RedisAddress::parse(url.reveal()));
        }
        RedisAddress::parse(url)
    });
    dedup.finish(&[]);
    let mut retention = root.take_table("retention", "[retention]");
    let payload = retention.take_seconds("payload").map(toml::Spanned::into_inner);
    // One that could not be read has had its problem noted, and is not compared with anything.
    let payload_is_right = payload.is_some() || !retention.wrote("payload");
    let payload = payload.unwrap_or(30 * DAY);
    let dead = retention.take_parsed("dead", |text| match text {
        "never" => Ok(None),
        text => parse_seconds(text).map(Some).map_err(|wanted| format!("{wanted}, or \"never\"")),
    });
    if let Some(dead) = &dead
        && payload_is_right
        && dead.get_ref().is_some_and(|dead| dead < payload)
    {
        retention.problem_with_help(
            dead.span(),
            "`retention.dead` is shorter than `retention.payload`",
            "dead letters are what somebody still has to look at; keep them at least as long as the others",
        );
    }
    let dead = dead.and_then(toml::Spanned::into_inner);
    let audit = retention.take_seconds("audit").map_or(365 * DAY, toml::Spanned::into_inner);
    retention.finish(&[]);

    let mut sources: Vec<SourceConfig> = Vec::new();
    let tables = root.take_tables("source", "[[source]]");
    let count = tables.len();
    if tables.is_empty() && root.lacks("source") {
        root.problem_with_help(0..0, "no [[source]] is declared", "a gateway without a source accepts nothing");
    }
    let mut complete = true;
    let mut named = Named::default();
    let mut waits = Vec::new();
    for table in tables {
        let (source, wait) = read_source(table, &body_limits, &mut named);
        match source {
            Some(source) => {
                waits.extend(wait.map(|wait| (sources.len(), wait)));
                sources.push(source);
            }
            None => complete = false,
        }
    }
    if window_is_right {
        check_window(&root, window, &window_span, payload_is_right.then_some(payload), &named.presets);
    }
    let machines = read_machines(root.take_tables("machine", "[[machine]]"));
    let ground = Ground {
        sources: &named.sources,
        sources_known: count > 0 && named.sources.len() == count && root.lacks_near("source"),
        dialect: journal.as_ref().map(Location::dialect),
        journal_url: journal.as_ref().and_then(Location::url),
        keep: Duration::from_secs(window.max(payload)),
        databases: RefCell::default(),
        machines: &machines.list,
        machines_known: machines.complete,
    };
    let routes = read_routes(file, root.take_tables("route", "[[route]]"), &ground);
    for route in routes.iter().flat_map(Routes::iter) {
        if let Handler::Http(handler) = &route.handler
            && let Some(source) = sources.iter().find(|source| source.name == route.source)
        {
            handler.forward(source.forward.clone());
        }
    }
    for (place, wait) in waits {
        if let (Some(routes), Some(source)) = (&routes, sources.get_mut(place)) {
            let unrouted = !routes.iter().any(|route| route.source == source.name);
            if unrouted && wait.get_ref().1.is_zero() {
                // An endpoint whose requests nobody wants yet: they are kept, like all events without a route.
                continue;
            }
            match find_awaited(&source.name, &wait, routes) {
                Ok(wait) => source.wait = Some(wait),
                Err(problem) => root.problem(wait.span(), problem),
            }
        }
    }
    root.finish(&[]);
    complete.then_some(())?;
    Some(Config {
        server,
        journal: journal?,
        spool,
        dedup_window: Duration::from_secs(window),
        dedup_redis: redis.map(toml::Spanned::into_inner),
        retention_payload: Duration::from_secs(payload),
        retention_dead: dead.map(Duration::from_secs),
        retention_audit: Duration::from_secs(audit),
        sources,
        routes: routes?,
        machines: machines.complete.then_some(machines.list)?,
    })
}

/// Keys must be remembered for as long as the same event may come again. One problem, however many reasons there are.
fn check_window(root: &Table<'_, '_>, window: u64, span: &Range<usize>, payload: Option<u64>, presets: &[&Preset]) {
    let longest = presets.iter().max_by_key(|preset| preset.retry_horizon_secs);
    if let Some(preset) = longest.filter(|preset| window < preset.retry_horizon_secs) {
        let problem = format!(
            "`dedup.window` is shorter than the {} h for which {} may retry",
            preset.retry_horizon_secs / 3600,
            preset.title
        );
        root.problem_with_help(span.clone(), problem, "a late retry would take effect again");
    } else if payload.is_some_and(|payload| window < payload) {
        root.problem_with_help(
            span.clone(),
            "`dedup.window` is shorter than `retention.payload`",
            "keys must be remembered at least as long as bodies are kept",
        );
    }
}

fn read_server(mut table: Table<'_, '_>) -> (ServerConfig, BodyLimits) {
    let address = |text: &str| {
        text.parse::<SocketAddr>()
            .map_err(|_| format!("{text:?} is not an address and port, such as \"127.0.0.1:8080\""))
    };
    let ingress = table.take_parsed("ingress", address);
    let admin = table.take_parsed("admin", address);
    let token = table.take_parsed("admin_token", secret_from_reference);
    let readable = |key: &str, value: &Option<_>| value.is_some() || !table.wrote(key);
    let readable = readable("ingress", &ingress) && readable("admin", &admin);
    let admin_span = admin.as_ref().map_or_else(|| table.span(), |admin| admin.span());
    let ingress = ingress.map_or_else(|| ([127, 0, 0, 1], 8080).into(), toml::Spanned::into_inner);
    let admin = admin.map_or_else(|| ([127, 0, 0, 1], 8081).into(), toml::Spanned::into_inner);
    if readable && share_a_port(ingress, admin) {
        table.problem_with_help(
            admin_span,
            format!("`ingress` and `admin` listen on the same port, {}", admin.port()),
            "what the internet may reach and what only operators may are two listeners; give `admin` another port",
        );
    } else if !admin.ip().is_loopback() && table.lacks("admin_token") {
        table.problem_with_help(
            admin_span,
            format!("the admin listener on {admin} is not on a loopback address and has no `admin_token`"),
            "set admin_token = \"env:ONCEHOOK_ADMIN_TOKEN\", or listen on 127.0.0.1",
        );
    } else if let Some(token) =
        token.as_ref().filter(|token| !admin.ip().is_loopback() && !is_strong(token.get_ref().reveal()))
    {
        table.problem_with_help(
            token.span(),
            format!("the `admin_token` is too short to guard {admin}, which is not a loopback address"),
            "it can be guessed; make one of 128 bits or more: openssl rand -hex 32",
        );
    }
    let token = token.map(toml::Spanned::into_inner);
    let admin_hosts = table
        .take_strings("admin_hosts")
        .map(|hosts| hosts.into_inner().into_iter().map(|host| host.into_inner().to_ascii_lowercase()).collect())
        .unwrap_or_default();
    let trusted_proxies = read_networks(&mut table, "trusted_proxies");
    let (limits, body_limits) = read_limits(table.take_table("limits", "[server.limits]"));
    table.finish(&["tls"]);
    let server = ServerConfig { ingress, admin, admin_token: token, admin_hosts, trusted_proxies, limits };
    (server, body_limits)
}

/// Whether the second of two listeners could not listen. The system chooses where a port is 0.
fn share_a_port(one: SocketAddr, other: SocketAddr) -> bool {
    let overlap = one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && overlap
}

/// Whether a token has 128 bits, if it was drawn at random from the kinds of characters that it shows. A word that repeats
/// itself was not.
fn is_strong(token: &str) -> bool {
    let has = |kind: fn(u8) -> bool| token.bytes().any(kind);
    let beyond_hex = |byte: u8| byte.is_ascii_lowercase() && !byte.is_ascii_hexdigit();
    let alphabet: f64 = match (has(beyond_hex), has(|b| b.is_ascii_uppercase()), has(|b| b.is_ascii_alphabetic())) {
        (true, true, _) => 62.0,
        (true, false, _) | (false, true, _) => 36.0,
        (false, false, true) => 16.0,
        (false, false, false) => 10.0,
    };
    let distinct: std::collections::HashSet<u8> = token.bytes().collect();
    distinct.len() >= 8 && token.len() as f64 * alphabet.log2() >= 128.0
}

fn read_limits(mut table: Table<'_, '_>) -> (Limits, BodyLimits) {
    let usual = Limits::default();
    let bytes = |number: Option<u64>, usual: usize| number.map_or(usual, |n| usize::try_from(n).unwrap_or(usual));
    let seconds = |found: Option<toml::Spanned<u64>>, usual: Duration| {
        found.map_or(usual, |found| Duration::from_secs(found.into_inner().max(1)))
    };
    let body = seconds(table.take_seconds("body"), usual.body);
    let body_bytes = table.take_number("body_bytes", BODY_BYTES);
    let limits = Limits {
        body_bytes: bytes(body_bytes, usual.body_bytes),
        head: seconds(table.take_seconds("head"), usual.head),
        body,
        write: seconds(table.take_seconds("write"), body),
        commit: seconds(table.take_seconds("commit"), usual.commit),
        connections: bytes(table.take_number("connections", 1..=1_000_000), usual.connections),
        in_flight: bytes(table.take_number("in_flight", 1..=1_000_000), usual.in_flight),
        in_flight_bytes: bytes(table.take_number("in_flight_bytes", 1..=16 << 30), usual.in_flight_bytes),
        waiting: bytes(table.take_number("waiting", 1..=1_000_000), usual.waiting),
    };
    if limits.in_flight_bytes < limits.body_bytes {
        table.problem(table.span(), "`in_flight_bytes` is smaller than one body of `body_bytes`");
    }
    table.finish(&[]);
    let written = body_bytes.map(|_| limits.body_bytes);
    let body_limits = BodyLimits { written, in_flight_bytes: limits.in_flight_bytes };
    (limits, body_limits)
}

/// Nothing if something is wrong with it, so that no statement is judged by another engine's rules.
fn read_journal(mut table: Table<'_, '_>, before: usize) -> Option<Location> {
    let url = table.take_parsed("url", |url| {
        // It may hold a password, so it may stand elsewhere as a whole.
        if url.starts_with("env:") || url.starts_with("file:") {
            return secret_from_reference(url).and_then(|url| Location::parse(url.reveal()));
        }
        Location::parse(url)
    });
    let file = table.finish(&[]);
    let usual = || Location::file("oncehook.db");
    (file.problems() == before).then(|| url.map_or_else(usual, toml::Spanned::into_inner))
}

fn read_spool(mut table: Table<'_, '_>, journal: Option<&Location>) -> SpoolConfig {
    let journal = journal.and_then(Location::path);
    let path = table.take_string("path");
    let usual = match journal {
        // Beside the journal's file: that directory is there, and is meant to last.
        Some(journal) => {
            let mut name = journal.file_stem().unwrap_or(journal.as_os_str()).to_os_string();
            name.push("-spool.db");
            journal.with_file_name(name)
        }
        None => PathBuf::from("oncehook-spool.db"),
    };
    if let (Some(path), Some(journal)) = (&path, journal)
        && Path::new(path.get_ref()) == journal
    {
        table.problem(path.span(), "the spool needs a file of its own, not the journal's");
    }
    let spool = SpoolConfig {
        path: path.map_or(usual, |path| PathBuf::from(path.into_inner())),
        max_events: table.take_number("max_events", 1..=1 << 32).unwrap_or(1_000_000),
        max_bytes: table.take_number("max_bytes", 1 << 20..=1 << 40).unwrap_or(1 << 30),
        after: table.take_duration("after").map_or(Duration::from_secs(2), toml::Spanned::into_inner),
        alarm: table.take_duration("alarm").map_or(Duration::from_secs(300), toml::Spanned::into_inner),
    };
    table.finish(&[]);
    spool
}

fn read_networks(table: &mut Table<'_, '_>, key: &'static str) -> Vec<IpNet> {
    let mut networks = Vec::new();
    for text in table.take_strings(key).map(toml::Spanned::into_inner).unwrap_or_default() {
        let parsed =
            text.get_ref().parse::<IpNet>().or_else(|_| text.get_ref().parse::<std::net::IpAddr>().map(IpNet::from));
        match parsed {
            Ok(network) => networks.push(network),
            Err(_) => table.problem(text.span(), format!("{:?} is not an address or network (CIDR)", text.get_ref())),
        }
    }
    networks
}
