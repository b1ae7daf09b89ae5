"""Plant faults in `core/`, one at a time, and count how many the tests catch: `make mutants`.

Each mutant is one small change to the syntax tree of one module: a comparison, an operator, a number, a condition, a
dropped statement. It runs in a process of its own, forked from one that has everything but tidegate imported, against
the tests of the core and the engine, stopping at the first failure. A mutant that no test notices is printed with its
line; some of those change nothing that can be seen (`--show` prints all of them).

    python tests/mutants/run.py [--sample N] [--seed N] [--module limit.py] [--function parse] [--jobs 2] [--tests tests/core]
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Groups = Sequence[Sequence[str]]

ROOT = Path(__file__).parents[2]
CORE = ROOT / "src" / "tidegate" / "core"
# Run one group after the other: most mutants are caught by the first, which starts fast.
TESTS = (
    ("tests/core/test_parse.py", "tests/core/test_oracle.py", "tests/core/test_calendar.py", "tests/core/test_adjust.py"),
    (
        "tests/core/test_window_changes.py",
        "tests/core/test_changed_limits.py",
        "tests/engine/test_limiter.py",
        "tests/engine/test_reservation.py",
        "tests/engine/test_settling.py",
    ),
    ("tests/core", "tests/conformance"),
)
PLUGINS = ("pytest_asyncio.plugin", "_hypothesis_pytestplugin", "pytest_timeout")
SECONDS = 240  # a mutant that runs longer hangs, which is noticed too
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
OPERATE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
NAMES = {"min": "max", "max": "min", "bisect_left": "bisect_right", "bisect_right": "bisect_left"}

# Mutants that change nothing anybody can see, by module, line and change, with the reason. Not planted, and counted apart.
EQUIVALENT = {
    ("log.py", "if head > 16 and head * 2 > tail:", "Gt -> GtE"): "when to copy a log, not what is in it",
    ("log.py", "if head > 16 and head * 2 > tail:", "16 -> 17"): "as above",
    ("log.py", "if head > 16 and head * 2 > tail:", "2 -> 3"): "as above",
    ("log.py", "if head > 16 and head * 2 > tail:", "And -> Or"): "as above",
    ("log.py", "if head > 16 and head * 2 > tail:", "condition negated"): "as above",
    ("log.py", "if total < 0 and [i for i, _, _ in changes] == list(range(head, head + len(changes))):", "0 -> 1"):
        "a change of nothing is not asked for",
    ("bucket.py", "if new.scale > MAX // old.scale:", "Gt -> GtE"): "a part is dropped one step earlier, below a permit",
    ("sliding.py", "return int(state[3] + state[0].length * (2 if state[1] else 1))", "1 -> 2"): "kept longer than needed",
    ("bounds.py", "if exact.denominator <= widest:", "LtE -> Lt"): "fraction_below finds the exact one too",
    ("calendar.py", "start, end = _recent(self, now // (60 * SECOND))", "60 -> 61"): "only which windows are remembered",
    ("calendar.py", "@lru_cache(maxsize=1024)", "1024 -> 1025"): "as above",
    ("calendar.py", "@lru_cache(maxsize=256)", "256 -> 257"): "as above",
    ("limit.py", "scale: int = field(init=False, repr=False, compare=False, default=1)", "1 -> 2"): "set before it is used",
    ("limit.py", "rate: int = field(init=False, repr=False, compare=False, default=0)", "0 -> 1"): "as above",
    ("limit.py", "capacity: int = field(init=False, repr=False, compare=False, default=0)", "0 -> 1"): "as above",
    ("limit.py", "floor: int = field(init=False, repr=False, compare=False, default=0)", "0 -> 1"): "as above",
    ("limit.py", "elif isinstance(period, (int, float)) and not isinstance(period, bool) and abs(period) < LONGEST:",
     "Lt -> LtE"): "refused below for the same reason",
}  # fmt: skip


class Mutant(NamedTuple):
    """One planted fault: where, what, the whole module with it, and the function it is in."""

    module: str
    line: int
    what: str
    source: str
    function: str = ""


def mutants(path: Path) -> Iterator[Mutant]:
    """Give every mutant of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = beside_the_point(tree)
    functions = {
        inner: outer.name for outer in ast.walk(tree) if isinstance(outer, ast.FunctionDef) for inner in ast.walk(outer)
    }
    for index, node in enumerate(ast.walk(tree)):
        if node in skipped:
            continue
        for what, change in changes(node):
            planted = copy.deepcopy(tree)
            change(next(other for i, other in enumerate(ast.walk(planted)) if i == index))
            line, function = getattr(node, "lineno", 0), functions.get(node, "")
            yield Mutant(path.name, line, what, ast.unparse(planted), function)


