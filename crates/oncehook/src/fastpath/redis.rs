//! Redis (or Valkey) as the store of shared keys: one server, several of which one is the primary, or a cluster.
//!
//! Promises: connections are multiplexed, so that questions and writes of many requests share a few packets; every
//! connection has shown before its use that it leads to a primary; one that failed is not used again. Errors and shown
//! addresses hold no password.
//! Does not: retry, or wait. Deadlines and the breaker are `shared`'s.

use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, ErrorKind, IntoConnectionInfo, RedisError, ServerErrorKind,
    Value,
};
use tokio::task::JoinSet;

use super::shared::{Answer, Entry, Store, StoreError};

/// The longest that the client itself waits. The deadlines in `shared` are shorter.
const CLIENT_WAIT: Duration = Duration::from_secs(1);

/// Where Redis is. Checked, not connected.
#[derive(Clone)]
pub struct RedisAddress {
    hosts: Vec<ConnectionInfo>,
    shown: String,
    cluster: bool,
}

/// Without what is secret.
impl std::fmt::Debug for RedisAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("RedisAddress").field(&self.shown).finish()
    }
}

impl RedisAddress {
    /// Reads `redis://[user][:password@]host[:port][,host…][/number]`; `rediss://` with TLS; `redis+cluster://` and
    /// `rediss+cluster://` for a cluster. `valkey` may be written for `redis`. The error does not repeat the URL, which may hold a password.
    pub fn parse(url: &str) -> Result<Self, String> {
        let wanted = "write redis://HOST:PORT, rediss:// with TLS, or redis+cluster://HOST,HOST";
        let unknown = || format!("this is not an address of Redis; {wanted}");
        let (scheme, rest) = url.split_once("://").ok_or_else(unknown)?;
        let single = scheme.strip_suffix("+cluster");
        let (kind, cluster) = (single.unwrap_or(scheme), single.is_some());
        let kind = match kind {
            "redis" | "valkey" => "redis",
            "rediss" | "valkeys" => "rediss",
            _ => return Err(unknown()),
        };
        if rest.contains('#') {
            return Err("an address of Redis has no fragment: certificates are always checked".to_owned());
        }
        // A password may hold any character but these as they are.
        let (place, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, places) = place.rsplit_once('@').unwrap_or(("", place));
        let at = if login.is_empty() { String::new() } else { format!("{login}@") };
        let connection_info = |host: &str| {
            if host.is_empty() {
                return Err(format!("a host is missing; {wanted}"));
            }
            let url = format!("{kind}://{at}{host}/{path}");
            // The error's detail may quote the URL.
            url.into_connection_info()
                .map_err(|error| format!("this address of Redis cannot be used ({}); {wanted}", error.category()))
        };
        let hosts = places.split(',').map(connection_info).collect::<Result<_, _>>()?;
        if cluster && !path.is_empty() && path != "0" {
            return Err("a cluster has no numbered databases".to_owned());
        }
        let path = if path.is_empty() { String::new() } else { format!("/{path}") };
        Ok(Self { hosts, shown: format!("{scheme}://{places}{path}"), cluster })
    }

    /// For people: without what is secret.
    pub fn shown(&self) -> &str {
        &self.shown
    }
}

#[derive(Clone)]
enum Link {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Link {
    async fn ask(&mut self, command: &Cmd) -> Result<Value, StoreError> {
        let answer = match self {
            Self::One(link) => link.req_packed_command(command).await,
            Self::Cluster(link) => link.req_packed_command(command).await,
        };
        Ok(answer?.extract_error()?)
    }
}

/// See the module's text.
pub(super) struct RedisStore {
    address: RedisAddress,
    link: RwLock<Option<Link>>,
}

impl RedisStore {
    pub(super) fn new(address: RedisAddress) -> Self {
        Self { address, link: RwLock::new(None) }
    }

    fn link(&self) -> Result<Link, StoreError> {
        let link = self.link.read().unwrap_or_else(PoisonError::into_inner).clone();
        link.ok_or_else(|| StoreError::Away("not connected".to_owned()))
    }

    fn set_link(&self, link: Option<Link>) {
        *self.link.write().unwrap_or_else(PoisonError::into_inner) = link;
    }

