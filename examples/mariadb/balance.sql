-- The fees that were taken and what the account has left. Only reads.
SELECT CONCAT('fee for ', payout_id, ': ', CAST(cents / 100 AS DECIMAL(20, 2))) FROM fees ORDER BY id;
SELECT CONCAT('balance of ', account, ': ', CAST(cents / 100 AS DECIMAL(20, 2))) FROM balances ORDER BY account;
