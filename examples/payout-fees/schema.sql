-- What was charged for which payout.
CREATE TABLE IF NOT EXISTS fees (
  id INTEGER PRIMARY KEY,
  payout_id TEXT NOT NULL UNIQUE,
  account TEXT NOT NULL,
  cents INTEGER NOT NULL,
  event_key TEXT NOT NULL
);
-- What each account has with us.
CREATE TABLE IF NOT EXISTS balances (
  account TEXT PRIMARY KEY,
  cents INTEGER NOT NULL
);
INSERT INTO balances (account, cents) VALUES ('acct_kettles', 100000) ON CONFLICT (account) DO NOTHING;
