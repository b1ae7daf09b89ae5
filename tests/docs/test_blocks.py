"""The harness itself: a page that is wrong must fail, and say where."""

import traceback
from textwrap import dedent

import pytest

from tests.docs.blocks import blocks_of, run_page


@pytest.fixture
def page(tmp_path):
    def write(text):
        path = tmp_path / "page.md"
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return write


def test_a_failing_block_fails_with_the_pages_line(page):
    path = page("""\
        # Title

        ```python
        x = 1
        ```

        ```python
        assert x == 2
        ```
        """)
    with pytest.raises(AssertionError) as failure:
        run_page(path)
    last = traceback.extract_tb(failure.tb)[-1]
    assert (last.filename, last.lineno) == (str(path), 8)


def test_a_syntax_error_fails(page):
    with pytest.raises(SyntaxError):
        run_page(page("```python\nif:\n```\n"))


def test_an_unclosed_block_fails(page):
    with pytest.raises(AssertionError, match=r"page\.md:3: this code block is never closed"):
        run_page(page("text\n\n```python\nx = 1\n"))


def test_a_failing_await_fails(page):
    with pytest.raises(ZeroDivisionError):
        run_page(page("```python\nimport asyncio\nawait asyncio.sleep(0)\n1 / 0\n```\n"))


def test_blocks_share_names_and_one_event_loop(page):
    path = page("""\
        ```python
        import asyncio
        async def here():
            return asyncio.get_running_loop()
        loop = await here()
        ```
        ```python
        assert await here() is loop
        ```
        """)
    assert run_page(path) == 2


def test_pages_do_not_see_each_other(page):
    run_page(page("```python\nleak = 1\n```\n"))
    with pytest.raises(NameError):
        run_page(page("```python\nleak\n```\n"))


def test_other_languages_do_not_run(page):
    path = page("```sh\nexit 1\n```\n\n```text\n1/0\n```\n")
    assert run_page(path) == 0
    assert [block.label for block in blocks_of(path)] == ["sh", "text"]


def test_a_block_in_a_list_is_dedented(page):
    assert run_page(page("- item\n\n  ```python\n  x = 1\n  assert x\n  ```\n")) == 1


def test_a_longer_fence_holds_a_shorter_one(page):
    path = page("````text\n```python\n1 / 0\n```\n````\n")
    assert run_page(path) == 0


def test_classes_of_a_page_know_their_module(page):
    """A dataclass looks its module up; a page that defines one must work."""
    path = page("""\
        ```python
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
        assert Point(1).x == 1
        ```
        """)
    assert run_page(path) == 1


def test_a_recipe_runs_elsewhere(page):
    path = page("```python recipe=openai\n1 / 0\n```\n\n```yaml recipe=openai\na: 1\n```\n\n```python\nx = 1\n```\n")
    assert run_page(path) == 1
    assert [block.recipe for block in blocks_of(path)] == ["openai", "openai", None]
