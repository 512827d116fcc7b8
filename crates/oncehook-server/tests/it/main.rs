//! The one test binary of the gateway: the real program, started, asked, attacked and killed.

#[cfg(test)]
mod api;
#[cfg(test)]
mod blind;
#[cfg(test)]
mod cli;
#[cfg(test)]
mod config;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod crash_points;
#[cfg(test)]
mod destinations;
#[cfg(test)]
mod disk;
#[cfg(test)]
mod dry_run;
#[cfg(test)]
mod effects;
#[cfg(test)]
mod elsewhere;
#[cfg(test)]
mod examples;
#[cfg(test)]
mod file_modes;
#[cfg(test)]
mod forwarding;
#[cfg(test)]
mod hanging_up;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod kit;
#[cfg(test)]
mod large;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod lost_log;
#[cfg(test)]
mod many;
#[cfg(test)]
mod mysql;
#[cfg(test)]
mod operate;
#[cfg(test)]
mod ordering;
#[cfg(test)]
mod output;
#[cfg(test)]
mod postgres;
#[cfg(test)]
mod postgres_days;
#[cfg(test)]
mod postgres_failover;
#[cfg(test)]
mod postgres_faults;
#[cfg(test)]
mod postgres_ground;
#[cfg(test)]
mod prove;
#[cfg(test)]
mod providers;
#[cfg(test)]
mod redis;
#[cfg(test)]
mod signature;
#[cfg(test)]
mod spool;
#[cfg(test)]
mod storm;
#[cfg(test)]
mod storm_command;
#[cfg(test)]
mod tail;
#[cfg(test)]
mod waiting;
#[cfg(test)]
mod watch;
