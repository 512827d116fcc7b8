//! Options that say which events are meant. All that are given must hold.

use clap::builder::PossibleValuesParser;
use oncehook::journal::EventStatus;

use super::client::Client;

/// The words of `--status`.
pub(super) fn statuses() -> PossibleValuesParser {
    PossibleValuesParser::new(EventStatus::ALL.iter().map(|status| status.as_str()))
}

#[derive(Debug, Default, clap::Args)]
pub(super) struct Filter {
    /// Only events of this source
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// Only events of exactly this type
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Only events in this status
    #[arg(long, value_parser = statuses())]
    status: Option<String>,
    /// Only the event with this key
    #[arg(long)]
    key: Option<String>,
    /// Only events about this
    #[arg(long)]
    entity: Option<String>,
    /// Only events received at or after this time (RFC 3339)
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only events received before this time (RFC 3339)
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
}

impl Filter {
    /// Fails if the source is a slip of the pen.
    pub(super) fn check(&self, client: &Client) -> anyhow::Result<()> {
        self.source.as_deref().map_or(Ok(()), |source| client.check_source(source))
    }

    /// By the names that the API gives them.
    pub(super) fn conditions(&self) -> [(&'static str, Option<&str>); 7] {
        [
            ("source", self.source.as_deref()),
            ("type", self.kind.as_deref()),
            ("status", self.status.as_deref()),
            ("key", self.key.as_deref()),
            ("entity", self.entity.as_deref()),
            ("since", self.since.as_deref()),
            ("until", self.until.as_deref()),
        ]
    }
}
