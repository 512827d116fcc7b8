//! A delivery: one event for one route in one epoch, the unit that happens exactly once; and what one try of it came to.
//!
//! Promises: an attempt's number only grows, and it is the fence: a settlement must hold the number of the latest
//! attempt, or nothing is written ([`Settled::Lost`]).
//!
//! Does not: decide when to try again. That is `retry`.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use oncehook_verify::{EventKey, UnixMicros};

use crate::event::{EventId, SourceName};
use crate::retry::between;

checked_name!(
    /// The name of a route.
    RouteName,
    BadRouteName,
    "a route name has 1 to 64 characters of a-z, 0-9, '-' and '_'"
);

words! {
    /// Where a delivery stands. The worst first: an event's status is the worst of its deliveries.
    #[derive(Default)]
    pub enum DeliveryState {
        /// Failed for good, unless an operator retries it.
        Dead = "dead",
        /// Waits for a prerequisite.
        Parked = "parked",
        /// Failed, and due again later.
        Retrying = "retrying",
        /// Leased to a handler.
        Running = "running",
        /// Due, not tried yet.
        #[default]
        Ready = "ready",
        /// A newer event made it moot. Final.
        Superseded = "superseded",
        /// An operator decided against it. Final.
        Skipped = "skipped",
        /// Took effect. Final.
        Succeeded = "succeeded",
    }
}

impl DeliveryState {
    /// Whether the delivery may still run by itself.
    pub fn is_pending(self) -> bool {
        matches!(self, Self::Ready | Self::Running | Self::Retrying | Self::Parked)
    }
}

/// Which delivery.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeliveryId {
    /// The event.
    pub event: EventId,
    /// The route.
    pub route: RouteName,
    /// 0, or the number of the forced replay.
    pub epoch: u32,
}

impl DeliveryId {
    /// The key that a receiver can rely on: the same for every attempt of this delivery, another one for every other.
    pub fn idempotency_key(&self) -> String {
        format!("{}_{}_{}", self.event, self.route, self.epoch)
    }
}

/// The right to try one delivery once: only the latest attempt of a delivery can settle it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fence {
    /// The delivery.
    pub delivery: DeliveryId,
    /// The attempt, from 1.
    pub attempt: u32,
}

/// An event as a handler is given it.
#[derive(Debug, Clone)]
pub struct HandedEvent {
    /// Its id.
    pub id: EventId,
    /// The source it came through.
    pub source: SourceName,
    /// Its key.
    pub key: EventKey,
    /// Its type.
    pub kind: Option<String>,
    /// What it is about.
    pub entity: Option<String>,
    /// When it happened, as the provider says.
    pub occurred_at: Option<UnixMicros>,
    /// When it arrived.
    pub received_at: UnixMicros,
    /// The headers that were kept, as `name: value` lines.
    pub headers: Bytes,
    /// The body, byte for byte.
    pub body: Bytes,
    /// For a follow-up: what the delivery before it returned, as JSON.
    pub result: Option<String>,
    /// Which version of its entity it tells about, as the provider counts.
    pub version: Option<i64>,
    /// With a state machine: the state that it leads to.
    pub state: Option<String>,
    /// What the provider says of its entity now, as JSON, where the route fetches it.
    pub current: Option<String>,
}

/// A leased delivery with all that its handler needs.
#[derive(Debug, Clone)]
pub struct Claim {
    /// Which delivery, which attempt.
    pub fence: Fence,
    /// The attempt after which it is dead.
    pub attempt_limit: u32,
    /// Since when it has waited for a prerequisite, if it has.
    pub parked_at: Option<UnixMicros>,
    /// The event.
    pub event: HandedEvent,
}

words! {
    /// Whose fault a failure is.
    pub enum Cause {
        /// The other side: refused, unreachable, too slow.
        Destination = "destination",
        /// The handler: an error in its SQL or its code.
        Handler = "handler",
        /// This gateway.
        Ours = "ours",
        /// The event: nothing that is tried with it can work, or it ends the process.
        Poison = "poison",
        /// Something that had to come first: it did not come in time, or the event does not fit what came instead.
        Prerequisite = "prerequisite",
    }
}

