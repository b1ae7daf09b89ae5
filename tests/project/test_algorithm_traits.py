"""Outside the core, algorithms are told apart by their traits: adding one touches the core and its ports only."""

import ast
from pathlib import Path

from tidegate.core.algorithms import ALGORITHMS

SOURCE = Path(__file__).parents[2] / "src" / "tidegate"
# A limit in a configuration file may name its algorithm: these look for the word in the text.
EXCEPTIONS = {"outbound/providers/file.py", "inbound/rules/extra_limits.py"}


def decides_by_name(node):
    """Return whether an expression compares `.algorithm`, or looks something up by it."""
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.Subscript):
        parts = [node.slice]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        parts = node.args
    else:
        return False
    return any(isinstance(part, ast.Attribute) and part.attr == "algorithm" for part in parts)


def found_in(tree):
    return [node.lineno for node in ast.walk(tree) if decides_by_name(node)]


def test_no_module_outside_the_core_compares_names_of_algorithms():
    found = {
        str(path.relative_to(SOURCE)): lines
        for path in sorted(SOURCE.rglob("*.py"))
        if "core" not in path.relative_to(SOURCE).parts
        and (lines := found_in(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert set(found) == EXCEPTIONS, found


def test_comparisons_are_found():
    for text in ("limit.algorithm == 'x'", "limit.algorithm in NAMES", "NAMES[limit.algorithm]", "A.get(m.algorithm)"):
        assert found_in(ast.parse(text)), text
    assert not found_in(ast.parse("Limit(1, '1s', limit.algorithm)"))


def test_ports_number_each_algorithm_once():
    """The identifier of a limit in Redis has three bits for the algorithm, so numbers are never reused."""
    numbers = {name: rules.port_number for name, rules in ALGORITHMS.items()}
    assert list(numbers.values()) == [1, 2, 3, 4, 5, 6]
    assert list(numbers) == [
        "token_bucket", "fixed_window", "calendar_window", "sliding_window", "sliding_log", "concurrency"
    ]  # fmt: skip
