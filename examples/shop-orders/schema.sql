-- The shop's own table. One payment is one order: the column is unique, whichever event brings it.
CREATE TABLE IF NOT EXISTS orders (
  id INTEGER PRIMARY KEY,
  payment_id TEXT NOT NULL UNIQUE,
  amount INTEGER NOT NULL,       -- in the smallest unit
  currency TEXT NOT NULL,
  event_key TEXT NOT NULL,       -- which event made it
  made_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
);
