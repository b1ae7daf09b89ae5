"""Ways around a budget that are closed: names of limits, tokens, extensions, carve-outs that end, odd amounts."""

import json
from base64 import urlsafe_b64encode
from contextlib import nullcontext

import pytest

from tests.agents.stepping import interleaved
from tidegate import ConfigError, Limit, Limiter
from tidegate.agents import Run, RunDenied, RunEndedError, RunRightError, TokenError, list_runs
from tidegate.agents._framework import reserve_call
from tidegate.agents._limits import add_counters
from tidegate.agents._node import Details

DAY = 86_400


@pytest.mark.parametrize(
    "limit",
    [
        "1000000/run name=usd_micros-run",
        "9/1m unit=usd name=usd_micros-run",
        "9/run unit=pages name=requests-run",
        Limit(9, "1m", name="requests-run"),
    ],
)
def test_no_limit_hides_the_counter_of_a_unit(memory, limit):
    run = Run("r", store=memory, limits=["1/run unit=usd"])
    child = Run.join(run.token(rights=["child", "charge"]), store=memory)
    with pytest.raises(ConfigError, match="only a limit per run in"):
        child.child("c", limits=[limit])
    named = child.child("c", limits=["9/run unit=usd name=usd_micros-run", "9/run name=requests-run"])
    reserve_call(named, {"usd": "0.9"}, "")
    with pytest.raises(RunDenied, match="r denied it"):
        reserve_call(named, {"usd": "0.9"}, "")


def test_a_counter_is_missing_unless_a_limit_has_its_name_and_its_unit():
    other = Limit(5, "1d", "fixed_window", unit="requests", name="usd_micros-run")
    counters = add_counters([other], ["usd_micros"], DAY)[1:]
    assert [(limit.unit, limit.name) for limit in counters] == [("usd_micros", "usd_micros-run")]


def test_the_parent_of_a_run_is_charged_after_the_run_has_changed(store):
    team = Limiter("5000/1d unit=tokens", store=store)
    run = Run("r", store=store, limits=["100/run"], parent=(team, "red"))
    child = run.child("c")
    run.extend({"requests": 1})
    for node in (run, child):
        reserve_call(node, {"tokens": 1000}, "")
    assert team.peek("red").remaining == 2999
    for _ in range(3):
        reserve_call(run, {"tokens": 1000}, "")
    with pytest.raises(RunDenied):
        reserve_call(run, {"tokens": 1000}, "")


@pytest.mark.parametrize("extended", ["carve-out", "parent"])
def test_a_carve_out_that_is_returned_while_it_is_extended_admits_nothing(memory, clock, extended):
    run = Run("r", store=memory, limits=["10/run unit=usd"], ttl=DAY)
    middle = run.child("middle", ttl=60 if extended == "parent" else None)
    part = middle.child("part", carve={"usd": 5}, ttl=60)
    part.charge({"usd": 0})
    other = Run.join(run.token(), store=memory)
    clock.advance(59)
    if extended == "parent":
        part.extend(ttl=3600)

    def returned():
        clock.advance(2)
        other.usage()

    node = part if extended == "carve-out" else middle
    refused = pytest.raises(RunDenied, match="has ended") if extended == "carve-out" else nullcontext()
    with refused:
        interleaved(node, node._extend_flow(None, 3600.0), 1, returned)  # noqa: SLF001 - what `extend` executes
    with pytest.raises(RunDenied, match="has ended"):
        part.reserve({"usd": 5})
    other.charge({"usd": 10})
    assert run.usage().used["usd_micros"] == 10_000_000


def test_what_is_kept_of_a_run_is_kept_until_its_new_end(store, clock):
    run = Run("r", store=store, limits=["10/run unit=usd"], ttl=DAY)
    part = run.child("part", carve={"usd": "5"})
    run.charge({"usd": 1}, label="model:x")
    run.extend(ttl=60 * DAY)
    part.extend(ttl=50 * DAY)
    clock.advance(9 * DAY)
    assert [listed.id for listed in list_runs(store) if listed.id == run.id] == [run.id]
    assert [dict(row.used)["usd_micros"] for row in run.report() if row.model == "x"] == [1_000_000]
    part.charge({"usd": 1})
    part.close()
    assert run.usage().used["usd_micros"] == 2_000_000


