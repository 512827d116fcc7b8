//! What the operator wrote: TOML with the place of every key and value, read table by table while problems are collected.
//!
//! A typed deserialiser stops at the first problem. This reader goes on: each `take_…` removes a key from its table and
//! notes what is wrong with it; whatever is left in a table at the end is an unknown key.
//!
//! One mistake is one problem: a key that is written but wrong is not missing as well ([`Table::lacks`]), and neither is one
//! that is misspelt. A file that is not TOML is not looked into any further.

use std::cell::RefCell;
use std::ops::Range;
use std::time::Duration;

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::duration::{parse_duration, parse_seconds};
use super::near::{did_you_mean, is_near};
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
    /// Those of them that were there, whether what they said was right or not.
    written: Vec<&'static str>,
}

/// A value and its place.
pub(super) type Placed<T> = Spanned<T>;

/// Names and texts, each with its place.
pub(super) type Pairs = Vec<(Placed<String>, Placed<String>)>;

impl<'t> File<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { text, problems: RefCell::new(Vec::new()) }
    }

    /// Parses the text. Nothing if it is not TOML: the first error is noted, and what follows one is seldom meant.
    pub(super) fn root(&self) -> Option<Table<'t, '_>> {
        let (root, errors) = DeTable::parse_recoverable(self.text);
        if let Some(error) = errors.first() {
            self.problem(error.span().unwrap_or(0..0), error.message().to_owned(), None);
            return None;
        }
        let span = root.span();
        Some(Table::new(self, "the file", span, root.into_inner()))
    }

    /// How much was found wrong so far. If it has not grown, what was read in between is right.
    pub(super) fn problems(&self) -> usize {
        self.problems.borrow().len()
    }

    pub(super) fn problem(&self, span: Range<usize>, message: impl Into<String>, help: Option<String>) {
        self.problems.borrow_mut().push(Problem::new(self.text, span, message, help));
    }

    pub(super) fn into_problems(self) -> Vec<Problem> {
        self.problems.into_inner()
    }
}

impl<'t, 'f> Table<'t, 'f> {
    fn new(file: &'f File<'t>, title: &'static str, span: Range<usize>, values: DeTable<'t>) -> Self {
        Self { file, title, span, values, known: Vec::new(), written: Vec::new() }
    }

    /// Whether a key was written. One that was taken and gave nothing has had its problem noted.
    pub(super) fn wrote(&self, key: &str) -> bool {
        self.written.contains(&key)
    }

    /// Whether a key that was asked for is not written at all: neither wrongly, nor under a name so near to its own that
    /// it is reported as misspelt.
    pub(super) fn lacks(&self, key: &str) -> bool {
        !self.wrote(key) && self.lacks_near(key)
    }

    /// Whether nothing that is left over looks like a misspelling of a key.
    pub(super) fn lacks_near(&self, key: &str) -> bool {
        !self.values.keys().any(|found| is_near(found.get_ref(), key))
    }

    /// Whether something was found wrong at this very place.
    pub(super) fn has_problem_in(&self, span: &Range<usize>) -> bool {
        self.file.problems.borrow().iter().any(|problem| problem.is_at(span))
    }

    /// How much was found wrong in the whole file so far.
    pub(super) fn problems(&self) -> usize {
        self.file.problems()
    }

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
        self.written.push(key);
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
        Table::new(self.file, title, span, values)
    }

    /// A sub-table that means something by being there. Nothing if it is not a table; that is noted.
    pub(super) fn take_table_if_written(&mut self, key: &'static str, title: &'static str) -> Option<Table<'t, 'f>> {
        let before = self.problems();
        let table = self.take_table(key, title);
        (self.wrote(key) && self.problems() == before).then_some(table)
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
                    tables.push(Table::new(self.file, title, span, values));
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
        self.take_time(key, parse_seconds)
    }

    /// A duration that may be shorter than a second, and that is not nothing.
    pub(super) fn take_duration(&mut self, key: &'static str) -> Option<Placed<Duration>> {
        self.take_time(key, |text| match parse_duration(text)? {
            Duration::ZERO => Err("must be longer than nothing".to_owned()),
            duration => Ok(duration),
        })
    }

    /// A duration. A bare number is no duration, in quotes or not, and what to write instead is said for both.
    fn take_time<T>(&mut self, key: &'static str, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<Placed<T>> {
        let number = self.values.iter().find(|(found, _)| found.get_ref() == key);
        let number = number.and_then(|(_, value)| Some(value.get_ref().as_integer()?.as_str().to_owned()));
        let Some(number) = number else { return self.take_parsed(key, parse) };
        let span = self.take(key)?.span();
        // Without a unit it fails, and says how to write one.
        let message = parse(&number).err()?;
        self.problem(span, format!("`{key}`: {message}"));
        None
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

    pub(super) fn take_number(&mut self, key: &'static str, allowed: std::ops::RangeInclusive<u64>) -> Option<u64> {
        let value = self.take(key)?;
        let number = value.get_ref().as_integer().map(|number| {
            u64::from_str_radix(number.as_str(), number.radix()).ok().filter(|number| allowed.contains(number))
        });
        match number {
            None => self.wrong_type(key, &value, "a whole number"),
            Some(None) => {
                self.problem(value.span(), format!("`{key}` must be between {} and {}", allowed.start(), allowed.end()))
            }
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
                let message = format!("`{key}`: {}", error.message());
                self.file.problem(error.span().unwrap_or(span), message, nearest_expected(error.message()));
                None
            }
        }
    }

    /// Reports the keys that nobody asked for. `later` names keys that a coming version knows.
    pub(super) fn finish(self, later: &[&str]) -> &'f File<'t> {
        for key in self.values.keys() {
            let name = key.get_ref().as_ref();
            if later.contains(&name) {
                self.problem(key.span(), format!("`{name}` in {} is not part of this version yet", self.title));
                continue;
            }
            let help = did_you_mean(name, self.known.iter().copied())
                .unwrap_or_else(|| format!("{} has: {}", self.title, self.known.join(", ")));
            self.file.problem(key.span(), format!("unknown key `{name}` in {}", self.title), Some(help));
        }
        self.file
    }
}

/// What was probably meant, if a type that reads itself says "unknown … `word`, expected one of `a`, `b`".
fn nearest_expected(message: &str) -> Option<String> {
    let (found, expected) = message.split_once(", expected ")?;
    let quoted = |text: &str| -> Vec<String> { text.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let known = quoted(expected);
    did_you_mean(quoted(found).first()?, known.iter().map(String::as_str))
}
