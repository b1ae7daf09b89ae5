"""A small task server: hands out tasks, takes failed tasks back, and stores which are done.

GET  /tasks?limit=10       returns up to ten tasks, and offers them to nobody else
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
    """Stores the tasks; a context manager that serves them from a thread."""

    daemon_threads = True

    def __init__(self, tasks: list[Task], port: int = 0) -> None:
        """Offer these tasks."""
        super().__init__(("127.0.0.1", port), Handler)
        self.waiting = deque(tasks)
        self.in_progress: dict[str, Task] = {}
        self.done: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, limit: int) -> list[Task]:
        """Take up to `limit` tasks out of the queue."""
        with self.lock:
            taken = [self.waiting.popleft() for _ in range(min(limit, len(self.waiting)))]
            self.in_progress.update((task["id"], task) for task in taken)
            return taken

    def settle(self, task_id: str, outcome: str) -> bool:
        """Mark a task as done, or offer it again; returns whether it was in progress."""
        with self.lock:
            task = self.in_progress.pop(task_id, None)
            if task is None:
                return False
            if outcome == "done":
                self.done.append(task_id)
            else:
                self.waiting.append(task)
            return True

    def __enter__(self) -> Self:
        """Start the thread."""
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server and its thread."""
        self.shutdown()
        self.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    """Handles the HTTP requests of the server."""

    server: TaskServer

    def do_GET(self) -> None:
        """Offer tasks."""
        query = parse_qs(urlsplit(self.path).query)
        self.respond(200, self.server.take(int(query.get("limit", ["10"])[0])))

    def do_POST(self) -> None:
        """Settle a task."""
        _, _, task_id, outcome = self.path.split("/")
        known = self.server.settle(task_id, outcome)
        self.respond(200 if known else 404, {"known": known})

    def respond(self, status: int, value: object) -> None:
        """Respond with JSON."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def some_tasks(count: int) -> list[Task]:
    """Create example tasks."""
    return [{"id": f"task-{number}", "prompt": f"summarise document {number}"} for number in range(1, count + 1)]


if __name__ == "__main__":
    TaskServer(some_tasks(60), int(sys.argv[1])).serve_forever()
