//! A shop behind the real gateway: a payment makes an order, an order makes a shipment and a mail.
//!
//! Its tables have no unique keys on purpose. Whatever happens twice stands there twice.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use serde_json::Value;
use tempfile::TempDir;

use crate::gateway::{CONFIG, Gateway, prepare};
use crate::inbox::Inbox;

const TABLES: &str = "
    CREATE TABLE orders (id INTEGER PRIMARY KEY, key TEXT NOT NULL, payment TEXT NOT NULL);
    CREATE TABLE shipments (order_id INTEGER NOT NULL, key TEXT NOT NULL);
    CREATE INDEX orders_by_key ON orders (key);
    CREATE INDEX shipments_by_key ON shipments (key);";

/// The route from payments to `orders`.
pub const ORDERS: &str = r#"
[[route]]
name = "orders"
source = "stripe"
types = ["payment_intent.*"]
retry = { max_attempts = 3, base = "20ms", cap = "100ms" }
[route.sql]
statement = "INSERT INTO orders (key, payment) VALUES (:key, :payment) RETURNING id"
bind = { key = "$key", payment = "/data/object/id" }
"#;

/// The follow-up in the same database.
pub const SHIPMENTS: &str = r#"
[[route]]
name = "shipments"
after = "orders"
retry = { max_attempts = 3, base = "20ms", cap = "100ms" }
[route.sql]
statement = "INSERT INTO shipments (order_id, key) VALUES (:order, :key)"
bind = { key = "$key", order = "$result/id" }
"#;

/// The follow-up that leaves the process.
#[must_use]
pub fn mails(inbox: &Inbox) -> String {
    let policy = r#"retry = { max_attempts = 100, base = "20ms", cap = "100ms" }"#;
    http("mails", &format!("after = \"orders\"\n{policy}"), &inbox.url("/mails"))
}

/// A route to a URL. `keys` is what stands before its handler, such as its source or its policies.
#[must_use]
pub fn http(name: &str, keys: &str, url: &str) -> String {
    format!("\n[[route]]\nname = \"{name}\"\n{keys}\n[route.http]\nurl = \"{url}\"\n")
}

/// The directory of a shop. It goes when it is dropped.
pub struct Shop {
    /// Where configuration and journal are.
    pub directory: TempDir,
    binary: PathBuf,
}

impl Shop {
    /// A shop with these routes, in a directory below `place`.
    #[must_use]
    pub fn new(binary: &str, place: &str, routes: &[&str]) -> Self {
        let directory = tempfile::tempdir_in(place).unwrap();
        let shop = Self { directory, binary: PathBuf::from(binary) };
        shop.configure(CONFIG, routes);
        shop.database().execute_batch(TABLES).unwrap();
        shop
    }

    /// Writes another configuration, for the next start.
    pub fn configure(&self, base: &str, routes: &[&str]) {
        prepare(self.path(), &format!("{base}{}", routes.concat()));
    }

