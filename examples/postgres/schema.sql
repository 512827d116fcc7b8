-- The shop's own tables. One payment is one order: the column is unique, whichever event brings it.
CREATE TABLE IF NOT EXISTS orders (
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  payment_id text NOT NULL UNIQUE,
  amount     bigint NOT NULL,    -- in the smallest unit
  currency   text NOT NULL,
  event_key  text NOT NULL,      -- which event made it
  made_at    timestamptz NOT NULL DEFAULT now()
);
-- What was charged for which payout.
CREATE TABLE IF NOT EXISTS fees (
  id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  payout_id text NOT NULL UNIQUE,
  account   text NOT NULL,
  cents     bigint NOT NULL,
  event_key text NOT NULL
);
-- What each account has with us.
CREATE TABLE IF NOT EXISTS balances (
  account text PRIMARY KEY,
  cents   bigint NOT NULL
);
INSERT INTO balances (account, cents) VALUES ('acct_kettles', 100000) ON CONFLICT (account) DO NOTHING;
