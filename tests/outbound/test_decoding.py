"""Bodies are decoded in chunks: the result is the same as at once, and chunks are small."""

import gzip
import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate.core import Limit
from tidegate.outbound._capacity.learning import MAX_PROVIDER_CHARGES, ProviderCharge, ProviderCharges
from tidegate.outbound._quota.decoding import DECODE_BYTES, BodyDecoder, DecodingError
from tidegate.outbound._quota.token_usage import UsageReader


def raw_deflate(body):
    engine = zlib.compressobj(wbits=-15)
    return engine.compress(body) + engine.flush()


PACKED = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZIP ", gzip.compress),
    "zlib": ("deflate", zlib.compress),
    "deflate": ("deflate", raw_deflate),
    "members": ("gzip", lambda body: gzip.compress(body[:10]) + gzip.compress(body[10:])),
    "padding": ("gzip", lambda body: gzip.compress(body) + bytes(50)),
}


def decoded(coding, packed, size):
    decoder, parts = BodyDecoder(coding), []
    for start in range(0, len(packed), size):
        parts += decoder.feed(packed[start : start + size])
    decoder.finish()
    assert all(0 < len(part) <= DECODE_BYTES for part in parts)
    return b"".join(parts)


@pytest.mark.parametrize("kind", PACKED)
@given(body=st.binary(max_size=300), size=st.integers(1, 80))
def test_pieces_decode_to_the_same_bytes(kind, body, size):
    coding, pack = PACKED[kind]
    assert decoded(coding, pack(body), size) == body


@cases("kind", PACKED)
@cases("extra", [-1, 0, 1])
@cases("size", [3, 65_536])
def test_bodies_around_the_chunk_size(kind, extra, size):
    coding, pack = PACKED[kind]
    body = bytes(3 * DECODE_BYTES + extra)
    assert decoded(coding, pack(body), size) == body


@given(body=st.binary(min_size=1, max_size=100), cut=st.integers(1, 20))
def test_an_incomplete_body_is_refused(body, cut):
    packed = gzip.compress(body)
    with pytest.raises(DecodingError):
        decoded("gzip", packed[: max(1, len(packed) - cut)], 7)


def test_an_identity_body_is_unchanged():
    assert list(BodyDecoder().feed(b"abc")) == list(BodyDecoder("identity").feed(b"abc")) == [b"abc"]
    BodyDecoder().finish()
    assert decoded("gzip", b"", 1) == b""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [b"a\n", b"\n", b"usage\n", b"data:usage\n", b'data:{"usage":{}}\n', b"x" * 999])
def test_reading_usage_from_a_decompression_bomb_takes_little_memory(lines):
    """Seventy megabytes of short lines, in a few pieces."""
    engine = zlib.compressobj(1, wbits=31)
    packed = [engine.compress(lines * (2**20 // len(lines))) for _ in range(70)]
    bomb = b"".join(packed) + engine.flush()
    reader = UsageReader("gzip")
    tracemalloc.start()
    try:
        for start in range(0, len(bomb), 65_536):
            reader.feed(bomb[start : start + 65_536])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reader.result() is None
    assert peak < 40 * 2**20


def test_usage_after_a_long_body_is_read():
    body = b"x" * 3_000_000 + b'\ndata: {"usage": {"total_tokens": 42}}\n\n'
    reader = UsageReader("gzip")
    reader.feed(gzip.compress(body))
    assert reader.result() == {"tokens": 42}
    whole = UsageReader("gzip")
    whole.feed(gzip.compress(json.dumps({"text": "x" * 100_000, "usage": {"total_tokens": 7}}).encode()))
    assert whole.result() == {"tokens": 7}


def test_the_number_of_provider_charges_is_bounded():
    """The oldest is forgotten: what it took comes back when its period has ended."""
    provider_charges, limit = ProviderCharges(), Limit(10**6, "1d")
    for number in range(5 * MAX_PROVIDER_CHARGES):
        provider_charges.add(ProviderCharge(0, 1, number))
    assert len(provider_charges) == MAX_PROVIDER_CHARGES
    assert provider_charges.take(0, 1) == [ProviderCharge(0, 1, 4 * MAX_PROVIDER_CHARGES)]
    provider_charges.drop_expired([limit], 10**12)
    assert len(provider_charges) == 0
