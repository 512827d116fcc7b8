"""Counts what came of it, in the three databases. Only reads."""

import sqlite3


def ask(file, question):
    database = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    (number,) = database.execute(question).fetchone()
    database.close()
    return number


print("orders:", ask("shop.db", "SELECT count(*) FROM orders"))
print("mails:", ask("mail.db", "SELECT count(*) FROM mails"))
print("shipments:", ask("shipment.db", "SELECT count(*) FROM shipments"))
print("kettles in stock:", ask("shipment.db", "SELECT pieces FROM stock"))
