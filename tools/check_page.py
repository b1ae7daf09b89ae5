"""Run the Python blocks of pages and check their links: python -m tools.check_page docs/concepts/waiting.md."""

import os
import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import run_page
from tests.docs.links import links_of, problem_of


def main(*names: str) -> int:
    """Return the number of problems."""
    pages = [Path(name).resolve() for name in names]
    if not pages:
        sys.exit("which page? make page PAGE=docs/concepts/waiting.md")
    problems = [problem for page in pages for target in links_of(page) if (problem := problem_of(page, target))]
    os.chdir(tempfile.mkdtemp())  # an example may write files
    for page in pages:
        print(f"{page.name}: {run_page(page)} blocks ran")
    print("\n".join(problems))
    return len(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
