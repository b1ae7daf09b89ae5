"""The defects of tests/mutants/planted.py can be planted: their lines are in src/ and their tests exist."""

from pathlib import Path

from tests.mutants.planted import DEFECTS, PACKAGE, ROOT


def missing(defects, package=PACKAGE, root=ROOT):
    """Return what has changed since a defect was written down."""
    for defect in defects:
        path = package / defect.file
        count = path.read_text(encoding="utf-8").count(defect.right) if path.exists() else 0
        if count != 1:
            yield f"{defect.file} has {count} times {defect.right!r}: plant {defect.what!r} where it is decided now"
        yield from (f"{test} does not exist" for test in defect.tests if not (root / test).exists())


def test_planted_defects_follow_the_code():
    assert list(missing(DEFECTS)) == []


def test_a_line_that_has_changed_is_found(tmp_path: Path):
    moved = DEFECTS[0]._replace(right="what no file has", tests=("tests/none.py",))
    assert len(list(missing([moved]))) == 2
    assert len(list(missing([DEFECTS[0]], package=tmp_path))) == 1
