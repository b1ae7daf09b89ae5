"""Forks children for tests: each runs one function, answers in a file, and is dumped and killed if it hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.servers.process import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DEADLINE = 20.0  # seconds after which a child that has not ended is a failure; an idle machine needs a hundredth


class Children:
    """The children of one test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: list[int] = []
        self.ended: set[int] = set()

    def fork(self, work: Callable[[], Any]) -> int:
        """Fork a child that calls `work` and answers what it returns, as JSON; give its number."""
        number = len(self.pids)
        path = self.path(number)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                path.write_text(json.dumps(work()), encoding="utf-8")
                code = 0
            except BaseException:  # noqa: BLE001 - the parent shows it
                path.write_text(traceback.format_exc(), encoding="utf-8")
            finally:
                os._exit(code)
        self.pids.append(pid)
        return number

    def path(self, number: int) -> Path:
        """Tell where a child leaves its answer."""
        return self.folder / f"{os.getpid()}-child-{number}"

    def answer(self, number: int) -> Any:
        """Wait for a child and give its answer; a child that failed or hangs is a failure of the test."""
        pid = self.pids[number]
        ended: list[int] = []

        def ends() -> bool:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.ended.add(pid)
                ended.append(os.waitstatus_to_exitcode(status))
            return bool(done)

        try:
            until(ends, f"the end of child {number}", DEADLINE)
        except AssertionError as error:
            raise AssertionError(f"{error}; its stacks:\n{self.dump(pid)}") from None
        said = self.path(number).read_text(encoding="utf-8") if self.path(number).exists() else "it said nothing"
        assert ended == [0], f"child {number} ended with {ended[0]}:\n{said}"
        return json.loads(said)

    def answers(self) -> list[Any]:
        """Wait for all children and give their answers."""
        return [self.answer(number) for number in range(len(self.pids))]

    def dump(self, pid: int) -> str:
        """Have a child that hangs write its stacks."""
        dump = self.folder / "stacks"
        os.kill(pid, signal.SIGUSR1)
        until(lambda: "most recent call first" in dump.read_text(encoding="utf-8"), "a dump of its stacks", 2)
        return dump.read_text(encoding="utf-8")

    def close(self) -> None:
        """Kill the children that have not ended."""
        for pid in set(self.pids) - self.ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@contextmanager
def forking(folder: Path) -> Iterator[Children]:
    """Fork children until the end of the block."""
    with (folder / "stacks").open("a", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)  # also works in a child that hangs while it is forked
        children = Children(folder)
        try:
            yield children
        finally:
            children.close()
            faulthandler.unregister(signal.SIGUSR1)


class Spender:
    """Something that takes permits of one key in a tight loop, in the background, and counts them."""

    def __init__(self, run: Callable[[Spender], object]) -> None:
        self.taken = 0
        self.calls = 0
        self.ending = False
        self.error: BaseException | None = None
        self._run = run
        self.thread = threading.Thread(target=self._guarded)

    def _guarded(self) -> None:
        try:
            self._run(self)
        except BaseException as error:  # noqa: BLE001 - raised where it is joined
            self.error = error

    def saw(self, decision: Any) -> None:
        self.calls += 1
        self.taken += decision.allowed


@contextmanager
def spending(run: Callable[[Spender], object], threads: int) -> Iterator[list[Spender]]:
    """Run spenders until the end of the block."""
    spenders = [Spender(run) for _ in range(threads)]
    for spender in spenders:
        spender.thread.start()
    try:
        until(lambda: all(spender.calls > 5 or spender.error for spender in spenders), "the first calls")
        yield spenders
    finally:
        for spender in spenders:
            spender.ending = True
        for spender in spenders:
            spender.thread.join(20)
    for spender in spenders:
        assert not spender.thread.is_alive()
        if spender.error is not None:
            raise spender.error


def goes_on(spenders: list[Spender]) -> None:
    """See that each spender is answered again."""
    before = [spender.calls for spender in spenders]
    until(
        lambda: all(spender.calls > calls + 1 for spender, calls in zip(spenders, before, strict=True)), "further calls"
    )
