"""Broken: it answers first and notes the event afterwards. If the sender is gone by then, the note is never written, and the
retry makes a second order. (A lock keeps copies apart that arrive together.)"""

import threading

from door import database, serve, time, work

one_at_a_time = threading.Lock()


def handle(door, event):
    with one_at_a_time, database() as db:
        if db.execute("SELECT 1 FROM seen WHERE event = ?", [event]).fetchone():
            return door.answer(200)
        work()
        db.execute("INSERT INTO orders VALUES (?)", [event])
        door.answer(200)
        db.execute("INSERT INTO seen VALUES (?, ?)", [event, time.time()])


serve(handle)
