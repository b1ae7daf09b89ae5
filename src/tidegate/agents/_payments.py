"""The ways in which a call may be paid, in order: its alternatives, and then those that credits pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from tidegate.agents._charging import Payment
from tidegate.agents._credits import CreditCost
from tidegate.agents._limits import RunCost, read_cost
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.agents._credits import CreditNode
    from tidegate.agents._node import Node

Named = list[tuple[str, "RunCost | CreditCost"]]
RunCosts = Sequence["RunCost | CreditCost"] | Mapping[str, "RunCost | CreditCost"]


def read_alternatives(costs: RunCosts) -> Named:
    """Return the alternatives of a call, each with its name: by default, that of its credits, or its place."""
    if isinstance(costs, Mapping):
        found = list(costs.items())
    else:
        found = [
            (cost.credits.name if isinstance(cost, CreditCost) else str(place), cost)
            for place, cost in enumerate(costs)
        ]
    if not found:
        raise ConfigError("needs at least one cost", field="costs")
    return found


def find_payments(node: Node, named: Named, bought: Mapping[str, CreditNode]) -> list[Payment]:
    """Return all ways to pay for a call of a node: each alternative, and then those that credits of the line pay."""
    found: list[Payment] = []
    usual: list[Mapping[str, int]] = []
    for name, cost in named:
        if isinstance(cost, CreditCost):
            payer = bought[cost.credits.name]
            amounts = read_cost(cost.cost, (*node.units, payer.unit), calls=1)
            if payer.unit not in amounts:
                message = f"the credits {payer.name!r} pay {payer.unit}, and the cost has none"
                raise ConfigError(message, field="cost")
            found.append(Payment(name, amounts, payer))
        else:
            usual.append(read_cost(cost, node.units, calls=1))
            found.append(Payment(name, usual[-1]))
    for name in dict.fromkeys(name for each in node.line for name in each.details.credits):
        known = bought.get(name)
        if known is not None:
            found += [Payment(name, amounts, known) for amounts in usual if amounts.get(known.unit)]
    return found


def digest_of(request: str | bytes) -> str:
    """Return the digest by which a repeated request is recognised."""
    return blake2b(
        request.encode("utf-8", "surrogatepass") if isinstance(request, str) else request, digest_size=16
    ).hexdigest()
