"""The admin endpoint: statistics about recent clients, and actions on single clients.

    GET  /api/admin/rate-limit-stats            {"total_entries": 3, "by_category": {"read": 2, …}}
    GET  /api/admin/rate-limit-stats?top=10     the same, with clients near a limit, lists, store metrics
    POST /api/admin/rate-limit-stats            {"action": "reset", "key": "203.0.113.9"}
                                                {"action": "block" | "allow", "key": "203.0.113.0/24", "seconds": 600}
                                                {"action": "unblock" | "disallow", "key": …}     {"action": "reload"}
                                                {"action": "reset_all"}

Actions require the token (`Authorization: Bearer …`). Local callers can read the statistics without it. Behind a proxy
on the same host every client has a local peer address, so requests with a forwarding header are not treated as local;
but not every proxy adds one.
"""

from __future__ import annotations

import hmac
import json
import logging
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from tidegate._limiter.waiting import ApplyStep
from tidegate._policy.key import show_key
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError, RateLimitError
from tidegate.inbound._client.address import parse_address
from tidegate.inbound._client.recent import share_left
from tidegate.inbound._responses.response import Response, json_response
from tidegate.observe.logs import shown

if TYPE_CHECKING:
    from tidegate._policy import Key
    from tidegate._runtime.flow import Flow
    from tidegate.inbound._client.recent import ClientNearLimit
    from tidegate.inbound._client.request import Request
    from tidegate.inbound._limiting.request_limiter import RequestLimiter

log: logging.Logger = logging.getLogger("tidegate.inbound")

MAX_BODY_BYTES: Final = 16_384
MAX_KEY_LENGTH: Final = 512
MAX_SHOWN_LENGTH: Final = 60  # characters of a value in an error message
MAX_CLIENTS_LISTED: Final = 1000  # for `top`
MAX_LIMITS_LISTED: Final = 100
MAX_BLOCK_SECONDS: Final = 366 * 86_400
FORWARDING_HEADERS: Final = ("x-forwarded-for", "forwarded", "x-real-ip", "via", "x-forwarded-host", "cf-connecting-ip")
TEST_CLIENT: Final = "testclient"  # the peer name of Starlette's test client; not a network address


def check_access(request_limiter: RequestLimiter, request: Request, peer: str | None) -> Response | None:
    """Return the response to an unauthorized request; None if it is authorized."""
    if request.method not in ("GET", "HEAD", "POST"):
        return json_response(405, {"error": "use GET or POST"})
    if _has_token(request_limiter, request):
        return None
    if request.method == "POST":
        error = "POST requires the admin token (admin_token), sent as 'Authorization: Bearer …'"
    elif _is_local(peer) and not any(request.header(name) for name in FORWARDING_HEADERS):
        return None
    else:
        error = "allowed only for local callers, or with the admin token"
    key = request_limiter.client_identifier.key_of(request.address)
    request_limiter.throttle.log_throttled(logging.WARNING, "admin request denied for %s", shown(key))
    return json_response(403, {"error": error})


def _has_token(request_limiter: RequestLimiter, request: Request) -> bool:
    given = request.header("authorization") or ""
    expected = f"Bearer {request_limiter.admin_token}"
    same = hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
    return same and request_limiter.admin_token is not None


def _is_local(peer: str | None) -> bool:
    found = parse_address(peer) if peer else None
    return ip_address(found.text).is_loopback if found else peer == TEST_CLIENT


def handle_flow(request_limiter: RequestLimiter, request: Request, query: str, body: bytes) -> Flow[Any, Response]:
    """Handle an authorized request."""
    if request.method != "POST":
        return json_response(200, statistics(request_limiter, dict(parse_qsl(query[:1024]))))
    if len(body) > MAX_BODY_BYTES:
        return json_response(413, {"error": f"the body must have at most {MAX_BODY_BYTES} bytes"})
    try:
        action_request = json.loads(body)
    except (ValueError, RecursionError):
        action_request = None
    if not isinstance(action_request, dict):
        example = '{"action": "reset", "key": "203.0.113.9"}'
        return json_response(400, {"error": f"expected a JSON object such as {example}"})
    try:
        done = yield from _run_action_flow(request_limiter, action_request)
    except ConfigError as error:
        return json_response(400, {"error": str(error)})
    except RateLimitError as error:
        return json_response(503, {"error": str(error)})
    return json_response(200, done)


