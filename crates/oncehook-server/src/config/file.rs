//! What the operator wrote: TOML with the place of every key and value, read table by table while problems are collected.
//!
//! A typed deserialiser stops at the first problem. This reader goes on: each `take_…` removes a key from its table and
//! notes what is wrong with it; whatever is left in a table at the end is an unknown key.

use std::cell::RefCell;
use std::ops::Range;
use std::time::Duration;

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::duration::{parse_duration, parse_seconds};
use super::problem::Problem;

/// A text under examination, and what was found wrong with it.
pub(super) struct File<'t> {
    text: &'t str,
    problems: RefCell<Vec<Problem>>,
}

/// One table of the file. Keys are taken out of it; [`Table::finish`] reports the rest.
pub(super) struct Table<'t, 'f> {
    file: &'f File<'t>,
    /// For messages: `[server]`, `[[source]]`.
    title: &'static str,
    span: Range<usize>,
    values: DeTable<'t>,
    /// Every key that was asked for, for "did you mean".
    known: Vec<&'static str>,
}

/// A value and its place.
pub(super) type Placed<T> = Spanned<T>;

/// Names and texts, each with its place.
pub(super) type Pairs = Vec<(Placed<String>, Placed<String>)>;

impl<'t> File<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { text, problems: RefCell::new(Vec::new()) }
    }

    /// Parses the text. Syntax errors are noted; what could be read is returned.
    pub(super) fn root(&self) -> Table<'t, '_> {
        let (root, errors) = DeTable::parse_recoverable(self.text);
        for error in errors {
            self.problem(error.span().unwrap_or(0..0), error.message().to_owned(), None);
        }
        let span = root.span();
        Table { file: self, title: "the file", span, values: root.into_inner(), known: Vec::new() }
    }

    pub(super) fn problem(&self, span: Range<usize>, message: impl Into<String>, help: Option<String>) {
        self.problems.borrow_mut().push(Problem::new(self.text, span, message, help));
    }

    pub(super) fn into_problems(self) -> Vec<Problem> {
        self.problems.into_inner()
    }
}

impl<'t, 'f> Table<'t, 'f> {
    /// The place of the whole table.
    pub(super) fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    pub(super) fn problem(&self, span: Range<usize>, message: impl Into<String>) {
        self.file.problem(span, message, None);
    }

    pub(super) fn problem_with_help(&self, span: Range<usize>, message: impl Into<String>, help: &str) {
        self.file.problem(span, message, Some(help.to_owned()));
    }

