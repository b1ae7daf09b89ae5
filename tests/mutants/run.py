"""Plant faults in `core/`, one at a time, and count how many the tests catch: `make mutants`.

Each mutant is one small change to the syntax tree of one module: a comparison, an operator, a number, a condition, a
dropped statement. It runs in a process of its own, forked from one that has everything but tidegate imported, against
the tests of the core and the engine, stopping at the first failure; tests that caught a mutant of the same function
run first. A mutant that no test notices is printed with its line; some of those change nothing that can be seen
(`--show` prints all of them).

    python tests/mutants/run.py [--changed [--commits 20]] [--sample N] [--seed N] [--module _limit.py] [--function parse] [--jobs 2] [--tests tests/core]
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
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Groups = Sequence[Sequence[str]]

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # run as a script
from tests.mutants.changed import COMMITS, changed_lines  # noqa: E402 - after the path

CORE = ROOT / "src" / "tidegate" / "core"
# Run one group after the other: most mutants are caught by the first, which starts fast.
TESTS = (
    (
        "tests/core/test_parse.py",
        "tests/core/test_oracle.py",
        "tests/core/test_calendar.py",
        "tests/core/test_adjust.py",
    ),
    (
        "tests/core/test_window_changes.py",
        "tests/core/test_changed_limits.py",
        "tests/core/test_bucket_changes.py",
        "tests/core/test_bucket_corrections.py",
        "tests/core/test_window_corrections.py",
        "tests/core/test_sliding_histories.py",
        "tests/core/test_log_histories.py",
        "tests/core/test_limit_numbers.py",
        "tests/core/test_traits.py",
        "tests/core/test_rate_fractions.py",
        "tests/engine/test_limiter.py",
        "tests/engine/test_reservation.py",
        "tests/engine/test_settling.py",
    ),
    ("tests/core", "tests/conformance"),
)
PLUGINS = ("pytest_asyncio.plugin", "_hypothesis_pytestplugin", "pytest_timeout")
SECONDS = 240  # a mutant that runs longer hangs, which is noticed too
MOST_CHANGED = 60  # mutants of changed lines
CHANGED_SECONDS = 60  # one of these hangs
MAX_CATCHERS = 6  # tests per function that are run first
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
OPERATE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
NAMES = {"min": "max", "max": "min", "bisect_left": "bisect_right", "bisect_right": "bisect_left"}

# Mutants that change nothing anybody can see, by module, line and change, with the reason. Not planted, and counted apart.
EQUIVALENT = {
    ("_algorithms.py", "return limit.view(state, limit, 0, now).remaining", "0 -> 1"): "what remains does not depend on the cost",
    ("_bounds.py", "if exact.denominator <= widest:", "LtE -> Lt"): "fraction_below finds the exact one too",
    ("_bounds.py", "b = pow(p, -1, q) if q > 1 else 0", "Gt -> GtE"): "the inverse modulo 1 is 0",
    ("_bounds.py", "b = pow(p, -1, q) if q > 1 else 0", "0 -> 1"): "for q = 1, the next line makes it `widest` from either",
    ("_bucket.py", "if state is not None and state[0] is limit:", "0 -> 1"): "refill, for all other states, gives the same",
    ("_bucket.py", "if now > at:", "Gt -> GtE"): "no time has passed, so nothing is refilled",
    ("_bucket.py", "if now - at > limit.max_elapsed:", "Gt -> GtE"): "both refill to the same level",
    ("_bucket.py", "if level > limit.capacity:", "Gt -> GtE"): "both are the capacity",
    ("_bucket.py", "if now > seen:", "Gt -> GtE"): "as above",
    ("_bucket.py", "if state is not None and state[0] != limit and expires_bucket(state) > now:", "Gt -> GtE"):
        "at that instant it is full, which both views say alike",
    ("_bucket.py", "before = at + ceil_div(cost * owner.scale - was, owner.rate) if cost <= owner.burst else ends",
     "LtE -> Lt"): "for a cost of the whole burst, that is when it ends",
    ("_bucket.py", "if delta >= 0:", "GtE -> Gt"): "a change of nothing is not asked for",
    ("_bucket.py", "if delta >= 0:", "0 -> 1"): "as above",
    ("_bucket.py", "marks = tuple([(t, max(top, peak + credit) if t <= at else top + credit) for t, top in marks])",
     "LtE -> Lt"): "a mark of that very instant is the peak, so that both sums are the same",
    ("_bucket.py", "if state is None or state[0] is not limit:", "0 -> 1"): "only the short path is not taken",
    ("_bucket.py", "return view_bucket(state, limit, 0, now).remaining", "0 -> 1"): "what remains does not depend on the cost",
    ("_bucket.py", "if state is None or state[0] is not limit or cost > limit.burst:", "Gt -> GtE"):
        "only the short path is not taken",
    ("_bucket.py", "if state is None or state[0] is not limit or cost > limit.burst:", "0 -> 1"): "as above",
    ("_calendar.py", "start, end = _recent(self, now // (60 * SECOND))", "60 -> 61"): "only which windows are remembered",
    ("_calendar.py", "return (start, end) if start <= now < end else _bounds(self, now)", "LtE -> Lt"): "as above",
    ("_calendar.py", "return _bounds(kind, minute * 60 * SECOND)", "60 -> 61"): "as above",
    ("_calendar.py", "return _bounds(kind, minute * 60 * SECOND)", "Mult -> FloorDiv"): "as above",
    ("_calendar.py", "return _bounds(kind, minute * 60 * SECOND)", "Mult -> FloorDiv (2)"): "as above",
    ("_calendar.py", "@lru_cache(maxsize=1024)", "1024 -> 1025"): "as above",
    ("_calendar.py", "@lru_cache(maxsize=256)", "256 -> 257"): "as above",
    ("_calendar.py", "while _instant(kind, first, zone) > now:", "Gt -> GtE"): "the loop below steps forward again",
    ("_calendar.py", "first = _step(kind, first, -1)", "1 -> 2"): "as above",
    ("_calendar.py", "while (end := _instant(kind, following := _step(kind, first, 1), zone)) <= now:", "LtE -> Lt"):
        "an instant's local date is never before a reset at that instant, so the loop above has found its window",
    ("_decision.py", "def acquire(", "dropped: del at"): "only says that the argument is not used",
    ("_decision.py", "def reset(", "dropped: del states, costs, now, at"): "as above",
    ("_decision.py", "ZERO_COSTS: Final = tuple((0,) * count for count in range(9))", "9 -> 10"): "both are as many zeros",
    ("_decision.py", "return remaining if remaining > 0 else 0", "Gt -> GtE"): "both are 0",
    ("_limit.py", "scale: int = field(init=False, repr=False, compare=False, default=1)", "1 -> 2"): "set before it is used",
    ("_limit.py", "rate: int = field(init=False, repr=False, compare=False, default=0)", "0 -> 1"): "as above",
    ("_limit.py", "capacity: int = field(init=False, repr=False, compare=False, default=0)", "0 -> 1"): "as above",
    ("_limit.py", "floor: int = field(init=False, repr=False, compare=False, default=0)", "0 -> 1"): "as above",
    ("_limit.py", "max_elapsed: int = field(init=False, repr=False, compare=False, default=0)", "0 -> 1"): "as above",
    ("_limit.py", "tick: int = field(init=False, repr=False, compare=False, default=1)", "1 -> 2"): "as above",
    ("_limit.py", "return match.end() if match else 0", "0 -> 1"): "the expression matches nothing at all, too",
    ("_limit.py", "place = good.end() if good else 0", "0 -> 1"): "as above",
    ("_limit.py", "return 0, False", "0 -> 1"): "of a period that is not exact, the length is not read",
    ("_log.py", "if len(times) > tail:", "Gt -> GtE"): "nothing lies behind the tail, so nothing is cut",
    ("_log.py", "if head > 16 and head * 2 > tail:", "Gt -> GtE"): "when to copy a log, not what is in it",
    ("_log.py", "if head > 16 and head * 2 > tail:", "Gt -> GtE (2)"): "as above",
    ("_log.py", "if head > 16 and head * 2 > tail:", "16 -> 17"): "as above",
    ("_log.py", "if head > 16 and head * 2 > tail:", "2 -> 3"): "as above",
    ("_log.py", "if head > 16 and head * 2 > tail:", "And -> Or"): "as above",
    ("_log.py", "if head > 16 and head * 2 > tail:", "condition negated"): "as above",
    ("_log.py", "if total < 0 and front == head + len(changes):", "Lt -> LtE"):
        "a change of nothing leaves the log as it is, copied or not",
    ("_log.py", "if total < 0 and front == head + len(changes):", "0 -> 1"):
        "as above",
    ("_log.py", "if state is None or state[0] is not limit:", "0 -> 1"): "`current` returns a state of the limit itself",
    ("_log.py", "if times[head] > now - limit.length and times[last] <= now:", "Sub -> Add"):
        "only the short path is not taken",
    ("_log.py", "if now < times[tail - 1]:", "Lt -> LtE"): "both are the same instant",
    ("_log.py", "if state[0] is not limit:", "0 -> 1"): "for the limit itself, that is the same instant",
    ("_log.py", 'return LogEntries(array("q"), array("q")), 0, 0, 0, now', "0 -> 1 (3)"): "sums are compared with their base",
    ("_log.py", "if delta < 0:", "Lt -> LtE"): "a change of nothing is not asked for",
    ("_log.py", "if delta < 0:", "0 -> 1"): "as above",
    ("_sliding.py", "def _rolled(state: State | None, limit: Limit, now: int) -> tuple[int, int, int, int]:",
     "dropped: state = current(state, limit, now)"): "windows that have ended count nothing, and begin where new ones do",
    ("_sliding.py", "if state is not None and state[0] is limit and now - state[3] < limit.length:", "Sub -> Add"):
        "only the short path is not taken",
    ("_sliding.py", "elif start - limit.length <= at < start:", "Lt -> LtE"): "the branch above has taken the start itself",
    ("_windows.py", "again = min(end, expires) if overlaps else 0", "0 -> 1"): "no window ends that soon after 1970",
    ("_windows.py", "return _view_common(limit, cost, 0, 0)", "0 -> 1"): "a window that has ended has used nothing",
    ("_windows.py", "return View((left, retry, counted[-1][2] - now if counted else 0))", "0 -> 1"):
        "a state that has not expired has a window that counts",
    ("_windows.py", "if state is not None and state[0] is limit:", "0 -> 1"):
        "what follows, for all other states, gives the same",
    ("_windows.py", "if delta > 0 and (at is None or (not held and start <= at <= now)):", "Gt -> GtE"):
        "a change of nothing is not asked for",
    ("_windows.py", "if delta >= 0:", "GtE -> Gt"): "what is left to change is nothing, and changes nothing",
    ("_windows.py", "if delta >= 0:", "0 -> 1"): "as above",
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
    times: Counter[tuple[int, str]] = Counter()  # of one change on one line, the second is told from the first
    for index, node in enumerate(ast.walk(tree)):
        if node in skipped:
            continue
        for kind, change in changes(node):
            planted = copy.deepcopy(tree)
            change(next(other for i, other in enumerate(ast.walk(planted)) if i == index))
            line, function = getattr(node, "lineno", 0), functions.get(node, "")
            times[line, kind] += 1
            what = kind if times[line, kind] == 1 else f"{kind} ({times[line, kind]})"
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
                yield f"dropped: {ast.unparse(statement)}", lambda n, i=i: n.body.__setitem__(i, ast.Pass())


class MutantImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from the mutant's source instead of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = f"tidegate.core.{mutant.module.removesuffix('.py')}"
        self.source = mutant.source

    def find_spec(self, name: str, *_: object) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module: Any) -> None:
        exec(compile(self.source, self.name, "exec"), module.__dict__)  # noqa: S102 - the mutant is our own code


class FailureReporter:
    """A pytest plugin that writes the name of the first failed test to a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.pipe, report.nodeid.split("[")[0].encode())


