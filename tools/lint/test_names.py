"""Names in src/: a class name has one meaning, a constant says what it bounds, and a module what it holds."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
# Public classes that exist once per framework, protocol or library.
TWINS = {
    "AsyncClient",
    "AsyncRateLimitTransport",
    "Client",
    "Limits",
    "RateLimitExceeded",
    "RateLimitMiddleware",
    "RateLimitTransport",
    "limit",
}
VAGUE = re.compile(
    r"_?(?:MOST|LEAST|LONGEST|SHORTEST|LARGEST|SMALLEST|HIGHEST|LOWEST|FEW|MANY|SOME|FIRST|LAST|NEXT|AGAIN|SOON|LATER"
    r"|PATIENCE|PARTS?|WHOLE|TEXTS?|FLAGS?|LOOKS?|KEPT|OWN|BIG|SMALL|SHORT|LONG|ENDLESS|ALMOST|NOTHING|MEANWHILE|STUFF"
    r"|THINGS?|(?:MOST|LONGEST|SHORTEST|LARGEST|SMALLEST|HIGHEST|LOWEST)_\w+)"
)

# Metaphors, words for "fast" and "without waiting" that differ from one module to the next, and names of anything.
VAGUE_WORD = re.compile(
    r"desk|seat|shelf|door|board|parts|visit|census|reckoning|whole|texts|fast|immediate|usual|common|now|instant|plain"
    r"|misc|utils?|helpers?|stuff|things|others?"
)
KNOWN_MODULES = {
    "common_request",  # inbound/limiting: issue 34 renames it
    "httpx_common",  # outbound/adapters: what httpx and httpx2 have in common
}


def vague_modules(paths):
    """Return the modules and packages whose name has a word that says nothing of what they hold."""
    names = {part for path in paths for part in path.with_suffix("").parts} - KNOWN_MODULES
    return sorted(name for name in names if any(map(VAGUE_WORD.fullmatch, name.split("_"))))


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text(encoding="utf-8"))


def assigned_names(statement):
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)]


def repeated_classes(trees):
    places = defaultdict(list)
    for path, tree in trees:
        for statement in tree.body:
            if isinstance(statement, ast.ClassDef) and statement.name not in TWINS:
                places[statement.name].append(str(path))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def vague_constants(trees):
    return [
        f"{path}:{statement.lineno}: {name}"
        for path, tree in trees
        for statement in tree.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for name in assigned_names(statement)
        if VAGUE.fullmatch(name)
    ]


def test_a_module_is_named_after_what_it_holds():
    assert vague_modules(path for path, _ in modules()) == []


def test_a_vague_module_name_is_found():
    paths = [Path("a/utils.py"), Path("a/fast_path.py"), Path("desk/b.py"), Path("a/explain.py"), Path("a/_now.py")]
    assert vague_modules(paths) == ["_now", "desk", "fast_path", "utils"]


def test_a_class_name_is_defined_once():
    assert repeated_classes(modules()) == {}


def test_a_constant_says_what_it_bounds_or_holds():
    assert vague_constants(modules()) == []


def test_a_repeated_class_name_is_found():
    trees = [("a.py", ast.parse("class Account: ...")), ("b.py", ast.parse("class Account: ...\nclass limit: ..."))]
    assert repeated_classes([*trees, ("c.py", ast.parse("class limit: ..."))]) == {"Account": ["a.py", "b.py"]}


@pytest.mark.parametrize("name", ["MOST", "_PATIENCE", "PARTS", "WHOLE", "LONGEST_NAME"])
def test_a_vague_constant_is_found(name):
    assert vague_constants([("a.py", ast.parse(f"{name}: Final = 5"))]) == [f"a.py:1: {name}"]


@pytest.mark.parametrize("name", ["MAX_BATCH", "FIRST_PAUSE", "TEXT_TYPES", "LAST_ENTRY_SIZE", "most"])
def test_a_telling_constant_is_allowed(name):
    assert vague_constants([("a.py", ast.parse(f"{name} = 5"))]) == []
