//! Durations as people write them: a whole number and one unit, such as `5s`, `30d`, or `200ms` where that makes sense.

use std::time::Duration;

/// A century is enough for anything, and keeps arithmetic on microseconds far from its limits.
const LONGEST_MILLIS: u64 = 100 * 366 * 86_400_000;

/// Seconds of `90s`, `15m`, `12h`, `35d` or `2w`.
pub(super) fn parse_seconds(text: &str) -> Result<u64, String> {
    match unit(text) {
        "ms" => Err(wanted(text, "s, m, h, d or w", "\"90s\" or \"35d\"")),
        _ => parse(text)
            .map(|duration| duration.as_secs())
            .ok_or_else(|| wanted(text, "s, m, h, d or w", "\"90s\" or \"35d\"")),
    }
}

/// The same, and `200ms`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    parse(text).ok_or_else(|| wanted(text, "ms, s, m, h, d or w", "\"200ms\" or \"90s\""))
}

fn parse(text: &str) -> Option<Duration> {
    let unit = unit(text);
    let scale: u64 = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        "w" => 604_800_000,
        _ => return None,
    };
    let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
    number.checked_mul(scale).filter(|millis| *millis <= LONGEST_MILLIS).map(Duration::from_millis)
}

/// What follows the digits.
fn unit(text: &str) -> &str {
    text.trim_start_matches(|c: char| c.is_ascii_digit())
}

fn wanted(text: &str, units: &str, examples: &str) -> String {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        let shown: String = text.chars().take(20).collect();
        return format!("{text:?} has no unit; write \"{shown}s\" for seconds or \"{shown}m\" for minutes ({units})");
    }
    format!("{text:?} is not a duration; write a whole number and {units}, such as {examples}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{parse_duration, parse_seconds};

    #[test]
    fn durations() {
        for (text, seconds) in
            [("0s", 0), ("90s", 90), ("15m", 900), ("12h", 43_200), ("35d", 3_024_000), ("2w", 1_209_600)]
        {
            assert_eq!(parse_seconds(text), Ok(seconds));
            assert_eq!(parse_duration(text), Ok(Duration::from_secs(seconds)));
        }
        for bad in ["", "5", "s", "ms", "-5s", "5 s", "5S", "1h30m", "1e3s", "99999999999999999999s", "9999999999d"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn milliseconds_only_where_they_make_sense() {
        assert_eq!(parse_duration("200ms"), Ok(Duration::from_millis(200)));
        assert!(parse_seconds("200ms").is_err());
        // The hint names what would be taken.
        assert!(parse_seconds("200ms").is_err_and(|text| !text.contains("ms, s")));
        assert!(parse_duration("2y").is_err_and(|text| text.contains("ms, s")));
    }
}
