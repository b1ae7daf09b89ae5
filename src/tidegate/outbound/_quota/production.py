"""When output counts at a provider that counts each token as it is produced (`output_counted: produced`).

Its tokens are reserved when the request is sent, and they count from when they were produced. tidegate knows only the
latest instant at which that can have been:

    streamed              the chunk with the token arrived: noted every 1/120 of the period
    not streamed          the end of the response, less the time in which the tokens after it were produced. For that,
                          the output is assumed to be at most an eighth faster than the fastest recent one.

So the output is counted in pieces, each from the latest instant at which its last token can have been produced. A
provider cannot have counted it later, so no window exceeds its limit.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core._bounds import MAX_INTEGER, SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core import Limit

SAMPLES_PER_PERIOD: Final = 120
RENEWALS_PER_PERIOD: Final = 8  # a reservation is renewed while its output is streamed
MAX_PIECES: Final = 12  # that an output is split into at a time
MAX_SPEEDUP: Final = (9, 8)  # an output is at most 9/8 as fast as the fastest recent one


def most_in_a_period(limits: Sequence[Limit], fastest: int | None) -> int:
    """Return how many tokens of one output can count at the same time; `fastest` is as for `ProducedOutput.pieces`."""
    if not fastest or not limits:
        return MAX_INTEGER
    numerator, denominator = MAX_SPEEDUP
    return min(MAX_INTEGER, -(-fastest * max(limit.length for limit in limits) * numerator // (SECOND * denominator)))


class OutputPiece(NamedTuple):
    """Tokens that count from an instant of the monotonic clock."""

    tokens: int
    since: int


class ProducedOutput:
    """When the output of one call was produced."""

    def __init__(self, limits: Sequence[Limit], began: int) -> None:
        """Start with a request that was charged at the instant `began`; `limits` count its output."""
        self._limits = limits
        self._length = length = min(limit.length for limit in limits)
        self._recent: list[OutputPiece] = []  # what `take_arrived` has returned, as long as it counts
        self._interval = max(1, length // SAMPLES_PER_PERIOD)
        self._renewal = length // RENEWALS_PER_PERIOD
        self._samples: list[OutputPiece] = []  # what had arrived by an instant
        self._arrived = 0
        self.counted: int = 0  # tokens that `take_arrived` has returned
        self._next_sample = began
        self._renewed = began

    def note(self, tokens: int, now: int) -> None:
        """Note how much of a streamed output has arrived."""
        if now >= self._next_sample and tokens > self._arrived:
            self._samples.append(OutputPiece(tokens - self._arrived, now))
            self._arrived = tokens
            self._next_sample = now + self._interval

    def is_renewal_due(self, now: int) -> bool:
        """Return whether the reservation of an output that is still arriving should be made again."""
        return now - self._renewed >= self._renewal

    def take_arrived(self, tokens: int, now: int) -> list[OutputPiece]:
        """Return what has arrived since the last renewal, in pieces; `tokens` is what has arrived altogether."""
        self._next_sample = now
        self.note(tokens, now)
        pieces, self._samples, self._renewed = merged(self._samples), [], now
        self.counted = self._arrived
        self._recent = [piece for piece in self._recent if piece.since > now - self._length] + pieces
        return pieces

    def put_back(self, pieces: list[OutputPiece]) -> None:
        """Count what `take_arrived` has returned later: it could not be charged."""
        self._samples = pieces + self._samples
        self._recent = self._recent[: len(self._recent) - len(pieces)]
        self.counted -= sum(piece.tokens for piece in pieces)

    def most_held(self, fastest: int | None, now: int) -> int:
        """Return how many tokens must be held for what is still produced, after `take_arrived`.

        No renewal is denied. So until the next one, what counts and what is held must be as much as can count at the
        same time: else others would be allowed what this output uses before its first tokens no longer count.
        """
        numerator, denominator = MAX_SPEEDUP
        seen = sum(piece.tokens for piece in self._recent)
        most = max(most_in_a_period(self._limits, fastest), seen * numerator // denominator)
        if not all(limit.rules.rolling for limit in self._limits):
            return most  # what has been counted may not count in the next window
        renewed = now - self._length + self._renewal * 3 // 2  # a renewal may be late by half of its interval
        return most - sum(piece.tokens for piece in self._recent if piece.since > renewed)

    def pieces(self, tokens: int, ended: int, fastest: int | None) -> list[OutputPiece]:
        """Split an output of this many tokens; `fastest` is the speed of the fastest recent one, in tokens per second.

        The last piece counts from the end, and what `take_arrived` has returned is not part of them.
        """
        left = max(0, tokens - self.counted)
        if self._samples:
            return merged(_scaled(self._samples, left, ended))
        if self.counted or not fastest or not left:
            return [OutputPiece(left, ended)]
        numerator, denominator = MAX_SPEEDUP
        duration = left * SECOND * denominator // (fastest * numerator)  # of the production, at least
        count = max(1, min(MAX_PIECES, duration // self._interval, left))
        ends = [left * number // count for number in range(count + 1)]
        return [OutputPiece(end - begin, ended - duration * (left - end) // left) for begin, end in pairwise(ends)]


def _scaled(samples: list[OutputPiece], tokens: int, ended: int) -> list[OutputPiece]:
    """Return pieces with this sum: chunks say only how many bytes have arrived, the response how many tokens."""
    whole = max(tokens, sum(sample.tokens for sample in samples))
    pieces, done, before = [], 0, 0
    for sample in samples:
        done += sample.tokens
        until = tokens * done // whole
        pieces.append(OutputPiece(until - before, sample.since))
        before = until
    return [*pieces, OutputPiece(tokens - before, ended)]


def merged(pieces: list[OutputPiece]) -> list[OutputPiece]:
    """Join neighbours until there are at most MAX_PIECES, none of them empty; each counts from its latest part on."""
    size = max(1, -(-len(pieces) // MAX_PIECES))
    groups = [pieces[max(0, end - size) : end] for end in range(len(pieces), 0, -size)][::-1]
    joined = [OutputPiece(sum(piece.tokens for piece in group), group[-1].since) for group in groups]
    while len(joined) > 1 and not joined[-1].tokens:
        before = joined.pop(-2)
        joined[-1] = OutputPiece(before.tokens, joined[-1].since)
    return joined
