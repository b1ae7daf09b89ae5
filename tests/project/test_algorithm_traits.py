"""Outside the core, algorithms and verbs are told apart by their traits.

Adding an algorithm touches the core and its two ports; adding a verb, the core and the verbs of the ports.
"""

import ast
from pathlib import Path

from tidegate.core._algorithms import ALGORITHMS
from tidegate.core._decision import VERBS, Verb

SOURCE = Path(__file__).parents[2] / "src" / "tidegate"
# A limit in a configuration file may name its algorithm: these look for the word in the text.
EXCEPTIONS = {"outbound/_providers/file.py", "inbound/_rules/extra_limits.py"}

# The modules that compare the name of a verb: what is special there concerns that verb alone.
BY_VERB = {
    "_limiter/limiter.py": "`acquire` is what try_acquire prepares",
    "stores/_memory/store.py": "the shortcut of `acquire` calls the algorithm itself",
    "testing/_reference.py": "it has nothing but the core",
    "testing/_vectors.py": "it makes histories of each verb",
    "outbound/_quota/gate_call.py": "it chooses the verb, and records what was charged",
}


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


def compared_verbs(tree):
    return {
        part.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(each, ast.Name) and each.id == "verb" for each in (node.left, *node.comparators))
        for each in (node.left, *node.comparators)
        for part in ast.walk(each)
        if isinstance(part, ast.Constant) and part.value in VERBS
    }


def test_few_modules_compare_names_of_verbs():
    found = {
        str(path.relative_to(SOURCE)): verbs
        for path in sorted(SOURCE.rglob("*.py"))
        if (verbs := compared_verbs(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert set(found) == set(BY_VERB), found
    assert compared_verbs(ast.parse("verb in ('hold', 'peek') or 'reset' != verb")) == {"hold", "peek", "reset"}


def test_a_verb_is_one_entry_and_its_function():
    """The ports number the verbs by their place in this table."""
    assert list(VERBS) == ["acquire", "peek", "hold", "adjust", "reset"]
    traits = {name: {trait for trait in Verb._fields[1:] if getattr(verb, trait)} for name, verb in VERBS.items()}
    assert traits == {
        "acquire": {"changes", "charges", "asks"},
        "peek": {"asks"},
        "hold": {"changes", "charges", "asks", "marks"},
        "adjust": {"changes", "corrects"},
        "reset": {"changes", "clears"},
    }


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
