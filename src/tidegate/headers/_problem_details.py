"""The body of a denial as problem details (RFC 9457), with the problem types of the RateLimit fields draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from tidegate.core._bounds import SECOND, ceil_div

if TYPE_CHECKING:
    from tidegate.core import Decision

PROBLEM_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "https://iana.org/assignments/http-problem-types#"

Kind = Literal["quota-exceeded", "temporary-reduced-capacity", "abnormal-usage-detected"]
KINDS: Final[dict[Kind, tuple[int, str]]] = {
    "quota-exceeded": (429, "Request cannot be satisfied as assigned quota has been exceeded"),
    "temporary-reduced-capacity": (503, "Request cannot be satisfied due to temporary server capacity constraints"),
    "abnormal-usage-detected": (429, "Request not satisfied due to detection of abnormal request pattern"),
}


def problem(
    decision: Decision, kind: Kind = "quota-exceeded", *, detail: str | None = None, instance: str | None = None
) -> dict[str, object]:
    """Describe a denial: type, title, status, detail and the names of the violated limits (`violated-policies`).

    The kind determines the status: 503 for `temporary-reduced-capacity`, else 429. `detail` replaces the default
    sentence; `instance` is a URI that identifies this occurrence.
    """
    status, title = KINDS[kind]
    body: dict[str, object] = {
        "type": TYPE_PREFIX + kind,
        "title": title,
        "status": status,
        "detail": _default_detail(decision) if detail is None else detail,
        "violated-policies": list(decision.violated),
    }
    if instance is not None:
        body["instance"] = instance
    return body


def _default_detail(decision: Decision) -> str:
    if decision.retry < 0:
        return "Rate limit exceeded. The request asks for more than the limit can ever allow."
    seconds = max(1, ceil_div(decision.retry, SECOND))
    return f"Rate limit exceeded. Try again in {seconds} second{'s' if seconds > 1 else ''}."
