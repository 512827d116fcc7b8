//! `[[route]]`: which events go to which handler.
//!
//! Promises: every problem of every route is noted in its place, also what shows only when the routes are put together (a
//! name used twice, an `after` that leads nowhere or in a circle).
//!
//! Does not: prepare statements or resolve names. Whether a table exists is looked at by `serve` when it starts and by `check
//! --database`; if it is not there when an event is handled, that costs an attempt, not the event.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use oncehook::delivery::RouteName;
use oncehook::event::SourceName;
use oncehook::glob::Glob;
use oncehook::handler::http::LONGEST_TIMEOUT;
use oncehook::handler::{
    Dialect, Elsewhere, Expression, Fetch, FetchOptions, Guarded, Handler, HeaderTemplate, HttpHandler, HttpOptions,
    OnClientError, SqlHandler, Template,
};
use oncehook::journal::open;
use oncehook::machine::Machine;
use oncehook::ordering::{Memory, OnDead, Ordering, Parking};
use oncehook::retry::RetryPolicy;
use oncehook::route::{BreakerPolicy, Route, RouteError, Routes};
use oncehook_verify::Secret;
use toml::Spanned;

use super::file::{File, Placed, Table};
use super::near::{did_you_mean, is_near};
use super::reference::secret_from_reference;

/// Keys of a route that a coming version knows.
const LATER_KEYS: &[&str] = &["publish"];

/// A database of the user's that is not the journal's, and how its engine writes parameters.
type OtherDatabase = (Arc<dyn Guarded>, Dialect);

/// Headers of a request: a name and what it says.
type NamedHeaders<T> = Vec<(String, T)>;

/// What a route is read against.
pub(super) struct Ground<'g> {
    /// The sources that are declared.
    pub(super) sources: &'g [SourceName],
    /// Whether these are all; otherwise another one may be declared whose name could not be read.
    pub(super) sources_known: bool,
    /// How the journal's engine writes parameters; nothing if it is not known which engine that is.
    pub(super) dialect: Option<Dialect>,
    /// The URL of the journal's database, if it is on a server.
    pub(super) journal_url: Option<&'g str>,
    /// How long guards in other databases are kept.
    pub(super) keep: Duration,
    /// Other databases, by URL: routes share their connections.
    pub(super) databases: RefCell<HashMap<String, OtherDatabase>>,
    /// The machines that are declared.
    pub(super) machines: &'g [Arc<Machine>],
    /// Whether these are all of them.
    pub(super) machines_known: bool,
}

/// A route that was read, and where.
struct Placing {
    route: Route,
    name: Range<usize>,
    /// Where `after` stands; the whole table if it is not written.
    after: Range<usize>,
}

/// What the routes are called, those with problems too.
#[derive(Default)]
struct Declared {
    /// As it is written, whether it can be a name or not.
    names: Vec<String>,
    /// Whether one of them has no name that could be read.
    nameless: bool,
}

impl Declared {
    /// Whether a route of that name is there, or one with problems may be meant.
    fn may_have(&self, name: &str) -> bool {
        let meant = |written: &String| RouteName::new(written).is_err() && is_near(&written.to_lowercase(), name);
        self.nameless || self.names.iter().any(|written| written == name || meant(written))
    }
}

/// Reads all routes. `None` if one of them cannot be used; the problems are noted.
pub(super) fn read_routes(file: &File<'_>, tables: Vec<Table<'_, '_>>, ground: &Ground<'_>) -> Option<Routes> {
    let mut used: Vec<String> = Vec::new();
    let mut declared = Declared::default();
    let mut placings = Vec::new();
    let mut complete = true;
    for mut table in tables {
        let ordering = read_ordering(&mut table, ground);
        if let Some(machine) = &ordering.machine {
            // Two routes would move the same state, and each would find the other's event late.
            if used.contains(&machine.name) {
                table.problem(table.span(), format!("another route has the machine `{}` already", machine.name));
                complete = false;
            }
            used.push(machine.name.clone());
        }
        let placing = read_route(&mut table, ground, &mut declared, ordering);
        complete &= placing.is_some();
        placings.extend(placing);
        table.finish(LATER_KEYS);
    }
    put_together(file, placings, &declared).filter(|_| complete)
}

