"""Settles a charge after the response has begun: slots are released and tokens counted when the body has ended.

The reservation of a strict call that is streamed is topped up while the output arrives, unless money is limited:

    an eighth is left     reserve half as much again; if that is denied, try again a little later
    MIN_HEADROOM left     the provider may be ahead by that much, or by two of the largest chunks so far: if no more can
                          be reserved now, the stream ends with Denied
    input reported        if the estimate of the input was too high, the difference is refunded at once

When the output is complete, the usage that the provider reports replaces what was reserved. It counts from when the
request was charged, as at the provider, not from when more was reserved; or from when it was produced (`production`).
Usage above the reservation is charged, too (`overrun` in the metrics), because the provider has counted it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.flow import complete_flow
from tidegate.core._bounds import MAX_INTEGER
from tidegate.errors import Denied, StoreUnavailable
from tidegate.outbound._providers.money import is_money
from tidegate.outbound._providers.prices import usage_cost
from tidegate.outbound._providers.profile import TOKEN_UNITS
from tidegate.outbound._quota.production import ProducedOutput, most_in_a_period
from tidegate.outbound._quota.request_tokens import units_of
from tidegate.outbound._quota.token_usage import UsageReader

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from tidegate._runtime.flow import CallFlow
    from tidegate.core import Decision
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.charge import Charge
    from tidegate.outbound._quota.cost import CallPlan
    from tidegate.outbound._quota.learned_sizes import LearnedSizes
    from tidegate.outbound._quota.production import OutputPiece

FIRST_ERROR_STATUS: Final = 400
MIN_HEADROOM: Final = 64  # tokens that the provider may have produced before the connection is closed, at least
RETRY_TOKENS: Final = 16  # after a denied top-up, try again when this many more tokens have arrived


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
        self.tops_up: bool = plan.tops_up
        self._plan = plan
        self._learned = learned
        self._counts = counts
        self._reader: UsageReader | None = None
        self._top_ups: list[Charge] = []
        self._cut_off = False
        self._ended = False
        self.reserved_output: int = self._first_reserved()  # tokens of output
        self._produced = self._watch_production()
        if plan.tops_up:
            self._headroom = MIN_HEADROOM
            self._arrived = 0
            self._next_top_up = self._top_up_at()
            self._input_known = False

    def _first_reserved(self) -> int:
        """Return how many tokens of output were reserved before the request was sent."""
        request = self._plan.request
        return self._plan.output_tokens * (1 if request is None else request.times)

    def _watch_production(self) -> ProducedOutput | None:
        """Return when the output is produced; None: the provider counts it with the request."""
        request = self._plan.request
        if request is None or request.profile.output_counted != "produced":
            return None
        limits = self.account.output_limits(request)
        if not limits:
            return None
        self._counted: list[tuple[int, int]] = []  # tokens that were counted while the output arrived, and since when
        self._first_output = self.reserved_output  # what the first charge reserves
        self._began = self.charge.since
        return ProducedOutput(limits, self._began)

    def reader(self, coding: str = "") -> UsageReader | None:
        """Return the reader of the response's usage; None: no tokens are counted."""
        if not self.counts_tokens:
            return None
        request = self._plan.request
        if request is None:
            self._reader = UsageReader(coding)
        elif not request.endpoint.counted:  # a batch, or a stored output, may report usage that is not its own
            return None
        else:
            watch = self._plan.tops_up or self._may_cost_more()
            watch = watch and self.status < FIRST_ERROR_STATUS
            self._reader = UsageReader(
                coding, request.profile, request.model, watch=watch, input_estimate=self._plan.input_tokens
            )
            self._reader.expects_output = request.endpoint.has_output and self.status < FIRST_ERROR_STATUS
        return self._reader

    def _may_cost_more(self) -> bool:
        """Return whether what arrives of a stream may cost more than is reserved, if no usage is reported."""
        request = self._plan.request
        if request is None or request.price is None or not request.streams or self._plan.body is not None:
            return False
        return self._unreserved() > 0

    def _count(self, name: str, amount: int = 1) -> None:
        if self._counts is not None:
            self._counts[name] += amount

    # ---- while the output arrives ------------------------------------------------------------------------------------

    def needs_top_up(self) -> bool:
        """Return whether the output has come near the end of its reservation, or its input is known."""
        reader = self._reader
        if not self._plan.tops_up or reader is None:
            return False
        if not reader.readable:
            return self._unreserved() > 0
        produced = reader.produced
        step, self._arrived = produced - self._arrived, produced
        if 2 * step > self._headroom:  # the next piece may be as large
            self._headroom = 2 * step
            self._next_top_up = min(self._next_top_up, self._top_up_at())
        if self._produced is not None:
            now = self.account.clock.steady()
            self._produced.note(produced, now)
            if self._produced.is_renewal_due(now):
                return True
        if reader.complete:
            return False
        return produced >= self._next_top_up or (not self._input_known and "input" in reader.parts)

    def top_up_flow(self) -> CallFlow[Any]:
        """Reserve more for an output that is still arriving; raises Denied when it may exceed what is reserved."""
        reader, request = self._reader, self._plan.request
        if reader is None or request is None or self.charge.settled:
            return
        if not self._input_known and "input" in reader.parts:
            self._input_known = True
            yield from self._return_input_flow(reader)
        yield from self._renew_if_due_flow(reader)
        produced, left = reader.produced, self._unreserved()
        if not reader.readable:  # how much has arrived is unknown, so it may be all that the request allows
            produced = self._next_top_up = self.reserved_output
        if produced < self._next_top_up:
            return
        if left <= 0:  # the provider itself ends the output
            self._next_top_up = request.longest * request.times + 1
            return
        amount = min(left, self._top_up_size()) if reader.readable else left
        decision = yield from self._extend_flow(amount)
        if decision is not None and not decision.allowed and reader.readable:
            amount = min(amount, self._available(decision))  # less may still fit
            if amount >= RETRY_TOKENS:
                decision = yield from self._extend_flow(amount)
        if decision is not None and decision.allowed:
            self._count("topped_up")
            self.reserved_output += amount
            self._next_top_up = self._top_up_at()
        elif produced >= self.reserved_output - self._headroom:
            self._cut_off = True
            self._count("cut_off")
            raise Denied(
                f"provider {self.account.provider.name}: the output was cut off after {produced} tokens: "
                "no more tokens can be reserved",
                decision,
            )
        else:
            self._next_top_up = min(produced + RETRY_TOKENS, self.reserved_output - self._headroom)

    def _unreserved(self) -> int:
        """Return how many tokens of output the request allows beyond those that are reserved."""
        request = self._plan.request
        return 0 if request is None else min(MAX_INTEGER, request.longest * request.times) - self.reserved_output

    def _top_up_at(self) -> int:
        """Return how many tokens of the output may arrive before more is reserved."""
        left = min(self.reserved_output // 8, self._per_period() // 16)
        return max(1, self.reserved_output - max(2 * self._headroom, left))

    def _top_up_size(self) -> int:
        """Return how many tokens to reserve at a time: half as many again, or an eighth of what a period produces."""
        return max(min(self.reserved_output // 2, self._per_period() // 8), self._headroom * 4)

    def _per_period(self) -> int:
        """Return how many tokens of the output can count at the same time."""
        plan = self._plan
        if self._produced is None or plan.request is None or plan.learned_key is None or self._learned is None:
            return MAX_INTEGER
        return most_in_a_period(self.account.output_limits(plan.request), self._learned.fastest(plan.learned_key))

    def _extend_flow(self, amount: int) -> CallFlow[Any]:
        """Try to reserve more tokens of output; returns the decision, None if the store is unavailable."""
        request = self._plan.request
        if request is None:
            return None
        whole = units_of(request._replace(times=1), 0, amount)
        cost = {unit: amount for unit, amount in whole.items() if amount and unit in self.charge.units}
        if not cost:
            return self.charge.decision  # no limit counts output
        try:
            decision, top_up = yield from self.account.extend_flow(cost)
        except StoreUnavailable:
            return None
        if top_up is not None:
            self._top_ups.append(top_up)
        return decision

    def _available(self, decision: Decision) -> int:
        """Return the tokens of output that a denied decision would have allowed."""
        request = self._plan.request
        if request is None:
            return 0
        rate, counts = request.profile.output_rate(request.model), request.profile.counts
        rows = zip(decision.policy_limits, decision.views, strict=False)
        return min(
            (max(0, view.remaining) // rate for limit, view in rows if "output" in counts.get(limit.unit, ())),
            default=0,
        )

    def _renew_if_due_flow(self, reader: UsageReader) -> CallFlow[Any]:
        """Count what was produced, and reserve the rest again: the first reservation would expire before it is used."""
        output, now = self._produced, self.account.clock.steady()
        if output is None or not output.is_renewal_due(now) or not reader.readable:
            return
        arrived = reader.produced
        pieces = output.take_arrived(min(arrived, self.reserved_output), now)
        charges, kept = [(self.charge, self._output_units(self._first_output))], self._top_ups
        charges += [(top_up, self._reserved_by(top_up)) for top_up in kept]
        try:
            yield from self._count_pieces_flow(pieces)
            held = yield from self.account.hold_flow(self._output_units(self.reserved_output - output.counted))
        except StoreUnavailable:
            return  # what was reserved stays charged
        self._top_ups, self._first_output = [held], 0
        for charge, units in charges:
            yield from self.account.shrink_flow(charge, units)

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

    def _return_input_flow(self, reader: UsageReader) -> CallFlow[Any]:
        """Refund the difference if the estimate of the input was too high."""
        request = self._plan.request
        if request is None:
            return
        known = reader.parts
        counted = known.get("input", 0) + known.get("cache_write", 0)
        if request.price is not None and request.profile.cache_apart:
            counted += known.get("cache_read", 0)  # cache reads cost money, too
        if counted < self._plan.input_tokens:
            before = units_of(request, self._plan.input_tokens, self._plan.output_tokens)
            self._plan = self._plan._replace(input_tokens=counted)
            after = units_of(request, counted, self._plan.output_tokens)  # money is rounded up as a whole
            yield from self.account.shrink_flow(self.charge, {unit: before[unit] - after[unit] for unit in after})

    # ---- at the end --------------------------------------------------------------------------------------------------

    def settle_flow(self, used: Mapping[str, int] | None) -> CallFlow[Any]:
        """Commit the usage that the response reports, or what else the provider charges for it, once.

        An error is logged and counted, not raised: it must not cost the caller a response that is paid for.
        """
        if self._ended or self.charge.settled:
            return
        self._ended = True
        try:
            yield from self._settle_flow(used)
        except GeneratorExit:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a store raises
            self._count("unsettled")
            log_unsettled(self.account.provider.title, error)

    def _settle_flow(self, used: Mapping[str, int] | None) -> CallFlow[Any]:
        charge = self.charge
        self._learn()
        request, reader = self._plan.request, self._reader
        if used is not None and reader is not None and reader.lacks_input:
            reserved = self._reserved_by(charge, *self._top_ups)
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
            extended = self.reserved_output - self._first_reserved()
            self.account.spent += charge.record_spending(final, self._extra_money(extended))
        units = charge.units
        known = {} if final is None else {unit: amount for unit, amount in final.items() if unit in units}
        charge.usage = final
        if not known:
            charges = (charge, *self._top_ups)
            yield from complete_flow(*(each.commit_flow() for each in charges))
            return
        self._count_overrun(known)
        if self._top_ups or self._produced is not None:
            yield from self._commit_flow(known)
        else:
            yield from charge.commit_flow(known)

    def _extra_money(self, output_tokens: int) -> int:
        """Return what top-ups of this many tokens have reserved, in micros."""
        request = self._plan.request
        return 0 if request is None or request.price is None else request.price.estimate(0, output_tokens)

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
        whole = self._reserved_by(self.charge, *self._top_ups) if self._top_ups else self.charge.amounts
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
            yield from self._commit_parts_flow(known)
            return
        output = self._output_tokens()
        later = self._output_units(output)
        rest = {unit: max(0, amount - later.get(unit, 0)) for unit, amount in known.items()}
        try:
            yield from self._count_output_flow(self._produced, output)
        except GeneratorExit:
            raise
        except BaseException:  # it is not charged now, so it stays charged where it was reserved
            yield from self._commit_parts_flow(known)
            raise
        yield from self._commit_parts_flow(rest)

    def _count_output_flow(self, produced: ProducedOutput, output: int) -> CallFlow[Any]:
        """Charge an output that has ended from when it was produced; refund what was counted in excess."""
        plan, now = self._plan, self.account.clock.steady()
        fastest = None
        if self._learned is not None and plan.learned_key is not None and self._reader is not None:
            fastest = self._learned.fastest(plan.learned_key) if self._reader.complete else None
        surplus = produced.counted - output
        yield from self._count_pieces_flow(produced.pieces(output, now, fastest))
        while surplus > 0 and self._counted:
            tokens, at = self._counted.pop()
            yield from self.account.return_flow(self._output_units(min(tokens, surplus)), at)
            surplus -= tokens

    def _output_tokens(self) -> int:
        """Return the tokens of the whole output, or what was reserved for it if that is unknown."""
        reader = self._reader
        if reader is None or not (reader.complete or self._cut_off) or not reader.readable:
            return self.reserved_output
        if self._cut_off or reader.lacks_output:
            return max(reader.produced, self.reserved_output)
        return reader.produced if "output" not in reader.parts else self._reported_output(reader)

    def _reported_output(self, reader: UsageReader) -> int:
        return reader.parts["output"] + reader.parts.get("reasoning", 0) * reader.reasoning_apart

    def _commit_parts_flow(self, known: Mapping[str, int]) -> CallFlow[Any]:
        """Commit the usage to the first charge. Then return the top-ups, so that nothing is free in between."""
        returns = (each.commit_flow(dict.fromkeys(self._reserved_by(each), 0)) for each in self._top_ups)
        yield from complete_flow(self.charge.commit_flow(dict(known)), *returns)

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
        reader = self._reader
        if reader is None or (reader.complete and used is not None):
            return used
        if request is not None and self._cut_off and reader.readable:
            return self._estimated(self._plan.input_tokens, max(reader.produced, self.reserved_output))
        reserved = self._reserved_by(self.charge, *self._top_ups)  # the provider may have produced all of it
        if self.charge.label is not None:  # no limit may count its money
            extended = self.reserved_output - self._first_reserved()
            reserved.setdefault(self.charge.label.unit, self.charge.label.money + self._extra_money(extended))
        arrived = self._arrived_units(reader)
        known = {*(used or ()), *arrived}
        return {unit: max(reserved.get(unit, 0), (used or {}).get(unit, 0), arrived.get(unit, 0)) for unit in known}

    def _learn(self) -> None:
        """Record what the output and the input took."""
        plan, reader = self._plan, self._reader
        request = plan.request
        if self._learned is None or reader is None or request is None or plan.learned_key is None:
            return
        parts, output, whole = reader.parts, None, None
        if self._cut_off:
            output = 2 * reader.produced  # it would have been longer
        elif self.status < FIRST_ERROR_STATUS and "output" in parts:
            output = self._reported_output(reader)
            if self._produced is not None:
                self._learned.record_speed(plan.learned_key, output, self.account.clock.steady() - self._began)
            if request.times > 1:
                output = -(-output // request.times)
            if plan.truncates_at is not None and plan.truncates_at <= output < request.longest:
                self._count("truncated")
                output *= 2  # as above
        if "input" in parts and reader.reports_input and not request.fixed:
            whole = parts["input"]
            if request.profile.cache_apart:
                whole += parts.get("cache_read", 0) + parts.get("cache_write", 0)
        self._learned.record(plan.learned_key, output, request.text_length, whole)
