"""Raises wherever a signal handler may raise in the package: before a `try` begins, and in a clean-up too.

CPython runs signal handlers of Python code at the start of a function, after a call, and at a jump backwards; so `with`
on a lock, whose methods are written in C, cannot be left between taking the lock and releasing it. `alarms` raises from
real signals.
"""

import dis
import gc
import random
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

import tidegate
from tests.seeds import is_quick

PACKAGE = str(Path(tidegate.__file__).parent)
TOOL = 4  # of sys.monitoring: neither the debugger, the profiler nor coverage


CHECKED = frozenset(("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX"))  # CPython looks for signals after these
JUMPS = ("JUMP_BACKWARD", "POP_JUMP_BACKWARD")  # ... and at these


@cache
def interruptible(code):
    """Return the offsets of the instructions before which a signal handler may run.

    A handler that raises after a call raises in the block of that call: where the next instruction is in another block,
    tracing cannot raise as CPython does.
    """
    blocks = dis._parse_exception_table(code)  # noqa: SLF001 - dis only prints it
    found, before, block = set(), "", None
    for instruction in dis.get_instructions(code):
        name, offset = instruction.opname, instruction.offset
        own = next((entry for entry in blocks if entry.start <= offset < entry.end), None)
        if (before in CHECKED and own == block) or (name.startswith(JUMPS) and not name.endswith("NO_INTERRUPT")):
            found.add(offset)
        before, block = name, own
    return found


class Interrupted(BaseException):
    """Raised by a signal handler; no `except Exception` may swallow it."""


class Countdown:
    """Raises once, at the given step."""

    def __init__(self, step):
        self.left = step

    def __call__(self):
        self.left -= 1
        if not self.left:
            raise Interrupted


def interrupted_at(step):
    """Raise at the given one of the places where this thread may be interrupted in the package; the first is 1."""
    return (monitored if sys.version_info >= (3, 12) else traced)(Countdown(step))


@contextmanager
def traced(countdown):
    known = {}

    def trace(frame, event, _arg):
        code = frame.f_code
        ours = known.get(code)
        if ours is None:
            ours = known[code] = code.co_filename.startswith(PACKAGE)
        if not ours:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and frame.f_lasti in interruptible(code):
            countdown()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield countdown
    finally:
        sys.settrace(before)


@contextmanager
def monitored(countdown):
    """Do what `traced` does, which misses instructions from Python 3.12 on."""
    monitoring = sys.monitoring
    thread = threading.get_ident()

    def look(code, offset):
        if not code.co_filename.startswith(PACKAGE) or offset not in interruptible(code):
            return monitoring.DISABLE
        if threading.get_ident() == thread:
            countdown()
        return None

    instruction = monitoring.events.INSTRUCTION
    monitoring.use_tool_id(TOOL, "interrupts")
    monitoring.register_callback(TOOL, instruction, look)
    monitoring.set_events(TOOL, instruction)
    try:
        yield countdown
    finally:
        monitoring.set_events(TOOL, 0)
        monitoring.register_callback(TOOL, instruction, None)
        monitoring.free_tool_id(TOOL)


@contextmanager
def quiet_finalizers():
    """Say nothing of an interruption that Python ignored, since it came while an object was finalized."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda told: None if told.exc_type is Interrupted else hook(told)
    try:
        yield
    finally:
        sys.unraisablehook = hook


def each_interruption(call, *, every=1):
    """Run `call` once for each of its instructions, interrupted there, until it comes to its end; give their numbers.

    Whoever iterates checks, between two calls, that all is well. `every` leaves instructions out where there are many.
    """
    for step in count(1, every):
        with quiet_finalizers(), suppress(Interrupted), interrupted_at(step) as countdown:
            call()
        if countdown.left > 0:
            return
        yield step


def rarely(every):
    """Return how many instructions to go on by: three times as many in `make test`; the test has the mark `seeds`."""
    return every * 3 if is_quick() else every


def sampled_interruptions(call, number):
    """Do what `each_interruption` does, at about `number` instructions evenly spread over the whole call."""
    never = 10**12
    with interrupted_at(never) as countdown:
        call()
    total = never - countdown.left
    yield from each_interruption(call, every=max(1, total // number))


@contextmanager
def alarms():
    """Raise from a signal handler, at a moment of the system's choosing; not in `interrupt_calls` itself.

    The alarm repeats: on a busy machine, the next one may come before `interrupt_calls` has handled the last.
    """

    def interrupt(_number, frame):
        if frame.f_code is not interrupt_calls.__code__:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    callbacks, gc.callbacks[:] = list(gc.callbacks), []  # Hypothesis has one, in which an exception is only printed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.callbacks[:] = callbacks


def interrupt_calls(call, times, longest=0.002):
    """Interrupt a call that is made again and again."""
    chance = random.Random(1)
    with quiet_finalizers(), alarms():
        for _ in range(times):
            try:
                # Again after a while, since a finalizer may swallow the first.
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00005, longest), 0.2)
                while True:
                    call()
            except Interrupted:
                pass
            except RuntimeError as error:  # the condition of an event in `threading`, interrupted in its clean-up
                if not isinstance(error.__context__, Interrupted):
                    raise
        signal.setitimer(signal.ITIMER_REAL, 0)  # here, as the end of `with` may be interrupted
