"""Hooks for schemathesis: use names that exist, and a new idempotency key for each request."""

import itertools

import schemathesis

NUMBERS = itertools.count()


@schemathesis.hook
def before_call(_context, case, _kwargs):
    """Use an existing policy and its units in every second request."""
    number = next(NUMBERS)
    if case.headers and case.headers.get("Idempotency-Key"):
        case.headers["Idempotency-Key"] = f"{number} {case.headers['Idempotency-Key']}"[:255]
    if number % 2 and isinstance(case.body, dict):
        case.body = use_known_names(case.body, releasing=case.path.endswith("/release"))


def use_known_names(body, *, releasing):
    """Replace names by existing ones; other invalid values stay invalid."""
    found = dict(body)
    names = {"policy": "slots"} if releasing else {"policy": "api", "domain": "edge"}
    for name, value in names.items():
        if isinstance(found.get(name), str) and found[name]:
            found[name] = value
    if isinstance(found.get("cost"), dict):
        found["cost"] = dict(
            zip(("requests",) if releasing else ("requests", "tokens"), found["cost"].values(), strict=False)
        )
    return found
