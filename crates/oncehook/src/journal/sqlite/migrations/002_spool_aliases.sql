-- Ids that the spool of a node has answered for events that have another one here.
CREATE TABLE oncehook_spool_aliases (
  alias BLOB    PRIMARY KEY CHECK (length(alias) = 16),
  event INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX oncehook_spool_aliases_event ON oncehook_spool_aliases (event);
