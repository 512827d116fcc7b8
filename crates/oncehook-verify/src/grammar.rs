//! How a signature header is laid out: one value, a prefixed value, or a list.
//!
//! A grammar only cuts the header into entries; it decodes nothing and judges nothing. Entries of unknown
//! kinds are left in or out without an error, because senders add kinds (and because an attacker may). The
//! number of entries is limited.

use serde::Deserialize;
use smallvec::SmallVec;

/// The most entries a signature header may list, known or not.
pub(crate) const MAX_ENTRIES: usize = 32;

/// The layout of a signature header.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Grammar {
    /// The header is the signature.
    Raw,
    /// Fixed text, then the signature: `sha256=…`.
    Prefix(String),
    /// The same, but the fixed text may be missing.
    OptionalPrefix(String),
    /// Signatures, separated by this text.
    List(String),
    /// A timestamp, then signatures, all separated by this text.
    TimeFirst(String),
    /// Names and values: `t=…,v1=…,v1=…`.
    Kv(Kv),
    /// Signatures, each after the name of its kind: `v1,… v1a,…`.
    Tagged(Tagged),
}

/// `name eq value`, several of them separated by `sep`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kv {
    /// Between pairs.
    pub sep: String,
    /// Between name and value.
    pub eq: String,
    /// The name of the timestamp, where the header carries it.
    pub ts: Option<String>,
    /// The name of a signature; may occur several times.
    pub sig: String,
    /// The name of the list of signed headers, where there is one.
    pub names: Option<String>,
    /// Spaces around pairs do not count.
    #[serde(default)]
    pub trim: bool,
}

/// `kind tag signature`, several of them separated by `sep`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tagged {
    /// Between entries.
    pub sep: String,
    /// Between kind and signature.
    pub tag: String,
    /// The one kind that is accepted, unless the scheme's `keys` say it per secret.
    pub accept: Option<String>,
}

/// One signature as text, with the kind it claims to be (empty where the grammar has no kinds).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    pub kind: &'a str,
    pub text: &'a str,
}

/// A signature header, cut into its parts.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Parsed<'a> {
    pub timestamp: Option<&'a str>,
    pub names: Option<&'a str>,
    pub entries: SmallVec<[Entry<'a>; 4]>,
}

/// Why a signature header cannot be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GrammarError {
    TooManyEntries,
    TwoTimestamps,
}

impl Grammar {
    /// Does the header itself carry the timestamp?
    pub(crate) const fn carries_timestamp(&self) -> bool {
        matches!(self, Self::Kv(Kv { ts: Some(_), .. }) | Self::TimeFirst(_))
    }

