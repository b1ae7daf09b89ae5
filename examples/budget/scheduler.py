"""A TaskScheduler that polls a task server and stays within a budget."""

import asyncio
import json
import logging
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from tidegate.budget import AsyncTaskBudget, RateLimitResult

log = logging.getLogger("scheduler")
Task = dict[str, Any]


class TaskScheduler:
    """Polls tasks, checks the budget, processes the allowed tasks, and records the completed ones."""

    def __init__(
        self,
        server: str,
        budget: AsyncTaskBudget,
        process: Callable[[Task], Awaitable[object]],
        batch_size: int = 10,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Process the tasks of a server with `process`, a coroutine function that takes a task."""
        self.server = server
        self.budget = budget
        self.process = process
        self.batch_size = batch_size
        self.sleep = sleep
        self.slots = asyncio.Semaphore(budget.settings.concurrency or batch_size)

    async def run(self, poll_every: float = 1.0) -> None:
        """Process tasks until the server has none left; wait while the budget is used up."""
        while True:
            result = await self.poll_and_process_tasks()
            if result is None:
                return
            if not result.allowed:
                await self.sleep(min(result.wait or poll_every, poll_every))

    async def poll_and_process_tasks(self) -> RateLimitResult | None:
        """Process one batch; returns the result of its check, or None if there are no tasks."""
        tasks = await self.call("GET", f"/tasks?limit={self.batch_size}")
        if not tasks:
            return None
        result = await self.budget.check_all_limits(len(tasks))
        if not result.allowed and result.fits:  # a part of the batch
            await self.return_tasks(tasks[result.fits :])
            tasks = tasks[: result.fits]
            result = await self.budget.check_all_limits(len(tasks))
        if not result.allowed:
            log.info("skipping %d tasks: %s", len(tasks), result.reason)
            await self.return_tasks(tasks)
            return result
        done = await asyncio.gather(*(self.process_one(task) for task in tasks))
        completed = [task["id"] for task, succeeded in zip(tasks, done, strict=True) if succeeded]
        await self.budget.record_completed_tasks(len(completed), task_ids=completed, result=result)
        for task in completed:
            await self.call("POST", f"/tasks/{task}/done")
        await self.return_tasks([task for task, succeeded in zip(tasks, done, strict=True) if not succeeded])
        return result

    async def process_one(self, task: Task) -> bool:
        """Process a task; returns whether it succeeded."""
        async with self.slots:
            try:
                await self.process(task)
            except Exception:
                log.exception("task %s failed", task["id"])
                return False
            return True

    async def return_tasks(self, tasks: list[Task]) -> None:
        """Return tasks to the server, which offers them again."""
        for task in tasks:
            await self.call("POST", f"/tasks/{task['id']}/failed")

    async def call(self, method: str, path: str) -> Any:  # noqa: ANN401 - any JSON value
        """Call the task server."""
        request = urllib.request.Request(self.server + path, method=method)  # noqa: S310 - our own server

        def send() -> object:
            with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310 - as above
                return json.load(response)

        return await asyncio.to_thread(send)


async def main(server: str) -> None:
    """Process the tasks of a server, within the budget that the environment configures."""

    async def process(task: Task) -> None:
        await asyncio.sleep(0.1)  # a real program calls a model here
        log.info("%s: %s", task["id"], task["prompt"])

    async with AsyncTaskBudget.from_env() as budget:
        await TaskScheduler(server, budget, process).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    with suppress(KeyboardInterrupt):  # Ctrl-C ends it
        asyncio.run(main(sys.argv[1]))