/// Puts routes together. What does not fit is noted and left out, until the rest fits.
fn put_together(file: &File<'_>, mut placings: Vec<Placing>, declared: &Declared) -> Option<Routes> {
    let mut complete = true;
    loop {
        let error = match Routes::new(placings.iter().map(|placing| placing.route.clone()).collect()) {
            Ok(routes) => return complete.then_some(routes),
            Err(error) => error,
        };
        complete = false;
        let (RouteError::Twice(name) | RouteError::AfterNothing(name, _) | RouteError::Circle(name)) = &error;
        // Of two routes with one name it is the second that is wrong.
        let at = placings.iter().rposition(|placing| placing.route.name == *name)?;
        let placing = placings.remove(at);
        match &error {
            RouteError::Twice(_) => file.problem(placing.name, error.to_string(), None),
            // It is there, but something is wrong with it, and has been said.
            RouteError::AfterNothing(_, before) if declared.may_have(before.as_str()) => {}
            RouteError::AfterNothing(_, before) => {
                let meant = did_you_mean(before.as_str(), declared.names.iter().map(String::as_str));
                file.problem(placing.after, error.to_string(), meant);
            }
            RouteError::Circle(_) => file.problem(placing.after, error.to_string(), None),
        }
    }
}

/// Every problem of a route is reported, so this goes on after the first.
fn read_route(
    table: &mut Table<'_, '_>,
    ground: &Ground<'_>,
    declared: &mut Declared,
    ordering: Ordering,
) -> Option<Placing> {
    let span = table.span();
    let before = declared.names.len();
    let name = table.take_parsed("name", |name| {
        declared.names.push(name.to_owned());
        RouteName::new(name).map_err(|error| error.to_string())
    });
    declared.nameless |= declared.names.len() == before;
    let source = table.take_string("source");
    let types = table.take_strings("types");
    let after = table.take_parsed("after", |name| RouteName::new(name).map_err(|error| error.to_string()));
    let source = match table.wrote("after") {
        true => {
            follow_up_has_none(table, "source", source.map(|source| source.span()));
            follow_up_has_none(table, "types", types.as_ref().map(Spanned::span));
            // Taken from the route before it; until then any will do.
            ground.sources.first().cloned().filter(|_| after.is_some())
        }
        false => read_source(table, source, ground),
    };
    let types = types.map(|types| read_types(table, &types)).unwrap_or_default();
    let retry = table.take_table("retry", "[route.retry]");
    let concurrency = table.take_number("concurrency", 1..=1_000).and_then(|number| usize::try_from(number).ok());
    let breaker = read_breaker(table.take_table("breaker", "[route.breaker]"));
    let written = table.take_table_if_written("fetch", "fetch");
    // What is written wrongly is meant nevertheless.
    let known = Known { result: !table.lacks("after"), state: !table.lacks("machine"), current: !table.lacks("fetch") };
    let fetch_is_right = written.is_some() || !table.wrote("fetch");
    let fetch = written.map(read_fetch);
    let handler = read_handler(table, known, ground);
    let usual = match &handler {
        Some(Handler::Http(_) | Handler::Elsewhere(_)) => RetryPolicy::patient(),
        _ => RetryPolicy::default(),
    };
    let retry = read_retry(retry, usual);
    if table.lacks("name") {
        table.problem(span.clone(), "a [[route]] needs a `name`");
    }

    let (name, after_span) = (name?, after.as_ref().map_or(span, Spanned::span));
    let mut route = Route::new(name.get_ref().clone(), source?, handler?);
    route.types = types;
    route.after = after.map(Spanned::into_inner);
    route.retry = retry;
    route.concurrency = concurrency.unwrap_or(route.concurrency);
    route.breaker = breaker;
    route.ordering = ordering;
    route.fetch = fetch.map_or(Some(None), |fetch| fetch.map(|fetch| Some(Arc::new(fetch))))?;
    fetch_is_right.then_some(Placing { route, name: name.span(), after: after_span })
}

fn follow_up_has_none(table: &Table<'_, '_>, key: &str, written: Option<Range<usize>>) {
    if let Some(span) = written {
        table.problem_with_help(
            span,
            format!("a route with `after` has no `{key}` of its own"),
            "it takes the events of the route that it comes after",
        );
    }
}

fn read_source(table: &Table<'_, '_>, source: Option<Placed<String>>, ground: &Ground<'_>) -> Option<SourceName> {
    let Some(source) = source else {
        if table.lacks("source") && table.lacks("after") {
            table.problem_with_help(
                table.span(),
                "a [[route]] needs a `source`",
                "the name of a [[source]], or `after` with the name of another route",
            );
        }
        return None;
    };
    let known = ground.sources.iter().find(|known| known.as_str() == source.get_ref());
    if known.is_none() && ground.sources_known {
        let names = || ground.sources.iter().map(SourceName::as_str);
        let declared = || format!("declared: {}", names().collect::<Vec<_>>().join(", "));
        let help = did_you_mean(source.get_ref(), names()).unwrap_or_else(declared);
        table.problem_with_help(source.span(), format!("there is no source `{}`", source.get_ref()), &help);
    }
    known.cloned()
}

