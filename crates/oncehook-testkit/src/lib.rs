//! Suites, fault tools and load for oncehook. Nothing here is part of a production build.
//!
//! - [`ceiling`]: the gateway without storage, for benchmarks.
//! - [`chaos_proxy`]: a TCP proxy that cuts, stalls, delays and refuses when it is told to.
//! - [`deliveries`]: what every journal promises workers and operators, with random histories of its own.
//! - [`journal`]: the behaviour of every journal, one call per backend.
//! - [`model`]: random histories against the reference journal, with a printed seed.
//! - [`floods`]: strangers who hold connections and memory while a genuine client sends.
//! - [`gateway`]: the real binary on free ports, to start, kill and ask.
//! - [`days`]: days of a journal on PostgreSQL, planted with SQL.
//! - [`leash`]: processes that must not outlive this one.
//! - [`nodes`]: many nodes on one server database, killed at random; the same for every engine.
//! - [`outage`]: a database that goes away under load, before a gateway with a spool.
//! - [`postgres`]: a real PostgreSQL server, one database per test.
//! - [`mysql`]: a real MariaDB server, one database per test.
//! - [`inbox`]: a destination that applies each idempotency key once.
//! - [`promises`]: every 2xx that a sender got, to be checked against what is stored.
//! - [`prove`]: everything at once, for as long as one likes, with mistakes planted that must be found.
//! - [`receiver`]: a destination that a test controls, well-behaved or not.
//! - [`redis`]: a real Redis, to stop, freeze and empty.
//! - [`sender`]: signed requests and a small HTTP client that can misbehave.
//! - [`shop`]: the gateway with a user's tables behind it, and the question whether each effect happened once.
//! - [`size`]: how big a test is.
//! - [`workload`]: load with latency figures, shared by tests and benchmarks.

pub mod ceiling;
pub mod chaos_proxy;
pub mod compare;
pub mod days;
pub mod deliveries;
pub mod floods;
pub mod gateway;
pub mod inbox;
pub mod journal;
pub mod leash;
pub mod model;
pub mod mysql;
pub mod nodes;
pub mod outage;
pub mod postgres;
pub mod promises;
pub mod prove;
pub mod random;
pub mod receiver;
pub mod redis;
pub mod sender;
pub mod shop;
pub mod size;
pub mod workload;
