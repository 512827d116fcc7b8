"""The effect, tuned: raw statements on one connection per worker, tasks fetched in bulk, no results kept."""
import os
from urllib.parse import urlparse

import orjson
import pymysql
from celery import Celery

app = Celery("tasks", broker=os.environ["REDIS_URL"])
app.conf.update(task_acks_late=True, worker_prefetch_multiplier=64, task_ignore_result=True, broker_pool_limit=64,
                worker_send_task_events=False, task_send_sent_event=False)
connection = None


def connect():
    global connection
    if connection is None:
        url = urlparse(os.environ["DATABASE_URL"])
        connection = pymysql.connect(host=url.hostname, port=url.port, user=url.username,
                                     password=url.password or "", database=url.path[1:])
    return connection


@app.task(bind=True, max_retries=5)
def process_event(self, row_id):
    database = connect()
    try:
        with database.cursor() as cursor:
            cursor.execute("SELECT payload FROM webhook_events WHERE id = %s AND processed = 0 FOR UPDATE", (row_id,))
            row = cursor.fetchone()
            if row is not None:
                data = orjson.loads(row[0])["data"]["object"]
                cursor.execute("INSERT INTO orders (payment_id, amount) VALUES (%s, %s) "
                               "ON DUPLICATE KEY UPDATE payment_id = payment_id", (data["id"], data["amount"]))
                cursor.execute("UPDATE webhook_events SET processed = 1 WHERE id = %s", (row_id,))
        database.commit()
    except pymysql.Error as error:
        database.rollback()
        raise self.retry(exc=error, countdown=2**self.request.retries)