class Run(NamedTuple):
    """A mutant under test: since when, and the pipe that names the test which failed."""

    mutant: Mutant
    since: float
    pipe: int


def start(mutant: Mutant, groups: Groups, likely: Sequence[str] = ()) -> tuple[int, Run]:
    """Run the tests on a mutant in a process of its own, the `likely` ones first."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, Run(mutant, time.monotonic(), reading)
    os.setsid()
    os.environ["CI"] = "true"  # the same examples for every mutant, so that none is caught by luck
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.meta_path.insert(0, MutantImporter(mutant))
    import pytest  # noqa: PLC0415 - imported by the parent already

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the others take longer to import than most mutants live
    options = [part for plugin in PLUGINS for part in ("-p", plugin)]
    options += ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "--no-header", "--tb=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # Hypothesis was imported before pytest looked
    plugins = [FailureReporter(writing)]
    try:
        # A likely test that cannot be found is no catch: only failed tests and failed imports are.
        caught = bool(likely) and int(pytest.main([*options, *likely], plugins)) in {1, 2}
        caught = caught or any(int(pytest.main([*options, *tests], plugins)) for tests in groups)
    except BaseException:  # noqa: BLE001 - whatever a mutant does, it was noticed
        caught = True
    os._exit(int(caught))


def judge(queue: list[Mutant], groups: Groups, jobs: int, seconds: int = SECONDS) -> list[Mutant]:
    """Run all mutants, some at a time; give those that survived. One that runs longer than `seconds` is caught."""
    survivors: list[Mutant] = []
    running: dict[int, Run] = {}
    catchers: dict[tuple[str, str], list[str]] = {}  # by module and function, the latest first
    total = len(queue)
    queue = list(queue)
    hung = 0
    while queue or running:
        while queue and len(running) < jobs:
            mutant = queue.pop(0)
            child, run = start(mutant, groups, catchers.get((mutant.module, mutant.function), ()))
            running[child] = run
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            mutant, _, pipe = running.pop(done)
            failed = os.read(pipe, 1000).decode()
            os.close(pipe)
            if failed:
                known = catchers.setdefault((mutant.module, mutant.function), [])
                known[:] = [failed, *(other for other in known if other != failed)][:MAX_CATCHERS]
            if status == 0:
                survivors.append(mutant)
                print(f"\nsurvived: core/{mutant.module}:{mutant.line} {mutant.what}")
            hung += status == signal.SIGKILL
            print(f"\r{total - len(queue) - len(running)}/{total}, {len(survivors)} survived", end="", flush=True)
            continue
        for child, run in running.items():
            if time.monotonic() - run.since > seconds:
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    print(f"\n{hung} were ended after {seconds} s, which counts as caught")
    return survivors


def main() -> None:
    """Plant, run, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changed", action="store_true", help="only lines that the latest commits changed, at most 60")
    parser.add_argument("--commits", type=int, default=COMMITS, help="how many commits `--changed` looks at")
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
    known = {key for key in EQUIVALENT if key[0] in lines}
    if stale := known - {(m.module, lines[m.module][m.line - 1].split("  #")[0].strip(), m.what) for m in every}:
        print(f"no such mutants, the code has changed: {sorted(stale)}")
        if not options.changed:  # those may have a survivor that is listed with its old line
            sys.exit(1)
    if options.function:
        planted = [m for m in planted if m.function in options.function]
    if options.changed:
        written = {path.name: changed_lines(path, options.commits) for path in paths}
        planted = [m for m in planted if m.line in written[m.module]]
        options.sample = options.sample or MOST_CHANGED
        if not planted:
            print("no changed line of core/ has a mutant")
            return
    if options.sample:
        planted = random.Random(options.seed).sample(planted, min(options.sample, len(planted)))
    if options.show:
        for mutant in planted:
            print(f"core/{mutant.module}:{mutant.line} {mutant.what}")
        return
    for name in ("pytest", "hypothesis.stateful", *PLUGINS):
        importlib.import_module(name)  # once, for all that are forked

    groups = [options.tests] if options.tests else TESTS
    control = Mutant("_algorithms.py", 0, "nothing changed", (CORE / "_algorithms.py").read_text(encoding="utf-8"))
    if all(os.waitpid(start(control, groups)[0], 0)[1] for _ in range(2)):
        sys.exit("the tests fail twice without a mutant: nothing can be said")
    began = time.monotonic()
    survivors = judge(planted, groups, options.jobs, CHANGED_SECONDS if options.changed else SECONDS)
    caught = len(planted) - len(survivors)
    took = time.monotonic() - began
    print(f"{caught} of {len(planted)} mutants caught: {caught / len(planted):.1%}, in {took:.0f} s")


if __name__ == "__main__":
    main()
