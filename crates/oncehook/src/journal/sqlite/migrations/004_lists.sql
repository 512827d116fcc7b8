-- Lists that cost what they find, however long the history.

-- What was set aside, in the order of events, for people.
CREATE INDEX oncehook_deliveries_aside ON oncehook_deliveries (event, state) WHERE state IN ('parked', 'superseded', 'skipped');

-- Events whose ids run ahead of their receipt, because the clock had been set back. (The id's milliseconds are above 15 bits.)
CREATE INDEX oncehook_events_ahead ON oncehook_events (seq, received_at) WHERE seq / 32768 > received_at / 1000 + 1000;

-- Whether an event of the block had no delivery when the block was written; NULL in blocks of before.
ALTER TABLE oncehook_blocks ADD COLUMN unrouted INTEGER;

-- The same once more for groups of blocks, so that a list need not look at every block of a long history: Bloom filters of
-- what is in a group, each value in the filter of its own cell, and the filters of a cell beside each other.
CREATE TABLE oncehook_groups (
  cell  INTEGER NOT NULL,
  last  INTEGER NOT NULL, -- the group's last event
  first INTEGER NOT NULL,
  items BLOB    NOT NULL, -- Bloom filter
  PRIMARY KEY (cell, last)
) STRICT, WITHOUT ROWID;