    /// Where configuration and journal are.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The journal's file, which is the shop's too.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.path().join("journal.db")
    }

    /// Opens the shop.
    #[must_use]
    pub fn start(&self) -> Gateway {
        Gateway::start(&self.binary, self.path())
    }

    /// Opens the shop with further arguments of `serve`.
    #[must_use]
    pub fn start_with(&self, arguments: &[&str]) -> Gateway {
        let mut command = Command::new(&self.binary);
        command.arg("serve").args(arguments);
        Gateway::start_command(command, self.path())
    }

    /// Opens the shop, which ends when a place of the program has been passed so many times.
    #[must_use]
    pub fn start_armed(&self, point: &str, passing: u64) -> Gateway {
        let mut command = Command::new(&self.binary);
        command.arg("serve").env("ONCEHOOK_CRASH_POINT", format!("{point}:{passing}"));
        let gateway = Gateway::start_command(command, self.path());
        assert!(gateway.log().contains(&format!("crash     at {point}:{passing}")), "{}", gateway.log());
        gateway
    }

    /// Writes a configuration for commands that talk to a running gateway: its ports are known now. Returns its name.
    pub fn client(&self, gateway: &Gateway) -> &'static str {
        let mut config = CONFIG.to_owned();
        for (key, address) in [("ingress", gateway.ingress), ("admin", gateway.admin)] {
            let free = format!("{key} = \"127.0.0.1:0\"");
            assert!(config.contains(&free));
            config = config.replace(&free, &format!("{key} = \"{address}\""));
        }
        std::fs::write(self.path().join("client.toml"), config).unwrap();
        "client.toml"
    }

    /// A connection to the shop's own tables.
    #[must_use]
    pub fn database(&self) -> Connection {
        let connection = Connection::open(self.file()).unwrap();
        connection.busy_timeout(Duration::from_secs(10)).unwrap();
        connection
    }

    /// The number that a query gives.
    #[must_use]
    pub fn count(&self, sql: &str) -> i64 {
        self.database().query_row(sql, [], |row| row.get(0)).unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// The keys of all stored events.
    #[must_use]
    pub fn events(&self) -> Vec<String> {
        let database = self.database();
        let mut statement = database.prepare("SELECT CAST(key AS TEXT) FROM oncehook_events").unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
    }

    /// Every stored event except these has one order and that order one shipment; nothing happened twice, and nothing
    /// for an event that is not there. Returns how many orders there are.
    pub fn check_once(&self, except: &[&str]) -> usize {
        let database = self.database();
        let mut orders: BTreeMap<String, Vec<(i64, String)>> = BTreeMap::new();
        let mut statement = database.prepare("SELECT key, id, payment FROM orders").unwrap();
        let mut rows = statement.query([]).unwrap();
        while let Some(row) = rows.next().unwrap() {
            let order = (row.get(1).unwrap(), row.get(2).unwrap());
            orders.entry(row.get(0).unwrap()).or_default().push(order);
        }
        let mut shipments: BTreeMap<String, Vec<i64>> = BTreeMap::new();
        let mut statement = database.prepare("SELECT key, order_id FROM shipments").unwrap();
        let mut rows = statement.query([]).unwrap();
        while let Some(row) = rows.next().unwrap() {
            shipments.entry(row.get(0).unwrap()).or_default().push(row.get(1).unwrap());
        }
        let mut checked = 0;
        for key in self.events() {
            let (orders, shipments) = (orders.remove(&key), shipments.remove(&key));
            if except.contains(&key.as_str()) {
                assert_eq!((orders, shipments), (None, None), "{key} had an effect");
                continue;
            }
            let orders = orders.unwrap_or_default();
            let [(id, payment)] = orders.as_slice() else { panic!("orders of {key}: {orders:?}") };
            assert_eq!(*payment, format!("pi_{key}"));
            assert_eq!(shipments.unwrap_or_default(), [*id], "shipments of {key}");
            checked += 1;
        }
        assert!(orders.is_empty(), "orders without an event: {orders:?}");
        assert!(shipments.is_empty(), "shipments without an event: {shipments:?}");
        checked
    }
}

/// One route of `GET /api/routes`.
pub async fn route(gateway: &Gateway, name: &str) -> Value {
    let routes = gateway.json("/api/routes").await;
    let found = routes["routes"].as_array().unwrap().iter().find(|route| route["name"] == name);
    found.unwrap_or_else(|| panic!("there is no route {name}: {routes}")).clone()
}

/// How many deliveries of a route wait or run.
pub async fn pending(gateway: &Gateway, name: &str) -> u64 {
    let backlog = &route(gateway, name).await["backlog"];
    backlog["waiting"].as_u64().unwrap() + backlog["running"].as_u64().unwrap()
}

/// Waits until no delivery of any route waits or runs. Returns how many are dead.
pub async fn drained(gateway: &Gateway) -> u64 {
    drained_within(gateway, Duration::from_secs(60)).await
}

/// The same with more or less patience.
pub async fn drained_within(gateway: &Gateway, patience: Duration) -> u64 {
    let deadline = Instant::now() + patience;
    loop {
        let routes = gateway.json("/api/routes").await;
        let routes = routes["routes"].as_array().unwrap();
        let sum = |field: &str| -> u64 { routes.iter().map(|route| route["backlog"][field].as_u64().unwrap()).sum() };
        if sum("waiting") + sum("running") == 0 {
            return sum("dead");
        }
        assert!(Instant::now() < deadline, "not drained: {routes:?}\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What happened to one delivery of an event: its JSON with all attempts.
pub async fn delivery(gateway: &Gateway, event: &str, route: &str) -> Value {
    let story = gateway.json(&format!("/api/events/{event}")).await;
    let found = story["deliveries"].as_array().unwrap().iter().find(|delivery| delivery["route"] == route);
    found.unwrap_or_else(|| panic!("{event} has no delivery for {route}: {story}")).clone()
}

/// How the attempts of a delivery ended, the first one first.
#[must_use]
pub fn outcomes(delivery: &Value) -> Vec<&str> {
    let attempts = delivery["attempts"].as_array().unwrap();
    attempts.iter().map(|attempt| attempt["outcome"].as_str().unwrap_or("none")).collect()
}
