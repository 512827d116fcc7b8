"""The receiver, tuned: asynchronous drivers with pools, one statement, no ORM, no validation layer in between."""
import asyncio
import hashlib
import hmac
import os
import time
from contextlib import asynccontextmanager
from urllib.parse import urlparse

import asyncmy
import orjson
import redis.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tasks import process_event

SECRET = hmac.new(os.environ["WEBHOOK_SECRET"].encode(), digestmod=hashlib.sha256)
ACCEPTED, DUPLICATE = b'{"status":"accepted"}', b'{"status":"duplicate"}'


@asynccontextmanager
async def lifespan(app):
    url = urlparse(os.environ["DATABASE_URL"])
    app.state.pool = await asyncmy.create_pool(
        host=url.hostname, port=url.port, user=url.username, password=url.password or "", db=url.path[1:],
        minsize=16, maxsize=32, autocommit=True)
    app.state.cache = redis.asyncio.Redis.from_url(os.environ["REDIS_URL"], max_connections=64)
    yield
    app.state.pool.close()


def genuine(header: str, body: bytes) -> bool:
    stamp, signature = header.split(",", 1)
    mac = SECRET.copy()
    mac.update(stamp[2:].encode() + b"." + body)
    fresh = abs(time.time() - int(stamp[2:])) <= 300
    return fresh and hmac.compare_digest(mac.hexdigest(), signature[3:])


async def receive(request: Request) -> Response:
    body = await request.body()
    if not genuine(request.headers["stripe-signature"], body):
        return Response(status_code=401)
    event = orjson.loads(body)
    state, key = request.app.state, event["id"]
    if not await state.cache.set(key, 1, nx=True, ex=86400):
        return Response(DUPLICATE, media_type="application/json")
    async with state.pool.acquire() as connection, connection.cursor() as cursor:
        try:
            await cursor.execute(
                "INSERT INTO webhook_events (event_id, type, payload, processed) VALUES (%s, %s, %s, 0)",
                (key, event["type"], body))
        except asyncmy.errors.IntegrityError:
            return Response(DUPLICATE, media_type="application/json")
        row = cursor.lastrowid
    await asyncio.to_thread(process_event.apply_async, (row,), ignore_result=True)
    return Response(ACCEPTED, media_type="application/json")


async def count(request: Request) -> Response:
    async with request.app.state.pool.acquire() as connection, connection.cursor() as cursor:
        await cursor.execute("SELECT COUNT(*) FROM orders")
        (orders,) = await cursor.fetchone()
    return Response(orjson.dumps({"orders": orders}), media_type="application/json")


app = Starlette(routes=[Route("/webhooks/stripe", receive, methods=["POST"]), Route("/count", count)], lifespan=lifespan)
