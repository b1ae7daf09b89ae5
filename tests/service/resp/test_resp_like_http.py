"""The same calls over RESP and over HTTP have the same results."""

import asyncio
import json
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.resp.harness import InProcessResp

POLICIES = {
    "api": "5/1m",
    "tiers": {"limits": ["3/1s", "100 tokens/1m"]},
    "windows": {"limits": "4/10s sliding_window"},
    "quiet": {"limits": "2/1m", "mode": "shadow"},
    "slots": {"limits": [{"quota": 2, "period": "1m", "algorithm": "concurrency"}]},
    "vip": {"limits": "1/1m", "overrides": [{"key": "b", "limits": "9/1m"}], "rollout": 50},
}
SUBJECTS = st.tuples(st.sampled_from([*POLICIES, "unknown"]), st.sampled_from(["a", "b", "ä", "k" * 1025]))
UNITS = {"requests": st.integers(0, 3), "tokens": st.integers(0, 99)}
COSTS = st.one_of(st.none(), st.integers(0, 7), st.fixed_dictionaries({}, optional=UNITS))
CALLS = st.tuples(
    st.sampled_from(["acquire", "acquire", "acquire", "peek", "release", "usage", "reset"]), SUBJECTS, COSTS
)
STEPS = st.lists(st.one_of(CALLS, st.sampled_from([0.0004, 0.3, 1.0, 7.7, 60.0])), max_size=25)


def with_cost(cost):
    """Return a cost as the last words of a command, and as fields of a JSON object."""
    if cost is None or cost == {}:
        return [], {}
    words = [str(cost)] if isinstance(cost, int) else [str(each) for pair in cost.items() for each in pair]
    return ["COST", *words], {"cost": cost}


def as_resp(body):
    """Return what RESP should answer, from the response over HTTP."""
    if "type" in body:
        return "error", body["type"].rpartition(":")[2]
    if "ok" in body:
        return "OK"
    if "allowed" not in body:
        keys = ("name", "quota", "used", "remaining", "reset_after", "unit")
        return [[millis(each[k]) if k == "reset_after" else each[k] for k in keys] for each in body["limits"]]
    retry = -1 if body["retry_after"] is None else millis(body["retry_after"])
    return [int(body["allowed"]), body["remaining"], retry, millis(body["reset_after"]), body["violated"]]


def millis(seconds):
    return ceil(round(seconds * 1_000_000) / 1000)


def plain(reply):
    """Return a reply, or the kind of an error."""
    if not isinstance(reply, Exception):
        return reply
    return "error", str(reply).split()[1].removesuffix(":")


async def compare(steps, pipelined):
    async with InProcessResp(policies=POLICIES) as resp, InProcessResp(policies=POLICIES) as http:
        client = await resp.connect()
        batch, expected = [], []
        for step in [*steps, 0.0]:
            if isinstance(step, tuple):
                verb, (policy, key), cost = step
                words, fields = with_cost(cost if verb not in ("usage", "reset") else None)
                batch.append((f"TG.{verb.upper()}", policy, key, *words))
                body = {"policy": policy, "key": key, **fields}
                expected.append((step, as_resp(json.loads((await http.post(verb, body)).content))))
            if not pipelined or not isinstance(step, tuple):
                replies = await client.ask_all(*batch)
                for reply, (call, answer) in zip(replies, expected, strict=True):
                    assert plain(reply) == answer, call
                batch, expected = [], []
            if not isinstance(step, tuple):
                resp.clock.advance(step)
                http.clock.advance(step)
        for each in POLICIES:
            ours, theirs = resp.decider.stats.count(each), http.decider.stats.count(each)
            assert [ours.allowed, ours.denied, ours.shadow] == [theirs.allowed, theirs.denied, theirs.shadow]
        assert resp.decider.stats.errors.totals() == http.decider.stats.errors.totals()


@settings(max_examples=60, deadline=None)
@given(STEPS, st.booleans())
def test_the_same_calls_have_the_same_results(steps, pipelined):
    asyncio.run(compare(steps, pipelined))
