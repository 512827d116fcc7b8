"""The mail service: one row in `mails` for each confirmation that is asked for, once.

The row is the mail as far as this database can promise it. A program that hands rows to a mail server works through
this table; only it can know what the mail server said.

    python3 mail.py [PORT]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "receiver" / "python"))

from once import Inbox, read_secret, serve

SCHEMA = """
CREATE TABLE IF NOT EXISTS mails (
  id INTEGER PRIMARY KEY,
  order_id INTEGER NOT NULL,
  text TEXT NOT NULL
);
"""


def write_mail(database, wish):
    price = f"{wish['amount'] / 100:.2f} {wish['currency'].upper()}"
    text = f"Thank you! Your order {wish['order']} over {price} is on its way."
    row = database.execute("INSERT INTO mails (order_id, text) VALUES (?, ?)", (wish["order"], text))
    return {"mail": row.lastrowid}


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 9001
    serve(port, Inbox("mail.db", SCHEMA), read_secret("services.secret"), write_mail)
