"""Broken: it notes the event first and then does the work. If the work is cancelled with the sender's connection, as many web
frameworks do, the retry finds the note and nobody ever makes the order."""

import sqlite3

from door import database, serve, time, work


def handle(door, event):
    with database() as db:
        try:
            db.execute("INSERT INTO seen VALUES (?, ?)", [event, time.time()])
        except sqlite3.IntegrityError:
            return door.answer(200)
        work()
        if door.sender_is_gone():
            raise ConnectionAbortedError("the request was cancelled")
        db.execute("INSERT INTO orders VALUES (?)", [event])
    door.answer(200)


serve(handle)
