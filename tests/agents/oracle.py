"""A tree of runs as plain dictionaries: what each node was billed, and which calls it must deny."""

from dataclasses import dataclass, field

CALLS = "requests"


@dataclass(eq=False)
class Billed:
    parent: "Billed | None"
    quotas: dict[str, int]
    ends: float
    carved: dict[str, int] = field(default_factory=dict)
    status: str = "open"
    returned: bool = False
    used: dict[str, int] = field(default_factory=dict)
    children: list["Billed"] = field(default_factory=list)

    def __post_init__(self):
        if self.parent is not None:
            self.parent.children.append(self)

    @property
    def line(self):
        return [self] if self.parent is None else [self, *self.parent.line]

    def counted(self, unit):
        """The nodes where a unit counts: up to a carve-out that has it, or above one that was returned."""
        found = []
        for node in self.line:
            found.append(node)
            if unit in node.carved:
                if not node.returned:
                    break
                found = []
        return found

    def accepts(self, now):
        return all(node.status == "open" and now < node.ends for node in self.line)

    def fits(self, cost):
        return all(
            node.used.get(unit, 0) + amount <= node.quotas.get(unit, 2**52)
            for unit, amount in cost.items()
            for node in self.counted(unit)
        )

    def add(self, cost):
        for unit, amount in cost.items():
            for node in self.counted(unit):
                node.used[unit] = node.used.get(unit, 0) + amount

    def walk(self):
        yield self
        for child in self.children:
            yield from child.walk()

    def give_back(self):
        """Return what this carve-out has not used to its parent."""
        if self.carved and not self.returned:
            self.returned = True
            self.parent.add({unit: -max(0, amount - self.used.get(unit, 0)) for unit, amount in self.carved.items()})

    def close(self):
        self.status = "closed"
        for node in reversed(list(self.walk())):
            node.give_back()


def give_back_ended(root, now):
    """Return the rest of all carve-outs that have ended; returns whether there was one."""
    ended = [
        node
        for node in root.walk()
        if node.carved
        and not node.returned
        and any(above.status == "closed" or above.ends <= now for above in node.line)
    ]
    for node in reversed(ended):
        node.give_back()
    return bool(ended)
