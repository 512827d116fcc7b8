//! The one test binary of the library.

#[cfg(test)]
mod effects;
#[cfg(test)]
mod elsewhere;
#[cfg(test)]
mod fetch;
#[cfg(test)]
mod http;
#[cfg(test)]
mod intake;
#[cfg(test)]
mod ledger;
#[cfg(test)]
mod lists;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod mysql;
#[cfg(test)]
mod mysql_effects;
#[cfg(test)]
mod mysql_tls;
#[cfg(test)]
mod ordering;
#[cfg(test)]
mod outbound;
#[cfg(test)]
mod postgres;
#[cfg(test)]
mod postgres_days;
#[cfg(test)]
mod postgres_effects;
#[cfg(test)]
mod postgres_front;
#[cfg(test)]
mod postgres_wrapped;
#[cfg(test)]
mod server_search;
#[cfg(test)]
mod sql_routes;
#[cfg(test)]
mod sqlite;
#[cfg(test)]
mod sqlite_stuck;
#[cfg(test)]
mod statements;
#[cfg(test)]
mod tls;
