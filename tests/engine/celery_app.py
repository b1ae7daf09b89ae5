"""A Celery application whose limiters are created at import, and used by threads while the worker forks its pool."""

import faulthandler
import json
import os
import signal
import threading
from itertools import count
from pathlib import Path

from celery import Celery
from celery.signals import worker_before_create_process

from tests.servers.process import until
from tidegate import Limit, Limiter

FOLDER = Path(os.environ["FOLDER"])  # of what the tasks and the parent report
QUOTA = int(os.environ["QUOTA"])
CALLS = 10  # of a task, and of the parent before each fork
STACKS = (FOLDER / "stacks").open("a", encoding="utf-8")
faulthandler.register(signal.SIGRTMIN, file=STACKS)  # also works in a child that hangs while it is forked
LIMIT = Limit(QUOTA, "1d", "fixed_window")

app = Celery("tests.engine.celery_app", broker=os.environ["BROKER"])
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)
LIMITERS = {
    (store, lease): Limiter(LIMIT, store=url, lease=lease)
    for store, url in json.loads(os.environ["STORES"]).items()
    for lease in (False, True)
}


@app.task
def take(store, lease):
    """Ask for permits, and report in the file of this process how many there were."""
    allowed = sum(LIMITERS[store, lease].try_acquire(f"tasks-{lease}").allowed for _ in range(CALLS))
    with (FOLDER / f"answers-{os.getpid()}").open("a", encoding="utf-8") as answers:
        answers.write(json.dumps([store, lease, allowed]) + "\n")


@app.task
def take_in_each(children):
    """Wait until each child of the pool runs this task; then ask each limiter."""
    (FOLDER / f"met-{os.getpid()}").touch()
    until(lambda: len(list(FOLDER.glob("met-*"))) == children, "a task in each child")
    for store, lease in LIMITERS:
        take(store, lease)


@worker_before_create_process.connect
def take_in_parent(**_):
    """Take permits just before a fork, so that a leased limiter holds some that the child must not spend."""
    for store, lease in LIMITERS:
        take(store, lease)


def decide_forever(limiter: Limiter, beat: Path) -> None:
    """Decide without pause, about other keys than the tasks do; tell how often."""
    for number in count():
        limiter.try_acquire(f"{beat.name}-{number // QUOTA}")
        if number % 20 == 0:
            beat.write_text(str(number), encoding="utf-8")


for (name, leased), each in LIMITERS.items():
    words = (each, FOLDER / f"parent-{name}-{leased}")
    threading.Thread(target=decide_forever, args=words, daemon=True).start()