/// A pattern that can never decide anything is a mistake about the others.
fn read_types(table: &Table<'_, '_>, types: &Placed<Vec<Placed<String>>>) -> Vec<Glob> {
    if types.get_ref().is_empty() {
        table.problem_with_help(
            types.span(),
            "`types` is empty, so it chooses nothing",
            "leave it out to take every event of the source",
        );
    }
    let mut globs: Vec<Glob> = Vec::new();
    for text in types.get_ref() {
        let glob = Glob::new(text.get_ref());
        if text.get_ref().is_empty() {
            table.problem(text.span(), "an empty pattern takes no event");
        } else if let Some(wider) = globs.iter().find(|wider| covers(wider, &glob)) {
            table.problem(
                text.span(),
                format!("`{}` is of no use: `{}` takes all of it", text.get_ref(), wider.as_str()),
            );
        } else if let Some(narrower) = globs.iter().find(|narrower| covers(&glob, narrower)) {
            table.problem(
                text.span(),
                format!("`{}` takes all of `{}`, which is of no use then", text.get_ref(), narrower.as_str()),
            );
        }
        globs.push(glob);
    }
    globs
}

/// Whether a pattern takes whatever another one takes. Says no where it is not sure: a `?` cannot stand for a `*`.
fn covers(wide: &Glob, narrow: &Glob) -> bool {
    wide.matches(narrow.as_str()) && !(wide.as_str().contains('?') && narrow.as_str().contains('*'))
}

fn read_ordering(table: &mut Table<'_, '_>, ground: &Ground<'_>) -> Ordering {
    let by_entity = table.take_parsed("order", |order| match order {
        "none" => Ok(false),
        "entity" => Ok(true),
        other => Err(format!("{other:?} is not an order; write \"none\" or \"entity\"")),
    });
    let by_entity = by_entity.is_some_and(Spanned::into_inner);
    let on_dead = table.take_parsed("on_dead", |word| match word {
        "block" => Ok(OnDead::Block),
        "continue" => Ok(OnDead::Continue),
        other => Err(format!("{other:?} is neither \"block\" nor \"continue\"")),
    });
    let pointless = |on_dead: &&Placed<OnDead>| !by_entity && *on_dead.get_ref() == OnDead::Continue;
    if let Some(on_dead) = on_dead.as_ref().filter(pointless) {
        table.problem_with_help(
            on_dead.span(),
            "`on_dead` says what a dead delivery means for those behind it, and here nobody is behind anybody",
            "write order = \"entity\", or leave it out",
        );
    }
    let machine = table.take_string("machine").and_then(|name| {
        let found = ground.machines.iter().find(|machine| machine.name == *name.get_ref());
        if found.is_none() && ground.machines_known {
            let names = || ground.machines.iter().map(|machine| machine.name.as_str());
            let declared = || match names().collect::<Vec<_>>().join(", ") {
                none if none.is_empty() => "none is declared".to_owned(),
                names => format!("declared: {names}"),
            };
            let help = did_you_mean(name.get_ref(), names()).unwrap_or_else(declared);
            let problem = format!("there is no [[machine]] named `{}`", name.get_ref());
            table.problem_with_help(name.span(), problem, &help);
        }
        found.cloned()
    });
    let usual = Parking::default();
    let longest = table.take_duration("park_for").map_or(usual.longest, Spanned::into_inner);
    Ordering {
        by_entity,
        on_dead: on_dead.map_or(OnDead::default(), Spanned::into_inner),
        newer_only: table.take_bool("newer_only").unwrap_or(false),
        machine,
        parking: Parking { longest, ..usual },
        memory: Memory::default(),
    }
}

/// What a binding of a route can name beside the event.
#[derive(Clone, Copy)]
struct Known {
    /// The result of a route before.
    result: bool,
    /// A state machine's state.
    state: bool,
    /// What is fetched.
    current: bool,
}

const NO_STATE: &str = "`$state` is the state of a machine, and this route has no `machine`";

const NO_CURRENT: &str = "`$current` is what `fetch` finds, and this route has no `fetch`";

