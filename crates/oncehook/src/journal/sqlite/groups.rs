//! Groups of blocks of the search index: which of them may hold a source, a type, an entity, or an event without deliveries.
//!
//! A block is a thousand events, and a history of millions has thousands of blocks. Every [`BLOCKS`] of them are summed up in
//! [`CELLS`] Bloom filters; a value is in the filter of its own cell. The filters of one cell stand beside each other, so a
//! list reads a few pages to know which groups to look at.
//!
//! Promises: a group is written in the transaction that seals its last block, and holds every value of its blocks. What is not
//! in a group yet is in memory only, and after a start or a failure it is gathered again from the events, behind the
//! accepts. Blocks behind the last group are looked at one by one, so a reader misses nothing meanwhile.
//! Does not: take values out. A group goes when all of its blocks are gone.

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::bloom::{Bloom, Item, may_contain};
use crate::journal::{EventQuery, EventStatus};

/// Blocks of a group.
const BLOCKS: usize = 64;

/// Filters of a group.
const CELLS: usize = 64;

/// For about a thousand values each, as many as a block has. A row of this size fills a quarter of a page.
const FILTER_BYTES: usize = 1_750;

// Values of different kinds never meet: no text of an event has a zero byte.

pub(super) fn source(name: &str) -> Item {
    Item::of(format!("\0s{name}").as_bytes())
}

pub(super) fn kind(name: &str) -> Item {
    Item::of(format!("\0t{name}").as_bytes())
}

pub(super) fn entity(name: &str) -> Item {
    Item::of(name.as_bytes())
}

pub(super) fn unrouted() -> Item {
    Item::of(b"\0u")
}

