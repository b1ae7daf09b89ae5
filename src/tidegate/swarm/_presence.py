"""Which agents are in the swarm, and the state of their resources.

A watcher publishes a request on `ratelimit.agents.ask`; each agent answers on `ratelimit.agents` with its name and its
resources. So presence costs nothing while there is no watcher. A namespace precedes both subjects.

An agent that joins publishes its name and that of its process on `ratelimit.agents.ask`; only another agent with the
same name answers, in the same way, so that both log it.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._runtime.fork import fork_safe
from tidegate.adaptive._capacities import subject_in
from tidegate.adaptive._signing import MalformedError, MessageSigner
from tidegate.adaptive._update import is_name
from tidegate.core._bounds import MAX_INTEGER, SECOND
from tidegate.swarm._arguments import process_name
from tidegate.swarm._capacity import Capacity

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.bus import Bus, Event

ASK_SUBJECT: Final = "ratelimit.agents.ask"
ANSWER_SUBJECT: Final = "ratelimit.agents"
MAX_ANSWER_BYTES: Final = 900_000  # NATS carries a little more by default
MAX_ANSWERS_BYTES: Final = 64 * 2**20  # of all answers that a watcher stores
MAX_ANSWERS: Final = 10_000
RESERVED_BYTES: Final = 1_000  # of an answer, for everything but its resources
log: logging.Logger = logging.getLogger("tidegate.swarm")


class Presence:
    """Answers watchers for one agent, and notices another agent with the same name."""

    def __init__(
        self,
        bus: Bus,
        agent_id: str,
        secret: str | bytes | None,
        describe: Callable[[], list[Capacity]],
        namespace: str = "",
    ) -> None:
        """Answer with the result of `describe`."""
        self._ask_subject = subject_in(namespace, ASK_SUBJECT)
        self._answer_subject = subject_in(namespace, ANSWER_SUBJECT)
        self._bus = bus
        self._agent_id = agent_id
        self._signer = MessageSigner(secret, bus.clock)
        self._describe = describe
        self._process = process_name()
        self._is_duplicate = False  # another agent with the same name was noticed
        self._subscription = bus.subscribe(self._ask_subject, self._on_ask)
        self._announce()

    def rejoin(self, agent_id: str) -> None:
        """Join under a name in a forked process."""
        self._agent_id = agent_id
        self._process = process_name()
        self._is_duplicate = False
        self._announce()

    def _announce(self) -> None:
        message = {"joined": self._agent_id, "process": self._process}
        self._bus.publish(self._ask_subject, self._signer.write(message, self._ask_subject))

    def _on_ask(self, event: Event) -> None:
        try:
            fields = self._signer.read_new(event.payload, MAX_ANSWER_BYTES, self._ask_subject)
        except MalformedError:  # not signed with the secret, or old
            return
        if "joined" in fields:  # also if it had to wait for a connection
            self._on_joined(fields["joined"], fields.get("process"))
        elif not event.late:
            self._answer()

    def _on_joined(self, agent_id: object, process: object) -> None:
        """Log once that another agent has the same name, and tell it so."""
        if agent_id != self._agent_id or process == self._process or self._is_duplicate or not is_name(process):
            return
        self._is_duplicate = True
        log.warning(
            "two agents have the agent_id %r: %r (this one) and %r. They ignore each other's reductions: "
            "give each agent a unique agent_id, or none",
            self._agent_id,
            self._process,
            process,
        )
        self._announce()

    def _answer(self) -> None:
        answer = {"agent_id": self._agent_id, "resources": self._resources()}
        self._bus.publish(self._answer_subject, self._signer.write(answer, self._answer_subject))

    def _resources(self) -> dict[str, Any]:
        """Describe as many resources as one message can carry."""
        found: dict[str, Any] = {}
        bytes_left = MAX_ANSWER_BYTES - RESERVED_BYTES - len(json.dumps(self._agent_id))
        for capacity in self._describe():
            fields = asdict(capacity)
            bytes_left -= 2 * len(json.dumps(capacity.resource)) + len(json.dumps(fields))
            if bytes_left < 0:
                break
            found[capacity.resource] = fields
        return found

    def close(self) -> None:
        """Stop answering."""
        self._subscription.close()


@dataclass(frozen=True, slots=True)
class Agent:
    """The last answer of an agent, and how many seconds ago it arrived."""

    agent_id: str
    seconds_ago: float
    resources: dict[str, Capacity]


class _Answer(NamedTuple):
    at: int  # in microseconds of steady time
    resources: dict[str, Capacity]
    size: int


class Watcher:
    """Requests answers and collects them."""

    def __init__(self, bus: Bus, secret: str | bytes | None = None, namespace: str = "") -> None:
        """Subscribe to answers on the bus."""
        self._ask_subject = subject_in(namespace, ASK_SUBJECT)
        self._answer_subject = subject_in(namespace, ANSWER_SUBJECT)
        self._bus = bus
        self._signer = MessageSigner(secret, bus.clock)
        self._lock = fork_safe(threading.Lock())
        self._answers: dict[str, _Answer] = {}
        self._bytes = 0  # total size of the answers
        self.malformed: int = 0
        self._subscription = bus.subscribe(self._answer_subject, self._on_answer)

    def ask(self) -> None:
        """Ask all agents to answer."""
        self._bus.publish(self._ask_subject, self._signer.write({}, self._ask_subject))

    def agents(self, within: float = 10.0) -> list[Agent]:
        """Return the agents that responded within the given number of seconds, by name; others are removed."""
        now = self._bus.clock.steady()
        with self._lock:
            for name in [name for name, answer in self._answers.items() if now - answer.at > within * SECOND]:
                self._remove(name)
            found = sorted(self._answers.items())
        return [Agent(name, (now - answer.at) / SECOND, answer.resources) for name, answer in found]

    def _remove(self, name: str) -> None:
        answer = self._answers.pop(name, None)
        self._bytes -= 0 if answer is None else answer.size

    def _on_answer(self, event: Event) -> None:
        try:
            name, resources = _read(self._signer.read_new(event.payload, MAX_ANSWER_BYTES, self._answer_subject))
        except (MalformedError, TypeError, KeyError, AttributeError):
            self.malformed += 1
            return
        answer = _Answer(self._bus.clock.steady(), resources, len(event.payload))
        with self._lock:
            self._remove(name)
            self._answers[name] = answer
            self._bytes += answer.size
            while self._bytes > MAX_ANSWERS_BYTES or len(self._answers) > MAX_ANSWERS:
                self._remove(next(iter(self._answers)))  # the oldest

    def close(self) -> None:
        """Unsubscribe from the bus."""
        self._subscription.close()


def _read(fields: dict[str, Any]) -> tuple[str, dict[str, Capacity]]:
    resources = {str(name): Capacity(**fields) for name, fields in fields["resources"].items()}
    for capacity in resources.values():
        counts = (capacity.available, capacity.total, capacity.in_flight, capacity.original)
        if not (all(map(_is_count, counts)) and _is_time(capacity.window) and _is_time(capacity.frozen_for)):
            raise MalformedError(f"a field of resource {capacity.resource!r} is not an integer, or is out of range")
    if not is_name(fields["agent_id"]) or not all(map(is_name, resources)):
        raise MalformedError("the names of an agent and its resources must be strings")
    return fields["agent_id"], resources


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -MAX_INTEGER <= value <= MAX_INTEGER


def _is_time(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and abs(value) <= MAX_INTEGER
    )