/// What the provider is asked before the handler runs. `None` if it cannot be used.
fn read_fetch(mut table: Table<'_, '_>) -> Option<Fetch> {
    let url = table.take_string("url");
    let auth = table.take_parsed("auth", secret_from_reference);
    let timeout = table.take_duration("timeout");
    let allow_private = table.take_bool("allow_private").unwrap_or(false);
    let fetch = match url {
        None => {
            if table.lacks("url") {
                table.problem(table.span(), "`fetch` needs a `url`, with {entity} in it");
            }
            None
        }
        Some(url) if is_relative(&table, &url) => None,
        Some(url) => {
            let usual = FetchOptions::new(url.get_ref().as_str());
            let options = FetchOptions {
                auth: auth.map(Spanned::into_inner),
                timeout: timeout.map_or(usual.timeout, Spanned::into_inner),
                allow_private,
                ..usual
            };
            Fetch::new(&options).map_err(|error| table.problem(url.span(), error)).ok()
        }
    };
    table.finish(&[]);
    fetch
}

fn read_retry(mut table: Table<'_, '_>, usual: RetryPolicy) -> RetryPolicy {
    let max_attempts = table.take_number("max_attempts", 1..=100).and_then(|number| u32::try_from(number).ok());
    let before = table.problems();
    let base = table.take_duration("base");
    let cap = table.take_duration("cap");
    let readable = table.problems() == before;
    let span = base.as_ref().or(cap.as_ref()).map_or_else(|| table.span(), Spanned::span);
    let policy = RetryPolicy {
        max_attempts: max_attempts.unwrap_or(usual.max_attempts),
        base: base.map_or(usual.base, Spanned::into_inner),
        cap: cap.map_or(usual.cap, Spanned::into_inner),
    };
    if readable && policy.base > policy.cap {
        table.problem(
            span,
            format!("`base` ({:?}) is longer than `cap` ({:?}), which no wait exceeds", policy.base, policy.cap),
        );
    }
    table.finish(&[]);
    policy
}

fn read_breaker(mut table: Table<'_, '_>) -> BreakerPolicy {
    let usual = BreakerPolicy::default();
    let failures = table.take_number("failures", 1..=1_000_000).and_then(|number| u32::try_from(number).ok());
    let before = table.problems();
    let rest = table.take_duration("rest");
    let longest_rest = table.take_duration("longest_rest");
    let readable = table.problems() == before;
    let span = rest.as_ref().or(longest_rest.as_ref()).map_or_else(|| table.span(), Spanned::span);
    let policy = BreakerPolicy {
        failures: failures.unwrap_or(usual.failures),
        rest: rest.map_or(usual.rest, Spanned::into_inner),
        longest_rest: longest_rest.map_or(usual.longest_rest, Spanned::into_inner),
    };
    if readable && policy.rest > policy.longest_rest {
        table.problem(
            span,
            format!("`rest` ({:?}) is longer than `longest_rest` ({:?})", policy.rest, policy.longest_rest),
        );
    }
    table.finish(&[]);
    policy
}

/// Exactly one handler.
fn read_handler(table: &mut Table<'_, '_>, known: Known, ground: &Ground<'_>) -> Option<Handler> {
    let sql = table.take_table_if_written("sql", "[route.sql]");
    let http = table.take_table_if_written("http", "[route.http]");
    if let (Some(_), Some(http)) = (&sql, &http) {
        table.problem_with_help(
            http.span(),
            "a route has one handler, and this one has [route.sql] too",
            "make it a route of its own, with `after` if it must come second",
        );
    }
    let several = sql.is_some() && http.is_some();
    let sql = sql.map(|sql| read_sql(sql, known, ground));
    let http = http.map(|http| read_http(http, known));
    match (sql, http) {
        (None, None) => {
            if table.lacks("sql") && table.lacks("http") {
                table.problem(table.span(), "a [[route]] needs a handler: [route.sql] or [route.http]");
            }
            None
        }
        (sql, http) => sql.flatten().or(http.flatten()).filter(|_| !several),
    }
}

const NO_RESULT: &str = "`$result` is what the route before returned, and this route has no `after`";

