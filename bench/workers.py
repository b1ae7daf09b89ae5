"""One process for each library, used in turn: no library runs while another is measured, or shares its heap.

Some peers keep threads that scan all their keys; in one process these would slow down whoever is measured next.
"""

from __future__ import annotations

import importlib
import multiprocessing
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.libraries import Library, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection


class Case(NamedTuple):
    """One thing to measure: `prepare` sets a library up for it, or gives None where the library cannot do it."""

    name: str
    title: str
    prepare: Callable[[Library], Callable[[], Any] | None]


def serve(pipe: Connection, name: str) -> None:
    """Measure whatever case is asked for, of one library, until the process is ended."""
    library = load(name)
    ready: dict[str, Callable[[], Any] | None] = {}
    while True:
        module, case = pipe.recv()
        if case not in ready:
            cases = {known.name: known for known in importlib.import_module(module).CASES}
            ready.clear()  # what was measured before gives its memory back
            ready[case] = cases[case].prepare(library)
        run = ready[case]
        pipe.send(None if run is None else run())


class Worker:
    """A process that measures one library."""

    def __init__(self, name: str) -> None:
        """Start it."""
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, module: str, case: str) -> Any:  # noqa: ANN401 - each comparison has its own kind of result
        """Prepare the case if it is another than before, and measure once."""
        self._pipe.send((module, case))
        return self._pipe.recv()

    def close(self) -> None:
        """End the process, whatever threads the library has left in it."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def started(names: Iterable[str]) -> Iterator[list[Worker]]:
    """Start a worker for each library."""
    workers = [Worker(name) for name in names]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()
