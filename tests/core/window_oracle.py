"""The brute-force oracle of windows whose limits change: every admitted call, and until when each of them counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Call:
    """One admitted call, the window it counts in, and whether that had ended at a later admission."""

    cost: int
    at: int
    since: int
    until: int
    window: int
    gone: bool = False


class WindowOracle:
    """Every admitted call since the key was last unused, and until when each counts.

    A call counts until its window ends, and what counts at a later admission also counts until that call's window ends.
    What has ended since the last admission counts on for a limit whose window holds that admission; what had ended
    before it counts again for one whose window begins before that admission's. A fixed window holds it while it is
    open, and is taken to begin before it if it is longer.
    """

    def __init__(self):
        self.calls = []
        self.own = (0, 0)
        self.last = 0
        self.admissions = 0

    def alive(self, now):
        return any(call.until > now for call in self.calls)

    def seen(self, now):
        """Give the instant that counts: a state that carries nothing knows its window's start, no later one."""
        if not self.alive(now):
            return now
        carries = any(call.gone or call.until > self.own[1] for call in self.calls)
        return max(now, self.last if carries else self.own[0])

    def window(self, limit, now):
        now, alive = self.seen(now), self.alive(now)
        if limit.calendar is not None:
            return limit.calendar.window(now)
        start = self.own[0] if alive and now - self.own[0] < limit.length else now
        return start, start + limit.length

    def counted(self, limit, now):
        start = self.window(limit, now)[0]
        holds, back = start <= self.last, start < self.own[0]
        if limit.calendar is None:
            holds = start == self.own[0]
            back = holds and limit.length > self.own[1] - self.own[0]
        now = self.seen(now)
        if not self.alive(now):
            return []
        return [call for call in self.calls if call.until > now or back or (holds and not call.gone)]

    def used(self, limit, now):
        return sum(call.cost for call in self.counted(limit, now))

    def admit(self, limit, cost, now):
        if not self.alive(now):
            self.calls.clear()
        window = self.window(limit, now)
        counted = self.counted(limit, now)
        self.admissions += 1
        for call in self.calls:
            call.gone = call not in counted
            if not call.gone and call.until <= window[1]:  # from now on, it counts in the present window
                call.since, call.until, call.window = *window, self.admissions
        self.calls = [call for call in self.calls if call.cost or call.until <= window[1]]
        self.own, self.last = window, max(self.seen(now), window[0])
        self.calls.append(Call(cost, now, *window, self.admissions))

    def correct(self, limit, delta, now, at):
        """Change what was used in the open windows that hold `at` (None: in all of them), the latest first.

        Tells whether it reached anything.
        """
        held = [
            call
            for call in self.calls
            if not call.gone and call.until > self.seen(now) and (at is None or call.since <= at < call.until)
        ]
        if delta > 0 and (at is None or (not held and self.window(limit, now)[0] <= at <= self.seen(now))):
            self.admit(limit, delta, now)
            return True
        if delta > 0 and held:
            max(held, key=lambda call: call.window).cost += delta
        else:
            for call in sorted(held, key=lambda call: -call.window):
                back = min(call.cost, -delta)
                call.cost -= back
                delta += back
            self.forget_what_is_unused()
        return bool(held)

    def forget_what_is_unused(self):
        """Close older windows in which nothing is used any more, and the own one with the last of them."""
        used = {call.window for call in self.calls if call.cost and not call.gone}
        self.calls = [call for call in self.calls if call.gone or call.window in used or call.until <= self.own[1]]
        if not used:
            self.calls.clear()

    def older(self):
        """Count the different ends of what outlasts the last admission's window."""
        return len({call.until for call in self.calls if call.until > self.own[1]})