fn read_sql(mut table: Table<'_, '_>, known: Known, ground: &Ground<'_>) -> Option<Handler> {
    let statement = table.take_one_or_many("statement");
    let requires = table.take_string("requires");
    let written = table.take_parsed("database", |url| read_database(url, ground));
    let database = written.as_ref().and_then(|database| database.get_ref().clone());
    // By whose rules the statement is read; nobody's, if the database or the journal could not be read.
    let dialect = match (&database, table.wrote("database")) {
        (Some((_, dialect)), _) => Some(*dialect),
        (None, true) if written.is_none() => None,
        (None, _) => ground.dialect,
    };
    let bind = read_bindings(&mut table, known);
    let handler = match (statement, bind, dialect) {
        (None, ..) => {
            if table.lacks("statement") {
                table.problem(table.span(), "[route.sql] needs a `statement`");
            }
            None
        }
        // A binding that could not be read would look like one that is missing.
        (Some(_), None, _) | (Some(_), _, None) => None,
        (Some(statement), Some(bind), Some(dialect)) => {
            match sql_handler(requires, statement.get_ref(), &bind, dialect)
                .and_then(|handler| allowed(handler, dialect))
            {
                Ok(statements) => Some(match database {
                    None => Handler::Sql(Arc::new(statements)),
                    Some((database, _)) => {
                        Handler::Elsewhere(Arc::new(Elsewhere { statements, database, keep: ground.keep }))
                    }
                }),
                Err(error) => {
                    table.problem(statement.span(), format!("`statement`: {error}"));
                    None
                }
            }
        }
    };
    table.finish(&[]);
    handler
}

fn sql_handler(
    requires: Option<Placed<String>>,
    statements: &[String],
    bind: &BTreeMap<String, Expression>,
    dialect: Dialect,
) -> Result<SqlHandler, String> {
    match requires {
        Some(requires) => SqlHandler::with_requirement(requires.get_ref(), statements, bind, dialect),
        None => SqlHandler::new(statements, bind, dialect),
    }
}

/// Another database for the effects of a route, and how it writes parameters. Nothing if it is the journal's own: there
/// effect and record commit together. The error does not repeat the URL, which may hold a password.
#[expect(clippy::type_complexity, reason = "it is taken apart at once")]
fn read_database(written: &str, ground: &Ground<'_>) -> Result<Option<(Arc<dyn Guarded>, Dialect)>, String> {
    let url = match written.starts_with("env:") || written.starts_with("file:") {
        true => secret_from_reference(written)?.reveal().to_owned(),
        false => written.to_owned(),
    };
    if ground.journal_url == Some(url.as_str()) {
        return Ok(None);
    }
    let mut databases = ground.databases.borrow_mut();
    if let Some((known, dialect)) = databases.get(&url) {
        return Ok(Some((Arc::clone(known), *dialect)));
    }
    let (database, dialect) = open::external(&url)?;
    databases.insert(url, (Arc::clone(&database), dialect));
    Ok(Some((database, dialect)))
}

/// What the engine would refuse at every attempt is said at once.
fn allowed(handler: SqlHandler, dialect: Dialect) -> Result<SqlHandler, String> {
    open::forbidden(&handler, dialect).map_or(Ok(handler), Err)
}

/// `None` if one of them cannot be read.
fn read_bindings(table: &mut Table<'_, '_>, known: Known) -> Option<BTreeMap<String, Expression>> {
    let mut bind = BTreeMap::new();
    let (pairs, mut complete) = table.take_map("bind");
    for (name, text) in pairs {
        match Expression::parse(text.get_ref()) {
            Ok(expression) => {
                if expression.needs_result() && !known.result {
                    table.problem(text.span(), NO_RESULT);
                }
                if expression.needs_state() && !known.state {
                    table.problem(text.span(), NO_STATE);
                }
                if expression.needs_current() && !known.current {
                    table.problem(text.span(), NO_CURRENT);
                }
                bind.insert(name.into_inner(), expression);
            }
            Err(error) => {
                table.problem(text.span(), error);
                complete = false;
            }
        }
    }
    complete.then_some(bind)
}

/// Whether a URL does not say where it leads. That is noted.
fn is_relative(table: &Table<'_, '_>, url: &Placed<String>) -> bool {
    let relative = !url.get_ref().contains("://");
    if relative {
        table.problem_with_help(
            url.span(),
            "`url` must say where it leads",
            &format!("write http:// or https:// and a host, such as http://{}", example(url.get_ref())),
        );
    }
    relative
}

/// What was probably meant: a path has lost its host, anything else only its scheme.
fn example(url: &str) -> String {
    let shown: String = url.chars().take(100).collect();
    if shown.starts_with('/') { format!("127.0.0.1:9000{shown}") } else { shown }
}

