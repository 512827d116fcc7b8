//! What the program uses: the configuration after all checks. A value of these types cannot be wrong in itself.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use oncehook::delivery::RouteName;
use oncehook::event::SourceName;
use oncehook::fastpath::RedisAddress;
use oncehook::handler::{Dialect, Handler};
use oncehook::journal::{mysql, postgres};
use oncehook::route::Routes;
use oncehook_verify::{
    Ack, Handshakes, Identifier, Identify, MissingKey, Preset, Scheme, Secret, Settings, SetupError, Verifier,
};

use super::duration::{parse_duration, parse_seconds};
use super::file::{File, Table};
use super::problem::Problems;
use super::reference::secret_from_reference;
use super::route::{Ground, read_routes};

/// A whole, checked configuration.
#[derive(Debug)]
pub struct Config {
    /// `[server]`
    pub server: ServerConfig,
    /// `[journal]`
    pub journal: JournalConfig,
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
    /// Largest body in bytes; 413 beyond.
    pub body_bytes: usize,
    /// A request's head must arrive within this time; an idle connection is closed after it.
    pub head: Duration,
    /// A request's body must arrive within this time.
    pub body: Duration,
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

/// `[journal]`
#[derive(Debug, Clone)]
pub enum JournalConfig {
    /// The SQLite file.
    Sqlite(PathBuf),
    /// The URL of a PostgreSQL database. It may hold a password.
    Postgres(Secret),
    /// The URL of a MariaDB or MySQL database. It may hold a password.
    Mysql(Secret),
}

impl JournalConfig {
    /// How its engine writes parameters.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        match self {
            Self::Sqlite(_) => Dialect::Sqlite,
            Self::Postgres(_) => Dialect::Postgres,
            Self::Mysql(_) => Dialect::Mysql,
        }
    }

    /// The URL of its server. It may hold a password.
    #[must_use]
    pub fn url(&self) -> Option<&str> {
        match self {
            Self::Sqlite(_) => None,
            Self::Postgres(url) | Self::Mysql(url) => Some(url.reveal()),
        }
    }

    /// Where it is, for people: without what is secret.
    #[must_use]
    pub fn shown(&self) -> String {
        match self {
            Self::Sqlite(path) => path.display().to_string(),
            Self::Postgres(url) => postgres::shown_url(url.reveal()),
            Self::Mysql(url) => mysql::shown_url(url.reveal()),
        }
    }
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

/// The provider that is no provider: any client, with a key in a header.
const ENDPOINT: &str = "idempotency-key";

impl std::fmt::Debug for SourceConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SourceConfig")
            .field("name", &self.name)
            .field("provider", &self.provider)
            .finish_non_exhaustive()
    }
}

const DAY: u64 = 86_400;

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 1 << 20,
            head: Duration::from_secs(15),
            body: Duration::from_secs(15),
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
    let mut root = file.root();
    let server = read_server(root.take_table("server", "[server]"));
    let journal = read_journal(root.take_table("journal", "[journal]"));
    let spool = read_spool(root.take_table("spool", "[spool]"), journal.as_ref());

    let mut dedup = root.take_table("dedup", "[dedup]");
    let window = dedup.take_seconds("window");
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
    let payload = retention.take_seconds("payload").map_or(30 * DAY, toml::Spanned::into_inner);
    let dead = retention.take_parsed("dead", |text| match text {
        "never" => Ok(None),
        text => parse_seconds(text).map(Some).map_err(|wanted| format!("{wanted}, or \"never\"")),
    });
    if let Some(dead) = &dead
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
    if window < payload {
        root.problem_with_help(
            window_span.clone(),
            "`dedup.window` is shorter than `retention.payload`",
            "keys must be remembered at least as long as bodies are kept",
        );
    }

    let mut sources: Vec<SourceConfig> = Vec::new();
    let tables = root.take_tables("source", "[[source]]");
    if tables.is_empty() {
        root.problem_with_help(
            0..0,
            "no [[source]] is declared",
            "a gateway without a source accepts nothing",
        );
    }
    let mut complete = true;
    let mut names = Vec::new();
    let mut waits = Vec::new();
    for table in tables {
        let (source, wait) = read_source(table, window, &window_span, &mut names);
        match source {
            Some(source) => {
                waits.extend(wait.map(|wait| (sources.len(), wait)));
                sources.push(source);
            }
            None => complete = false,
        }
    }
    // Without a journal its own problem has been noted; the statements are read as the usual one would.
    let ground = Ground {
        sources: &names,
        dialect: journal.as_ref().map_or(Dialect::Sqlite, JournalConfig::dialect),
        journal_url: journal.as_ref().and_then(JournalConfig::url),
        keep: Duration::from_secs(window.max(payload)),
        databases: RefCell::default(),
    };
    let routes = read_routes(file, root.take_tables("route", "[[route]]"), &ground);
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
    root.finish(&["machine"]);
    complete.then_some(())?;
    Some(Config {
        server: server?,
        journal: journal?,
        spool,
        dedup_window: Duration::from_secs(window),
        dedup_redis: redis.map(toml::Spanned::into_inner),
        retention_payload: Duration::from_secs(payload),
        retention_dead: dead.map(Duration::from_secs),
        retention_audit: Duration::from_secs(audit),
        sources,
        routes: routes?,
    })
}

