"""The receiver, as a tutorial has it: check the signature, SET NX, insert, hand over to Celery."""
import hashlib
import hmac
import json
import os
import time

import redis
from fastapi import FastAPI, HTTPException, Request
from sqlalchemy.exc import IntegrityError

from models import Order, Session, WebhookEvent
from tasks import process_event

app = FastAPI()
cache = redis.Redis.from_url(os.environ["REDIS_URL"])
SECRET = os.environ["WEBHOOK_SECRET"].encode()


def verify(header: str, body: bytes) -> None:
    parts = dict(part.split("=", 1) for part in header.split(","))
    expected = hmac.new(SECRET, f"{parts['t']}.".encode() + body, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected, parts["v1"]) or abs(time.time() - int(parts["t"])) > 300:
        raise HTTPException(401, "bad signature")


@app.post("/webhooks/stripe")
async def receive(request: Request):
    body = await request.body()
    verify(request.headers["stripe-signature"], body)
    event = json.loads(body)
    if not cache.set(f"webhook:{event['id']}", 1, nx=True, ex=86400):
        return {"status": "duplicate"}
    with Session() as session:
        row = WebhookEvent(event_id=event["id"], type=event["type"], payload=body.decode())
        session.add(row)
        try:
            session.commit()
        except IntegrityError:
            return {"status": "duplicate"}
        process_event.delay(row.id)
    return {"status": "accepted"}


@app.get("/count")
def count():
    with Session() as session:
        return {"orders": session.query(Order).count()}
