//! The one test binary of the gateway: the real program, started, asked, attacked and killed.

#[cfg(test)]
mod api;
#[cfg(test)]
mod cli;
#[cfg(test)]
mod config;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod disk;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod kit;
#[cfg(test)]
mod providers;
#[cfg(test)]
mod signature;
#[cfg(test)]
mod storm;