fn read_http(mut table: Table<'_, '_>, known: Known) -> Option<Handler> {
    let before = table.problems();
    let url = table.take_string("url");
    let secret = table.take_parsed("secret", secret_from_reference);
    let timeout = table.take_duration("timeout");
    let body = table.take_parsed("body", Template::parse);
    let (headers, header_templates) = read_headers(&mut table, known);
    let allow_private = table.take_bool("allow_private").unwrap_or(false);
    let on_4xx = table.take_parsed("on_4xx", |word| match word {
        "retry" => Ok(OnClientError::Retry),
        "dead" => Ok(OnClientError::GiveUp),
        "result" => Ok(OnClientError::Result),
        other => Err(format!("{other:?} is not \"retry\", \"dead\" or \"result\"")),
    });
    if let Some(body) = body.as_ref().filter(|body| body.get_ref().any(Expression::needs_result) && !known.result) {
        table.problem(body.span(), NO_RESULT);
    }
    if let Some(body) = body.as_ref().filter(|body| body.get_ref().any(Expression::needs_current) && !known.current) {
        table.problem(body.span(), NO_CURRENT);
    }
    if let Some(timeout) = timeout.as_ref().filter(|timeout| *timeout.get_ref() > LONGEST_TIMEOUT) {
        table.problem(timeout.span(), format!("`timeout` must not be longer than {} s", LONGEST_TIMEOUT.as_secs()));
    }
    let right = table.problems() == before;
    let handler = match url {
        None => {
            if table.lacks("url") {
                table.problem(table.span(), "[route.http] needs a `url`");
            }
            None
        }
        Some(url) if is_relative(&table, &url) => None,
        // What is wrong has been said; the handler would only say it again.
        Some(_) if !right => None,
        Some(url) => {
            let usual = HttpOptions::new(url.get_ref().as_str());
            let options = HttpOptions {
                secret: secret.as_ref().map(|secret| secret.get_ref().clone()),
                timeout: timeout.map_or(usual.timeout, Spanned::into_inner),
                body: body.map(Spanned::into_inner),
                headers,
                header_templates,
                allow_private,
                on_4xx: on_4xx.map_or(usual.on_4xx, Spanned::into_inner),
                ..usual
            };
            match HttpHandler::new(options) {
                Ok(handler) => Some(Handler::Http(Arc::new(handler))),
                Err(error) => {
                    table.problem(to_blame(&table, &url, secret.as_ref(), allow_private), error);
                    None
                }
            }
        }
    };
    table.finish(&[]);
    handler
}

/// What a handler refused: it says why, not where.
fn to_blame(
    table: &Table<'_, '_>,
    url: &Placed<String>,
    secret: Option<&Placed<Secret>>,
    allow_private: bool,
) -> Range<usize> {
    let bare = || HttpOptions { allow_private, ..HttpOptions::new(url.get_ref().as_str()) };
    if HttpHandler::new(bare()).is_err() {
        return url.span();
    }
    match secret {
        Some(secret) if HttpHandler::new(HttpOptions { secret: Some(secret.get_ref().clone()), ..bare() }).is_err() => {
            secret.span()
        }
        _ => table.span(),
    }
}

/// Headers whose values are secrets, and headers that are filled from events. A value may be a reference to a secret, so that
/// a token need not stand in the file; what it refers to is never filled.
fn read_headers(table: &mut Table<'_, '_>, known: Known) -> (NamedHeaders<String>, NamedHeaders<HeaderTemplate>) {
    let (mut secrets, mut templates) = (Vec::new(), Vec::new());
    let (pairs, _) = table.take_map("headers");
    for (name, value) in pairs {
        let text = value.get_ref();
        if text.starts_with("env:") || text.starts_with("file:") {
            match secret_from_reference(text) {
                Ok(secret) => secrets.push((name.into_inner(), secret.reveal().to_owned())),
                Err(message) => table.problem(value.span(), message),
            }
            continue;
        }
        match HeaderTemplate::parse(text) {
            Ok(template) => {
                let needs = |needs: fn(&Expression) -> bool| template.any(needs);
                if needs(Expression::needs_result) && !known.result {
                    table.problem(value.span(), NO_RESULT);
                }
                if needs(Expression::needs_current) && !known.current {
                    table.problem(value.span(), NO_CURRENT);
                }
                if needs(Expression::needs_state) && !known.state {
                    table.problem(value.span(), NO_STATE);
                }
                templates.push((name.into_inner(), template));
            }
            Err(error) => table.problem(value.span(), format!("the header `{}`: {error}", name.get_ref())),
        }
    }
    (secrets, templates)
}
