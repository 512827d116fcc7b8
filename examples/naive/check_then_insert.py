"""Broken: it looks whether the event is known, and notes it later. Copies that arrive together all find nothing."""

from door import database, serve, time, work


def handle(door, event):
    with database() as db:
        if db.execute("SELECT 1 FROM seen WHERE event = ?", [event]).fetchone():
            return door.answer(200)
        work()
        db.execute("INSERT INTO orders VALUES (?)", [event])
        db.execute("INSERT OR REPLACE INTO seen VALUES (?, ?)", [event, time.time()])
    door.answer(200)


serve(handle)
