"""Each tutorial works if a reader follows it literally."""

from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.docs.test_pages import PAGES
from tests.docs.tutorial import Tutorial

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = [*sorted((DOCS / "tutorials").glob("*.md")), DOCS / "howto" / "egress.md"]
NEEDS_SDK = {"call-language-models.md"}  # tests/recipes follows it: its SDK is not in this environment


@pytest.mark.timeout(300)  # a tutorial runs many commands, one after another
@pytest.mark.once("protect-an-api")
@pytest.mark.parametrize("page", [page for page in TUTORIALS if page.name not in NEEDS_SDK], ids=lambda page: page.stem)
def test_a_reader_can_follow_the_tutorial(page, tmp_path):
    with Tutorial(page, tmp_path) as tutorial:
        assert tutorial.follow() > 0


def test_only_tutorials_have_files():
    """A block with a title runs nowhere else."""
    assert {page for page in PAGES if any(block.title for block in blocks_of(page))} <= set(TUTORIALS)


def test_a_wrong_output_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nprint(1)\n```\n\n```sh\npython a.py\n```\n\n```text\n2\n```\n')
    with Tutorial(page, tmp_path) as tutorial, pytest.raises(AssertionError, match=r"it printed\n1\n"):
        tutorial.follow()


def test_a_program_that_ends_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\npython -c 'raise SystemExit(8)'   # leave it running\n```\n")
    with Tutorial(page, tmp_path) as tutorial, pytest.raises(AssertionError, match=r"page.md:2: it ended"):
        tutorial.follow()
