"""The Denied in the errors of an SDK."""

import pytest

from tidegate import Denied, Limiter
from tidegate.outbound import find_denied


@pytest.fixture
def denied():
    with Limiter("1/1h") as limiter:
        limiter.try_acquire("k")
        with pytest.raises(Denied) as caught:
            limiter.acquire("k", timeout=0)
    return caught.value


class SdkError(Exception):
    """An error that an SDK raises instead."""


def raised(function):
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - whatever it raises
        function()
    return caught.value


def test_a_denied_is_found_itself(denied):
    assert find_denied(denied) is denied


def test_a_denied_is_found_as_the_cause(denied):
    def wrap():
        try:
            raise denied
        except Denied as error:
            raise SdkError("Connection error.") from error

    assert find_denied(raised(wrap)) is denied


def test_a_denied_is_found_below_errors_that_were_raised_while_handling_it(denied):
    def wrap():
        try:
            try:
                raise denied
            except Denied:
                raise SdkError("Connection error.")  # noqa: B904 - as litellm does
        except SdkError:
            raise SdkError("Internal error")  # noqa: B904 - as litellm does

    assert find_denied(raised(wrap)) is denied


def test_a_denied_is_found_in_an_exception_group(denied):
    assert find_denied(ExceptionGroup("tasks", [ValueError(), ExceptionGroup("inner", [denied])])) is denied


def test_other_errors_have_no_denied(denied):
    def hide():
        try:
            raise denied
        except Denied:
            raise SdkError("Connection error.") from None

    assert find_denied(SdkError()) is None
    assert find_denied(raised(hide)) is None


def test_a_cycle_of_causes_ends():
    first, second = SdkError(), SdkError()
    first.__cause__, second.__cause__ = second, first
    assert find_denied(first) is None
