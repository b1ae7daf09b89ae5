"""A small task server: offers tasks, takes them back, and knows which are done.

GET  /tasks?limit=10       up to ten tasks, which nobody else is offered meanwhile
POST /tasks/ID/done        the task is done
POST /tasks/ID/failed      the task is offered again
"""

import json
import sys
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

Task = dict[str, Any]


class TaskServer(ThreadingHTTPServer):
    """Keeps the tasks; a context manager that serves them from a thread."""

    daemon_threads = True

    def __init__(self, tasks: list[Task], port: int = 0) -> None:
        """Offer these tasks, by id."""
        super().__init__(("127.0.0.1", port), Handler)
        self.waiting = deque(tasks)
        self.under_way: dict[str, Task] = {}
        self.done: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, limit: int) -> list[Task]:
        """Offer some tasks."""
        with self.lock:
            taken = [self.waiting.popleft() for _ in range(min(limit, len(self.waiting)))]
            self.under_way.update((task["id"], task) for task in taken)
            return taken

    def settle(self, name: str, outcome: str) -> bool:
        """Take a task back."""
        with self.lock:
            task = self.under_way.pop(name, None)
            if task is None:
                return False
            if outcome == "done":
                self.done.append(name)
            else:
                self.waiting.append(task)
            return True

    def __enter__(self) -> Self:
        """Serve."""
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.shutdown()
        self.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    """Speaks HTTP for the server."""

    server: TaskServer

    def do_GET(self) -> None:
        """Offer tasks."""
        query = parse_qs(urlsplit(self.path).query)
        self.answer(200, self.server.take(int(query.get("limit", ["10"])[0])))

    def do_POST(self) -> None:
        """Take a task back."""
        _, _, name, outcome = self.path.split("/")
        known = self.server.settle(name, outcome)
        self.answer(200 if known else 404, {"known": known})

    def answer(self, status: int, value: object) -> None:
        """Answer in JSON."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


def some_tasks(count: int) -> list[Task]:
    """Make tasks up."""
    return [{"id": f"task-{number}", "prompt": f"summarise document {number}"} for number in range(1, count + 1)]


if __name__ == "__main__":
    TaskServer(some_tasks(60), int(sys.argv[1])).serve_forever()
