"""Celery: a base class of tasks that are limited for all workers together.

    class Fetch(LimitedTask):
        limiter = Limiter("60/1m", store="redis://…")

    @app.task(base=Fetch)
    def fetch(url): ...

A task without a permit is not run: the same task is queued again, for the instant at which the store allows it. That
does not count as one of its retries, and no worker waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tidegate.errors import ConfigError, Denied

if TYPE_CHECKING:  # Celery has no types

    class Task:
        """A task of Celery."""

        name: str
        request: Any
        run: Any
        signature_from_request: Any

    class Retry(Exception):  # noqa: N818 - the name of Celery
        """Says that a task was queued again."""

        def __init__(self, *, when: float) -> None:
            """Take the seconds until then."""
else:
    try:
        from celery import Task
        from celery.exceptions import Retry
    except ImportError:  # pragma: no cover - the development environment has it
        raise ConfigError("needs Celery: pip install celery") from None

if TYPE_CHECKING:
    from tidegate._limiter.limiter import Limiter
    from tidegate._policy import Cost, Key


__all__ = ["LimitedTask"]


class LimitedTask(Task):
    """A task that needs a permit before it is run."""

    abstract = True
    limiter: ClassVar[Limiter | None] = None
    cost: ClassVar[Cost] = 1

    def limit_key(self, *args: Any, **kwargs: Any) -> Key:  # noqa: ANN401 - the arguments of the task
        """Return the key that is limited: by default, the name of the task."""
        del args, kwargs
        return str(self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as above
        """Run the task if there is a permit; otherwise queue it again for when there will be one."""
        if self.limiter is None:
            raise ConfigError(f"{self.name} needs a limiter: set `limiter` of its base class", field="limiter")
        key = self.limit_key(*args, **kwargs)
        decision = self.limiter.try_acquire(key, self.cost)
        if decision.allowed:
            return self.run(*args, **kwargs)
        wait = decision.retry_after
        if wait is None or self.request.called_directly:
            raise Denied(f"{self.name} has no permit for {key!r}: {', '.join(decision.violated)}", decision)
        again = self.signature_from_request(self.request, args, kwargs, countdown=wait, retries=self.request.retries)
        if self.request.is_eager:
            raise Denied(f"{self.name} has no permit for {key!r}, and runs eagerly", decision)
        again.apply_async()
        raise Retry(when=wait)