    async fn connect(&self) -> Result<Link, StoreError> {
        if self.address.cluster {
            let cluster = ClusterClient::builder(self.address.hosts.clone())
                .connection_timeout(CLIENT_WAIT)
                .response_timeout(CLIENT_WAIT)
                .retries(1)
                .build()?;
            let mut link = Link::Cluster(cluster.get_async_connection().await?);
            // Any key will do: some node answers for it.
            link.ask(redis::cmd("GET").arg("oncehook")).await?;
            return Ok(link);
        }
        let mut last = StoreError::Away("no host is named".to_owned());
        for host in &self.address.hosts {
            match connect_primary(host).await {
                Ok(link) => return Ok(link),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

async fn connect_primary(host: &ConnectionInfo) -> Result<Link, StoreError> {
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(CLIENT_WAIT)).set_response_timeout(Some(CLIENT_WAIT));
    let client = Client::open(host.clone())?;
    let mut link = Link::One(client.get_multiplexed_async_connection_with_config(&config).await?);
    match link.ask(&redis::cmd("ROLE")).await {
        Ok(Value::Array(role)) => match role.first() {
            Some(Value::BulkString(name)) if name == b"master" => Ok(link),
            _ => Err(StoreError::Away("the server is a replica, not a primary".to_owned())),
        },
        Ok(_) => Err(StoreError::Away("the server does not tell its role".to_owned())),
        // A user without the right to ask may still have the right to read and write.
        Err(StoreError::Refused(_)) => link.ask(redis::cmd("GET").arg("oncehook")).await.map(|_| link),
        Err(error) => Err(error),
    }
}

impl Store for RedisStore {
    fn probe(&self) -> Answer<'_, ()> {
        Box::pin(async move {
            self.set_link(None);
            self.set_link(Some(self.connect().await?));
            Ok(())
        })
    }

    fn get(&self, key: Vec<u8>) -> Answer<'_, Option<Vec<u8>>> {
        Box::pin(async move {
            match self.link()?.ask(redis::cmd("GET").arg(key)).await? {
                Value::BulkString(value) => Ok(Some(value)),
                // Nothing, or a stranger's value under our key.
                _ => Ok(None),
            }
        })
    }

    fn put(&self, entries: Vec<Entry>) -> Answer<'_, usize> {
        Box::pin(async move {
            let link = self.link()?;
            let answers = if let Link::One(mut link) = link {
                let mut pipeline = redis::Pipeline::with_capacity(entries.len());
                for entry in &entries {
                    pipeline.add_command(set(entry));
                }
                let answers = link.req_packed_commands(&pipeline, 0, entries.len()).await?;
                answers.into_iter().map(|answer| Ok(answer.extract_error()?)).collect()
            } else {
                // Each is a command of its own, so that the cluster's client can send it to its slot.
                let write = |entry| {
                    let mut link = link.clone();
                    async move { link.ask(&set(&entry)).await }
                };
                let mut writes: JoinSet<_> = entries.into_iter().map(write).collect();
                let mut answers = Vec::new();
                while let Some(answer) = writes.join_next().await {
                    answers.push(answer.unwrap_or_else(|_| Err(StoreError::Away("a write broke off".to_owned()))));
                }
                answers
            };
            let written = |answer: Result<Value, StoreError>| Ok(usize::from(answer? != Value::Nil));
            answers.into_iter().map(written).sum()
        })
    }
}

/// Never replaces: the first fact about a key is the one that stays true.
fn set(entry: &Entry) -> Cmd {
    let mut set = redis::cmd("SET");
    let millis = u64::try_from(entry.life.as_millis()).unwrap_or(u64::MAX).max(1);
    set.arg(&entry.key).arg(&entry.value).arg("NX").arg("PX").arg(millis);
    set
}

/// Whether the connection is worth keeping. All knowledge about the server's errors is here.
impl From<RedisError> for StoreError {
    fn from(error: RedisError) -> Self {
        // The detail of an error may quote what was asked for.
        let reason = error.code().map_or_else(|| error.category().to_owned(), str::to_owned);
        let refused = match error.kind() {
            // A failed-over server, one that loads its file, a cluster in trouble: find the right one anew.
            ErrorKind::Server(
                ServerErrorKind::ReadOnly
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::Moved
                | ServerErrorKind::Ask
                | ServerErrorKind::TryAgain
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown,
            ) => false,
            ErrorKind::Server(_) | ErrorKind::UnexpectedReturnType => true,
            // OOM and MISCONF: it is full, or cannot save. What is there can be read.
            ErrorKind::Extension => !matches!(error.code(), Some("NOAUTH" | "NOREPLICAS")),
            _ => false,
        };
        if refused { StoreError::Refused(reason) } else { StoreError::Away(reason) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r16_addresses_are_read_and_shown_without_their_password() {
        for (url, hosts, cluster, shown) in [
            ("redis://127.0.0.1", 1, false, "redis://127.0.0.1"),
            ("redis://127.0.0.1:6380/2", 1, false, "redis://127.0.0.1:6380/2"),
            ("redis://user:p%40ss@a:1,b:2,c", 3, false, "redis://a:1,b:2,c"),
            ("rediss://:p@cache.example:6380", 1, false, "rediss://cache.example:6380"),
            ("valkey://a", 1, false, "valkey://a"),
            ("redis+cluster://:p@a:1,b:2", 2, true, "redis+cluster://a:1,b:2"),
            ("rediss+cluster://a", 1, true, "rediss+cluster://a"),
            ("redis://[::1]:6379", 1, false, "redis://[::1]:6379"),
        ] {
            let address = RedisAddress::parse(url).unwrap_or_else(|error| panic!("{url}: {error}"));
            assert_eq!((address.hosts.len(), address.cluster, address.shown()), (hosts, cluster, shown), "{url}");
            assert!(!format!("{address:?}").contains("p@"), "{address:?}");
        }
        for url in [
            "",
            "redis",
            "http://a",
            "redis://",
            "redis://a,",
            "redis://a/x",
            "redis://secret@a:notaport",
            "rediss://a/#insecure",
            "redis+cluster://a/3",
            "redis+unix:///tmp/x",
        ] {
            let error = RedisAddress::parse(url).expect_err(url);
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
