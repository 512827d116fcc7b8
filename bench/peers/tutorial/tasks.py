"""The effect: one order per event, marked as processed in the same transaction."""
import json
import os

from celery import Celery
from sqlalchemy.exc import IntegrityError

from models import Order, Session, WebhookEvent

app = Celery("tasks", broker=os.environ["REDIS_URL"])
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=1, task_reject_on_worker_lost=True)


@app.task(bind=True, max_retries=5)
def process_event(self, row_id):
    with Session() as session:
        event = session.get(WebhookEvent, row_id)
        if event is None or event.processed:
            return
        data = json.loads(event.payload)["data"]["object"]
        session.add(Order(payment_id=data["id"], amount=data["amount"]))
        event.processed = True
        try:
            session.commit()
        except IntegrityError:
            session.rollback()
        except Exception as error:
            raise self.retry(exc=error, countdown=2**self.request.retries)
