//! Durations as people write them: a whole number and one unit, such as `5s`, `30d`.

/// Seconds of `90s`, `15m`, `12h`, `35d` or `2w`.
pub(super) fn parse_seconds(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let scale = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        "w" => 604_800,
        _ => return Err(wanted(text)),
    };
    let number: u64 = number.parse().map_err(|_| wanted(text))?;
    // A century is enough for anything, and keeps arithmetic on microseconds far from its limits.
    number.checked_mul(scale).filter(|seconds| *seconds <= 100 * 366 * 86_400).ok_or_else(|| wanted(text))
}

fn wanted(text: &str) -> String {
    format!(
        "{text:?} is not a duration; write a whole number and s, m, h, d or w, such as \"90s\" or \"35d\""
    )
}

#[cfg(test)]
mod tests {
    use super::parse_seconds;

    #[test]
    fn durations() {
        for (text, seconds) in
            [("0s", 0), ("90s", 90), ("15m", 900), ("12h", 43_200), ("35d", 3_024_000), ("2w", 1_209_600)]
        {
            assert_eq!(parse_seconds(text), Ok(seconds));
        }
        for bad in ["", "5", "s", "-5s", "5 s", "5S", "1h30m", "1e3s", "99999999999999999999s", "9999999999d"]
        {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
    }
}
