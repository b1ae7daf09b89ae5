"""Every relative link in the documentation leads to a file that exists, and to a heading that exists."""

from tests.cases import cases
from tests.docs.links import anchors_of, links_of, problem_of
from tests.docs.test_pages import PAGES


@cases("page", PAGES)
def test_links_of_page_lead_somewhere(page):
    assert list(filter(None, (problem_of(page, target) for target in links_of(page)))) == []


def test_broken_links_are_found(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text(
        "# Page\n\n[a](other.md#limits-and-s) [b](other.md#gone) [c](gone.md) [d](https://x.test/#y) `[e](f)`\n"
    )
    other.write_text("# Other\n\n## Limits, and `s`\n\n```sh\n# gone\n```\n\n## Limits, and `s`\n")
    assert anchors_of(other) == {"other", "limits-and-s", "limits-and-s-1"}
    problems = [problem_of(page, target) for target in links_of(page)]
    assert problems == [
        None,
        "page.md: other.md#gone: the page has no such heading",
        "page.md: gone.md: there is no such file",
        None,
    ]
