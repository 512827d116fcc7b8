//! Named places at which a test can end the process, as kill -9 would.
//!
//! Only in builds with the feature `crash-points`, which tests switch on and releases do not: elsewhere [`point`] is
//! nothing at all.

/// Ends the process here, if the test that started it asked for this place.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn point(_name: &str) {}

#[cfg(feature = "crash-points")]
pub use armed::{arm, point};

#[cfg(feature = "crash-points")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicI64, Ordering};

    static PLAN: OnceLock<(String, AtomicI64)> = OnceLock::new();

    /// Asks for the end at the `count`th passing of a place: `name` or `name:count`.
    pub fn arm(plan: &str) {
        let (name, count) = plan.split_once(':').unwrap_or((plan, "1"));
        // A plan that was made before stays.
        let _ = PLAN.set((name.to_owned(), AtomicI64::new(count.parse().unwrap_or(1))));
    }

    /// Ends the process here, if the test that started it asked for this place.
    pub fn point(name: &str) {
        if let Some((wanted, left)) = PLAN.get()
            && wanted == name
            && left.fetch_sub(1, Ordering::SeqCst) == 1
        {
            // SIGKILL: no destructor, no flush, no goodbye.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            loop {
                std::thread::park();
            }
        }
    }
}