/// What a query looks for, the rarest first.
pub(super) fn wanted(query: &EventQuery) -> Vec<Item> {
    let none = query.status == Some(EventStatus::Unrouted);
    [
        query.entity.as_deref().map(entity),
        none.then(unrouted),
        query.kind.as_deref().map(kind),
        query.source.as_deref().map(source),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What is in the blocks behind the last group.
pub(super) struct Gathering {
    cells: Vec<Bloom>,
    blocks: usize,
    first: i64,
    /// The last event of the blocks that are in here; none before the first.
    last: Option<i64>,
    /// Whether that is the last block of all. Then the next block that is sealed comes in here at once.
    pub(super) complete: bool,
}

impl Gathering {
    /// Nothing is known yet.
    pub(super) fn new() -> Self {
        Self { cells: vec![Bloom::of_bytes(FILTER_BYTES); CELLS], blocks: 0, first: 0, last: None, complete: false }
    }

    /// The last event that was gathered, or is in a group.
    pub(super) fn reached(&self, connection: &Connection) -> rusqlite::Result<i64> {
        self.last.map_or_else(|| grouped_to(connection), Ok)
    }

    /// Takes in what is in the next block. The block that completes a group writes it. If the transaction fails, the gathering
    /// is of no use any more.
    pub(super) fn add(
        &mut self,
        connection: &Connection,
        first: i64,
        last: i64,
        items: &[Item],
    ) -> rusqlite::Result<()> {
        for item in items {
            if let Some(cell) = self.cells.get_mut(item.cell(CELLS)) {
                cell.insert(*item);
            }
        }
        self.first = if self.blocks == 0 { first } else { self.first };
        self.last = Some(last);
        self.blocks += 1;
        if self.blocks < BLOCKS {
            return Ok(());
        }
        let sql = "INSERT INTO oncehook_groups (cell, last, first, items) VALUES (?1, ?2, ?3, ?4)";
        let mut insert = connection.prepare_cached(sql)?;
        for (number, cell) in (0_i64..).zip(&mut self.cells) {
            insert.execute(params![number, last, self.first, cell.as_bytes()])?;
            *cell = Bloom::of_bytes(FILTER_BYTES);
        }
        self.blocks = 0;
        Ok(())
    }
}

/// The last event that is in a group.
pub(super) fn grouped_to(connection: &Connection) -> rusqlite::Result<i64> {
    let sql = "SELECT coalesce(max(last), 0) FROM oncehook_groups WHERE cell = 0";
    connection.prepare_cached(sql)?.query_row([], |row| row.get(0))
}

/// Calls `look` for the groups that touch a span of sequences and may hold all items, newest first, until it says that it has
/// enough.
pub(super) fn each(
    connection: &Connection,
    (from, to): (i64, i64),
    items: &[Item],
    mut look: impl FnMut(i64, i64) -> rusqlite::Result<bool>,
) -> rusqlite::Result<()> {
    let Some((first, others)) = items.split_first() else { return Ok(()) };
    let mut statement = connection.prepare_cached(
        "SELECT first, last, items FROM oncehook_groups WHERE cell = ?1 AND last >= ?2 AND first <= ?3 ORDER BY last DESC",
    )?;
    let mut other = connection.prepare_cached("SELECT items FROM oncehook_groups WHERE cell = ?1 AND last = ?2")?;
    let mut rows = statement.query((cell(*first), from, to))?;
    while let Some(group) = rows.next()? {
        if !holds(group, 2, *first)? {
            continue;
        }
        let last: i64 = group.get(1)?;
        let mut all = true;
        for item in others {
            let held = other.query_row((cell(*item), last), |row| holds(row, 0, *item)).optional()?;
            all &= held.unwrap_or(true);
        }
        if all && look(group.get(0)?, last)? {
            return Ok(());
        }
    }
    Ok(())
}

fn cell(item: Item) -> i64 {
    item.cell(CELLS).cast_signed() as i64
}

fn holds(row: &Row<'_>, column: usize, item: Item) -> rusqlite::Result<bool> {
    Ok(may_contain(row.get_ref(column)?.as_blob()?, item))
}

/// Drops the groups up to an event that have no block left. The last group stays: it says how far groups go.
pub(super) fn drop_empty(connection: &Connection, reached: i64) -> rusqlite::Result<()> {
    let sql = "SELECT last FROM oncehook_groups g
                WHERE cell = 0 AND last <= ?1 AND last < (SELECT max(last) FROM oncehook_groups WHERE cell = 0)
                  AND NOT EXISTS (SELECT 1 FROM oncehook_blocks b WHERE b.last BETWEEN g.first AND g.last)";
    let mut statement = connection.prepare_cached(sql)?;
    let empty = statement.query_map([reached], |row| row.get(0))?.collect::<rusqlite::Result<Vec<i64>>>()?;
    let mut delete = connection.prepare_cached("DELETE FROM oncehook_groups WHERE cell = ?1 AND last = ?2")?;
    for last in empty {
        for number in 0..CELLS as i64 {
            delete.execute([number, last])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::sqlite::follower;
    use crate::journal::sqlite::search::tests::{counted, made};

    /// Two groups and some blocks behind them.
    const EVENTS: i64 = (2 * BLOCKS as i64 + 3) * follower::BLOCK as i64 + 10;

    /// Everything is as usual, but for the fifth event.
    fn history() -> Connection {
        let (rare, kind) = ("iif(value = 5, 'rare', 'shop')", "iif(value = 5, 'rare', 'usual')");
        let deliveries = "INSERT INTO oncehook_deliveries (event, route, state, run_at)
                          SELECT seq, 'orders', 'succeeded', 0 FROM oncehook_events WHERE received_at <> 5";
        made(EVENTS, ["value * 100", rare, kind, "'entity ' || value"], deliveries)
    }

    /// The history with all of its blocks and groups.
    fn grouped_history() -> Connection {
        let (mut connection, mut gathering) = (history(), Gathering::new());
        gather_all(&mut connection, &mut gathering);
        seal_all(&mut connection, &mut gathering);
        connection
    }

    fn seal_all(connection: &mut Connection, gathering: &mut Gathering) {
        while follower::seal(connection, true, gathering).unwrap() {}
    }

    fn gather_all(connection: &mut Connection, gathering: &mut Gathering) {
        while !gathering.complete {
            follower::gather(connection, gathering).unwrap();
        }
    }

    /// The whole table.
    fn written(connection: &Connection) -> Vec<(i64, i64, i64, Vec<u8>)> {
        let sql = "SELECT cell, last, first, items FROM oncehook_groups ORDER BY cell, last";
        let mut statement = connection.prepare(sql).unwrap();
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))).unwrap();
        rows.collect::<Result<_, _>>().unwrap()
    }

    fn found(connection: &mut Connection, query: &EventQuery) -> (Vec<i64>, u64) {
        counted(connection, &EventQuery { limit: 5, ..query.clone() })
    }

    fn queries() -> Vec<(EventQuery, Vec<i64>)> {
        let query = |source: &str, kind: &str, entity: &str, status: Option<EventStatus>| {
            let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            EventQuery { source: text(source), kind: text(kind), entity: text(entity), status, ..EventQuery::default() }
        };
        vec![
            (query("rare", "", "", None), vec![5]),
            (query("", "rare", "", None), vec![5]),
            (query("", "", "entity 5", None), vec![5]),
            (query("shop", "", "entity 5", None), vec![]),
            (query("", "", "entity 100000", None), vec![100_000]),
            (query("", "", "", Some(EventStatus::Unrouted)), vec![5]),
            (query("nobody", "", "", None), vec![]),
            (query("", "nothing", "", None), vec![]),
            (query("", "", "nobody", None), vec![]),
        ]
    }

    #[test]
    fn a_rare_value_deep_in_a_long_history_is_found_without_looking_at_every_block() {
        let mut connection = grouped_history();
        assert_eq!(written(&connection).len(), 2 * CELLS);
        for (query, wanted) in queries() {
            let (found, steps) = found(&mut connection, &query);
            assert_eq!(found, wanted, "{query:?}");
            // A block is a thousand events and some ten steps for each; the whole history 25,000 hundreds.
            assert!(steps < 2_000, "{query:?} took {steps}");
        }
        let usual = EventQuery { source: Some("shop".to_owned()), ..EventQuery::default() };
        assert_eq!(found(&mut connection, &usual).0.len(), 6);
    }

    #[test]
    fn groups_are_the_same_whether_they_are_gathered_at_once_or_after_a_start() {
        let at_once = grouped_history();
        let mut after = history();
        seal_all(&mut after, &mut Gathering::new());
        assert!(written(&after).is_empty());
        for (query, wanted) in queries() {
            assert_eq!(found(&mut after, &query).0, wanted, "without groups: {query:?}");
        }
        let mut gathering = Gathering::new();
        for _ in 0..BLOCKS + 5 {
            follower::gather(&mut after, &mut gathering).unwrap();
        }
        // The process ends here; what was in memory is gone.
        gather_all(&mut after, &mut Gathering::new());
        assert!(written(&after) == written(&at_once));
    }

    #[test]
    fn a_group_goes_with_its_last_block() {
        let connection = grouped_history();
        let last = |connection: &Connection| written(connection).first().map(|row| row.1);
        let first_group = last(&connection).unwrap();
        connection.execute("DELETE FROM oncehook_blocks WHERE last < ?1", [first_group]).unwrap();
        drop_empty(&connection, i64::MAX).unwrap();
        assert_eq!(written(&connection).len(), 2 * CELLS, "one block of it is left");
        connection.execute("DELETE FROM oncehook_blocks WHERE last = ?1", [first_group]).unwrap();
        drop_empty(&connection, first_group).unwrap();
        assert_eq!(written(&connection).len(), CELLS);
        connection.execute("DELETE FROM oncehook_blocks", []).unwrap();
        drop_empty(&connection, i64::MAX).unwrap();
        assert_eq!(written(&connection).len(), CELLS, "the last group stays");
    }
}
