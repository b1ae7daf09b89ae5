"""What schemathesis cannot know of the service: names that exist, and that an idempotency key is for one request."""

import itertools

import schemathesis

NUMBERS = itertools.count()


@schemathesis.hook
def before_call(_context, case, _kwargs):
    """Ask about a policy that there is, in units that it counts, with every second request."""
    number = next(NUMBERS)
    if case.headers and case.headers.get("Idempotency-Key"):
        case.headers["Idempotency-Key"] = f"{number} {case.headers['Idempotency-Key']}"[:255]
    if number % 2 and isinstance(case.body, dict):
        case.body = known(case.body, releasing=case.path.endswith("/release"))


def known(body, *, releasing):
    """Put names that exist in the place of others; what is wrong stays wrong."""
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