    /// Checks what serde cannot: separators that separate nothing.
    pub(crate) fn check(&self) -> Result<(), String> {
        let parts: &[(&str, &str)] = match self {
            Self::Raw => &[],
            Self::Prefix(prefix) | Self::OptionalPrefix(prefix) => &[("prefix", prefix)],
            Self::List(sep) | Self::TimeFirst(sep) => &[("sep", sep)],
            Self::Kv(kv) => &[("kv.sep", &kv.sep), ("kv.eq", &kv.eq), ("kv.sig", &kv.sig)],
            Self::Tagged(tagged) => &[("tagged.sep", &tagged.sep), ("tagged.tag", &tagged.tag)],
        };
        for (name, text) in parts {
            if text.is_empty() {
                return Err(format!("signature.grammar.{name} must not be empty"));
            }
        }
        match self {
            Self::Kv(Kv { ts: Some(ts), sig, .. }) if ts == sig => {
                Err("signature.grammar.kv: ts and sig must have different names".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Cuts a header's value. A value that holds no signature gives no entries.
    pub(crate) fn parse<'a>(&self, value: &'a str) -> Result<Parsed<'a>, GrammarError> {
        let mut parsed = Parsed::default();
        match self {
            Self::Raw => parsed.entries.push(Entry { kind: "", text: value }),
            Self::Prefix(prefix) => {
                if let Some(text) = value.strip_prefix(prefix.as_str()) {
                    parsed.entries.push(Entry { kind: "", text });
                }
            }
            Self::OptionalPrefix(prefix) => {
                let text = value.strip_prefix(prefix.as_str()).unwrap_or(value);
                parsed.entries.push(Entry { kind: "", text });
            }
            Self::List(sep) | Self::TimeFirst(sep) => {
                for (index, text) in value.split(sep.as_str()).enumerate() {
                    if index == MAX_ENTRIES {
                        return Err(GrammarError::TooManyEntries);
                    }
                    match (self, index) {
                        (Self::TimeFirst(_), 0) => parsed.timestamp = Some(text),
                        _ => parsed.entries.push(Entry { kind: "", text }),
                    }
                }
            }
            Self::Kv(kv) => {
                for (index, pair) in value.split(kv.sep.as_str()).enumerate() {
                    if index == MAX_ENTRIES {
                        return Err(GrammarError::TooManyEntries);
                    }
                    let pair = if kv.trim { pair.trim_matches(' ') } else { pair };
                    let Some((name, text)) = pair.split_once(kv.eq.as_str()) else { continue };
                    if name == kv.sig {
                        parsed.entries.push(Entry { kind: "", text });
                    } else if Some(name) == kv.names.as_deref() {
                        parsed.names = Some(text);
                    } else if Some(name) == kv.ts.as_deref() && parsed.timestamp.replace(text).is_some() {
                        return Err(GrammarError::TwoTimestamps);
                    }
                }
            }
            Self::Tagged(tagged) => {
                for (index, entry) in value.split(tagged.sep.as_str()).enumerate() {
                    if index == MAX_ENTRIES {
                        return Err(GrammarError::TooManyEntries);
                    }
                    if let Some((kind, text)) = entry.split_once(tagged.tag.as_str()) {
                        parsed.entries.push(Entry { kind, text });
                    }
                }
            }
        }
        Ok(parsed)
    }

    /// The header's value for one signature: the reverse of `parse`.
    pub(crate) fn render(&self, kind: &str, timestamp: Option<&str>, names: Option<&str>, signature: &str) -> String {
        match self {
            Self::Raw | Self::List(_) => signature.to_owned(),
            Self::Prefix(prefix) | Self::OptionalPrefix(prefix) => format!("{prefix}{signature}"),
            Self::TimeFirst(sep) => format!("{}{sep}{signature}", timestamp.unwrap_or_default()),
            Self::Kv(Kv { sep, eq, ts, sig, names: listed, trim }) => {
                let between = if *trim { format!("{sep} ") } else { sep.clone() };
                let mut pairs = Vec::new();
                for (name, value) in [(ts, timestamp), (listed, names)] {
                    pairs.extend(name.as_ref().zip(value).map(|(name, value)| format!("{name}{eq}{value}")));
                }
                pairs.push(format!("{sig}{eq}{signature}"));
                pairs.join(&between)
            }
            Self::Tagged(tagged) => format!("{kind}{}{signature}", tagged.tag),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv() -> Grammar {
        Grammar::Kv(Kv {
            sep: ",".into(),
            eq: "=".into(),
            ts: Some("t".into()),
            sig: "v1".into(),
            names: None,
            trim: false,
        })
    }

    fn tagged() -> Grammar {
        Grammar::Tagged(Tagged { sep: " ".into(), tag: ",".into(), accept: None })
    }

    fn texts(grammar: &Grammar, value: &str) -> Vec<(String, String)> {
        let parsed = grammar.parse(value).unwrap();
        parsed.entries.iter().map(|entry| (entry.kind.to_owned(), entry.text.to_owned())).collect()
    }

    #[test]
    fn pairs_are_cut_and_unknown_ones_left_out() {
        let parsed = kv().parse("t=12,v1=aa,v0=bb,v1=cc,junk,=,v1").unwrap();
        assert_eq!(parsed.timestamp, Some("12"));
        assert_eq!(texts(&kv(), "t=12,v1=aa,v0=bb,v1=cc=,junk"), [("".into(), "aa".into()), ("".into(), "cc=".into())]);
        assert_eq!(texts(&kv(), "t=12, v1=aa"), [], "spaces are not trimmed");
    }

    #[test]
    fn two_timestamps_are_refused() {
        assert_eq!(kv().parse("t=1,t=2,v1=aa"), Err(GrammarError::TwoTimestamps));
    }

    #[test]
    fn tagged_entries_keep_their_kind() {
        assert_eq!(
            texts(&tagged(), "v1,aa v1a,bb  nonsense v1,"),
            [("v1".into(), "aa".into()), ("v1a".into(), "bb".into()), ("v1".into(), String::new()),]
        );
    }

    #[test]
    fn lists_are_limited_whatever_they_hold() {
        let list = |count: usize| vec!["v1,aa"; count].join(" ");
        assert!(tagged().parse(&list(MAX_ENTRIES)).is_ok());
        assert_eq!(tagged().parse(&list(MAX_ENTRIES + 1)), Err(GrammarError::TooManyEntries));
        assert_eq!(kv().parse(&vec!["v9=a"; MAX_ENTRIES + 1].join(",")), Err(GrammarError::TooManyEntries));
    }

    #[test]
    fn a_prefix_is_needed() {
        let grammar = Grammar::Prefix("sha256=".into());
        assert_eq!(texts(&grammar, "sha256=aa"), [("".into(), "aa".into())]);
        assert_eq!(texts(&grammar, "sha1=aa"), []);
        assert_eq!(texts(&grammar, "SHA256=aa"), []);
    }

    #[test]
    fn lists_trimmed_pairs_and_optional_prefixes() {
        let none = String::new;
        assert_eq!(texts(&Grammar::List(",".into()), "aa,bb"), [(none(), "aa".into()), (none(), "bb".into())]);
        assert_eq!(texts(&Grammar::OptionalPrefix("sha256=".into()), "aa"), [(none(), "aa".into())]);
        assert_eq!(texts(&Grammar::OptionalPrefix("sha256=".into()), "sha256=aa"), [(none(), "aa".into())]);
        let positional = Grammar::TimeFirst(",".into());
        assert_eq!(positional.parse("12,aa,bb").unwrap().timestamp, Some("12"));
        assert_eq!(texts(&positional, "12,aa,bb").len(), 2);
        assert_eq!(texts(&positional, "12"), []);
        let trimmed = Grammar::Kv(Kv {
            sep: ",".into(),
            eq: "=".into(),
            ts: Some("t".into()),
            sig: "v1".into(),
            names: Some("h".into()),
            trim: true,
        });
        let parsed = trimmed.parse("t=12, h=a b, v1=aa").unwrap();
        assert_eq!((parsed.timestamp, parsed.names, parsed.entries.len()), (Some("12"), Some("a b"), 1));
    }

    #[test]
    fn what_is_rendered_parses_back() {
        for grammar in [
            Grammar::Raw,
            Grammar::Prefix("v0=".into()),
            Grammar::OptionalPrefix("v0=".into()),
            Grammar::List(",".into()),
            Grammar::TimeFirst(",".into()),
            kv(),
            tagged(),
        ] {
            let value = grammar.render("v1", Some("12"), None, "c2ln");
            let parsed = grammar.parse(&value).unwrap();
            assert_eq!(parsed.entries.len(), 1);
            assert_eq!(parsed.entries[0].text, "c2ln");
            assert_eq!(parsed.timestamp.is_some(), grammar.carries_timestamp());
        }
    }
}
