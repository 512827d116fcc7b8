-- The fees that were taken and what the account has left. Only reads.
SELECT 'fee for ' || payout_id || ': ' || round(cents / 100.0, 2) FROM fees ORDER BY id;
SELECT 'balance of ' || account || ': ' || round(cents / 100.0, 2) FROM balances ORDER BY account;