def beside_the_point(tree: ast.Module) -> set[ast.AST]:
    """Find what cannot matter: type annotations, what only type checkers read, and messages."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns]
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            parts = [node.annotation]
        elif (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING") or isinstance(
            node, (ast.JoinedStr, ast.Raise)
        ):
            parts = [node]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            parts = [node]  # an alias of a type
        found.update(child for part in parts if part is not None for child in ast.walk(part))
    return found


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Give the small changes that can be made to a node."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            other: Any = COMPARE[type(operator)]
            yield (
                f"{type(operator).__name__} -> {other.__name__}",
                lambda n, i=i, other=other: n.ops.__setitem__(i, other()),
            )
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATE:
        other = OPERATE[type(node.op)]
        yield f"{type(node.op).__name__} -> {other.__name__}", lambda n, other=other: setattr(n, "op", other())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value} -> {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {other.__name__}", lambda n, other=other: setattr(n, "op", other())
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "condition negated", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield f"{node.id} -> {NAMES[node.id]}", lambda n: setattr(n, "id", NAMES[n.id])
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "returns None", lambda n: setattr(n, "value", ast.Constant(None))
    elif isinstance(node, (ast.FunctionDef, ast.If, ast.For)):
        for i, statement in enumerate(node.body):
            if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Delete)):
                yield "statement dropped", lambda n, i=i: n.body.__setitem__(i, ast.Pass())


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from the mutant's source instead of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = f"tidegate.core.{mutant.module.removesuffix('.py')}"
        self.source = mutant.source

    def find_spec(self, name: str, *_: object) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.source, self.name, "exec"), module.__dict__)  # noqa: S102 - the mutant is our own code


def start(mutant: Mutant, groups: Groups) -> int:
    """Run the tests on a mutant in a process of its own."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.environ["CI"] = "true"  # the same examples for every mutant, so that none is caught by luck
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.meta_path.insert(0, Planted(mutant))
    import pytest  # noqa: PLC0415 - imported by the parent already

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the others take longer to import than most mutants live
    options = [part for plugin in PLUGINS for part in ("-p", plugin)]
    options += ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "--no-header", "--tb=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # Hypothesis was imported before pytest looked
    try:
        code = next((code for tests in groups if (code := int(pytest.main([*options, *tests])))), 0)
    except BaseException:  # noqa: BLE001 - whatever a mutant does, it was noticed
        code = 1
    os._exit(0 if code == 0 else 1)


def judge(queue: list[Mutant], groups: Groups, jobs: int) -> list[Mutant]:
    """Run all mutants, some at a time; give those that survived."""
    survivors: list[Mutant] = []
    running: dict[int, tuple[Mutant, float]] = {}
    total = len(queue)
    queue = list(queue)
    while queue or running:
        while queue and len(running) < jobs:
            mutant = queue.pop(0)
            running[start(mutant, groups)] = (mutant, time.monotonic())
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            mutant, _ = running.pop(done)
            if status == 0:
                survivors.append(mutant)
                print(f"\nsurvived: core/{mutant.module}:{mutant.line} {mutant.what}")
            print(f"\r{total - len(queue) - len(running)}/{total}, {len(survivors)} survived", end="", flush=True)
            continue
        for child, (_, since) in running.items():
            if time.monotonic() - since > SECONDS:
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    print()
    return survivors


def main() -> None:
    """Plant, run, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="only so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--module", action="append", help="only this module of core/ (may be repeated)")
    parser.add_argument("--function", action="append", help="only this function (may be repeated)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tests", action="append", help="what to run (may be repeated)")
    parser.add_argument("--show", action="store_true", help="list the mutants and stop")
    options = parser.parse_args()
    os.chdir(ROOT)
    paths = [path for path in sorted(CORE.glob("*.py")) if not options.module or path.name in options.module]
    lines = {path.name: path.read_text(encoding="utf-8").splitlines() for path in paths}
    every = [mutant for path in paths for mutant in mutants(path)]
    planted = [
        m for m in every if (m.module, lines[m.module][m.line - 1].split("  #")[0].strip(), m.what) not in EQUIVALENT
    ]
    if options.function:
        planted = [m for m in planted if m.function in options.function]
    if options.sample:
        planted = random.Random(options.seed).sample(planted, min(options.sample, len(planted)))
    if options.show:
        for mutant in planted:
            print(f"core/{mutant.module}:{mutant.line} {mutant.what}")
        return
    for name in ("pytest", "hypothesis.stateful", *PLUGINS):
        importlib.import_module(name)  # once, for all that are forked

    groups = [options.tests] if options.tests else TESTS
    control = Mutant("algorithms.py", 0, "nothing changed", (CORE / "algorithms.py").read_text(encoding="utf-8"))
    if os.waitpid(start(control, groups), 0)[1]:
        sys.exit("the tests fail without a mutant: nothing can be said")
    began = time.monotonic()
    survivors = judge(planted, groups, options.jobs)
    caught = len(planted) - len(survivors)
    took = time.monotonic() - began
    print(f"{caught} of {len(planted)} mutants caught: {caught / len(planted):.1%}, in {took:.0f} s")


if __name__ == "__main__":
    main()
