"""Broken: it remembers events for seven seconds (elsewhere: five minutes, in a cache). Providers retry for days."""

from door import database, serve, time, work

TTL_SECONDS = 7


def handle(door, event):
    with database() as db:
        db.execute("BEGIN IMMEDIATE")
        now = time.time()
        fresh = db.execute(
            "INSERT INTO seen VALUES (?, ?) ON CONFLICT (event) DO UPDATE SET at = excluded.at WHERE at < ?",
            [event, now, now - TTL_SECONDS],
        ).rowcount
        if fresh:
            db.execute("INSERT INTO orders VALUES (?)", [event])
        db.execute("COMMIT")
    work()
    door.answer(200)


serve(handle)
