//! An `INSERT` or `REPLACE` of the user's that can be said once of many rows.
//!
//! MariaDB has a command that runs one statement with the values of many rows (bulk execution). It must not be used: it answers
//! that all is done although it asked a `SELECT` among the values once for all of them, or stopped half-way. An insert of
//! several rows is what it says on every server.
//!
//! Promises: the statement for many rows does what the one for each row would do in turn. What cannot be seen to be like
//! that is not taken, and runs row by row. So the values are parameters and constants, and parameters stand nowhere else; and
//! there is no `IGNORE`, which forgives several rows what it does not forgive one.
//! Does not: check what the user may do (`user_sql`).

use super::connection::Insert;
use crate::handler::Dialect;
use crate::handler::sql::lexer::{Piece, pieces};

/// Such a statement, cut where its row is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ManyRows {
    head: String,
    row: String,
    tail: String,
}

impl ManyRows {
    /// Cuts a statement, if it is of this kind.
    pub(super) fn of(statement: &str) -> Option<Self> {
        let mut found = pieces(statement, Dialect::Mysql).ok()?;
        found.retain(|piece| {
            !matches!(piece, Piece::Comment) && !matches!(piece, Piece::Other(space) if space.trim().is_empty())
        });
        let word = |piece: &Piece<'_>, wanted: &[&str]| matches!(piece, Piece::Word(word) if wanted.iter().any(|one| word.eq_ignore_ascii_case(one)));
        let is_odd = |piece: &Piece<'_>| {
            matches!(piece, Piece::Variable) || word(piece, &["select", "returning", "last_insert_id", "ignore"])
        };
        if !word(found.first()?, &["insert", "replace"]) || found.iter().any(is_odd) {
            return None;
        }
        let at = found.iter().position(|piece| word(piece, &["values", "value"]))?;
        let (before, behind) = found.split_at(at);
        let [Piece::Word(keyword), Piece::Other(open @ "("), values @ ..] = behind else { return None };
        let end = values.iter().position(|piece| matches!(piece, Piece::Other(")")))?;
        let (values, behind) = values.split_at(end);
        let [Piece::Other(close), tail @ ..] = behind else { return None };
        let is_parameter = |piece: &Piece<'_>| matches!(piece, Piece::Other("?"));
        let is_constant = |piece: &Piece<'_>| match piece {
            Piece::Text | Piece::Other("," | "-" | "+" | ".") => true,
            Piece::Word(text) => {
                text.starts_with(|c: char| c.is_ascii_digit()) || word(piece, &["null", "true", "false", "default"])
            }
            _ => false,
        };
        let plain = values.iter().all(|piece| is_parameter(piece) || is_constant(piece))
            && !before.iter().chain(tail).any(|piece| is_parameter(piece) || matches!(piece, Piece::Other(";")));
        let update = ["on", "duplicate", "key", "update"];
        let known_tail =
            tail.is_empty() || tail.len() > 4 && tail.iter().zip(update).all(|(piece, wanted)| word(piece, &[wanted]));
        let place = |part: &str| part.as_ptr().addr() - statement.as_ptr().addr();
        let cut = (
            statement.get(..place(keyword)),
            statement.get(place(open)..=place(close)),
            statement.get(place(close) + 1..),
        );
        match cut {
            (Some(head), Some(row), Some(tail)) if plain && known_tail => {
                Some(Self { head: head.to_owned(), row: row.to_owned(), tail: tail.to_owned() })
            }
            _ => None,
        }
    }

    pub(super) fn insert(&self) -> Insert<'_> {
        Insert { head: &self.head, row: &self.row, tail: &self.tail }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_insert_is_cut_at_its_row() {
        // The signs | are where it is cut: before the keyword, before the row, and behind it.
        for marked in [
            "INSERT INTO orders (payment, amount) |VALUES |(?, ?)|",
            "replace orders |value |(?, -1.5e3, 'it''s ), (', null)|",
            "INSERT INTO `a b`.orders |VALUES|(?)| ON DUPLICATE KEY UPDATE n = n + VALUES(n), s = '?' -- ?",
            "/* é */ INSERT INTO orders -- values\n |VALUES |(?, DEFAULT)|",
        ] {
            let parts: Vec<String> = marked.split('|').map(str::to_owned).collect();
            let [head, _, row, tail] = parts.try_into().unwrap();
            assert_eq!(ManyRows::of(&marked.replace('|', "")), Some(ManyRows { head, row, tail }), "{marked}");
        }
    }

    #[test]
    fn what_could_differ_from_row_to_row_is_not_taken() {
        for statement in [
            "INSERT INTO orders VALUES (?, (SELECT price FROM prices WHERE name = ?))",
            "INSERT INTO orders SELECT ?, ? FROM dual",
            "INSERT IGNORE INTO orders VALUES (?)",
            "INSERT INTO orders SET payment = ?",
            "INSERT INTO orders VALUES (?), (?)",
            "INSERT INTO orders VALUES (?, UUID())",
            "INSERT INTO orders VALUES (?, next_number)",
            "INSERT INTO orders VALUES (?, @a)",
            "INSERT INTO orders VALUES (?) ON DUPLICATE KEY UPDATE amount = ?",
            "INSERT INTO orders VALUES (?) ON DUPLICATE KEY UPDATE amount = (SELECT 1)",
            "INSERT INTO orders VALUES (?) ON DUPLICATE KEY UPDATE id = LAST_INSERT_ID(id)",
            "INSERT INTO orders VALUES (?) RETURNING id",
            "INSERT INTO orders VALUES (?) AS new ON DUPLICATE KEY UPDATE n = new.n",
            "INSERT INTO orders VALUES (?);",
            "INSERT INTO `values` (a) VALUES (?)",
            "INSERT INTO orders PARTITION (p?) VALUES (?)",
            "UPDATE orders SET amount = ? WHERE payment IN (VALUES (?))",
            "DELETE FROM orders WHERE payment = ?",
            "INSERT INTO orders VALUES ?",
            "INSERT INTO orders VALUES (?",
            "",
        ] {
            assert_eq!(ManyRows::of(statement), None, "{statement}");
        }
    }
}
