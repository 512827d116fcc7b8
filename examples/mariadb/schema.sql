-- The shop's own tables. One payment is one order: the column is unique, whichever event brings it. Ids of providers are
-- compared byte by byte, or pi_a and pi_A would be one payment.
CREATE TABLE IF NOT EXISTS orders (
  id         BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  payment_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL UNIQUE,
  amount     BIGINT NOT NULL,        -- in the smallest unit
  currency   VARCHAR(3) NOT NULL,
  event_key  VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,  -- which event made it
  made_at    TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP
) ENGINE = InnoDB;
-- What was charged for which payout.
CREATE TABLE IF NOT EXISTS fees (
  id        BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  payout_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL UNIQUE,
  account   VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  cents     BIGINT NOT NULL,
  event_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL
) ENGINE = InnoDB;
-- What each account has with us.
CREATE TABLE IF NOT EXISTS balances (
  account VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL PRIMARY KEY,
  cents   BIGINT NOT NULL
) ENGINE = InnoDB;
INSERT INTO balances (account, cents) VALUES ('acct_kettles', 100000) ON DUPLICATE KEY UPDATE account = balances.account;
