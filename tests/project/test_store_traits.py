"""Other packages ask a store for its traits and methods (`instant`, `unleased`), never for its class."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "tidegate"
CLASS_CHECK = re.compile(r"isinstance\([^)]*\b(?!Opened)[A-Z]\w+Store\b")


def class_checks(text):
    return [line.strip() for line in text.splitlines() if CLASS_CHECK.search(line)]


def test_no_package_checks_the_class_of_a_store():
    found = {
        path.relative_to(PACKAGE).as_posix(): class_checks(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_check_of_the_class_of_a_store_is_found():
    text = "isinstance(store, Store)\nif isinstance(store.inner, (MemoryStore, int)):\nisinstance(a, OpenedStore)\n"
    assert class_checks(text) == ["if isinstance(store.inner, (MemoryStore, int)):"]
