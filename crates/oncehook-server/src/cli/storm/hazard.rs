//! The ways in which a provider delivers one event more than once, and what a handler gets wrong about each.

use serde::Serialize;

/// One way. The order is the order of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Hazard {
    /// All copies arrive together
    Race,
    /// The sender goes away before it has heard the answer, and tries again
    Partial,
    /// The answer takes longer than the sender waits, and it tries again meanwhile
    Slow,
    /// The same bytes once more, later
    Replay,
    /// A retry with a new timestamp and a new signature
    Resigned,
    /// The newest event first, and the copies in no order at all
    Reordered,
    /// Another body under the id of an event that took effect
    Conflict,
    /// All attempts of a provider's retry schedule (needs --profile)
    Schedule,
}

impl Hazard {
    /// What runs if nobody chooses.
    pub(super) const USUAL: [Self; 7] =
        [Self::Race, Self::Partial, Self::Slow, Self::Replay, Self::Resigned, Self::Reordered, Self::Conflict];

    /// Its name on the command line and in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Race => "race",
            Self::Partial => "partial",
            Self::Slow => "slow",
            Self::Replay => "replay",
            Self::Resigned => "resigned",
            Self::Reordered => "reordered",
            Self::Conflict => "conflict",
            Self::Schedule => "schedule",
        }
    }

    /// Its name for people.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Race => "race",
            Self::Partial => "partial failure",
            Self::Slow => "slow answer",
            Self::Replay => "replay",
            Self::Resigned => "re-signed retry",
            Self::Reordered => "reordering",
            Self::Conflict => "conflict",
            Self::Schedule => "retry schedule",
        }
    }

    /// Where to look when events took effect more than once.
    pub(super) fn why_doubled(self) -> &'static str {
        match self {
            Self::Race => {
                "copies that arrive together pass the check before one of them is noted: let a unique key decide, in the effect's transaction"
            }
            Self::Partial => {
                "the event is noted after the effect, and not at all when the sender is gone: note it in the effect's transaction"
            }
            Self::Slow => {
                "a lock ran out, or there was none, while the first attempt was at work: check a fence, or a unique key, in the effect's transaction"
            }
            Self::Replay => "the event was forgotten: remember keys longer than the provider retries",
            Self::Resigned => "copies are told apart by signature or timestamp: the event's id is what stays the same",
            Self::Reordered => "a copy that comes after newer events is taken for a new one",
            Self::Conflict => {
                "the id is not what decides: another body under a known id is no new event, keep it aside"
            }
            Self::Schedule => "the event was forgotten, or noted too late, before the provider stopped retrying",
        }
    }

    /// Where to look when events were acknowledged and had no effect.
    pub(super) fn why_lost(self) -> &'static str {
        match self {
            Self::Partial | Self::Slow | Self::Schedule => {
                "the event is noted before its effect, and the effect died with the sender's connection: do both in one transaction"
            }
            Self::Reordered => "an event that came after a newer one was dropped",
            Self::Race | Self::Replay | Self::Resigned | Self::Conflict => {
                "the event was acknowledged before its effect was durable"
            }
        }
    }
}
