"""Prints the fees that were taken and what the account has left. Only reads."""

import sqlite3

database = sqlite3.connect("file:payouts.db?mode=ro", uri=True)
for payout, cents in database.execute("SELECT payout_id, cents FROM fees ORDER BY id"):
    print(f"fee for {payout}: {cents / 100:.2f}")
for account, cents in database.execute("SELECT account, cents FROM balances ORDER BY account"):
    print(f"balance of {account}: {cents / 100:.2f}")
database.close()
