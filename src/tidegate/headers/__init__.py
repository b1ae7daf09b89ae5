"""What servers say of their limits: a Decision as header fields, and header fields of any generation as Advice.

    write(decision, style)         X-RateLimit-*, the IETF's RateLimit fields, both or none; Retry-After on denials
    problem(decision, kind)         the body of a denial as problem details (RFC 9457)
    read(headers, now)              what another server said, whatever its dialect
    parse_retry_after(value, now)   seconds to wait, from seconds or a date

Only these modules know the wire forms. The IETF's is that of draft-ietf-httpapi-ratelimit-headers-11.
"""

from tidegate.headers.problems import PROBLEM_TYPE, problem
from tidegate.headers.reading import Advice, LimitAdvice, read
from tidegate.headers.values import parse_retry_after
from tidegate.headers.writing import STYLES, Style, check_style, write

__all__ = [
    "PROBLEM_TYPE",
    "STYLES",
    "Advice",
    "LimitAdvice",
    "Style",
    "check_style",
    "parse_retry_after",
    "problem",
    "read",
    "write",
]
