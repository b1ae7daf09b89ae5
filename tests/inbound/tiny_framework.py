"""A web framework that tidegate does not know, and the one module that it takes to limit its requests."""

from typing import Any, ClassVar, NamedTuple

from tidegate.inbound import Request
from tidegate.inbound._client.request import read_header
from tidegate.inbound._limiting.limited_call import FrameworkLimit, FrameworkLimits
from tidegate.inbound._limiting.native_requests import requests_of
from tidegate.inbound._responses import exceeded

# ---- the framework ---------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A request: neither a WSGI environ nor an ASGI scope."""

    verb: str
    where: str
    sender: str
    fields: dict[str, str]
    notes: dict[str, Any]


class Answer(NamedTuple):
    status: int
    text: str
    fields: dict[str, str]


class AnswerError(Exception):
    """Becomes the answer that it carries."""

    def __init__(self, answer):
        super().__init__(answer.text)
        self.answer = answer


def serve(handler, verb="GET", where="/", sender="203.0.113.9", **fields):
    """Answer one request."""
    try:
        return handler(Call(verb, where, sender, {name.replace("_", "-"): fields[name] for name in fields}, {}))
    except AnswerError as error:
        return error.answer


# ---- its limits ------------------------------------------------------------------------------------------------------


class RateLimitExceeded(exceeded.RateLimitExceeded, AnswerError):  # noqa: N818 - as in all frameworks
    """Raised for a denied request."""

    def __init__(self, denial, decision):
        AnswerError.__init__(self, FRAMEWORK.make_response(denial))
        self.denial, self.decision = denial, decision


@read_header.register
def find_field(call: Call, name: str):
    return call.fields.get(name.lower())


class CallFramework:
    """What differs from other frameworks."""

    request_type = Call

    def find_request(self, function, args, kwargs):
        return next(each for each in (*args, *kwargs.values()) if isinstance(each, Call))

    def mapping(self, native):
        return native.notes

    def sender(self, native, mapping):
        return native.sender, native.fields

    def common(self, native, mapping, address):
        return Request(native.verb, native.where, address, native, lambda name: find_field(native, name), mapping)

    def is_websocket(self, native):
        return False

    def make_response(self, response):
        return Answer(response.status, response.body.decode(), dict(response.headers))

    def add_fields(self, response, fields):
        response.fields.update(fields)
        return response

    def error_response(self, error):
        return error.answer if isinstance(error, AnswerError) else None

    def status(self, response):
        return response.status

    def make_error(self, response, decision, native):
        return RateLimitExceeded(response, decision)

    def deny_call(self, response, decision, native):
        raise RateLimitExceeded(response, decision)


FRAMEWORK = CallFramework()
requests_of.register(Call, lambda _: FRAMEWORK)


class limit(FrameworkLimit):  # noqa: N801 - used as a decorator
    """Limits the handlers that it decorates."""

    _framework: ClassVar = FRAMEWORK


class Limits(FrameworkLimits[limit]):
    """One limiter for an application."""

    _limit: ClassVar = limit
