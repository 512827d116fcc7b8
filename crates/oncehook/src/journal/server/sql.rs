//! The texts of statements that need nothing but their text: the shared journal binds their parameters and reads their rows.
//!
//! How parameters are numbered: [`value`](super::value). Beside each text stands what it is given and what it returns.

/// One text for each plain statement. An engine fills this in.
pub(in crate::journal) struct Sql {
    /// `$1`: table of alias, event. The first of an alias stays.
    pub(in crate::journal) keep_aliases: &'static str,
    /// `$1`: alias. Returns the event that it stands for.
    pub(in crate::journal) resolve_alias: &'static str,
    /// Returns the highest id that is stored.
    pub(in crate::journal) last_id: &'static str,
}