    fn take(&mut self, key: &'static str) -> Option<Spanned<DeValue<'t>>> {
        self.known.push(key);
        let place = self.values.keys().find(|found| found.get_ref() == key)?.clone();
        self.values.remove(&place)
    }

    fn wrong_type(&self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) {
        self.problem(value.span(), format!("`{key}` must be {wanted}, not a {}", value.get_ref().type_str()));
    }

    /// A sub-table; an empty one if it is not written.
    pub(super) fn take_table(&mut self, key: &'static str, title: &'static str) -> Table<'t, 'f> {
        let (span, values) = match self.take(key) {
            None => (self.span(), DeTable::new()),
            Some(value) => {
                let span = value.span();
                match value.into_inner() {
                    DeValue::Table(values) => (span, values),
                    other => {
                        self.wrong_type(key, &Spanned::new(span.clone(), other), "a table");
                        (span, DeTable::new())
                    }
                }
            }
        };
        Table { file: self.file, title, span, values, known: Vec::new() }
    }

    /// A sub-table that means something by being there.
    pub(super) fn take_table_if_written(
        &mut self,
        key: &'static str,
        title: &'static str,
    ) -> Option<Table<'t, 'f>> {
        let written = self.values.keys().any(|found| found.get_ref() == key);
        let table = self.take_table(key, title);
        written.then_some(table)
    }

    /// An array of tables.
    pub(super) fn take_tables(&mut self, key: &'static str, title: &'static str) -> Vec<Table<'t, 'f>> {
        let Some(value) = self.take(key) else { return Vec::new() };
        let span = value.span();
        let DeValue::Array(items) = value.into_inner() else {
            self.problem(span, format!("`{key}` must be written as [[{key}]]"));
            return Vec::new();
        };
        let mut tables = Vec::new();
        for item in items {
            let span = item.span();
            match item.into_inner() {
                DeValue::Table(values) => {
                    tables.push(Table { file: self.file, title, span, values, known: Vec::new() });
                }
                _ => self.problem(span, format!("`{key}` must be written as [[{key}]]")),
            }
        }
        tables
    }

    pub(super) fn take_string(&mut self, key: &'static str) -> Option<Placed<String>> {
        let value = self.take(key)?;
        match value.get_ref().as_str() {
            Some(text) => Some(Spanned::new(value.span(), text.to_owned())),
            None => {
                self.wrong_type(key, &value, "a string");
                None
            }
        }
    }

    /// A string that a function turns into something else.
    pub(super) fn take_parsed<T>(
        &mut self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<Placed<T>> {
        let text = self.take_string(key)?;
        match parse(text.get_ref()) {
            Ok(value) => Some(Spanned::new(text.span(), value)),
            Err(message) => {
                self.problem(text.span(), format!("`{key}`: {message}"));
                None
            }
        }
    }

    pub(super) fn take_seconds(&mut self, key: &'static str) -> Option<Placed<u64>> {
        self.take_parsed(key, parse_seconds)
    }

    /// A duration that may be shorter than a second, and that is not nothing.
    pub(super) fn take_duration(&mut self, key: &'static str) -> Option<Placed<Duration>> {
        self.take_parsed(key, |text| match parse_duration(text)? {
            Duration::ZERO => Err("must be longer than nothing".to_owned()),
            duration => Ok(duration),
        })
    }

    pub(super) fn take_bool(&mut self, key: &'static str) -> Option<bool> {
        let value = self.take(key)?;
        match value.get_ref().as_bool() {
            Some(flag) => Some(flag),
            None => {
                self.wrong_type(key, &value, "true or false");
                None
            }
        }
    }

    /// A table of strings whose keys are the author's own (empty if it is not written), and whether all of it could be
    /// read.
    pub(super) fn take_map(&mut self, key: &'static str) -> (Pairs, bool) {
        let Some(value) = self.take(key) else { return (Vec::new(), true) };
        let Some(table) = value.get_ref().as_table() else {
            self.wrong_type(key, &value, "a table of strings");
            return (Vec::new(), false);
        };
        let mut pairs = Vec::new();
        for (name, value) in table.iter() {
            match value.get_ref().as_str() {
                Some(text) => pairs.push((
                    Spanned::new(name.span(), name.get_ref().to_string()),
                    Spanned::new(value.span(), text.to_owned()),
                )),
                None => self.wrong_type(name.get_ref(), value, "a string"),
            }
        }
        let whole = pairs.len() == table.len();
        (pairs, whole)
    }

    pub(super) fn take_number(
        &mut self,
        key: &'static str,
        allowed: std::ops::RangeInclusive<u64>,
    ) -> Option<u64> {
        let value = self.take(key)?;
        let number = value.get_ref().as_integer().map(|number| {
            u64::from_str_radix(number.as_str(), number.radix())
                .ok()
                .filter(|number| allowed.contains(number))
        });
        match number {
            None => self.wrong_type(key, &value, "a whole number"),
            Some(None) => self.problem(
                value.span(),
                format!("`{key}` must be between {} and {}", allowed.start(), allowed.end()),
            ),
            Some(found) => return found,
        }
        None
    }

    /// A list of strings.
    pub(super) fn take_strings(&mut self, key: &'static str) -> Option<Placed<Vec<Placed<String>>>> {
        let value = self.take(key)?;
        let Some(items) = value.get_ref().as_array() else {
            self.wrong_type(key, &value, "a list of strings");
            return None;
        };
        let mut strings = Vec::new();
        for item in items {
            match item.get_ref().as_str() {
                Some(text) => strings.push(Spanned::new(item.span(), text.to_owned())),
                None => self.wrong_type(key, item, "a list of strings"),
            }
        }
        Some(Spanned::new(value.span(), strings))
    }

    /// One string, or a list of them.
    pub(super) fn take_one_or_many(&mut self, key: &'static str) -> Option<Placed<Vec<String>>> {
        let value = self.take(key)?;
        if let Some(text) = value.get_ref().as_str() {
            return Some(Spanned::new(value.span(), vec![text.to_owned()]));
        }
        let texts = value.get_ref().as_array().and_then(|items| {
            items.iter().map(|item| item.get_ref().as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
        });
        match texts {
            Some(texts) => Some(Spanned::new(value.span(), texts)),
            None => {
                self.wrong_type(key, &value, "a string or a list of strings");
                None
            }
        }
    }

    /// A value of a type that reads itself.
    pub(super) fn take_typed<T: Deserialize<'t>>(&mut self, key: &'static str) -> Option<Placed<T>> {
        let value = self.take(key)?;
        let span = value.span();
        match T::deserialize(value.into_deserializer()) {
            Ok(typed) => Some(Spanned::new(span, typed)),
            Err(error) => {
                let error: toml::de::Error = error;
                self.problem(error.span().unwrap_or(span), format!("`{key}`: {}", error.message()));
                None
            }
        }
    }

    /// Reports the keys that nobody asked for. `later` names keys that a coming version knows.
    pub(super) fn finish(self, later: &[&str]) {
        for key in self.values.keys() {
            let name = key.get_ref().as_ref();
            if later.contains(&name) {
                self.problem(
                    key.span(),
                    format!("`{name}` in {} is not part of this version yet", self.title),
                );
                continue;
            }
            let near = self.known.iter().min_by_key(|known| distance(known, name));
            let help = near
                .filter(|known| distance(known, name) <= 2)
                .map(|known| format!("did you mean `{known}`?"))
                .or_else(|| Some(format!("{} has: {}", self.title, self.known.join(", "))));
            self.file.problem(key.span(), format!("unknown key `{name}` in {}", self.title), help);
        }
    }
}

/// Edits between two words (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, a) in a.chars().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (cell, b) in row.iter_mut().skip(1).zip(&b) {
            let above = *cell;
            left = (diagonal + usize::from(a != *b)).min(above + 1).min(left + 1);
            diagonal = above;
            *cell = left;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::distance;

    #[test]
    fn distances() {
        for (a, b, edits) in [
            ("", "", 0),
            ("abc", "abc", 0),
            ("kitten", "sitting", 3),
            ("", "ab", 2),
            ("secret", "secrets", 1),
        ] {
            assert_eq!(distance(a, b), edits, "{a} {b}");
            assert_eq!(distance(b, a), edits, "{b} {a}");
        }
    }
}
