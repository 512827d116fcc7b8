//! May anything be forgotten now? Decided here for every journal, and for the guards in other databases.
//!
//! A clock says what is old, and a clock can be wrong: one start of a machine whose clock is 40 days ahead would erase
//! every event and every key, and each event that is sent again would take effect again. So the clock is compared with the
//! time that the journal believed last. If it is more than [`JUMP`] away from that, nothing is forgotten until
//!
//! - the clock is right again, or
//! - the clock has gone on evenly for [`LASTING`] while the journal looked at it: a gateway that was switched off for a month, or
//! - an operator says that the clock is right ([`Deliveries::trust_clock`](crate::journal::Deliveries::trust_clock)).
//!
//! To forget late costs a little disk; to forget too early costs effects that happen twice. The same holds for a clock that
//! was set back: keys that are stored meanwhile would expire too early ([`NewEvent::remembered_until`]).
//!
//! Pure: journals load and store the [`ClockMemory`] as text, and ask [`look`].
//!
//! [`NewEvent::remembered_until`]: crate::event::NewEvent::remembered_until

use std::fmt;
use std::time::Duration;

use oncehook_verify::UnixMicros;

/// A clock that is farther away than this from the time that was believed last is doubted.
pub(crate) const JUMP: Duration = Duration::from_secs(2 * 86_400);

/// A doubted clock is believed when it has gone on evenly for this long.
const LASTING: Duration = Duration::from_secs(3 * 86_400);

/// At most this much counts between two looks: what happened between them is not known.
const STEP: Duration = Duration::from_secs(3_600);

/// A change that is smaller than this is not worth storing.
const WORTH: Duration = Duration::from_secs(30);

/// What a journal remembers of its clock between two looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClockMemory {
    /// The time that was believed last.
    believed: i64,
    /// A clock that is not believed: its time at the last look, and for how long it has gone on evenly.
    doubted: Option<(i64, i64)>,
}

/// Why nothing is forgotten: the clock is too far away from the time that was believed last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockDoubt {
    /// The time that the clock says.
    pub now: UnixMicros,
    /// The time that was believed last.
    pub believed: UnixMicros,
}

impl fmt::Display for ClockDoubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let days = self.now.0.abs_diff(self.believed.0) / 86_400_000_000;
        let way = if self.now.0 > self.believed.0 { "ahead of" } else { "behind" };
        write!(f, "the clock is {days} days {way} the time that the journal has seen last")
    }
}

impl ClockMemory {
    /// This time is right.
    pub(crate) fn believing(now: UnixMicros) -> Self {
        Self { believed: now.0, doubted: None }
    }

    /// As a journal stores it.
    pub(crate) fn text(&self) -> String {
        match self.doubted {
            None => self.believed.to_string(),
            Some((last, lasted)) => format!("{} {last} {lasted}", self.believed),
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split(' ').map(|number| number.parse::<i64>().ok());
        let believed = numbers.next()??;
        let doubted = match (numbers.next(), numbers.next()) {
            (Some(last), Some(lasted)) => Some((last?, lasted?)),
            _ => None,
        };
        Some(Self { believed, doubted })
    }

    /// Whether storing this in place of what is stored makes a difference.
    pub(crate) fn is_news(&self, stored: Option<&Self>) -> bool {
        stored.is_none_or(|stored| match (self.doubted, stored.doubted) {
            (None, None) => self.believed.abs_diff(stored.believed) >= micros(WORTH).unsigned_abs(),
            (Some((last, _)), Some((before, _))) => last.abs_diff(before) >= micros(WORTH).unsigned_abs(),
            _ => true,
        })
    }
}

/// A time span. One that is longer than there has been time is as long as that.
pub(crate) fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX).min(i64::MAX / 2)
}

