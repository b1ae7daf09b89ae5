"""The names of endpoints in reports: the pattern that the rules have for a path, else the path without its ids."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.inbound._rules.model import Category

IDENTIFIER = re.compile(r"/(?:\d+|[0-9a-fA-F]{8,}|[0-9a-fA-F-]{32,}|[^/]*\d[^/]*\d[^/]*)(?=/|$)")


def endpoint_name(method: str, path: str, categories: Iterable[Category]) -> str:
    """Return the name of an endpoint, such as `GET /users/{id}`."""
    paths = {endpoint.path for category in categories for endpoint in category.endpoints}
    shown = path if path in paths else IDENTIFIER.sub("/{id}", path)
    return f"{method} {shown}"
