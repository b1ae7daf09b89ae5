"""Finds out how many worker processes the web server has: each has its own counts in memory."""

from __future__ import annotations

import os
import re
import sys
from multiprocessing import current_process
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SERVER: Final = re.compile(r"gunicorn|uvicorn|hypercorn|granian|fastapi")  # in the path of the program
WORKERS_OPTION: Final = re.compile(r"(?:\A| )(?:-w|--workers)[ =]?(\d{1,4})(?= |\Z)")


def count_workers(environ: Mapping[str, str] = os.environ, words: Sequence[str] | None = None) -> int:
    """Return how many worker processes the server has, as far as this process can know; otherwise 1.

    The command line takes precedence over the environment, as in the servers. `words` is the command line (default:
    of this process). A configuration file of the server is not read.
    """
    words = sys.argv if words is None else words
    if words and SERVER.search(words[0]):
        for line in (" ".join(words[1:]), environ.get("GUNICORN_CMD_ARGS", "")):
            found = WORKERS_OPTION.findall(line)
            if found:
                return max(1, int(found[-1]))
    # `uvicorn.run(…, workers=4)` starts its workers with its configuration as an argument.
    config = getattr(current_process(), "_kwargs", {}).get("config")
    workers = getattr(config, "workers", None) or environ.get("WEB_CONCURRENCY", "")
    return max(1, int(workers)) if str(workers).isdecimal() else 1
