//! Problems in a configuration file, with their place, shown as a compiler would.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use serde::Serialize;

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub help: Option<String>,
    /// Line in the file, from 1.
    pub line: usize,
    /// Column in the line, in characters, from 1.
    pub column: usize,
    #[serde(skip)]
    span: Range<usize>,
}

/// All that is wrong with a file. Never empty.
#[derive(Debug, Clone)]
pub struct Problems {
    path: String,
    text: String,
    /// In the order of the file.
    pub list: Vec<Problem>,
}

impl Problem {
    /// A problem at a byte range of the text.
    pub(super) fn new(text: &str, span: Range<usize>, message: impl Into<String>, help: Option<String>) -> Self {
        let start = span.start.min(text.len());
        let before = text.get(..start).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        let end = span.end.clamp(start, text.len());
        Self { message: message.into(), help, line, column, span: start..end }
    }

    /// Whether it is about this place.
    pub(super) fn is_at(&self, span: &Range<usize>) -> bool {
        self.span == *span
    }
}

impl Problems {
    pub(super) fn new(path: &str, text: &str, mut list: Vec<Problem>) -> Self {
        list.sort_by_key(|problem| (problem.span.start, problem.message.clone()));
        Self { path: path.to_owned(), text: text.to_owned(), list }
    }

    /// The one problem of a file that cannot be read at all.
    pub(super) fn unreadable(path: &str, error: &std::io::Error) -> Self {
        let help = (error.kind() == std::io::ErrorKind::NotFound)
            .then(|| "`oncehook init` writes a commented one; --config names another".to_owned());
        Self::new(path, "", vec![Problem::new("", 0..0, format!("cannot read {path}: {error}"), help)])
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.list {
            let mut group =
                Level::ERROR.primary_title(problem.message.as_str()).elements(Vec::<annotate_snippets::Padding>::new());
            if !self.text.is_empty() {
                group = group.element(
                    Snippet::source(self.text.as_str())
                        .path(self.path.as_str())
                        .annotation(AnnotationKind::Primary.span(problem.span.clone())),
                );
            }
            if let Some(help) = &problem.help {
                group = group.element(Level::HELP.message(help.as_str()));
            }
            writeln!(f, "{}\n", Renderer::plain().render(&[group]))?;
        }
        match self.list.len() {
            1 => write!(f, "1 problem in {}", self.path),
            count => write!(f, "{count} problems in {}", self.path),
        }
    }
}

impl std::error::Error for Problems {}
