"""Commits each webhook that oncehook forwards once, in this application's own database.

Promises: nothing unsigned touches the database; the key and the effect commit together or not at all; a repeat is answered
with what the first one was answered, with 200 and never with an error; 503 means that nothing was committed, or that
nobody knows, and that trying again is safe.

Does not: anything outside its database. An effect that leaves it (a mail, a call) belongs into a table of things to do,
written in the same transaction, or into a route of its own in oncehook.

Python's standard library only. docs/RECEIVER.md tells the same for other databases.
"""

import base64
import hashlib
import hmac
import json
import signal
import sqlite3
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOLERANCE_SECONDS = 300
LARGEST_BODY_BYTES = 1 << 20

TABLE = """
CREATE TABLE IF NOT EXISTS received_webhooks (
  idempotency_key TEXT PRIMARY KEY,
  received_at INTEGER NOT NULL DEFAULT (unixepoch()),
  answer TEXT
) WITHOUT ROWID;
"""
TAKE = """
INSERT INTO received_webhooks (idempotency_key) VALUES (:key)
ON CONFLICT (idempotency_key) DO NOTHING
"""
KEEP = "UPDATE received_webhooks SET answer = :answer WHERE idempotency_key = :key"
FIND = "SELECT answer FROM received_webhooks WHERE idempotency_key = :key"


class Rejected(Exception):
    """The request is not from our gateway, or not from now."""


def verify(secret, headers, body, now):
    """Checks a Standard Webhooks signature over the raw body and returns the idempotency key, which it covers."""
    key = headers.get("webhook-id", "")
    timestamp = headers.get("webhook-timestamp", "")
    if not key or not timestamp.isascii() or not timestamp.isdigit():
        raise Rejected("webhook-id or webhook-timestamp is missing")
    if abs(now - int(timestamp)) > TOLERANCE_SECONDS:
        raise Rejected("webhook-timestamp is too old or too new")
    signed = f"{key}.{timestamp}.".encode() + body
    mac = hmac.new(secret, signed, hashlib.sha256)
    expected = b"v1," + base64.b64encode(mac.digest())
    given = headers.get("webhook-signature", "").encode().split(b" ")
    if not any([hmac.compare_digest(expected, one) for one in given]):
        raise Rejected("webhook-signature does not fit")
    # Idempotency-Key is the same text, but only webhook-id is signed.
    if headers.get("idempotency-key", key) != key:
        raise Rejected("idempotency-key is not webhook-id")
    return key


class Inbox:
    """The application's database with its table of keys. One connection and one writer at a time, as SQLite has it."""

    def __init__(self, path, schema):
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.executescript(TABLE + schema)

    def once(self, key, effect):
        """Runs effect(database) unless the key is known. Returns its answer, as JSON text, and whether it is a repeat."""
        with self._lock:
            database = self._database
            database.execute("BEGIN IMMEDIATE")
            try:
                repeat = database.execute(TAKE, {"key": key}).rowcount == 0
                if repeat:
                    (answer,) = database.execute(FIND, {"key": key}).fetchone()
                else:
                    answer = json.dumps(effect(database))
                    database.execute(KEEP, {"answer": answer, "key": key})
                database.execute("COMMIT")
                return answer, repeat
            except BaseException:
                if database.in_transaction:
                    database.execute("ROLLBACK")
                raise


def serve(port, inbox, secret, effect):
    """Answers webhooks until the process ends. effect(database, event) makes the changes and returns the answer."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30
        wbufsize = -1  # head and body leave in one piece

        def do_POST(self):
            length = self.headers.get("content-length", "")
            if not length.isdigit() or int(length) > LARGEST_BODY_BYTES:
                self.close_connection = True
                return self.reply(413, {"error": "too large, or of unknown length"})
            body = self.rfile.read(int(length))
            try:
                key = verify(secret, self.headers, body, time.time())
                event = json.loads(body)
            except Rejected as rejected:
                return self.reply(401, {"error": str(rejected)})
            except ValueError:
                return self.reply(400, {"error": "the body is not JSON"})
            try:
                answer, repeat = inbox.once(key, lambda database: effect(database, event))
            except Exception as error:
                say(f"failed {key}: {error!r}")
                return self.reply(503, {"error": "nothing was committed; try again"})
            say(f"{'repeat' if repeat else 'applied'} {key}")
            self.reply(200, answer)

        def reply(self, status, answer):
            body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    # End without a stack trace when the terminal says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    server = Server(("127.0.0.1", port), Handler)
    say(f"listening on http://127.0.0.1:{port}")
    server.serve_forever()


def read_secret(path):
    """The bytes that sign: what follows whsec_ is base64."""
    with open(path, encoding="ascii") as file:
        return base64.b64decode(file.read().strip().removeprefix("whsec_"), validate=True)


def say(text):
    print(text, file=sys.stderr, flush=True)
