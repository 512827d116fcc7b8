//! Retry schedules of providers, made short.
//!
//! Where a provider publishes its schedule, that is used. Elsewhere the attempts are spread over its horizon (how long a copy
//! may still come) with growing distances, which is how all of them do it.

use std::time::Duration;

use oncehook_verify::Preset;

/// Attempts where nothing better is known.
const ATTEMPTS: u32 = 8;

/// When the attempts of a schedule are due, from the first on, if the whole takes `within`.
pub(super) fn schedule(preset: &Preset, within: Duration) -> Vec<Duration> {
    let real = real(preset);
    let whole = real.last().copied().unwrap_or(0).max(1) as f64;
    real.iter().map(|second| within.mul_f64(*second as f64 / whole)).collect()
}

/// Seconds after the first attempt.
fn real(preset: &Preset) -> Vec<u64> {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 3_600;
    let gaps: &[u64] = match preset.name.as_str() {
        // The example of the specification: 75 h 35 min in all.
        "standard-webhooks" => {
            &[5, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, 24 * HOUR]
        }
        "svix" => &[5, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR, 10 * HOUR],
        "slack" => &[1, MINUTE, 5 * MINUTE],
        // It never retries by itself; somebody presses the button within three days.
        "github" => return vec![0, preset.retry_horizon_secs],
        _ => return growing(preset.retry_horizon_secs),
    };
    let mut at = 0;
    let mut offsets = vec![0];
    for gap in gaps {
        at += gap;
        offsets.push(at);
    }
    offsets
}

/// Each distance twice the one before, up to the horizon.
fn growing(horizon: u64) -> Vec<u64> {
    let whole = (1_u64 << (ATTEMPTS - 1)) - 1;
    (0..ATTEMPTS).map(|attempt| horizon * ((1 << attempt) - 1) / whole).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_begin_at_once_grow_and_fit_the_time() {
        for preset in Preset::all() {
            let within = Duration::from_secs(10);
            let times = schedule(preset, within);
            assert!(times.len() >= 2, "{}", preset.name);
            assert_eq!(times.first(), Some(&Duration::ZERO), "{}", preset.name);
            assert!(times.is_sorted(), "{}: {times:?}", preset.name);
            assert!(times.last().unwrap().abs_diff(within) < Duration::from_millis(1), "{}", preset.name);
        }
    }

    #[test]
    fn the_example_of_the_standard_takes_75_hours_and_35_minutes() {
        let preset = Preset::named("standard-webhooks").unwrap();
        assert_eq!(real(preset).last(), Some(&(75 * 3_600 + 35 * 60 + 5)));
        assert_eq!(growing(127), [0, 1, 3, 7, 15, 31, 63, 127]);
    }
}