impl Cause {
    /// What the log says of a failure about which nothing else may be said there.
    fn in_log(self) -> &'static str {
        match self {
            Self::Destination => "the destination failed",
            Self::Handler => "the handler failed",
            Self::Ours => "the gateway failed",
            Self::Poison => "the event cannot be handled",
            Self::Prerequisite => "the event does not fit what came before it",
        }
    }
}

/// Why an attempt failed, and whether another one makes sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// Whose fault it is.
    pub cause: Cause,
    /// For operators, kept with the attempt and shown by the API and the CLI. It may quote a destination or a database. Bounded.
    pub message: String,
    /// For the log: our own words and codes only, never text of a destination, a database, a body or a secret.
    pub summary: Cow<'static, str>,
    /// What to do about it.
    pub remedy: Remedy,
    /// Whether the destination is known to work: it answered, and did not want this one.
    pub answered: bool,
}

/// What a failed attempt asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remedy {
    /// Try again; not before the time given, if one is given.
    Retry(Option<Duration>),
    /// Trying again cannot help.
    GiveUp,
    /// Not yet: something else has to come first. No attempt is held against it.
    Defer,
}

/// The longest error text that is kept.
const MESSAGE_BYTES: usize = 1_000;

/// The text of a failure: words of the program are borrowed, and may be logged. A text that was put together at run time is
/// owned, and may quote an event, a destination or a database: operators see it, the log does not.
impl Failure {
    /// A failure that another attempt may mend.
    pub fn retry(cause: Cause, text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(cause, text.into(), Remedy::Retry(None))
    }

    /// A failure that no further attempt can mend.
    pub fn permanent(cause: Cause, text: impl Into<Cow<'static, str>>) -> Self {
        Self::new(cause, text.into(), Remedy::GiveUp)
    }

    /// Not yet: the delivery is parked until another one of its entity succeeds, and looked at again now and then.
    pub fn defer(reason: impl Into<Cow<'static, str>>) -> Self {
        Self { answered: true, ..Self::new(Cause::Prerequisite, reason.into(), Remedy::Defer) }
    }

    fn new(cause: Cause, text: Cow<'static, str>, remedy: Remedy) -> Self {
        let summary = match text {
            Cow::Borrowed(words) => words,
            Cow::Owned(_) => cause.in_log(),
        };
        Self { cause, message: bounded(&text), summary: Cow::Borrowed(summary), remedy, answered: false }
    }

    /// Says in the log what failed. The text must hold our own words and codes only: it is logged as it is.
    pub fn in_log(mut self, summary: impl Into<Cow<'static, str>>) -> Self {
        self.summary = summary.into();
        self
    }

    /// The failure of an attempt whose lease ran out. Whatever it was, the event is the only thing known to be part of it.
    pub fn never_ended() -> Self {
        Self::retry(Cause::Poison, "the attempt never ended: the process stopped, or it outlasted its lease")
    }

    /// The destination answered that it does not want this one. It works, so its breaker has nothing to do with it.
    pub fn answered(mut self) -> Self {
        self.answered = true;
        self
    }

    /// Not before this much time has passed.
    pub fn after(mut self, wait: Duration) -> Self {
        if let Remedy::Retry(after) = &mut self.remedy {
            *after = Some(wait);
        }
        self
    }
}

/// Makes a text safe to print, because parts of it may come from anywhere, and cuts it at a character's end.
fn bounded(text: &str) -> String {
    let mut text = crate::text::printable(text).into_owned();
    if text.len() > MESSAGE_BYTES {
        text.truncate(text.floor_char_boundary(MESSAGE_BYTES));
        text.push('…');
    }
    text
}

