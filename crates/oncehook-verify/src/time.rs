//! A moment in time, as the whole workspace stores it.
//!
//! Times are microseconds since the Unix epoch in one `i64`. This module converts and prints them; it
//! never asks what time it is.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Microseconds since the Unix epoch (1970-01-01T00:00:00Z); negative before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMicros(pub i64);

impl UnixMicros {
    /// A time given in whole seconds. Values beyond the range stop at its end.
    #[must_use]
    pub const fn from_secs(secs: i64) -> Self {
        Self(secs.saturating_mul(1_000_000))
    }

    /// A time given in whole milliseconds. Values beyond the range stop at its end.
    #[must_use]
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis.saturating_mul(1_000))
    }

    /// Whole seconds, rounded towards the past.
    #[must_use]
    pub const fn as_secs(self) -> i64 {
        self.0.div_euclid(1_000_000)
    }

    /// UTC with six digits of fraction: `2026-11-15T02:20:17.123456Z`.
    ///
    /// Times outside the years -9999 to 9999 print as the nearest one inside.
    #[must_use]
    pub fn to_rfc3339(self) -> String {
        let end = if self.0 < 0 { Timestamp::MIN } else { Timestamp::MAX };
        let timestamp = Timestamp::from_microsecond(self.0).unwrap_or(end);
        format!("{timestamp:.6}")
    }

    /// Reads an RFC 3339 time with any offset. Fractions finer than a microsecond are cut off towards the
    /// past, so the same text always gives the same number.
    #[must_use]
    pub fn parse_rfc3339(text: &str) -> Option<Self> {
        let timestamp: Timestamp = text.parse().ok()?;
        let micros = timestamp.as_nanosecond().div_euclid(1_000);
        i64::try_from(micros).ok().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_and_reads_the_same_moment() {
        let time = UnixMicros(1_794_709_217_123_456);
        assert_eq!(time.to_rfc3339(), "2026-11-15T02:20:17.123456Z");
        assert_eq!(UnixMicros::parse_rfc3339(&time.to_rfc3339()), Some(time));
        assert_eq!(UnixMicros::parse_rfc3339("2026-11-15T03:20:17.123456+01:00"), Some(time));
    }

    #[test]
    fn whole_seconds_keep_six_digits() {
        assert_eq!(UnixMicros(0).to_rfc3339(), "1970-01-01T00:00:00.000000Z");
    }

    #[test]
    fn seconds_round_towards_the_past() {
        assert_eq!(UnixMicros(-1).as_secs(), -1);
        assert_eq!(UnixMicros(1_999_999).as_secs(), 1);
    }

    #[test]
    fn extremes_do_not_overflow() {
        assert_eq!(UnixMicros::from_secs(i64::MAX).0, i64::MAX);
        assert_eq!(UnixMicros::from_millis(i64::MIN).0, i64::MIN);
        assert!(UnixMicros(i64::MAX).to_rfc3339().starts_with("9999-"));
        assert_eq!(UnixMicros::parse_rfc3339("yesterday"), None);
        assert_eq!(UnixMicros::parse_rfc3339("2026-11-15T03:20:17"), None, "no offset, no moment");
    }
}
