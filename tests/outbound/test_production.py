"""Output that the provider counts as it is produced: how it is split, and from when each piece counts."""

import json

import pytest

from tests.outbound.virtual_provider import usage
from tidegate import Limit
from tidegate.outbound import Gate, OutboundRequest, Providers
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.outbound._quota.production import MAX_PIECES, OutputPiece, ProducedOutput, merged, most_in_a_period
from tidegate.stores import open_store
from tidegate.testing import ManualClock

SECOND = 1_000_000
LIMITS = [Limit(10_000, "1m", unit="output-tokens", algorithm="sliding_log")]


def test_a_streamed_output_counts_from_when_its_chunks_arrived():
    output = ProducedOutput(LIMITS, 0)
    for second in range(1, 11):
        output.note(100 * second, second * SECOND)
    assert output.pieces(1000, 11 * SECOND, None) == [
        *(OutputPiece(100, second * SECOND) for second in range(1, 10)),
        OutputPiece(100, 11 * SECOND),  # the last piece is charged now
    ]
    halved = output.pieces(500, 11 * SECOND, None)  # chunks had fewer tokens than their bytes suggest
    assert sum(piece.tokens for piece in halved) == 500
    assert halved[0] == OutputPiece(50, SECOND)


def test_an_output_that_was_not_streamed_counts_from_the_latest_instant_that_its_speed_allows():
    output = ProducedOutput(LIMITS, 0)
    pieces = output.pieces(900, 10 * SECOND, 200)  # at most 225 a second, so it took at least 4 s
    assert sum(piece.tokens for piece in pieces) == 900
    assert pieces[-1].since == 10 * SECOND
    done = 0
    for piece in pieces:
        done += piece.tokens
        assert piece.since >= 10 * SECOND - (900 - done) * SECOND // 225 - 1
    assert len(pieces) == 8
    assert pieces[0].since == pytest.approx(6_500_000, abs=3000)
    assert output.pieces(900, 10 * SECOND, None) == [OutputPiece(900, 10 * SECOND)]
    assert output.pieces(0, 10 * SECOND, 200) == [OutputPiece(0, 10 * SECOND)]


def test_what_was_counted_while_it_arrived_is_not_counted_again():
    output = ProducedOutput(LIMITS, 0)
    output.note(100, SECOND)
    assert not output.is_renewal_due(7 * SECOND)
    assert output.is_renewal_due(30 * SECOND)
    assert output.take_arrived(300, 30 * SECOND) == [OutputPiece(100, SECOND), OutputPiece(200, 30 * SECOND)]
    assert output.counted == 300
    assert output.pieces(350, 31 * SECOND, 1000) == [OutputPiece(50, 31 * SECOND)]
    assert output.pieces(200, 31 * SECOND, 1000) == [OutputPiece(0, 31 * SECOND)]


def test_pieces_are_few_and_count_from_their_latest_part():
    pieces = merged([OutputPiece(1, at) for at in range(100)])
    assert len(pieces) <= MAX_PIECES
    assert sum(piece.tokens for piece in pieces) == 100
    assert pieces[-1].since == 99
    assert merged([OutputPiece(5, 1), OutputPiece(0, 2)]) == [OutputPiece(5, 2)]
    assert most_in_a_period(LIMITS, 200) == 13_500
    assert most_in_a_period(LIMITS, None) > 10**9


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_the_store_counts_each_piece_for_a_period(kind, tmp_path):
    clock = ManualClock(1_728_000_000)
    store = open_store("memory://" if kind == "memory" else f"sqlite:///{tmp_path}/quota.db", clock=clock)
    known = Providers.of(
        {"domain": "x.example", "limits": ["10000/1m unit=output-tokens sliding_log"], "profile": "anthropic"}
    )
    gate = Gate(known, store)
    body = json.dumps({"model": "m", "max_tokens": 1000, "messages": []}).encode()
    request = OutboundRequest(
        "POST", "https://x.example/v1/messages", {}.get, lambda: body, True, lambda _: False, True
    )

    def call(tokens, seconds, others=0):
        def send(_provider, _body=None):
            for _ in range(others):
                clock.advance(seconds / others)
                call(1, 0)
            clock.advance(0 if others else seconds)
            return ProviderResponse(200, (), lambda: None, 200)

        settlement = gate.run(gate.send_flow(request, send)).settlement
        settlement.open()
        settlement.feed(json.dumps({"usage": {"input_tokens": 1, "output_tokens": tokens}}).encode())
        settlement.end()
        gate.run(settlement.settle_flow())

    for _ in range(5):
        call(100, 1)  # the fastest of so few may be twice as fast as the fastest seen: 225 a second, at most
    clock.advance(120)
    call(900, 10, others=20)  # a piece is added to the next entry of the log: there are others every half second
    assert usage(known, store) == 900 + 20
    clock.advance(55.5)
    assert usage(known, store) == 900 + 9
    clock.advance(2.5)
    assert 300 <= usage(known, store) <= 600
    clock.advance(2)
    assert usage(known, store) == 0
    call(900, 10)  # without others, all of it counts from the end
    clock.advance(59)
    assert usage(known, store) == 900
    gate.close()
    store.close()
