"""Requests that are multipart forms: how many images they ask for, whatever the form contains."""

import gzip
import io
from math import inf

import aiohttp
import httpx
import pytest

from tests.cases import cases
from tests.outbound.clients import HTTPX_LIBRARIES, KINDS, fetch
from tests.outbound.server import QuotaServer
from tidegate import Denied
from tidegate.outbound import Providers, UnboundedCost
from tidegate.outbound._quota.form_body import MAX_HEADER_LENGTH, MAX_PARTS, read_number
from tidegate.outbound.httpx import RateLimitTransport

PATH = "/v1/images/edits"
FORM = {"content-type": "multipart/form-data; boundary=b"}
PRICES = {"date": "2026-11-01", "default": {"kinds": {"image": 0.04}}}


def providers(domain="127.0.0.1", limit="1/day unit=usd name=money"):
    settings = {"domain": domain, "profile": "openai", "price": PRICES, "limits": [limit]}
    return Providers.of({**settings, "strict": True})


def part(value, header='form-data; name="n"', line="\r\n"):
    return f"--b{line}Content-Disposition: {header}{line}{line}{value}{line}".encode()


def form(*parts):
    image = part("\x00\x01", 'form-data; name="image"; filename="a.png"\r\nContent-Type: image/png')
    return b"".join([image, *parts, b"--b--\r\n"])


@cases("kind", KINDS)
@cases(("body", "images"), [(form(part(2)), 2), (form(), 1)])
def test_the_images_that_a_form_asks_for_are_paid(kind, body, images):
    with QuotaServer() as server:
        (found,) = fetch(kind, providers(), [server.url + PATH], method="POST", body=body, headers=FORM, timeout=0)
    assert found.outcome.cost == {"usd_micros": images * 40_000}


def test_a_compressed_form_is_read():
    body, headers = gzip.compress(form(part(2))), {**FORM, "content-encoding": "gzip"}
    with QuotaServer() as server:
        (found,) = fetch("httpx", providers(), [server.url + PATH], method="POST", body=body, headers=headers)
    assert found.outcome.cost == {"usd_micros": 80_000}


@pytest.mark.parametrize("library", HTTPX_LIBRARIES)
@pytest.mark.parametrize(
    ("data", "files"),
    [
        ({"n": "2"}, {"image": ("a.png", b"image")}),
        ({"n": 2}, {"image": ("a.png", io.BytesIO(b"image"))}),
        ({}, {"n": (None, "2"), "image": b"image"}),
    ],
    ids=["bytes", "file object", "field as a file"],
)
def test_the_forms_that_httpx_builds(library, data, files):
    module, adapter = HTTPX_LIBRARIES[library]
    sent = []

    def handle(request):
        sent.append(request.read())
        return module.Response(200)

    transport = adapter.RateLimitTransport(providers("api.test"), transport=module.MockTransport(handle))
    with module.Client(transport=transport) as client:
        response = client.post(f"https://api.test{PATH}", data=data, files=files)
    assert response.extensions["tidegate"].cost == {"usd_micros": 80_000}
    assert b"image" in sent[0]


def test_the_forms_that_aiohttp_builds():
    body = aiohttp.FormData()
    body.add_field("image", io.BytesIO(b"image"), filename="a.png")
    body.add_field("mask", b"\xff" * 5000, filename="b.png")
    body.add_field("n", "2")
    with QuotaServer() as server:
        (found,) = fetch("aiohttp", providers(), [server.url + PATH], method="POST", body=body)
    assert found.outcome.cost == {"usd_micros": 80_000}


def test_a_request_for_more_images_than_the_limit_pays_for_is_denied():
    with QuotaServer() as server:
        for body in (form(part(26)), form(part(10**30)), form(*[part(1)] * MAX_PARTS), b'{"n": 9007199254740991}'):
            with pytest.raises(Denied):
                fetch("httpx", providers(), [server.url + PATH], method="POST", body=body, headers=FORM, timeout=0)
        assert not server.requests


JSON = b'{"model": "dall-e-3", "n": 10}'


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/images/generations", iter([JSON]), {}),
        ("/v1/images/generations", gzip.compress(JSON)[:25], {"content-encoding": "gzip"}),
        ("/v1/images/generations", b"\x1f\x8b" + JSON, {"content-encoding": "gzip"}),
        ("/v1/images/generations", b"\x0b" + JSON, {"content-encoding": "br"}),
        ("/v1/images/generations", b"n=10&prompt=x", {}),
        (PATH, iter([form(part(10))]), FORM),
        (PATH, form(part(10)), {**FORM, "content-encoding": "br"}),
    ],
    ids=["generator", "incomplete gzip", "no gzip", "brotli", "fields of a query", "form of a generator", "coded form"],
)
def test_a_strict_call_is_not_sent_if_the_number_of_images_cannot_be_read(path, body, headers):
    transport = RateLimitTransport(providers("api.test"), transport=httpx.MockTransport(lambda _: pytest.fail("sent")))
    with httpx.Client(transport=transport) as client, pytest.raises(UnboundedCost):
        client.post(f"https://api.test{path}", content=body, headers=headers)


def test_a_request_without_a_body_asks_for_one_image():
    transport = RateLimitTransport(providers("api.test"), transport=httpx.MockTransport(lambda _: httpx.Response(400)))
    with httpx.Client(transport=transport) as client:
        response = client.post(f"https://api.test{PATH}")
        assert client.get(f"https://api.test{PATH}").status_code == 400
    assert response.status_code == 400


@cases(
    ("body", "number"),
    [
        (form(), 0),
        (b"", 0),
        (form(part(3)), 3),
        (form(part(3, line="\n")), 3),
        (form(part(3, "form-data; name=n")), 3),
        (form(part(3, "form-data;NAME = n ;x=y")), 3),
        (form(part(3, 'form-data;\r\n name="n"')), 3),
        (form(part(3, 'form-data; name="\\n"')), 3),
        (form(part(3, "form-data; name*=utf-8''n")), 3),
        (form(part(3, 'form-data; filename="a"; name="n"\r\nContent-Type: text/plain')), 3),
        (form(part(" +3 ")), 3),
        (form(part("\r\n3")), 3),
        (form(part("3.0")), 3),
        (form(part(2), part(5), part(3)), 5),
        (part(7) + form(part(1)), 7),
        (form(part(3, 'form-data; name="number"')), 0),
        (form(part(3, 'form-data; filename="n"')), 0),
        (form(part("many"), part(-4), part("nan"), part("")), 0),
        (form(part("0" * 60 + "5")), inf),
        (form(part(3, 'form-data; name="n"; filename="' + "a" * MAX_HEADER_LENGTH + '"')), inf),
        (form(*[part("x", "form-data; name=x")] * MAX_PARTS), inf),
        (b'Content-Disposition: form-data; name="n"', inf),
        (b'Content-Disposition: form-data; name="n"\r\n\r\n3', 3),
        (b"a prompt about Content-Disposition headers", 0),
    ],
)
def test_the_number_in_a_field(body, number):
    assert read_number(body, "n") == number