def test_a_token_gains_neither_time_nor_rights_by_a_child(store, clock):
    run = Run("r", store=store, limits=["1/run unit=usd"])
    holder = Run.join(run.token(rights=["child", "read"], ttl=10), store=store)
    child = holder.child("c")
    below = child.child("d")
    for node in (child, below):
        with pytest.raises(RunRightError, match="no right to charge"):
            node.charge({"usd": "0.5"})
        with pytest.raises(RunRightError, match="no right to charge"):
            node.token()
        again = Run.join(node.owner_key(), store=store)
        for other in (node, again):
            with pytest.raises(RunRightError, match="beyond the end of that token"):
                other.extend(ttl=80_000)
            assert other.rights == ("child", "read")
        again.child("f").extend(ttl=9)
    spender = Run.join(run.token(ttl=10), store=store).child("s").child("t")
    spender.charge({"usd": "0.1"})
    clock.advance(10)
    for node in (spender, child, below):
        with pytest.raises((RunDenied, RunRightError)):
            node.charge({"usd": "0.1"})
    with pytest.raises(RunDenied, match="has ended"):
        spender.child("late")
    assert run.usage().used["usd_micros"] == 100_000


def test_a_node_of_another_format_is_refused(memory):
    run = Run("r", store=memory, limits=["9/run"])
    fields = json.loads(run._node().data)  # noqa: SLF001 - what is stored
    for changed in ({"format": 1}, {"format": 3, "more": 1}):
        with pytest.raises(RunEndedError, match="another version"):
            Details.load(json.dumps(fields | changed).encode())
    del fields["format"]
    with pytest.raises(RunEndedError, match="another version"):
        Details.load(json.dumps(fields).encode())


def test_the_limit_that_denied_is_extended(memory):
    asked = []

    def ask(exhausted):
        asked.append(exhausted.limit)
        return {"usd": "0.5"}

    limits = ["5/run unit=usd name=total", "1/run unit=usd name=hard"]
    run = Run("r", store=memory, limits=limits, on_exhausted=ask)
    run.charge({"usd": 2})
    assert asked == ["hard", "hard"]
    assert {name: limit.quota for name, limit in run.usage().limits.items()} == {"total": 5_000_000, "hard": 2_000_000}


def test_nobody_is_asked_about_a_limit_that_is_not_per_run(memory):
    limits = ["5/run unit=usd", "1/1d unit=usd fixed_window"]
    run = Run("r", store=memory, limits=limits, ttl=3600, on_exhausted=lambda _: pytest.fail("asked"))
    with pytest.raises(RunDenied):
        run.charge({"usd": 2})


@pytest.mark.parametrize(
    "answer", [{"usd": -1}, {"eur": 1}, {"usd": "1e999999"}, {"usd": 10**5000}, [1], "5"], ids=range(6)
)
def test_an_answer_that_cannot_be_used_denies(memory, caplog, answer):
    run = Run("r", store=memory, limits=["1/run unit=usd"], on_exhausted=lambda _: answer)
    with pytest.raises(RunDenied):
        run.charge({"usd": 2})
    assert "r is not extended" in caplog.text


@pytest.mark.parametrize(
    "amount", ["1e999999", "-1e999999", 10**5000, -(10**5000), 2**53, "9" * 100_000, True, "x"], ids=range(8)
)
def test_an_amount_that_cannot_be_counted_is_a_config_error(memory, amount):
    run = Run("r", store=memory, limits=["1/run unit=usd", "9/run unit=tokens"])
    wrong = [
        lambda: run.reserve({"usd": amount}),
        lambda: run.reserve({"tokens": amount}),
        lambda: run.extend({"usd": amount}),
        lambda: run.child("c", carve={"usd": amount}),
    ]
    for call in wrong:
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(ConfigError, match="amounts by unit"):
        run.extend([1])


def test_nodes_above_a_carve_out_are_kept_until_its_rest_was_returned(store, clock):
    run = Run("r", store=store, limits=["10/run unit=usd"], ttl=DAY)
    middle = run.child("middle", ttl=60)
    middle.child("part", carve={"usd": 9}).charge({"usd": 1})
    middle.child("plain")
    clock.advance(61)
    flow = run._tree._remove_ended_flow()  # noqa: SLF001 - which makes room when the tree is full
    interleaved(run, flow, 0, None)
    other = Run.join(run.token(), store=store)
    other.charge({"usd": 9})
    usage = other.usage()
    assert usage.used["usd_micros"] == 10_000_000
    assert [child.name for child in usage.children[0].children] == ["part"]


@pytest.mark.parametrize("payload", [b'["a",["b"],[],Infinity,"x"]', b"[" * 2900], ids=["infinity", "deep"])
def test_a_payload_that_cannot_be_read_is_no_token(payload):
    text = urlsafe_b64encode(payload).decode().rstrip("=")
    with pytest.raises(TokenError):
        Run.join(f"tgr1.{text}.AAAA")


def test_text_that_is_no_unicode_is_refused_or_counted(memory):
    for name in ("\ud800", "a\udfffb"):
        with pytest.raises(ConfigError, match="must be 1 to 200 characters"):
            Run(name, store=memory)
    run = Run("r", store=memory, max_repeats=1)
    run.reserve(request="\ud800").commit()
    with pytest.raises(RunDenied, match="same request"):
        run.reserve(request="\ud800")
