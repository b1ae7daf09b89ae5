"""Faults to insert into core.sql: each must make it differ from the Python core in an answer or a stored state."""

from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    right: str
    wrong: str
    seed: int = 0


FAULTS = (
    Fault("ceil_div rounds down", "select (a + b - 1) / b", "select a / b"),
    Fault("floor_div cuts off", "select a / b - (a % b < 0)::int", "select a / b"),
    Fault("a bucket takes one too few", "if state[1] < cost * l.scale then", "if state[1] <= cost * l.scale then", 1),
    Fault(
        "a bucket may overflow",
        "then capacity else level + passed * rate end",
        "then capacity + 1 else level + passed * rate end",
    ),
    Fault(
        "time runs backwards", "passed bigint := greatest(0, now - state[2]);", "passed bigint := now - state[2];", 2
    ),
    Fault(
        "a change of limit counts at the faster rate",
        "        least(\n            rescale(",
        "        greatest(\n            rescale(",
        13,
    ),
    Fault("fractions are kept where they do not fit", "        part := 0;", "        part := part;", 12),
    Fault(
        "debt has no floor",
        "then state[1] - l.floor else delta * l.scale end",
        "then state[1] - l.floor - 1 else delta * l.scale end",
    ),
    Fault("what was refilled comes back", "            peak := l.capacity;\n", "            peak := state[1];\n", 2),
    Fault(
        "marks of one instant pile up",
        "state[cardinality(state) - 1] >= state[2] loop",
        "state[cardinality(state) - 1] > state[2] loop",
        14,
    ),
    Fault("marks are not raised", "    if state[cardinality(state)] < state[1] then", "    if false then", 8),
    Fault(
        "a window is a microsecond too long",
        "else state[2] + l.length end",
        "else state[2] + l.length + 1 end",
    ),
    Fault(
        "an older window is corrected",
        "windows[i + 1] <= at and at < windows[i + 2]",
        "true",
        15,
    ),
    Fault(
        "what outlasts a window is forgotten", "if counted[i + 2] > present[2] and counted[i] > 0 then", "if false then"
    ),
    Fault("what has ended is forgotten", "    if back then\n", "    if false then\n"),
    Fault("what has just ended is forgotten", "windows[i + 2] > now or overlapping then", "windows[i + 2] > now then"),
    Fault("an ended window goes on", "if windows[i + 2] > now or overlapping then", "if true then"),
    Fault("the latest charge is forgotten", "greatest(now, coalesce(state[4], state[2]))", "greatest(now, state[2])"),
    Fault(
        "the wait is for the last to end", "then least(retry, counted[i]) else retry end", "then retry else retry end"
    ),
    Fault("a calendar window ends late", "while l.bounds[i + 1] <= now loop", "while l.bounds[i + 1] < now loop"),
    Fault(
        "never is only a long time",
        "        retry := -1;\n    elsif cost > greatest(0, remaining)",
        "        retry := 1;\n    elsif cost > greatest(0, remaining)",
        11,
    ),
    Fault(
        "the previous window weighs too little",
        "ceil_div(previous * least(",
        "(previous * least(".replace("(", "floor_div(", 1),
    ),
    Fault(
        "counts are not clamped", "    count := least(most, count);\n    previous := least(most, previous);\n", "", 3
    ),
    Fault("a log forgets a microsecond early", "e.at <= now - l.length\n", "e.at <= now - l.length + 1\n", 14),
    Fault(
        "a log's last entry is not given back first",
        "where e.log = state[1] and e.sum > state[2] order by e.sum desc limit 1;",
        "where e.log = state[1] and e.sum > state[2] order by e.sum limit 1;",
        13,
    ),
    Fault(
        "slots that end last are released first",
        "where e.log = state[1] and e.sum > state[2] order by e.sum limit 1;",
        "where e.log = state[1] and e.sum > state[2] order by e.sum desc limit 1;",
        13,
    ),
    Fault("sums do not follow a correction", "set sum = e.sum + change where e.log", "set sum = e.sum where e.log", 5),
    Fault("the base does not follow a correction", "            state[2] := state[2] - change;\n", "", 13),
    Fault(
        "an ended state is read",
        "    if s.ends <= now then\n        return case",
        "    if false then\n        return case",
        7,
    ),
    Fault(
        "a denied call is charged",
        "    if changed is null or verb = 'peek' then\n        return views;",
        "    if changed is null then changed := acquire(limits, states, array_fill(1::bigint, "
        "array[cardinality(limits)]), now, false); end if;\n"
        "    if changed is null or verb = 'peek' then\n        return views;",
    ),
    Fault("a hold leaves no mark", "charged := mark_bucket(charged);", "charged := charged;", 1),
    Fault(
        "states are found by name alone",
        "        if s.name = l.name and s.algorithm = l.algorithm then\n"
        "            return s;\n        end if;\n    end loop;",
        "        if s.name = l.name then\n            return s;\n        end if;\n    end loop;",
        11,
    ),
    Fault(
        "limits that left the policy are forgotten",
        "        kept := kept || s;\n        last := greatest(last, s.ends);\n    end loop;\n    if known",
        "    end loop;\n    if known",
        5,
    ),
    Fault("a look is kept", "if changed is null or verb = 'peek' then", "if changed is null then"),
    Fault(
        "a reset spares other limits",
        "        if forget or s.ends <= now then",
        "        if s.ends <= now then",
        11,
    ),
    Fault(
        "a key is swept before its end",
        "            if s.ends > now then\n                kept := kept || s;",
        "            if s.ends > now + 3600000000 then\n                kept := kept || s;",
    ),
)
