"""The shipment service: one row in `shipments` and one item less in stock for each order, once.

    python3 shipment.py [PORT]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "receiver" / "python"))

from once import Inbox, read_secret, serve

SCHEMA = """
CREATE TABLE IF NOT EXISTS shipments (
  id INTEGER PRIMARY KEY,
  order_id INTEGER NOT NULL,
  payment TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, pieces INTEGER NOT NULL);
INSERT INTO stock (item, pieces) VALUES ('kettle', 20000) ON CONFLICT (item) DO NOTHING;
"""


def ship(database, order):
    row = database.execute(
        "INSERT INTO shipments (order_id, payment) VALUES (?, ?)", (order["order"], order["payment"])
    )
    database.execute("UPDATE stock SET pieces = pieces - 1 WHERE item = 'kettle'")
    return {"shipment": row.lastrowid}


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 9002
    serve(port, Inbox("shipment.db", SCHEMA), read_secret("services.secret"), ship)
