"""Rate limit header fields: writes a Decision as fields, and reads the fields of other servers as Advice.

    write(decision, style)          X-RateLimit-*, the RateLimit fields of the IETF draft, both or none; Retry-After
    problem(decision, kind)         the body of a denial as problem details (RFC 9457)
    read(headers, now)              the limits that another server announced, in any dialect
    parse_retry_after(value, now)   seconds to wait, from seconds or a date

Only these modules know the wire formats. The RateLimit fields are those of draft-ietf-httpapi-ratelimit-headers-11.
"""

from tidegate.headers._problem_details import PROBLEM_TYPE, Kind, problem
from tidegate.headers._reader import Advice, Headers, LimitAdvice, read
from tidegate.headers._values import parse_retry_after
from tidegate.headers._writer import STYLES, Style, check_style, write

__all__ = [
    "PROBLEM_TYPE",
    "STYLES",
    "Advice",
    "Headers",
    "Kind",
    "LimitAdvice",
    "Style",
    "check_style",
    "parse_retry_after",
    "problem",
    "read",
    "write",
]
