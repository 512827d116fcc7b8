"""What the five handlers share: an HTTP server that checks Stripe's signature, and a shop whose orders anybody can count.

The handlers differ in one thing only: when and how they remember that an event has been handled.
"""

import hashlib
import hmac
import http.server
import json
import os
import select
import socket
import sqlite3
import sys
import time

SECRET = os.environ.get("STRIPE_SECRET", "whsec_naive").encode()

TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS orders (event TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS seen (event TEXT PRIMARY KEY, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS locks (event TEXT PRIMARY KEY, until REAL NOT NULL);
"""


def database():
    return sqlite3.connect(sys.argv[2], timeout=30, isolation_level=None)


def work(seconds=0.05):
    """Calling the payment API, rendering the invoice: whatever takes a moment."""
    time.sleep(seconds)


class Door(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    handle_event = None

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if not self.is_genuine(body):
            return self.answer(401)
        return type(self).handle_event(self, json.loads(body)["id"])

    def is_genuine(self, body):
        parts = dict(part.split("=", 1) for part in self.headers.get("stripe-signature", "").split(",") if "=" in part)
        signed = parts.get("t", "").encode() + b"." + body
        return hmac.compare_digest(hmac.new(SECRET, signed, hashlib.sha256).hexdigest(), parts.get("v1", ""))

    def answer(self, status):
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def sender_is_gone(self):
        """What web frameworks look at when they cancel the handler of a request that nobody waits for."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, *_):
        """A sender that has gone away is nothing to talk about."""


def serve(handle_event):
    Door.handle_event = handle_event
    database().executescript(TABLES)
    server = Server(("127.0.0.1", int(sys.argv[1])), Door)
    print(f"listening on http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()
