"""Reads the fields of requests from JSON values; an error names the field, what was given and what is expected."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import MAX_INTEGER
from tidegate.errors import ConfigError
from tidegate.service.decisions.policy_limiters import MAX_BATCH, Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.policy import Cost

MAX_DESCRIPTOR_PAIRS: Final = 32  # pairs of a descriptor
MAX_SHOWN_NAME: Final = 50  # characters of an unknown name that are compared or shown
new_tuple: Final = tuple.__new__


class BadFieldError(ConfigError):
    """An invalid field of a request; `pointer` is its JSON pointer (RFC 6901)."""

    def __init__(self, pointer: str, message: str) -> None:
        """Set the field and the reason."""
        super().__init__(message, field=pointer.replace("/", ".").strip(".") or None)
        self.pointer = pointer
        self.detail = message


class BatchRequest(NamedTuple):
    """The content of a batch: keys of one policy with a cost of 1 each, or asks, which are not read yet."""

    policy: str
    keys: list[Any]
    asks: list[Any] | None


class RequestFields:
    """The fields of a JSON object in a request; `pointer` is its place in the request."""

    __slots__ = ("pointer", "values")  # created for every ask: costs half of a NamedTuple

    def __init__(self, values: dict[str, Any], pointer: str = "") -> None:
        """Read these fields."""
        self.values = values
        self.pointer = pointer

    def error(self, name: str, message: str) -> BadFieldError:
        """Build an error about a field."""
        return BadFieldError(f"{self.pointer}/{name}", message)

    def subject(self) -> Subject:
        """Read the subject of the request."""
        values = self.values
        policy = values.get("policy")
        if "provider" in values:
            return self._provider()
        if policy.__class__ is str and "domain" not in values and "descriptor" not in values:
            key = values.get("key")
            if key.__class__ is str:
                return new_tuple(Subject, (policy, key, "", (), ""))  # half the cost of Subject(policy, key)
            if isinstance(key, list) and key and all(part.__class__ is str for part in key):
                return Subject(policy, tuple(key) if len(key) > 1 else key[0])
            raise self.error("key", f"expected a string, or a non-empty list of strings, {self._given('key')}")
        if "domain" not in values:
            if "policy" in values:
                raise self.error("policy", f"expected the name of a policy, {self._given('policy')}")
            raise self.error("policy", "missing: expected policy and key, or domain and descriptor")
        for other in ("policy", "key"):
            if other in values:
                raise self.error(other, "cannot be combined with domain")
        domain = values["domain"]
        if domain.__class__ is not str or not domain:
            raise self.error("domain", f"expected the name of a domain, {self._given('domain')}")
        return Subject(domain=domain, descriptor=self._descriptor())

    def _provider(self) -> Subject:
        for other in ("policy", "key", "domain", "descriptor"):
            if other in self.values:
                raise self.error(other, "cannot be combined with provider")
        return Subject(provider=self.string("provider"))

    def _descriptor(self) -> tuple[tuple[str, str], ...]:
        pairs = self.values.get("descriptor")
        valid = isinstance(pairs, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(part.__class__ is str for part in pair)  # noqa: PLR2004 - a key and a value
            for pair in pairs
        )
        if not valid or not pairs or len(pairs) > MAX_DESCRIPTOR_PAIRS:
            expected = f'expected a list of 1 to {MAX_DESCRIPTOR_PAIRS} pairs such as [["path", "/login"]]'
            raise self.error("descriptor", expected if pairs else f"{expected}, {self._given('descriptor')}")
        return tuple((key, value) for key, value in pairs)

    def actual_cost(self) -> Cost | None:
        """Read the cost that settles a reservation; None: the estimate."""
        return None if self.values["cost"] is None else self.cost()

    def cost(self) -> Cost:
        """Read a cost: an integer, or one for each unit."""
        cost = self.values["cost"]
        if cost.__class__ is int and 0 <= cost <= MAX_INTEGER:
            whole: int = cost
            return whole
        values = cost if isinstance(cost, dict) else {"": cost}
        amounts = {unit: amount for unit, value in values.items() if (amount := read_integer(value)) is not None}
        if len(amounts) < len(values):
            wrong = next(value for unit, value in values.items() if unit not in amounts)
            message = f'expected an integer from 0 to {MAX_INTEGER}, or one for each unit such as {{"tokens": 100}}'
            raise self.error("cost", f"{message}, not {describe_value(wrong)}")
        return amounts if isinstance(cost, dict) else amounts[""]

    def number(self, name: str) -> float:
        """Read a number."""
        value = self.values[name]
        if value.__class__ is int or value.__class__ is float:
            return float(min(max(value, -1e15), 1e15))
        raise self.error(name, f"expected a number, {self._given(name)}")

    def timeout(self) -> float:
        """Read the seconds to wait for a permit; `wait` is the older name of `timeout`."""
        if "wait" not in self.values:
            return self.number("timeout")
        if "timeout" in self.values:
            raise self.error("wait", "cannot be combined with timeout: wait is its older name")
        return self.number("wait")

    def integer(self, name: str, maximum: int) -> int:
        """Read an integer from 1."""
        value = self.values[name]
        if value.__class__ is int and 1 <= value <= maximum:
            return int(value)
        raise self.error(name, f"expected an integer from 1 to {maximum}, {self._given(name)}")

    def string(self, name: str) -> str:
        """Read a required string."""
        value = self.values.get(name)
        if value.__class__ is str and value:
            return value
        raise self.error(name, f"expected a non-empty string, {self._given(name)}")

    def batch(self) -> BatchRequest:
        """Read a batch: either `policy` and `keys`, or `asks`."""
        values = self.values
        if ("keys" in values) == ("asks" in values):
            raise self.error("asks", "expected either policy and keys, or asks")
        if "keys" in values:
            return BatchRequest(self.string("policy"), self._items("keys"), None)
        if "policy" in values:
            raise self.error("policy", "cannot be combined with asks: each ask has its own policy")
        return BatchRequest("", [], self._items("asks"))

    def _items(self, name: str) -> list[Any]:
        """Read a list within the maximum size of a batch."""
        values = self.values[name]
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_BATCH:
            given = f"{len(values)} items" if isinstance(values, list) else type_name(values)
            raise self.error(name, f"expected a list of 1 to {MAX_BATCH} items, not {given}")
        return values

    def _given(self, name: str) -> str:
        """Return the end of an error message: what the request has instead of the expected value."""
        return f"not {describe_value(self.values[name])}" if name in self.values else "but the field is missing"


def read_integer(value: object) -> int | None:
    """Read an integer; accept 3.0: JSON has only one number type, and some languages write all numbers with a point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER else None


def type_name(value: object) -> str:
    """Return the name of the JSON type of a value."""
    names: tuple[tuple[type, str], ...] = (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a number"),
        (str, "a string"),
        (list, "a list"),
        (dict, "an object"),
    )
    return next((name for each, name in names if isinstance(value, each)), "null")


def describe_value(value: object) -> str:
    """Return a JSON value as error messages show it: a number itself, its type otherwise."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)[:MAX_SHOWN_NAME]
    if isinstance(value, list) and value:
        unexpected = next((each for each in value if not isinstance(each, str)), None)
        return f"a list of {len(value)} items" if unexpected is None else f"a list with {type_name(unexpected)}"
    if isinstance(value, (str, list)) and not value:
        return f"an empty {'string' if isinstance(value, str) else 'list'}"
    return type_name(value)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return advice for an unknown name: the closest known name, or all of them."""
    close = get_close_matches(name[:MAX_SHOWN_NAME], known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"


def escape_pointer(name: str) -> str:
    """Escape a name as part of a JSON pointer; a long name is truncated."""
    return name[:100].replace("~", "~0").replace("/", "~1")
