//! How far a proof is: a bar on a terminal, and elsewhere a line for every scenario that begins.
//!
//! Promises: lines that are printed through it are never mixed with the bar. Does not: know how long things take; it expects of each
//! scenario what one took on two quiet cores, and stops short of its end when that was too little.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// The bar.
pub struct Progress {
    bar: ProgressBar,
    begun: Instant,
    number: usize,
    count: usize,
}

impl Progress {
    /// For so many scenarios that are expected to take so many seconds together.
    #[must_use]
    pub fn new(count: usize, seconds: u64) -> Self {
        let bar = ProgressBar::new(seconds.max(1));
        let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {percent:>3} % {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar, begun: Instant::now(), number: 0, count }
    }

    /// A scenario begins.
    pub fn begin(&mut self, name: &str) {
        self.number += 1;
        let message = format!("{} of {}: {name}", self.number, self.count);
        if self.bar.is_hidden() {
            let minutes = self.begun.elapsed().as_secs_f64() / 60.0;
            eprintln!("{minutes:5.1} min, {message}");
        }
        self.bar.set_message(message);
    }

    /// It is done, and was expected to take so many seconds.
    pub fn end(&self, seconds: u64) {
        self.bar.inc(seconds);
    }

    /// Prints a line on stdout.
    pub fn say(&self, line: &str) {
        self.bar.suspend(|| println!("{line}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