def statistics(request_limiter: RequestLimiter, query: dict[str, str]) -> dict[str, Any]:
    """Return the number of recent clients by category; with `top`, also clients, lists and metrics."""
    now = request_limiter.now()
    counts = request_limiter.metrics()
    found: dict[str, Any] = {"total_entries": sum(counts.values()), "by_category": counts}
    top = query.get("top", "")
    if not top.isdecimal() or len(top) > 9:  # noqa: PLR2004 - digits
        return found
    max_clients = min(int(top), MAX_CLIENTS_LISTED)
    near = [
        (name, each)
        for name, category_limiter in request_limiter.category_limiters.items()
        for each in category_limiter.recent_clients.nearest_to_limit(now, max_clients)
    ]
    near.sort(key=lambda pair: share_left(pair[1]))
    found["near_limit"] = [_describe_client(name, each) for name, each in near[:max_clients]]
    found["decisions"] = {
        name: {
            "allowed": sum(each.allowed for each in request_limiter.limiters_of(name)),
            "denied": sum(each.denied_requests for each in request_limiter.limiters_of(name)),
        }
        for name in request_limiter.category_limiters
    }
    found["denied_by_limit"] = dict(request_limiter.denied_by_limit.most_common(MAX_LIMITS_LISTED))
    blocks = request_limiter.denial_blocks
    found["blocked"] = request_limiter.blocked_clients.expiry_times(now)
    found["blocked_for_denials"] = blocks.listed.expiry_times(now) if blocks is not None else {}
    found["allowed"] = request_limiter.allowed_clients.expiry_times(now)
    found["store"] = request_limiter.store.metrics()
    return found


def _describe_client(category: str, near: ClientNearLimit) -> dict[str, Any]:
    return {
        "category": category,
        "key": show_key(near.key),
        "limit": near.limit,
        "quota": near.quota,
        "remaining": near.remaining,
        "reset": near.reset,
    }


def _run_action_flow(request_limiter: RequestLimiter, action_request: dict[str, Any]) -> Flow[Any, dict[str, Any]]:
    action, key = action_request.get("action"), action_request.get("key")
    known = ("reset", "reset_all", "block", "unblock", "allow", "disallow", "reload")
    if action not in known:
        raise ConfigError(f"must be one of {', '.join(known)}, not {_describe_value(action)}", field="action")
    name = request_limiter.client_identifier.name_of(key) if isinstance(key, str) else str(key)
    log.warning("admin action: %s %s", action, shown(name))
    if action == "reload":
        error = request_limiter.reload()
        if error is not None:
            raise ConfigError(error)
        return {"done": action}
    if action == "reset_all":
        return {"done": action, "clients": (yield from request_limiter.reset_all_flow())}
    if not isinstance(key, str) or not key or len(key) > MAX_KEY_LENGTH:
        raise ConfigError(
            "must be a client address, a network, or a key as shown in the statistics, "
            f"as a string of 1 to {MAX_KEY_LENGTH} characters, not {_describe_value(key)}",
            field="key",
        )
    if action == "reset":
        return (yield from _reset_flow(request_limiter, key, action_request.get("category")))
    done = _change_list(request_limiter, action, key, action_request.get("seconds"))
    if action == "unblock" and request_limiter.denial_blocks is not None:
        wanted = _find_key(request_limiter, request_limiter.client_identifier.name_of(key))
        done["found"] = (yield from request_limiter.denial_blocks.remove_flow(wanted)) or done["found"]
    return done


def _find_key(request_limiter: RequestLimiter, name: str) -> Key:
    """Return the key of a recently seen client by its string form; the string itself if there is none."""
    for category_limiter in request_limiter.category_limiters.values():
        key = category_limiter.recent_clients.find_key(name)
        if key != name:
            return key
    return name


def _describe_value(value: object) -> str:
    """Return a JSON value as error messages show it."""
    if isinstance(value, (list, dict)):
        return "an array" if isinstance(value, list) else "an object"
    return json.dumps(value)[:MAX_SHOWN_LENGTH]


def _change_list(request_limiter: RequestLimiter, action: str, key: str, seconds: object) -> dict[str, Any]:
    """Add a client to a list, or remove it."""
    clients = request_limiter.blocked_clients if action in ("block", "unblock") else request_limiter.allowed_clients
    now, name = request_limiter.now(), request_limiter.client_identifier.name_of(key)
    if action in ("block", "allow"):
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds <= MAX_BLOCK_SECONDS:
            expected = f"must be a number of seconds above 0 and at most {MAX_BLOCK_SECONDS}"
            raise ConfigError(f"{expected}, not {_describe_value(seconds)}", field="seconds")
        clients.add(name, now + round(seconds * SECOND), now)
        done = {"done": action, "key": name, "seconds": seconds}
    else:
        done = {"done": action, "key": key, "found": clients.remove(name)}
    request_limiter.update_special()
    return done


def _reset_flow(request_limiter: RequestLimiter, text: str, category: object) -> Flow[Any, dict[str, Any]]:
    """Reset a client, in one category or in all."""
    if category is not None and (not isinstance(category, str) or category not in request_limiter.category_limiters):
        raise ConfigError(
            f"must be one of {', '.join(request_limiter.category_limiters)}, not {_describe_value(category)}",
            field="category",
        )
    names = [category] if isinstance(category, str) else list(request_limiter.category_limiters)
    wanted: Key = request_limiter.client_identifier.name_of(text)
    for name in names:
        category_limiter = request_limiter.category_limiters[name]
        key = category_limiter.recent_clients.find_key(wanted)
        for limiter in request_limiter.all_limiters_of(name):
            policy = limiter.policy
            yield ApplyStep(limiter.store, "reset", ((policy, key, (0,) * len(policy.limits)),), limiter.current_time())
        category_limiter.recent_clients.remove(key)
    return {"done": "reset", "key": show_key(wanted), "categories": names}