fn read_server(mut table: Table<'_, '_>) -> Option<ServerConfig> {
    let address = |text: &str| {
        text.parse::<SocketAddr>()
            .map_err(|_| format!("{text:?} is not an address and port, such as \"127.0.0.1:8080\""))
    };
    let ingress = table
        .take_parsed("ingress", address)
        .map_or_else(|| ([127, 0, 0, 1], 8080).into(), toml::Spanned::into_inner);
    let admin = table.take_parsed("admin", address);
    let token = table.take_parsed("admin_token", secret_from_reference).map(toml::Spanned::into_inner);
    let token_written = token.is_some();
    let admin_span = admin.as_ref().map_or_else(|| table.span(), |admin| admin.span());
    let admin = admin.map_or_else(|| ([127, 0, 0, 1], 8081).into(), toml::Spanned::into_inner);
    if !admin.ip().is_loopback() && !token_written {
        table.problem_with_help(
            admin_span,
            format!("the admin listener on {admin} is not on a loopback address and has no `admin_token`"),
            "set admin_token = \"env:ONCEHOOK_ADMIN_TOKEN\", or listen on 127.0.0.1",
        );
    }
    let admin_hosts = table
        .take_strings("admin_hosts")
        .map(|hosts| {
            hosts.into_inner().into_iter().map(|host| host.into_inner().to_ascii_lowercase()).collect()
        })
        .unwrap_or_default();
    let trusted_proxies = read_networks(&mut table, "trusted_proxies");
    let limits = read_limits(table.take_table("limits", "[server.limits]"));
    table.finish(&["tls"]);
    Some(ServerConfig { ingress, admin, admin_token: token, admin_hosts, trusted_proxies, limits })
}

