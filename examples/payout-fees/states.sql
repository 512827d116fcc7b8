-- The same statements for SQLite, PostgreSQL, MariaDB and MySQL.
CREATE TABLE payouts (id VARCHAR(64) PRIMARY KEY, account VARCHAR(64) NOT NULL, state VARCHAR(16) NOT NULL);
CREATE TABLE fees (payout_id VARCHAR(64) PRIMARY KEY, account VARCHAR(64) NOT NULL, cents BIGINT NOT NULL, event_key VARCHAR(255) NOT NULL);
CREATE TABLE balances (account VARCHAR(64) PRIMARY KEY, cents BIGINT NOT NULL);
INSERT INTO balances (account, cents) VALUES ('acct_kettles', 100000);
