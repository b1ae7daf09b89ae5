"""The admin endpoint: statistics about recent clients, and actions on single clients.

    GET  /api/admin/rate-limit-stats            {"total_entries": 3, "by_category": {"read": 2, …}}
    GET  /api/admin/rate-limit-stats?top=10     the same, with clients near a limit, lists, store metrics
    POST /api/admin/rate-limit-stats            {"action": "reset", "key": "203.0.113.9"}
                                                {"action": "block" | "allow", "key": "203.0.113.0/24", "seconds": 600}
                                                {"action": "unblock" | "disallow", "key": …}     {"action": "reload"}

Actions require the token (`Authorization: Bearer …`). Local callers can read the statistics without it. Behind a proxy
on the same host every client has a local peer address, so requests with a forwarding header are not treated as local;
but not every proxy adds one.
"""

from __future__ import annotations

import hmac
import json
import logging
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, RateLimitError
from tidegate.inbound.client.address import address_key, parse_address
from tidegate.inbound.responses.response import Response, json_answer
from tidegate.observe.logs import shown
from tidegate.policy import join_key

if TYPE_CHECKING:
    from tidegate.inbound.client.recent import ClientNearLimit
    from tidegate.inbound.client.request import Request
    from tidegate.inbound.limiting.flow import Steps
    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.policy import Key

log = logging.getLogger("tidegate.inbound")

MAX_BODY_BYTES: Final = 16_384
MAX_KEY_LENGTH: Final = 512
MAX_CLIENTS_LISTED: Final = 1000  # for `top`
MAX_BLOCK_SECONDS: Final = 366 * 86_400
FORWARDING_HEADERS: Final = ("x-forwarded-for", "forwarded", "x-real-ip", "via", "x-forwarded-host", "cf-connecting-ip")
TEST_CLIENT: Final = "testclient"  # the peer name of Starlette's test client; not a network address


def forbidden(guard: RequestLimiter, request: Request, peer: str | None) -> Response | None:
    """Return the response to an unauthorized request; None if it is authorized."""
    if request.method not in ("GET", "HEAD", "POST"):
        return json_answer(405, {"error": "use GET or POST"})
    if _has_token(guard, request):
        return None
    if request.method == "POST":
        error = "POST requires the admin token (admin_token), sent as 'Authorization: Bearer …'"
    elif _is_local(peer) and not any(request.header(name) for name in FORWARDING_HEADERS):
        return None
    else:
        error = "allowed only for local callers, or with the admin token"
    guard.say(logging.WARNING, "admin request denied for %s", shown(str(request.address)))
    return json_answer(403, {"error": error})


def _has_token(guard: RequestLimiter, request: Request) -> bool:
    given = request.header("authorization") or ""
    expected = f"Bearer {guard.admin_token}"
    same = hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
    return same and guard.admin_token is not None


def _is_local(peer: str | None) -> bool:
    found = parse_address(peer) if peer else None
    return ip_address(found.text).is_loopback if found else peer == TEST_CLIENT


def answering(guard: RequestLimiter, request: Request, query: str, body: bytes) -> Steps[Response]:
    """Handle an authorized request."""
    if request.method != "POST":
        return json_answer(200, statistics(guard, dict(parse_qsl(query[:1024]))))
    if len(body) > MAX_BODY_BYTES:
        return json_answer(413, {"error": f"the body must have at most {MAX_BODY_BYTES} bytes"})
    try:
        order = json.loads(body)
    except (ValueError, RecursionError):
        order = None
    if not isinstance(order, dict):
        example = '{"action": "reset", "key": "203.0.113.9"}'
        return json_answer(400, {"error": f"expected a JSON object such as {example}"})
    try:
        done = yield from _obeying(guard, order)
    except ConfigError as error:
        return json_answer(400, {"error": str(error)})
    except RateLimitError as error:
        return json_answer(503, {"error": str(error)})
    return json_answer(200, done)


