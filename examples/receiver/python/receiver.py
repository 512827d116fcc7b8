"""A receiver: writes a row into `payments` for every payment that oncehook forwards, once.

    python3 receiver.py [PORT [DATABASE [SECRET_FILE]]]
"""

import sys

from once import Inbox, read_secret, serve

# On purpose without a unique column: if a webhook took effect twice, two rows would show it.
SCHEMA = """
CREATE TABLE IF NOT EXISTS payments (
  id INTEGER PRIMARY KEY,
  payment TEXT NOT NULL,
  amount INTEGER NOT NULL
);
"""


def record_payment(database, event):
    payment = event["data"]["object"]
    row = database.execute(
        "INSERT INTO payments (payment, amount) VALUES (?, ?)", (payment["id"], payment["amount"])
    )
    return {"payment": row.lastrowid}


if __name__ == "__main__":
    usual = ["9000", "receiver.db", "receiver.secret"]
    port, database, secret_file = sys.argv[1:] + usual[len(sys.argv) - 1 :]
    serve(int(port), Inbox(database, SCHEMA), read_secret(secret_file), record_payment)