fn read_limits(mut table: Table<'_, '_>) -> Limits {
    let usual = Limits::default();
    let bytes =
        |number: Option<u64>, usual: usize| number.map_or(usual, |n| usize::try_from(n).unwrap_or(usual));
    let seconds = |found: Option<toml::Spanned<u64>>, usual: Duration| {
        found.map_or(usual, |found| Duration::from_secs(found.into_inner().max(1)))
    };
    let limits = Limits {
        body_bytes: bytes(table.take_number("body_bytes", 1..=64 << 20), usual.body_bytes),
        head: seconds(table.take_seconds("head"), usual.head),
        body: seconds(table.take_seconds("body"), usual.body),
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
    limits
}

fn read_journal(mut table: Table<'_, '_>) -> Option<JournalConfig> {
    let url = table.take_parsed("url", |url| {
        // It may hold a password, so it may stand elsewhere as a whole.
        if url.starts_with("env:") || url.starts_with("file:") {
            return secret_from_reference(url).and_then(|url| journal_from_url(url.reveal()));
        }
        journal_from_url(url)
    });
    table.finish(&[]);
    Some(url.map_or_else(|| JournalConfig::Sqlite(PathBuf::from("oncehook.db")), toml::Spanned::into_inner))
}

fn read_spool(mut table: Table<'_, '_>, journal: Option<&JournalConfig>) -> SpoolConfig {
    let path = table.take_string("path");
    let usual = match journal {
        // Beside the journal's file: that directory is there, and is meant to last.
        Some(JournalConfig::Sqlite(journal)) => {
            let mut name = journal.file_stem().unwrap_or(journal.as_os_str()).to_os_string();
            name.push("-spool.db");
            journal.with_file_name(name)
        }
        Some(_) | None => PathBuf::from("oncehook-spool.db"),
    };
    if let (Some(path), Some(JournalConfig::Sqlite(journal))) = (&path, journal)
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

/// The error does not repeat the URL of a server: it may hold a password.
fn journal_from_url(url: &str) -> Result<JournalConfig, String> {
    match url.split_once("://") {
        Some(("sqlite", "")) => {
            Err("what follows sqlite:// is the path of the file, such as sqlite://oncehook.db".to_owned())
        }
        Some(("sqlite", path)) => Ok(JournalConfig::Sqlite(PathBuf::from(path))),
        Some(("postgres" | "postgresql", _)) => {
            postgres::check_url(url)?;
            Secret::new(url).map(JournalConfig::Postgres).map_err(|error| error.to_string())
        }
        Some(("mysql" | "mariadb", _)) => {
            mysql::check_url(url)?;
            Secret::new(url).map(JournalConfig::Mysql).map_err(|error| error.to_string())
        }
        _ => Err("this is not a journal; write sqlite://PATH, postgres://USER@HOST/DATABASE or mysql://USER@HOST/DATABASE".to_owned()),
    }
}

fn read_networks(table: &mut Table<'_, '_>, key: &'static str) -> Vec<IpNet> {
    let mut networks = Vec::new();
    for text in table.take_strings(key).map(toml::Spanned::into_inner).unwrap_or_default() {
        let parsed = text
            .get_ref()
            .parse::<IpNet>()
            .or_else(|_| text.get_ref().parse::<std::net::IpAddr>().map(IpNet::from));
        match parsed {
            Ok(network) => networks.push(network),
            Err(_) => table
                .problem(text.span(), format!("{:?} is not an address or network (CIDR)", text.get_ref())),
        }
    }
    networks
}

/// A source's `wait` as it was written: the route, if one is named, and how long.
type Awaited = toml::Spanned<(Option<String>, Duration)>;

/// Every problem of a source is reported, so this goes on after the first.
fn read_source(
    mut table: Table<'_, '_>,
    window: u64,
    window_span: &Range<usize>,
    names: &mut Vec<SourceName>,
) -> (Option<SourceConfig>, Option<Awaited>) {
    let span = table.span();
    let wait = read_wait(&mut table);
    let endpoint = wait.is_none().then(|| toml::Spanned::new(span, (None, Duration::ZERO)));
    let source = read_source_itself(table, window, window_span, names, wait.is_some());
    // An endpoint answers with a result whether it waits or not.
    let endpoint = endpoint.filter(|_| source.as_ref().is_some_and(|source| source.endpoint));
    (source, wait.or(endpoint))
}

fn read_source_itself(
    mut table: Table<'_, '_>,
    window: u64,
    window_span: &Range<usize>,
    names: &mut Vec<SourceName>,
    waits: bool,
) -> Option<SourceConfig> {
    let span = table.span();
    let name = table.take_parsed("name", |name| SourceName::new(name).map_err(|error| error.to_string()));
    if let Some(name) = &name {
        if names.contains(name.get_ref()) {
            table.problem(name.span(), format!("there are two sources named `{}`", name.get_ref()));
        }
        names.push(name.get_ref().clone());
    }
    let provider = table.take_string("provider");
    let preset = provider.as_ref().and_then(|provider| Preset::named(provider.get_ref()));
    let handover = table.take_string("handover");
    let needs_secrets = !preset.is_some_and(|preset| preset.verify.fetches_keys()) && handover.is_none();
    let secrets = read_secrets(&mut table, needs_secrets);
    let url = table.take_string("url");
    let params = read_params(&mut table);
    let tolerance = table.take_seconds("tolerance");
    let key = table.take_one_or_many("key");
    let endpoint = provider.as_ref().is_some_and(|provider| provider.get_ref() == ENDPOINT);
    let missing_key = table.take_typed::<MissingKey>("missing_key");
    if let Some(missing_key) = missing_key.as_ref().filter(|_| endpoint) {
        table
            .problem(missing_key.span(), "an endpoint needs a key with every request: no `missing_key` here");
    }
    let usual = if endpoint { MissingKey::Reject } else { MissingKey::default() };
    let missing_key = missing_key.map_or(usual, toml::Spanned::into_inner);
    let allow_ips = read_networks(&mut table, "allow_ips");
    let rate_limits = table
        .take_table_if_written("rate_limit", "`rate_limit`")
        .map_or_else(RateLimits::default, read_rate_limits);
    let on_outage = table.take_parsed("on_outage", |word| match word {
        "retry" => Ok(OnOutage::Retry),
        "spool" => Ok(OnOutage::Spool),
        _ => Err("write \"retry\" or \"spool\"".to_owned()),
    });
    // Whoever never sends again must not be told to.
    let retries = preset.is_none_or(|preset| preset.retries);
    let usual = if retries { OnOutage::Retry } else { OnOutage::Spool };
    let on_outage = on_outage.map_or(usual, toml::Spanned::into_inner);
    let verify = table.take_typed::<Scheme>("verify");
    let identify = table.take_typed::<Identify>("identify");

    let Some(provider) = provider else {
        table.problem_with_help(
            span,
            "a [[source]] needs a `provider`",
            "a preset's name (`oncehook providers` lists them) or \"custom\" with a [source.verify] table",
        );
        table.finish(&[]);
        return None;
    };
    if name.is_none() {
        table.problem(span.clone(), "a [[source]] needs a `name`");
    }
    if let Some(tolerance) = &tolerance
        && *tolerance.get_ref() == 0
    {
        table.problem(tolerance.span(), "a `tolerance` of zero would refuse every request");
    }
    let custom = provider.get_ref() == "custom";
    let scheme = match (preset, verify) {
        (Some(_), Some(verify)) => {
            table.problem(verify.span(), "a [source.verify] table goes with provider = \"custom\" only");
            None
        }
        (Some(preset), None) => Some(preset.verify.clone()),
        (None, Some(verify)) if custom => Some(verify.into_inner()),
        (None, None) if custom => {
            table.problem(span.clone(), "provider = \"custom\" needs a [source.verify] table");
            None
        }
        (None, _) => {
            table.problem_with_help(
                provider.span(),
                format!("there is no preset `{}`", provider.get_ref()),
                "`oncehook providers` lists them all; \"custom\" takes a [source.verify] table",
            );
            None
        }
    };
    if let Some(preset) = preset
        && window < preset.retry_horizon_secs
    {
        table.problem_with_help(
            window_span.clone(),
            format!(
                "`dedup.window` is shorter than the {} h for which {} may retry",
                preset.retry_horizon_secs / 3600,
                preset.title
            ),
            "a late retry would take effect again",
        );
    }
    let mut identify = identify
        .map(toml::Spanned::into_inner)
        .or_else(|| preset.map(|preset| preset.identify.clone()))
        .unwrap_or_default();
    if let Some(key) = key {
        match identify.clone().with_key(key.get_ref()) {
            Ok(changed) => identify = changed,
            Err(error) => table.problem(key.span(), error.to_string()),
        }
    }
    let handshakes = preset.map(|preset| preset.handshakes.clone()).unwrap_or_default();
    if let Some(handover) = handover.as_ref().filter(|_| !handshakes.hands_over_secret()) {
        table.problem(handover.span(), "`handover` is for providers that hand over a secret by themselves");
    }
    if waits && preset.is_some_and(|preset| preset.ack != Ack::default()) {
        table.problem(provider.span(), "this provider insists on an answer of its own: no `wait` here");
    }
    check_params(&table, preset, scheme.as_ref(), &params);
    let settings = Settings {
        tolerance_secs: tolerance.map(toml::Spanned::into_inner),
        url: url.map(toml::Spanned::into_inner),
        params: params.into_inner(),
    };
    let note = |error: SetupError| table.problem(span.clone(), error.to_string());
    let verifier = match &scheme {
        None => None,
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
        rate_limits,
    })
}

/// The route that is meant, with the time. An unnamed one is the source's only one.
fn find_awaited(source: &SourceName, wait: &Awaited, routes: &Routes) -> Result<WaitConfig, String> {
    let (name, up_to) = wait.get_ref();
    let route = match name {
        Some(name) => {
            let named = routes.get(name).filter(|route| route.source == *source);
            named
                .ok_or_else(|| format!("`wait` names the route `{name}`, which source `{source}` has not"))?
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
        if rate.is_none() && at_once.is_some() {
            table.problem(span, format!("`{burst}` goes with `{per_second}`"));
        }
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        rate.map(|rate| Rate { per_second: small(rate), burst: small(at_once.unwrap_or(rate)) })
    };
    let limits =
        RateLimits { source: read("per_second", "burst"), peer: read("peer_per_second", "peer_burst") };
    if limits == RateLimits::default() {
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
            Some(("env" | "file", _)) => {
                secret_from_reference(&text).map(|secret| secret.reveal().to_owned())
            }
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
    for param in
        preset.params.iter().filter(|param| !param.optional && !needed.contains(&param.name.as_str()))
    {
        if !params.get_ref().contains_key(&param.name) {
            let problem = format!("{} needs `params.{}`", preset.title, param.name);
            table.problem_with_help(params.span(), problem, &param.hint);
        }
    }
    for name in params.get_ref().keys().filter(|name| !preset.params.iter().any(|param| param.name == **name))
    {
        table.problem(params.span(), format!("{} knows no `params.{name}`", preset.title));
    }
}

fn read_secrets(table: &mut Table<'_, '_>, needed: bool) -> Vec<Secret> {
    let span = table.span();
    let Some(references) = table.take_strings("secrets") else {
        if !needed {
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
            Ok(secret) => secrets.push(secret),
            Err(message) => table.problem(reference.span(), message),
        }
    }
    secrets
}
