"""Every Python block in the documentation runs, and every block says what language it is in."""

from pathlib import Path

import pytest

from tests.cases import cases
from tests.docs.blocks import blocks_of, run_page

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
AMBIGUOUS = {"", "py", "python3", "pycon", "Python"}


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_of_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write files
    run_page(page)


@cases("page", PAGES)
def test_blocks_are_labelled(page):
    """A block without a label, or with an alias of `python`, would silently not run."""
    wrong = [f"{name(page)}:{block.line}" for block in blocks_of(page) if block.label in AMBIGUOUS]
    assert not wrong, f"label these blocks python, sh, text, ...: {wrong}"


def test_the_readme_has_an_example():
    assert any(block.label == "python" for block in blocks_of(ROOT / "README.md"))


def test_each_recipe_has_a_test():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("tests/recipes/recipe_*.py")))
    named = {block.recipe for page in PAGES for block in blocks_of(page) if block.recipe and block.label == "python"}
    assert named
    assert [recipe for recipe in sorted(named) if f'"{recipe}"' not in tests] == []


def test_pages_are_in_the_folder_of_what_the_reader_wants():
    """At the top of docs/ is only the index."""
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert {page.parts[0] for page in pages} == {"README.md", "tutorials", "howto", "concepts", "reference"}