/// What becomes of a delivery after an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It took effect; the result is JSON, if the handler returned one.
    Succeeded(Option<String>),
    /// It failed and is due again at that (steady) time.
    RetryAt(UnixMicros, Failure),
    /// It failed for good.
    Dead(Failure),
    /// It waits for a prerequisite, and is looked at again at that (steady) time at the latest.
    Parked(UnixMicros, Failure),
    /// It did not run, and will not: it came too late. The text says why.
    Superseded(String),
}

/// An attempt that failed, as the log tells it. Holds nothing that an event, a destination or a database said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedAttempt {
    /// The event.
    pub event: EventId,
    /// The attempt's number.
    pub attempt: u32,
    /// The attempt after which the delivery is dead.
    pub limit: u32,
    /// Whose fault it is.
    pub cause: Cause,
    /// What failed, in our own words.
    pub summary: Cow<'static, str>,
    /// After how long the next attempt is due; nothing if the delivery is dead.
    pub next_in: Option<Duration>,
}

impl FailedAttempt {
    /// Nothing if the attempt did not fail. `now` is of the clock of the verdict.
    pub fn of(event: EventId, attempt: u32, limit: u32, verdict: &Verdict, now: UnixMicros) -> Option<Self> {
        let (failure, next_in) = match verdict {
            Verdict::RetryAt(at, failure) => (failure, Some(between(now, *at))),
            Verdict::Dead(failure) => (failure, None),
            Verdict::Succeeded(_) | Verdict::Parked(..) | Verdict::Superseded(_) => return None,
        };
        let (cause, summary) = (failure.cause, failure.summary.clone());
        Some(Self { event, attempt, limit, cause, summary, next_in })
    }
}

impl Verdict {
    /// The state that the delivery gets.
    pub(crate) fn state(&self) -> DeliveryState {
        match self {
            Self::Succeeded(_) => DeliveryState::Succeeded,
            Self::RetryAt(..) => DeliveryState::Retrying,
            Self::Dead(_) => DeliveryState::Dead,
            Self::Parked(..) => DeliveryState::Parked,
            Self::Superseded(_) => DeliveryState::Superseded,
        }
    }

    /// Whether it counts as an attempt. What was put off or came too late was not tried.
    pub(crate) fn is_attempt(&self) -> bool {
        !matches!(self, Self::Parked(..) | Self::Superseded(_))
    }
}

/// An attempt that is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settlement {
    /// Which attempt.
    pub fence: Fence,
    /// What becomes of the delivery.
    pub verdict: Verdict,
    /// Routes that start once this one has taken effect. Their deliveries are written in the same transaction.
    pub followups: Vec<RouteName>,
}

/// What settling came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// Written.
    Done,
    /// The attempt is not the latest any more, or the delivery was settled meanwhile. Nothing was written.
    Lost,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_errors_are_cut_between_characters() {
        let failure = Failure::retry(Cause::Handler, "ä".repeat(MESSAGE_BYTES));
        assert!(failure.message.len() <= MESSAGE_BYTES + '…'.len_utf8() && failure.message.ends_with("ä…"));
    }

    #[test]
    fn the_log_gets_words_of_the_program_and_never_a_composed_text() {
        let fixed = Failure::retry(Cause::Ours, "the lease ran out");
        assert_eq!((fixed.message.as_str(), fixed.summary.as_ref()), ("the lease ran out", "the lease ran out"));
        let quoting = Failure::permanent(Cause::Destination, format!("it answered {}", "card 4242"));
        assert_eq!(
            (quoting.message.as_str(), quoting.summary.as_ref()),
            ("it answered card 4242", "the destination failed")
        );
        assert_eq!(quoting.in_log("HTTP 400").summary, "HTTP 400");
    }

    #[test]
    fn words_come_back() {
        for state in DeliveryState::ALL {
            assert_eq!(DeliveryState::parse(state.as_str()), Some(state));
        }
        for cause in Cause::ALL {
            assert_eq!(Cause::parse(cause.as_str()), Some(cause));
        }
    }
}
