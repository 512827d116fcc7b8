-- Ids that the spool of a node has answered for events that have another one here: another node was first with the key.
CREATE TABLE oncehook.spool_aliases (
  alias uuid CONSTRAINT spool_aliases_once PRIMARY KEY,
  event uuid NOT NULL
);
CREATE INDEX spool_aliases_event ON oncehook.spool_aliases (event);
