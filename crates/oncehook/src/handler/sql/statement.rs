//! Cutting a text into statements, and replacing `:name` by the placeholder that an engine takes.
//!
//! Promises: what stands in quotes, comments and dollar quotes is left alone; a name that is not bound is an error.
//! Does not: understand SQL beyond that. Whether a statement is allowed is the journal's to say.

use super::lexer::{self, Piece};

/// How an engine writes placeholders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `?1`, and a name may be used more than once.
    Sqlite,
    /// `$1`, and a name may be used more than once.
    Postgres,
    /// `?`, once for each use.
    Mysql,
}

/// One statement, ready to be prepared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statement {
    text: String,
    parameters: Vec<usize>,
}

impl Statement {
    /// Marked as a handler's. Engines that keep prepared statements by their text must never take one of these for one of
    /// the journal's own, which may do what handlers may not.
    pub(super) fn marked(mut self) -> Self {
        self.text.insert_str(0, "/* handler */ ");
        self
    }

    /// The text with placeholders.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// For each placeholder, from the first: which of the bound names it takes.
    pub fn parameters(&self) -> &[usize] {
        &self.parameters
    }
}

/// Cuts a text into statements. `names` are the bound names; a parameter is a place among them.
pub(super) fn parse(text: &str, names: &[&str], dialect: Dialect) -> Result<Vec<Statement>, String> {
    let mut statements = Vec::new();
    let mut current = Statement::default();
    let mut bare = true;
    let mut rest = text;
    while !rest.is_empty() {
        let (piece, length) = lexer::piece(rest, dialect)?;
        let (taken, after) = rest.split_at(length);
        rest = after;
        match taken {
            ";" => {
                let ended = std::mem::take(&mut current);
                statements.extend((!bare).then_some(ended));
                bare = true;
                continue;
            }
            // A cast (`::text`) is not a name.
            ":" if after.starts_with(':') => {
                current.text.push_str("::");
                rest = after.get(1..).unwrap_or_default();
                continue;
            }
            ":" => {
                let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
                let (name, after) = after.split_at(end);
                if !name.is_empty() {
                    let place = names.iter().position(|known| *known == name);
                    let place = place.ok_or_else(|| format!("the statement uses :{name}, which is not bound"))?;
                    placeholder(&mut current, place, dialect);
                    rest = after;
                    continue;
                }
            }
            "?" | "$" | "@" if dialect == Dialect::Sqlite => {
                return Err(format!("write parameters as :name, not with `{taken}`"));
            }
            _ => {}
        }
        bare &= matches!(piece, Piece::Comment | Piece::Code) || taken.trim().is_empty();
        current.text.push_str(taken);
    }
    statements.extend((!bare).then_some(current));
    Ok(statements)
}

fn placeholder(statement: &mut Statement, place: usize, dialect: Dialect) {
    let known = statement.parameters.iter().position(|parameter| *parameter == place);
    let number = match (dialect, known) {
        (Dialect::Sqlite | Dialect::Postgres, Some(known)) => known + 1,
        _ => {
            statement.parameters.push(place);
            statement.parameters.len()
        }
    };
    statement.text.push_str(&match dialect {
        Dialect::Sqlite => format!("?{number}"),
        Dialect::Postgres => format!("${number}"),
        Dialect::Mysql => "?".to_owned(),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str, dialect: Dialect) -> Vec<(String, Vec<usize>)> {
        let parsed = parse(text, &["a", "b"], dialect).unwrap();
        parsed.into_iter().map(|one| (one.text.trim().to_owned(), one.parameters)).collect()
    }

    #[test]
    fn names_become_placeholders() {
        let text = "INSERT INTO t VALUES (:b, :a, :b)";
        assert_eq!(texts(text, Dialect::Sqlite), [("INSERT INTO t VALUES (?1, ?2, ?1)".into(), vec![1, 0])]);
        assert_eq!(texts(text, Dialect::Postgres), [("INSERT INTO t VALUES ($1, $2, $1)".into(), vec![1, 0])]);
        assert_eq!(texts(text, Dialect::Mysql), [("INSERT INTO t VALUES (?, ?, ?)".into(), vec![1, 0, 1])]);
    }

    #[test]
    fn quotes_comments_and_casts_are_left_alone() {
        let text = "SELECT ':a;', \"x;:a\", 'it''s :a' -- :a;\n, :a::text /* ; :b */; UPDATE t SET x = :b;;  -- end\n";
        let parsed = texts(text, Dialect::Postgres);
        assert_eq!(parsed.len(), 2);
        assert_eq!(parsed[0].0, "SELECT ':a;', \"x;:a\", 'it''s :a' -- :a;\n, $1::text /* ; :b */");
        assert_eq!(parsed[1], ("UPDATE t SET x = $1".into(), vec![1]));
        let text = r"SELECT 'a\':b', :a # ;:b";
        assert_eq!(texts(text, Dialect::Mysql), [(r"SELECT 'a\':b', ? # ;:b".into(), vec![0])]);
        let text = "SELECT $x$ :a; $x$, :a, '{\"k\":1}'";
        assert_eq!(texts(text, Dialect::Postgres), [("SELECT $x$ :a; $x$, $1, '{\"k\":1}'".into(), vec![0])]);
        let text = r"SELECT E'\':a;', a$$, :a /* /* ; */ :b */";
        assert_eq!(texts(text, Dialect::Postgres), [(text.replacen(":a /*", "$1 /*", 1), vec![0])]);
        assert_eq!(texts("SELECT [x:a;y], :a", Dialect::Sqlite), [("SELECT [x:a;y], ?1".into(), vec![0])]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        for text in ["SELECT :c", "SELECT 'open", "SELECT /* open", "SELECT ?", "SELECT $a", "SELECT @a"] {
            assert!(parse(text, &["a"], Dialect::Sqlite).is_err(), "{text}");
        }
        assert_eq!(parse(" -- nothing\n ; /* here */ ;", &[], Dialect::Sqlite).unwrap(), []);
    }
}
