//! Options that say which events are meant. All that are given must hold.

#[derive(Debug, Default, clap::Args)]
pub(super) struct Filter {
    /// Only events of this source
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// Only events of exactly this type
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Only events in this status, such as quarantined, unrouted, dead, ready or succeeded
    #[arg(long)]
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
