//! The one test binary of the gateway: the real program, started, asked, attacked and killed.

#[cfg(test)]
mod crash;
#[cfg(test)]
mod disk;
#[cfg(test)]
mod storm;
