//! The one integration binary of the crate: everything here goes through the public API.

#[cfg(test)]
mod batches;
#[cfg(test)]
mod explanations;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod handshakes;
#[cfg(test)]
mod keys;
#[cfg(test)]
mod kit;
#[cfg(test)]
mod mutations;
#[cfg(test)]
mod oracles;
#[cfg(test)]
mod presets;
#[cfg(test)]
mod props;
#[cfg(test)]
mod traps;
#[cfg(test)]
mod vectors;
