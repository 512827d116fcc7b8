//! The one test binary of the library.

#[cfg(test)]
mod http;
mod memory;
#[cfg(test)]
mod outbound;
mod sqlite;
#[cfg(test)]
mod tls;
