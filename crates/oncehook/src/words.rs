//! Two small patterns that many nouns share: enums whose variants are words, and names that are checked once.
//!
//! Promises: each variant has one word, and the word leads back to it. Does not: define any noun; that is done where it is used.

/// An enum whose variants each have a word: in JSON, in the journal, in the configuration or in metrics.
macro_rules! words {
    ($(#[$about:meta])* pub enum $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// Every variant, in the order of the definition.
            pub const ALL: [Self; [$($word),+].len()] = [$(Self::$variant),+];

            /// The variant's word.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)+
                }
            }

            /// The variant of that word.
            pub fn parse(word: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|variant| variant.as_str() == word)
            }
        }
    };
}

/// The name of a configured thing: 1 to 64 characters of `a-z`, `0-9`, `-` and `_`. It stands in URLs, metrics and keys.
macro_rules! checked_name {
    ($(#[$about:meta])* $name:ident, $error:ident, $message:literal) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(std::sync::Arc<str>);

        /// Why a text is not such a name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
        #[error($message)]
        pub struct $error;

        impl $name {
            /// Checks the text once; the name is valid ever after.
            pub fn new(name: &str) -> Result<Self, $error> {
                let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_');
                let valid = (1..=64).contains(&name.len()) && name.bytes().all(allowed);
                if valid { Ok(Self(name.into())) } else { Err($error) }
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
