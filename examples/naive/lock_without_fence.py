"""Broken: it takes a lock that runs out, works, and does not look whether the lock is still its own when it writes. Work that takes
longer than the lock is done twice by a sender that tries again."""

from door import database, serve, time, work

LOCK_SECONDS = 0.6
WORK_SECONDS = 1.4


def lock(db, event):
    now = time.time()
    return db.execute(
        "INSERT INTO locks VALUES (?, ?) ON CONFLICT (event) DO UPDATE SET until = excluded.until WHERE until < ?",
        [event, now + LOCK_SECONDS, now],
    ).rowcount


def handle(door, event):
    with database() as db:
        if db.execute("SELECT 1 FROM seen WHERE event = ?", [event]).fetchone():
            return door.answer(200)
        if not lock(db, event):
            return door.answer(409)
        work(WORK_SECONDS)
        db.execute("INSERT INTO orders VALUES (?)", [event])
        db.execute("INSERT OR REPLACE INTO seen VALUES (?, ?)", [event, time.time()])
    door.answer(200)


serve(handle)