/// Looks at the clock. Returns what to remember, and the doubt in which nothing may be forgotten.
///
/// A journal that has never looked takes the receipt of its newest event for the time that was believed last.
pub(crate) fn look(
    memory: Option<ClockMemory>,
    newest: Option<UnixMicros>,
    now: UnixMicros,
) -> (ClockMemory, Option<ClockDoubt>) {
    let memory = memory.unwrap_or_else(|| ClockMemory::believing(newest.unwrap_or(now)));
    let is_near = |time: i64| now.0.abs_diff(time) <= micros(JUMP).unsigned_abs();
    if is_near(memory.believed) {
        return (ClockMemory::believing(now), None);
    }
    let lasted = match memory.doubted.filter(|(last, _)| is_near(*last)) {
        Some((last, lasted)) => lasted.saturating_add(now.0.saturating_sub(last).clamp(0, micros(STEP))),
        None => 0,
    };
    if lasted >= micros(LASTING) {
        return (ClockMemory::believing(now), None);
    }
    let doubt = ClockDoubt { now, believed: UnixMicros(memory.believed) };
    (ClockMemory { doubted: Some((now.0, lasted)), ..memory }, Some(doubt))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000_000;
    const DAY: i64 = 24 * HOUR;

    fn at(time: i64) -> UnixMicros {
        UnixMicros(1_000 * DAY + time)
    }

    /// A journal that looks, and keeps the memory that it gets back.
    #[derive(Default)]
    struct Looks(Option<ClockMemory>);

    impl Looks {
        fn may_forget(&mut self, time: i64) -> bool {
            let (memory, doubt) = look(self.0, None, at(time));
            assert_eq!(ClockMemory::parse(&memory.text()), Some(memory));
            self.0 = Some(memory);
            doubt.is_none()
        }
    }

    #[test]
    fn a_clock_that_jumps_is_doubted_until_it_is_right_again() {
        for jump in [40 * DAY, -40 * DAY, 2 * DAY + 1, -2 * DAY - 1] {
            let mut looks = Looks::default();
            assert!(looks.may_forget(0) && looks.may_forget(HOUR));
            assert!(!looks.may_forget(HOUR + jump), "{jump}");
            for step in (0..48).filter(|_| jump.abs() > 10 * DAY) {
                assert!(!looks.may_forget(HOUR + jump + step * HOUR), "{jump} {step}");
            }
            assert!(looks.may_forget(2 * HOUR), "{jump}: right again");
        }
    }

    #[test]
    fn a_gateway_that_was_off_for_a_month_forgets_after_three_days_of_running() {
        let mut looks = Looks::default();
        assert!(looks.may_forget(0));
        let back = 30 * DAY;
        let first = (0..1_000).find(|hours| looks.may_forget(back + hours * HOUR));
        assert_eq!(first, Some(72));
        assert!(looks.may_forget(back + 73 * HOUR));
    }

    #[test]
    fn time_that_nobody_saw_and_further_jumps_do_not_count() {
        let mut looks = Looks::default();
        assert!(looks.may_forget(0));
        for day in 1..40 {
            assert!(!looks.may_forget(40 * DAY + day * DAY), "one look a day is an hour a day: {day}");
        }
        for number in 1..200 {
            assert!(!looks.may_forget(100 * DAY + number * 3 * DAY), "another jump each time");
        }
    }

    #[test]
    fn a_journal_that_never_looked_believes_its_newest_event() {
        assert!(look(None, None, at(0)).1.is_none());
        assert!(look(None, Some(at(-DAY)), at(0)).1.is_none());
        let doubt = look(None, Some(at(-40 * DAY)), at(0)).1.unwrap();
        assert_eq!(doubt.to_string(), "the clock is 40 days ahead of the time that the journal has seen last");
        let doubt = look(None, Some(at(40 * DAY)), at(0)).1.unwrap();
        assert_eq!(doubt.to_string(), "the clock is 40 days behind the time that the journal has seen last");
    }

    #[test]
    fn not_every_look_is_stored() {
        let stored = ClockMemory::believing(at(0));
        assert!(stored.is_news(None));
        assert!(!ClockMemory::believing(at(1_000_000)).is_news(Some(&stored)));
        assert!(ClockMemory::believing(at(HOUR)).is_news(Some(&stored)));
        assert!(look(Some(stored), None, at(40 * DAY)).0.is_news(Some(&stored)));
    }
}
