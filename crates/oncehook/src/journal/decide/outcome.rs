//! What the end of an attempt writes: the columns of its delivery, the row of the attempt, and what follows.
//!
//! Promises: every journal writes these values and decides none of them again. A final state has no due time. Follow-ups
//! are made after a success only. An attempt that was put off, or came too late, is not held against the delivery.
//!
//! Does not: check the fence. The statement that writes does.

use oncehook_verify::UnixMicros;

use crate::delivery::{Cause, DeliveryState, Failure, RouteName, Verdict};

/// Whether an attempt was leased, or ran inside the transaction that settles it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    /// Leased: the delivery is `running` and its attempt has the fence's number.
    Lease,
    /// Leased, and the lease ran out.
    LostLease,
    /// Not leased: the delivery is due and locked, and the fence's number is the next one.
    Lock,
}

/// What an attempt that has ended writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome<'v> {
    pub(crate) state: DeliveryState,
    /// When the delivery is due or looked at again; nothing if the state is final. Then it is settled now, and the due time
    /// stays.
    pub(crate) run_at: Option<UnixMicros>,
    pub(crate) result: Option<&'v str>,
    /// For people.
    pub(crate) error: Option<&'v str>,
    /// Whose fault it is that it is dead.
    pub(crate) cause: Option<Cause>,
    /// Whether it counts as an attempt. If not, the number of an attempt under a lock is not used, and a leased delivery
    /// gets one more attempt than the lease said.
    pub(crate) counts: bool,
    /// What the row of the attempt says; nothing if there is no row: what ran under a lock and did not fail stands in the
    /// delivery itself.
    pub(crate) attempt: Option<AttemptEnd<'v>>,
    /// Routes that start now.
    pub(crate) followups: &'v [RouteName],
}

/// How the row of an attempt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttemptEnd<'v> {
    pub(crate) outcome: &'static str,
    pub(crate) error: Option<&'v str>,
}

/// What an attempt writes that ended with this verdict.
pub(crate) fn outcome<'v>(held: Held, verdict: &'v Verdict, followups: &'v [RouteName]) -> Outcome<'v> {
    let failed = if held == Held::LostLease { "lost" } else { "failed" };
    let said = |failure: &'v Failure| Some(failure.message.as_str());
    let (run_at, error, row) = match verdict {
        Verdict::Succeeded(_) => (None, None, ("succeeded", None)),
        Verdict::RetryAt(at, failure) => (Some(*at), said(failure), (failed, said(failure))),
        Verdict::Dead(failure) => (None, said(failure), (failed, said(failure))),
        Verdict::Parked(at, failure) => (Some(*at), said(failure), ("given_back", said(failure))),
        Verdict::Superseded(why) => (None, Some(why.as_str()), ("given_back", None)),
    };
    let (state, counts) = (verdict.state(), verdict.is_attempt());
    let (result, followups) = match verdict {
        Verdict::Succeeded(result) => (result.as_deref(), followups),
        _ => (None, [].as_slice()),
    };
    let cause = match verdict {
        Verdict::Dead(failure) => Some(failure.cause),
        _ => None,
    };
    let has_row = held != Held::Lock || row.0 == failed;
    let attempt = has_row.then_some(AttemptEnd { outcome: row.0, error: row.1 });
    Outcome { state, run_at, result, error, cause, counts, attempt, followups }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r14_an_outcome_says_what_is_written() {
        use DeliveryState::{Dead, Parked, Retrying, Succeeded, Superseded};
        let failure = || Failure::retry(Cause::Handler, "no such table");
        let next = [RouteName::new("next").unwrap()];
        let at = UnixMicros(7);
        let said = Some("no such table");
        let failed = |outcome| Some((outcome, said));
        // The verdict; state, due, result, error, counts, follow-ups; the attempt's row if it was leased, lost, locked.
        for (verdict, (state, run_at, result, error, counts, follows), rows) in [
            (
                Verdict::Succeeded(Some("1".to_owned())),
                (Succeeded, None, Some("1"), None, true, 1),
                [Some(("succeeded", None)), Some(("succeeded", None)), None],
            ),
            (
                Verdict::RetryAt(at, failure()),
                (Retrying, Some(at), None, said, true, 0),
                [failed("failed"), failed("lost"), failed("failed")],
            ),
            (
                Verdict::Dead(failure()),
                (Dead, None, None, said, true, 0),
                [failed("failed"), failed("lost"), failed("failed")],
            ),
            (
                Verdict::Parked(at, failure()),
                (Parked, Some(at), None, said, false, 0),
                [failed("given_back"), failed("given_back"), None],
            ),
            (
                Verdict::Superseded("late".to_owned()),
                (Superseded, None, None, Some("late"), false, 0),
                [Some(("given_back", None)), Some(("given_back", None)), None],
            ),
        ] {
            for (held, row) in [Held::Lease, Held::LostLease, Held::Lock].into_iter().zip(rows) {
                let expected = Outcome {
                    state,
                    run_at,
                    result,
                    error,
                    cause: (state == Dead).then_some(Cause::Handler),
                    counts,
                    attempt: row.map(|(outcome, error)| AttemptEnd { outcome, error }),
                    followups: next.get(..follows).unwrap(),
                };
                assert_eq!(outcome(held, &verdict, &next), expected, "{held:?} {verdict:?}");
            }
        }
    }
}