def statistics(guard: RequestLimiter, query: dict[str, str]) -> dict[str, Any]:
    """Return the number of recent clients by category; with `top`, also clients, lists and metrics."""
    now = guard.now()
    counts = {name: gate.census.clean(now) for name, gate in guard.gates.items()}
    found: dict[str, Any] = {"total_entries": sum(counts.values()), "by_category": counts}
    top = query.get("top", "")
    if not top.isdecimal() or len(top) > 9:  # noqa: PLR2004 - digits
        return found
    most = min(int(top), MAX_CLIENTS_LISTED)
    near = [(name, each) for name, gate in guard.gates.items() for each in gate.census.near(now, most)]
    near.sort(key=lambda pair: pair[1].remaining / pair[1].quota)
    found["near_limit"] = [_shown(name, each) for name, each in near[:most]]
    found["decisions"] = {name: {"allowed": gate.allowed, "denied": gate.denied} for name, gate in guard.gates.items()}
    found["blocked"] = guard.blocks.shown(now)
    found["allowed"] = guard.passes.shown(now)
    found["store"] = guard.store.metrics()
    return found


def _shown(category: str, near: ClientNearLimit) -> dict[str, Any]:
    return {
        "category": category,
        "key": key_text(near.key),
        "limit": near.limit,
        "quota": near.quota,
        "remaining": near.remaining,
        "reset": near.reset,
    }


def key_text(key: Key) -> str:
    """Write a key as a string, as actions name it."""
    return key if isinstance(key, str) else join_key(key)


def _obeying(guard: RequestLimiter, order: dict[str, Any]) -> Steps[dict[str, Any]]:
    action, key = order.get("action"), order.get("key")
    known = ("reset", "block", "unblock", "allow", "disallow", "reload")
    if action not in known:
        raise ConfigError(f"must be one of {', '.join(known)}, not {action!r}", field="action")
    log.warning("admin action: %s %s", action, shown(str(key)))
    if action == "reload":
        refused = guard.reload()
        if refused is not None:
            raise ConfigError(refused)
        return {"done": action}
    if not isinstance(key, str) or not key or len(key) > MAX_KEY_LENGTH:
        raise ConfigError("must be a string: a client address, a network, or a key as shown in the statistics", field="key")
    if action == "reset":
        return (yield from _resetting(guard, key, order.get("category")))
    return _listing(guard, action, key, order.get("seconds"))


def _listing(guard: RequestLimiter, action: str, key: str, seconds: object) -> dict[str, Any]:
    """Add a client to a list, or remove it."""
    some = guard.blocks if action in ("block", "unblock") else guard.passes
    now = guard.now()
    if action in ("block", "allow"):
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= MAX_BLOCK_SECONDS:
            raise ConfigError(f"must be a number above 0 and at most {MAX_BLOCK_SECONDS}", field="seconds")
        name = some.add(key, now + round(seconds * SECOND), now, guard.clients.ipv6_prefix)
        done = {"done": action, "key": name, "seconds": seconds}
    else:
        done = {"done": action, "key": key, "found": some.remove(key, guard.clients.ipv6_prefix)}
    guard.look_at_lists()
    return done


def _resetting(guard: RequestLimiter, text: str, category: object) -> Steps[dict[str, Any]]:
    """Reset a client, in one category or in all."""
    if category is not None and (not isinstance(category, str) or category not in guard.gates):
        raise ConfigError(f"must be one of {', '.join(guard.gates)}, not {category!r}", field="category")
    names = [category] if isinstance(category, str) else list(guard.gates)
    wanted: Key = address_key(text, guard.clients.ipv6_prefix) if parse_address(text) else text
    for name in names:
        gate = guard.gates[name]
        key = gate.census.find(wanted)
        yield partial(gate.limiter.reset, key)
        gate.census.forget(key)
    return {"done": "reset", "key": key_text(wanted), "categories": names}
