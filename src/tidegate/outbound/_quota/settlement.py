"""Settles a charge after the response has begun: slots are released and tokens counted when the body has ended.

Every client, and the egress gateway, pass the body through the settlement:

    open          the response has begun; its body has this Content-Encoding
    feed          before each piece is passed on; sometimes `renew_flow` must be run then
    end           the whole body has arrived
    settle_flow   the body is closed, complete or not; only the first call has an effect

The usage that the provider reports replaces what was reserved. It counts from when the request was charged, as at the
provider, or, if the provider counts output when it is produced, from then (`production`). While such an output is
streamed, what has arrived is charged every eighth of a period, and what can arrive within a period is reserved again.
Usage above the reservation is charged, too (`overrun` in the metrics), because the provider has counted it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from tidegate._policy.units import is_money
from tidegate._runtime.flow import complete_flow
from tidegate.core._bounds import MAX_INTEGER
from tidegate.errors import StoreUnavailable
from tidegate.outbound._providers.prices import usage_cost
from tidegate.outbound._providers.profile import TOKEN_UNITS
from tidegate.outbound._quota.production import ProducedOutput
from tidegate.outbound._quota.request_tokens import units_of
from tidegate.outbound._quota.token_usage import UsageReader

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from tidegate._runtime.flow import CallFlow
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.charge import Charge
    from tidegate.outbound._quota.cost import CallPlan
    from tidegate.outbound._quota.learned_sizes import LearnedSizes
    from tidegate.outbound._quota.production import OutputPiece

FIRST_ERROR_STATUS: Final = 400

log: logging.Logger = logging.getLogger("tidegate.outbound")


def log_unsettled(name: str, error: Exception) -> None:
    """Log that a call could not be settled."""
    log.error("%s: could not settle a call, so what was reserved stays charged: %s", name, error)


class PendingSettlement:
    """The charge of a request whose response has begun."""

    def __init__(
        self,
        account: Account,
        charge: Charge,
        status: int,
        plan: CallPlan,
        learned: LearnedSizes | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        """Settle `charge`; what is learned and counted goes to `learned` and `counts`."""
        self.account = account
        self.charge = charge
        self.status = status
        priced = plan.request is not None and plan.request.price is not None
        self.counts_tokens: bool = bool(account.estimated) or priced
        self.charged_units: Mapping[str, int] | None = None  # what the provider charges, once it is settled
        self._plan = plan
        self._learned = learned
        self._counts = counts
        self.reader: UsageReader | None = None
        self.used: Mapping[str, int] | None = None  # what the response reports, once it is settled
        self._watches = False  # whether the output is charged while it arrives
        self._held: Charge | None = None  # what is reserved for the rest of an output that is still produced
        self._ended = False
        times = 1 if plan.request is None else plan.request.times
        self.reserved_output: int = plan.output_tokens * times  # tokens that the output may take
        self._first_output = plan.first_output * times  # of these, what the first charge reserves
        self._produced = self._watch_production()

    def _watch_production(self) -> ProducedOutput | None:
        """Return when the output is produced; None: the provider counts it with the request."""
        request = self._plan.request
        if request is None or request.profile.output_counted != "produced":
            return None
        limits = self.account.output_limits(request)
        if not limits:
            return None
        self._counted: list[tuple[int, int]] = []  # tokens that were counted while the output arrived, and since when
        self._began = self.charge.since
        return ProducedOutput(limits, self._began)

    def open(self, coding: str = "") -> None:
        """Begin to read the usage from a body with this Content-Encoding, if any tokens are counted."""
        request, succeeded = self._plan.request, self.status < FIRST_ERROR_STATUS
        if not self.counts_tokens:
            return
        if request is None:
            self.reader = UsageReader(coding)
        elif request.endpoint.counted:  # else, as of a batch or a stored output, the usage may not be its own
            self._watches = self._produced is not None and request.streams and succeeded
            self.reader = UsageReader(
                coding,
                request.profile,
                request.model,
                watch=self._watches or (self._may_cost_more() and succeeded),
                input_estimate=self._plan.input_tokens,
            )
            self.reader.expects_output = request.endpoint.has_output and succeeded

    def _may_cost_more(self) -> bool:
        """Return whether what arrives of a stream may cost more than is reserved, if no usage is reported."""
        request = self._plan.request
        if request is None or request.price is None or not request.streams or self._plan.lowers:
            return False
        return request.longest * request.times > self.reserved_output

    def _count(self, name: str, amount: int = 1) -> None:
        if self._counts is not None:
            self._counts[name] += amount

    # ---- while the output arrives ------------------------------------------------------------------------------------

    def feed(self, piece: bytes) -> bool:
        """Read the next piece of the body; returns whether `renew_flow` must be run before it is passed on."""
        reader = self.reader
        if reader is None:
            return False
        reader.feed(piece)
        if not self._watches or self._produced is None or not reader.readable:
            return False
        now = self.account.clock.steady()
        self._produced.note(reader.produced, now)
        return self._produced.is_renewal_due(now)

    def end(self) -> None:
        """Record that the whole body has arrived."""
        if self.reader is not None:
            self.reader.end()

    def renew_flow(self) -> CallFlow[Any]:
        """Charge what was produced, and reserve the rest again: the first reservation would expire before it is used.

        No more counts and is reserved than can count at the same time (see `most_held`).
        """
        output, reader, request = self._produced, self.reader, self._plan.request
        if output is None or reader is None or request is None or self.charge.settled:
            return
        now = self.account.clock.steady()
        pieces = output.take_arrived(min(reader.produced, self.reserved_output), now)
        before, first = self._held, self._first_output
        fastest = None
        if self._learned is not None and self._plan.learned_key is not None:
            fastest = self._learned.fastest(self._plan.learned_key)
        rest = min(self.reserved_output - output.counted, output.most_held(fastest, now))
        try:
            try:
                yield from self._count_pieces_flow(pieces)
            except BaseException:  # also if the task is cancelled; a part may have been charged
                output.put_back(pieces)
                raise
            held = yield from self.account.hold_flow(self._output_units(rest))
        except StoreUnavailable:
            return  # what was reserved stays charged
        if held is None:
            return  # the same
        self._held, self._first_output = held, 0
        if before is None:
            yield from self.account.shrink_flow(self.charge, self._output_units(first))
        else:
            yield from self.account.shrink_flow(before, self._reserved_by(before))

    def _count_pieces_flow(self, pieces: list[OutputPiece]) -> CallFlow[Any]:
        """Charge output from when it was produced."""
        if any(piece.tokens for piece in pieces):
            charged = [(self._output_units(piece.tokens), piece.since) for piece in pieces]
            instants = yield from self.account.charge_pieces_flow(charged)
            self._counted += [(piece.tokens, at) for piece, at in zip(pieces, instants, strict=True)]

    def _output_units(self, tokens: int) -> dict[str, int]:
        """Return what tokens of output count, by unit, apart from money."""
        request = self._plan.request
        if request is None:
            return {}
        units = units_of(request._replace(times=1, price=None), 0, tokens)
        return {unit: amount for unit, amount in units.items() if amount and unit in self.charge.units}

    # ---- at the end --------------------------------------------------------------------------------------------------

    def settle_flow(self) -> CallFlow[Any]:
        """Commit the usage that was read, or what else the provider charges for the call, once: the body is closed.

        An error is logged and counted, not raised: it must not cost the caller a response that is paid for.
        """
        if self._ended or self.charge.settled:
            return
        self._ended = True
        try:
            self.used = None if self.reader is None else self.reader.result()
            yield from self._settle_flow(self.used)
        except GeneratorExit:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a store raises
            self._count("unsettled")
            log_unsettled(self.account.provider.title, error)

    def _settle_flow(self, used: Mapping[str, int] | None) -> CallFlow[Any]:
        charge = self.charge
        self._learn()
        request, reader = self._plan.request, self.reader
        if used is not None and reader is not None and reader.lacks_input:
            reserved = self._reserved_by(*self._charges)
            used = {unit: max(amount, reserved.get(unit, 0)) for unit, amount in used.items()}
        if used is not None and reader is not None and reader.lacks_output:
            used = reader.result_with_output(self.reserved_output)
        if used is not None and request is not None and request.price is not None and reader is not None:
            parts = reader.parts_with_output(self.reserved_output)
            paid = usage_cost(request.price, parts, request.profile) + request.fee
            if request.endpoint.has_output and "output" not in reader.parts and "total" not in reader.parts:
                paid = max(paid, self._plan.money)  # only a part of the usage is reported
            used = {**used, request.price.unit: min(MAX_INTEGER, paid)}
        final = self.charged_units = self._final_units(used)
        if charge.label is not None:
            self.account.spent += charge.record_spending(final)
        units = charge.units
        known = {} if final is None else {unit: amount for unit, amount in final.items() if unit in units}
        charge.usage = final
        if not known:
            yield from complete_flow(*(each.commit_flow() for each in self._charges))
            return
        self._count_overrun(known)
        yield from self._commit_flow(known)

    @property
    def _charges(self) -> list[Charge]:
        """What is reserved: by the first charge, and for the rest of an output."""
        return [self.charge] if self._held is None else [self.charge, self._held]

    def _estimated(self, input_tokens: int, output_tokens: int) -> dict[str, int]:
        """Return what this many tokens count, and the fee of the request."""
        request = self._plan.request
        if request is None:
            return {}
        units = units_of(request._replace(times=1), input_tokens, output_tokens)
        if request.price is not None:
            units[request.price.unit] = min(MAX_INTEGER, units[request.price.unit] + request.fee)
        return units

    def _arrived_units(self, reader: UsageReader) -> dict[str, int]:
        """Return what has arrived counts at least, with the estimate of the input; empty: that is not known."""
        request = self._plan.request
        if request is None or not reader.produced:
            return {}
        longest = min(MAX_INTEGER, request.longest * request.times)
        return self._estimated(self._plan.input_tokens, min(longest, reader.produced))

    def _count_overrun(self, known: Mapping[str, int]) -> None:
        """Count usage above what was reserved."""
        whole = self.charge.amounts if self._held is None else self._reserved_by(*self._charges)
        over = {unit: amount - whole.get(unit, 0) for unit, amount in known.items()}
        if self._produced is not None and self._counted:
            for unit, amount in self._output_units(sum(tokens for tokens, _ in self._counted)).items():
                over[unit] = over.get(unit, 0) - amount
        if max(over.values()) > 0:
            self._count("overrun")
            micros = max((each for unit, each in over.items() if is_money(unit)), default=0)
            self._count("overrun_micros", max(0, micros))
            self._count("overrun_tokens", max(0, *(over.get(unit, 0) for unit in TOKEN_UNITS)))

    def _commit_flow(self, known: dict[str, int]) -> CallFlow[Any]:
        """Commit the usage: from when the request was charged, or output from when it was produced."""
        if self._produced is None:
            yield from self.charge.commit_flow(known)
            return
        output = self._output_tokens()
        later = self._output_units(output)
        rest = {unit: max(0, amount - later.get(unit, 0)) for unit, amount in known.items()}
        try:
            yield from self._count_output_flow(self._produced, output)
        except GeneratorExit:
            raise
        except BaseException:  # what is not charged now stays charged where it was reserved
            counted = self._output_units(sum(tokens for tokens, _ in self._counted))
            left = {unit: max(0, amount - counted.get(unit, 0)) for unit, amount in known.items()}
            yield from self._commit_parts_flow(left)
            raise
        yield from self._commit_parts_flow(rest)

    def _count_output_flow(self, produced: ProducedOutput, output: int) -> CallFlow[Any]:
        """Charge an output that has ended from when it was produced; refund what was counted in excess."""
        plan, now = self._plan, self.account.clock.steady()
        fastest = None
        if self._learned is not None and plan.learned_key is not None and self.reader is not None:
            fastest = self._learned.fastest(plan.learned_key) if self.reader.complete else None
        surplus = produced.counted - output
        yield from self._count_pieces_flow(produced.pieces(output, now, fastest))
        while surplus > 0 and self._counted:
            tokens, at = self._counted.pop()
            yield from self.account.return_flow(self._output_units(min(tokens, surplus)), at)
            surplus -= tokens

    def _output_tokens(self) -> int:
        """Return the tokens of the whole output, or what was reserved for it if that is unknown."""
        reader = self.reader
        if reader is None or not reader.complete or not reader.readable:
            return self.reserved_output
        if reader.lacks_output:
            return max(reader.produced, self.reserved_output)
        return reader.produced if "output" not in reader.parts else self._reported_output(reader)

    def _reported_output(self, reader: UsageReader) -> int:
        return reader.parts["output"] + reader.parts.get("reasoning", 0) * reader.reasoning_apart

    def _commit_parts_flow(self, known: Mapping[str, int]) -> CallFlow[Any]:
        """Commit the usage to the first charge. Then return what is held, so that nothing is free in between."""
        held = () if self._held is None else (self._held.commit_flow(dict.fromkeys(self._reserved_by(self._held), 0)),)
        yield from complete_flow(self.charge.commit_flow(dict(known)), *held)

    def _reserved_by(self, *charges: Charge) -> dict[str, int]:
        """Return the tokens that charges reserve, by unit."""
        found: dict[str, int] = {}
        for charge in charges:
            for unit, amount in charge.amounts.items():
                if unit in TOKEN_UNITS or is_money(unit):
                    found[unit] = found.get(unit, 0) + amount
        return found

    def _final_units(self, used: Mapping[str, int] | None) -> Mapping[str, int] | None:
        """Return what the provider charges, by unit; None: what is reserved."""
        request = self._plan.request
        profile = None if request is None else request.profile
        if used is None and self.status >= FIRST_ERROR_STATUS:
            if profile is not None and request is not None and profile.failed != "free":
                return self._estimated(self._plan.input_tokens, 0) if profile.failed == "input" else None
            units = {*self.charge.units, *(() if self.charge.label is None else (self.charge.label.unit,))}
            return {unit: 0 for unit in units if unit in TOKEN_UNITS or is_money(unit)}
        if profile is not None and profile.charges == "estimate":  # of the quota; what is paid for is the usage
            return {unit: amount for unit, amount in (used or {}).items() if is_money(unit)}
        reader = self.reader
        if reader is None or (reader.complete and used is not None):
            return used
        reserved = self._reserved_by(*self._charges)  # the provider may have produced all of it
        if self.charge.label is not None:  # no limit may count its money
            reserved.setdefault(self.charge.label.unit, self.charge.label.money)
        arrived = self._arrived_units(reader)
        known = {*(used or ()), *arrived}
        return {unit: max(reserved.get(unit, 0), (used or {}).get(unit, 0), arrived.get(unit, 0)) for unit in known}

    def _learn(self) -> None:
        """Record what the output and the input took."""
        plan, reader = self._plan, self.reader
        request = plan.request
        if self._learned is None or reader is None or request is None or plan.learned_key is None:
            return
        parts, output, whole = reader.parts, None, None
        if self.status < FIRST_ERROR_STATUS and "output" in parts:
            output = self._reported_output(reader)
            if self._produced is not None:
                self._learned.record_speed(plan.learned_key, output, self.account.clock.steady() - self._began)
            if request.times > 1:
                output = -(-output // request.times)
            if plan.truncates_at is not None and plan.truncates_at <= output < request.longest:
                self._count("truncated")
                output *= 2  # it would have been longer
        if "input" in parts and reader.reports_input and not request.fixed:
            whole = parts["input"]
            if request.profile.cache_apart:
                whole += parts.get("cache_read", 0) + parts.get("cache_write", 0)
        self._learned.record(plan.learned_key, output, request.text_length, whole)
