"""Many small cases in one test: `@cases` instead of `@pytest.mark.parametrize` where rows share their fixtures.

An id for each of thousands of rows costs more than the rows, and hides in the count of tests what is one promise.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from _pytest.mark import ParameterSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

MOST = 10  # failures that are shown


def cases(names: str | tuple[str, ...], table: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call a test with each row of a table; it fails with all rows that failed, named by their values.

    Rows share the fixtures of the test. Several decorators multiply, as those of pytest do.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [values_of(row, len(keys)) for row in table]
    assert rows, "a table without rows tests nothing"

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in keys]

        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def all_rows(**given: Any) -> None:
                failed = Failures()
                for arguments in named(keys, rows):
                    with failed.of(arguments):
                        await test(**given, **arguments)
                failed.report()
        else:

            @functools.wraps(test)
            def all_rows(**given: Any) -> None:
                failed = Failures()
                for arguments in named(keys, rows):
                    with failed.of(arguments):
                        test(**given, **arguments)
                failed.report()

        all_rows.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]  # what pytest reads
        return all_rows

    return decorate


def values_of(row: Any, count: int) -> tuple[Any, ...]:
    """Return the values of a row, which may be a `pytest.param` with an id."""
    if isinstance(row, ParameterSet):
        assert not row.marks, "a row with a mark needs a test of its own"
        return tuple(row.values)
    return (row,) if count == 1 else tuple(row)


def named(keys: list[str], rows: list[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each row."""
    return (dict(zip(keys, row, strict=True)) for row in rows)


class CasesFailed(ExceptionGroup[Exception]):
    """Several rows failed."""


class Failures:
    """The rows that failed."""

    def __init__(self) -> None:
        self._found: list[Exception] = []
        self._arguments: dict[str, Any] = {}

    def of(self, arguments: dict[str, Any]) -> Failures:
        """Record the failure of the block as that of these arguments."""
        self._arguments = arguments
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        # What pytest raises to skip a test, or because its time is over, is no Exception: it ends the test.
        if not isinstance(error, Exception):
            return False
        for each in error.exceptions if isinstance(error, CasesFailed) else [error]:
            each.add_note(f"in the case {self._arguments!r}")
            self._found.append(each)
        return True

    def report(self) -> None:
        """Raise what was recorded."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise CasesFailed(f"{len(self._found)} cases failed", self._found[:MOST])
