"""What is known about a key whose calls the provider has rejected. Time is an argument.

A 401 or 403 may be about the call: a header of the caller, a model or resource that the account may not use. That
another member of the pool could send the same call shows only that the members differ for this call. So callers who
send such calls must not take the key from others:

    accepted      a response without error                                               the start
    doubted       for one model: another member could send a call that this one may      the key is still used
                  not; for DOUBT, other members are preferred for calls of this model
    suspended     another member could send a call that was answered with 401, and no    the key is not used, for a
                  call was accepted within ACCEPTED                                      pause that doubles each time

A model is not doubted if the key was accepted for it within DOUBT. A 401 of a key that was not accepted within ACCEPTED
is enough for a doubt: the call may be one that cannot be repeated. A pause ends by itself, then the key is tried again.
A changed file ends all of this, and a response without error ends the suspension and the doubt about its model.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from tidegate.outbound._providers.provider import Provider

DOUBT: Final = 60 * SECOND
ACCEPTED: Final = 300 * SECOND
FIRST_SUSPENSION: Final = 60 * SECOND
MAX_SUSPENSION: Final = 3600 * SECOND
MAX_MODELS: Final = 100  # remembered for each account
MAX_MODEL_NAME: Final = 200  # characters


class KeyTrouble:
    """Whether the key of one account is doubted or suspended; `version` is its provider, as its file says."""

    __slots__ = ("_accepted_models", "_accepted_until", "_doubted_models", "_pause", "_suspended_until", "_version")

    def __init__(self) -> None:
        """Start with an accepted key."""
        self._version: Provider | None = None
        self._clear()

    def _clear(self) -> None:
        self._accepted_until = 0
        self._accepted_models: dict[str, int] = {}  # until when an acceptance counts
        self._doubted_models: dict[str, int] = {}  # until when they are doubted
        self._suspended_until = 0
        self._pause = 0

    def _use(self, version: Provider) -> None:
        if self._version is not version:
            self._clear()
            self._version = version

    def is_suspended(self, version: Provider, now: int) -> bool:
        """Return whether the key is not used."""
        return self._version is version and now < self._suspended_until

    def is_doubted(self, version: Provider, model: str, now: int) -> bool:
        """Return whether other keys are preferred for a model."""
        return self._version is version and now < self._doubted_models.get(model[:MAX_MODEL_NAME], 0)

    def was_accepted(self, version: Provider, now: int) -> bool:
        """Return whether a call was accepted lately, so that a 401 is about its call."""
        return self._version is version and now < self._accepted_until

    def accept(self, version: Provider, model: str, now: int) -> None:
        """Record a response without error."""
        self._use(version)
        self._accepted_until, self._suspended_until, self._pause = now + ACCEPTED, 0, 0
        self._doubted_models.pop(model[:MAX_MODEL_NAME], None)
        remember(self._accepted_models, model, now + DOUBT)

    def doubt(self, version: Provider, model: str, now: int) -> bool:
        """Record that a call of a model was rejected, but not because of the call; returns whether a doubt begins."""
        self._use(version)
        if now < self._accepted_models.get(model[:MAX_MODEL_NAME], 0) or self.is_doubted(version, model, now):
            return False
        remember(self._doubted_models, model, now + DOUBT)
        return True

    def suspend(self, version: Provider, now: int) -> int:
        """Record that another key could send a call that was answered with 401; returns the pause, 0 if none begins."""
        self._use(version)
        if self.is_suspended(version, now) or self.was_accepted(version, now):
            return 0
        self._pause = min(2 * self._pause or FIRST_SUSPENSION, MAX_SUSPENSION)
        self._suspended_until = now + self._pause
        return self._pause


def remember(models: dict[str, int], model: str, until: int) -> None:
    """Note an instant for a model; of too many models, the one that was noted first is dropped."""
    name = model[:MAX_MODEL_NAME]
    models.pop(name, None)
    models[name] = until
    if len(models) > MAX_MODELS:
        with suppress(StopIteration, RuntimeError, KeyError):  # another thread does the same
            del models[next(iter(models))]
