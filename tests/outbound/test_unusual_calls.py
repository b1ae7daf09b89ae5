"""Unusual calls: without a bound, with odd ones, with files; stored outputs; signed and compressed requests."""

import base64
import gzip
import json
import logging

import httpx
import pytest

from tests.cases import cases
from tidegate.outbound import Providers, request_options
from tidegate.outbound._providers.profile_file import shipped_profile
from tidegate.outbound._quota.learned_sizes import QUANTILE_SAMPLES
from tidegate.outbound._quota.request_tokens import estimate, read_request
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

CHAT = "/v1/chat/completions"
USAGE = {"usage": {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}}


class Caller:
    """Sends requests to a provider that returns `reply`, and keeps what arrived there."""

    def __init__(self, reply, quota=1_000_000, *, tokenizer=None, **fields):
        self.clock, self.arrived = ManualClock(1_728_000_000), []
        limits = ["10_000/1m", f"{quota}/1m unit=tokens name=tpm"]
        providers = Providers.of({"domain": "llm.test", "limits": limits, "profile": "openai", **fields})

        def handle(request):
            self.arrived.append(request)
            answer = reply(request) if callable(reply) else reply
            return httpx.Response(200, json=answer) if isinstance(answer, dict) else httpx.Response(200, content=answer)

        store = MemoryStore(clock=self.clock)
        transport = RateLimitTransport(
            providers, store, httpx.MockTransport(handle), timeout=0, tokenizer=tokenizer, clock=self.clock
        )
        self.gate, self.client = transport.gate, httpx.Client(transport=transport, base_url="https://llm.test")

    def send(self, path=CHAT, body=None, method="POST", *, strict=False, **options):
        with request_options(strict=strict):
            content = {} if body is None else {"json": body}
            return self.client.request(method, path, **content, **options)

    def reserved(self, *arguments, **options):
        return self.send(*arguments, **options).extensions["tidegate"].cost["tokens"]

    @property
    def used(self):
        (account,) = self.gate.accounts
        return account.limiter.usage(account.key)["tpm"].used

    @property
    def sent(self):
        return json.loads(self.arrived[-1].content)


def events(*documents):
    for document in documents:
        name = f"event: {document['type']}\n".encode() if "type" in document else b""
        yield name + b"data: " + json.dumps(document).encode() + b"\n\n"


def words(count):
    return [{"choices": [{"delta": {"content": "word"}}]}] * count


# ---- calls without a bound -------------------------------------------------------------------------------------------


def test_a_strict_stream_without_a_bound_gets_one():
    caller = Caller(lambda _request: events(*words(1000)), quota=3000)
    caller.send(body={"model": "m", "stream": True, "messages": []}, strict=True)
    assert caller.sent["max_completion_tokens"] == shipped_profile("openai").default_output
    assert caller.used <= 3000
    assert caller.gate.metrics()["overrun"] == 0


def answer_with(tokens):
    def answer(request):
        bound = json.loads(request.content).get("max_completion_tokens", tokens)
        return {"usage": {"prompt_tokens": 10, "completion_tokens": min(tokens, bound)}}

    return answer


def test_without_a_bound_what_outputs_took_is_reserved_even_if_that_is_more_than_the_default():
    caller = Caller(answer_with(5000))
    for _ in range(QUANTILE_SAMPLES):
        caller.send(body={"model": "m"})
        caller.clock.advance(61)
    assert 5000 < caller.reserved(body={"model": "m"}) < 5020


def test_strict_calls_without_a_bound_are_clamped_less_and_less():
    caller = Caller(answer_with(5000), tokenizer=lambda _text: 10)
    for _ in range(2 * QUANTILE_SAMPLES):
        caller.send(body={"model": "m"}, strict=True)
        caller.clock.advance(61)
    assert caller.sent["max_completion_tokens"] >= 5000
    assert caller.gate.metrics()["overrun"] == 0


# ---- odd bounds ------------------------------------------------------------------------------------------------------


@cases(("field", "bound"), [
     ("64000.0", 64_000), ('"64000"', 64_000), ("63999.5", 64_000), ("1e400", 2**53 - 1), ("9" * 40, 2**53 - 1),
     (f'"{"9" * 40}"', 2**53 - 1), ("-1", 1000), ("null", 1000), ("true", 1000), ("NaN", 1000), ('"many"', 1000),
     ("[5]", 1000), ("0", 0)])  # fmt: skip
def test_a_bound_is_read_as_lenient_servers_read_it(field, bound):
    request = read_request(shipped_profile("openai"), CHAT, f'{{"max_tokens": {field}}}'.encode())
    assert request.bound == bound


@pytest.mark.parametrize(("field", "times"), [("2.0", 2), ('"3"', 3), ("-5", 1), ("0", 1), ("9" * 40, 2**53 - 1)])
def test_the_number_of_outputs_is_read_in_the_same_way(field, times):
    assert read_request(shipped_profile("openai"), CHAT, f'{{"n": {field}}}'.encode()).times == times


@pytest.mark.parametrize("field", ["64000.0", '"64000"', "-1", "9" * 40, "true", "1e400"])
def test_a_strict_call_leaves_no_bound_that_it_did_not_understand(field):
    caller = Caller(USAGE, quota=3000)
    caller.send(content=f'{{"model": "m", "max_tokens": {field}}}', strict=True)
    assert caller.sent["max_tokens"] <= 3000
    assert "max_completion_tokens" not in caller.sent


# ---- requests that no model answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/responses/resp_1"), ("GET", "/v1/batches/batch_1"), ("POST", "/v1/batches"), ("DELETE", "/v1/x")],
)
def test_the_usage_of_a_stored_output_or_a_batch_is_not_charged(method, path):
    for profile in ({}, {"strict": True}):
        caller = Caller({"usage": {"input_tokens": 10, "output_tokens": 500_000}}, **profile)
        assert caller.reserved(path, method=method) == 0
        assert caller.used == 0


def test_an_estimate_in_the_file_applies_to_every_method():
    caller = Caller({"usage": {"input_tokens": 10, "output_tokens": 500}}, estimate={"tokens": 800})
    assert caller.reserved("/v1/answer", method="GET") == 800
    assert caller.used == 510


def test_a_permit_for_a_call_that_the_program_sends_itself_is_still_estimated():
    caller = Caller(USAGE)
    with caller.gate.acquire("llm.test"):
        assert caller.used == 1000


# ---- signed and encoded requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [{"authorization": "AWS4-HMAC-SHA256 A"}, {"x-amz-content-sha256": "ab"}, {"content-digest": "sha-256=:a:"}],
)
def test_the_body_of_a_signed_request_is_not_changed(header):
    body = {"messages": [], "inferenceConfig": {"maxTokens": 2000}}
    used = {"usage": {"inputTokens": 5, "outputTokens": 7}}
    caller = Caller(used, profile="bedrock", output_reserve="p50", quota=3000)
    path = "/model/m/converse"
    for _ in range(QUANTILE_SAMPLES):
        caller.send(path, body, strict=True)
        caller.clock.advance(61)
    caller.send(path, {**body, "inferenceConfig": {"maxTokens": 4000}}, strict=True)
    assert caller.sent["inferenceConfig"] == {"maxTokens": 7}  # more than the quota: what most outputs took
    caller.clock.advance(61)
    assert caller.reserved(path, body, strict=True, headers=header) > 2000
    assert caller.sent == body


def test_a_compressed_request_is_read_but_not_changed():
    caller = Caller(USAGE, per=["model"])
    body = gzip.compress(b'{"model": "m", "max_tokens": 64000}')
    headers = {"content-encoding": "gzip"}
    assert caller.reserved(content=body, headers=headers, strict=True) > 64_000
    assert caller.arrived[-1].content == body
    assert list(caller.gate.capacities()) == ["llm.test/model=m"]
    for broken in (body[:20], b"no gzip", gzip.compress(bytes(10 * 2**20))):
        caller.send(content=broken, headers=headers)


# ---- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colon", [":", "%3A"])
def test_a_model_of_bedrock_contains_a_colon(colon):
    name = "us.anthropic.claude-sonnet-4-20250514-v1:0"
    used = {"usage": {"inputTokens": 10, "outputTokens": 20}}
    caller = Caller(used, profile="bedrock", per=["model"])
    caller.send(f"/model/{name.replace(':', colon)}/converse", {"inferenceConfig": {"maxTokens": 100}})
    assert list(caller.gate.capacities()) == [f"llm.test/model={name}"]
    assert caller.used == 110  # its output counts five times


@pytest.mark.parametrize(
    ("model", "bound"),
    [("meta.llama3-8b-instruct-v1:0", "max_gen_len"), ("anthropic.claude-3-haiku-20240307-v1:0", "max_tokens"),
     ("amazon.nova-lite-v1:0", "inferenceConfig")],
)  # fmt: skip
def test_a_strict_call_of_bedrock_bounds_the_output_in_the_words_of_its_model(model, bound):
    caller = Caller({}, profile="bedrock")
    caller.send(f"/model/{model}/invoke", {"prompt": "hello"}, strict=True)
    assert set(caller.sent) == {"prompt", bound}


def test_an_embedding_of_bedrock_has_no_output():
    caller = Caller({"embedding": [], "inputTextTokenCount": 3}, profile="bedrock")
    assert caller.reserved("/model/amazon.titan-embed-text-v2:0/invoke", {"inputText": "hello"}) < 10
    assert caller.used == 3


# ---- streams that repeat their text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["openai", "groq", "openrouter"])
def test_text_that_a_stream_repeats_at_its_end_is_not_counted_twice(profile):
    text = "word" * 900
    used = {"input_tokens": 10, "output_tokens": 900, "total_tokens": 910}
    stream = [*[{"type": "response.output_text.delta", "delta": "word"}] * 900,
              {"type": "response.output_text.done", "text": text},
              {"type": "response.content_part.done", "part": {"type": "output_text", "text": text}},
              {"type": "response.output_item.done", "item": {"content": [{"text": text}]}},
              {"type": "response.completed", "response": {"output": [{"content": [{"text": text}]}], "usage": used}},
              ]  # fmt: skip
    caller = Caller(lambda _request: events(*stream), quota=1700, profile=profile)
    body = {"model": "m", "stream": True, "input": "x", "max_output_tokens": 64_000}
    caller.send("/v1/responses", body, strict=True)
    assert caller.used == 910


# ---- usage with a part missing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("output", [{}, {"completion_tokens": "900"}, {"completion_tokens": -1}])
def test_a_usage_without_an_output_keeps_what_is_reserved_for_the_output(strict, output):
    caller = Caller({"usage": {"prompt_tokens": 5, **output}})
    caller.send(body={"model": "m", "max_tokens": 1000, "messages": []}, strict=strict)
    assert caller.used == 1005


def test_a_usage_without_an_output_counts_what_has_arrived_of_a_stream():
    caller = Caller(lambda _request: events(*words(3000), {"usage": {"prompt_tokens": 5}}))
    caller.send(body={"model": "m", "stream": True, "messages": []}, strict=False)
    assert caller.used >= 1005


@pytest.mark.parametrize(
    ("path", "usage", "used"),
    [
        (CHAT, {"prompt_tokens": 5, "total_tokens": 5}, 5),
        (CHAT, {"prompt_tokens": 5, "completion_tokens": 0}, 5),
        ("/v1/embeddings", {"prompt_tokens": 5}, 5),
    ],
)
def test_a_call_that_has_no_output_counts_none(path, usage, used):
    caller = Caller({"usage": usage})
    caller.send(path, {"model": "m", "max_tokens": 1000, "messages": []})
    assert caller.used == used


# ---- files -----------------------------------------------------------------------------------------------------------


def content(part):
    return json.dumps({"max_tokens": 1, "messages": [{"content": [part]}]}).encode()


@cases(
    ("profile", "part", "tokens"),
    [
        ("openai", {"type": "file", "file": {"file_id": "file-1"}}, 3000),
        ("openai", {"type": "input_file", "file_id": "file-1"}, 3000),
        ("openai", {"type": "input_file", "file_url": "https://a.test/a.pdf"}, 3000),
        ("openai", {"type": "input_image", "file_id": "file-1"}, 1105),
        ("openai", {"type": "file", "file": {"filename": "a.pdf", "file_data": "A" * 250_000}}, 10_000),
        ("anthropic", {"type": "document", "source": {"type": "url", "url": "https://a.test/a.pdf"}}, 1500),
        ("anthropic", {"type": "document", "source": {"type": "file", "file_id": "file-1"}}, 1500),
        ("google", {"inlineData": {"mimeType": "audio/mp3", "data": "A" * 5_000_000}}, 10_000),
        ("google", {"inlineData": {"mimeType": "image/png", "data": "A" * 1000}}, 1290),
        ("default", {"type": "input_file", "file_data": "A" * 250_000}, 10_000),
        ("default", {"type": "input_file", "file_id": "file-1"}, 3000),
    ],
)
def test_files_are_estimated_even_if_only_their_names_are_known(profile, part, tokens):
    assert tokens <= estimate(content(part), shipped_profile(profile))["input-tokens"] <= tokens + 80


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/images/edits"])
@pytest.mark.parametrize("profile", ["openai", "default"])
def test_an_uploaded_file_is_not_text(profile, path):
    form = b"--b\r\ncontent-disposition: form-data; name=file\r\n\r\n" + bytes(1_000_000)
    assert estimate(form, shipped_profile(profile), f"https://llm.test{path}")["tokens"] < 3000


def test_a_parameter_of_a_tool_is_not_an_image():
    tools = [{"name": "crop", "input_schema": {"properties": {"image": {"type": "string"}}}}]
    body = json.dumps({"tools": tools, "max_tokens": 1}).encode()
    assert estimate(body, shipped_profile("anthropic"))["input-tokens"] < 400


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_text_that_the_program_tokenized_counts_its_numbers():
    caller = Caller(USAGE, tokenizer=len)
    assert caller.reserved("/v1/embeddings", {"model": "m", "input": [[5, 6, 7], [8]]}) == 4
    assert caller.reserved("/v1/embeddings", {"model": "m", "input": [7] * 300_000}) == 300_000


def test_the_data_of_an_image_is_no_text_for_the_tokenizer():
    texts = []
    caller = Caller(USAGE, tokenizer=lambda text: len(texts.append(text) or text))
    data = base64.b64encode(bytes(900)).decode()
    caller.send("/v1/responses", {"model": "m", "input": [{"type": "input_image", "image_url": data}]})
    assert data not in texts[0]


def test_a_tokenizer_that_fails_is_replaced_by_an_estimate(caplog):
    def tokenize(text):
        raise ValueError("special token <|endoftext|>")

    caller = Caller(USAGE, tokenizer=tokenize)
    body = {"model": "m", "max_tokens": 100, "prompt": "a" * 400}
    with caplog.at_level(logging.ERROR, "tidegate"):
        assert [200 < caller.reserved(body=body) < 250 for _ in range(2)] == [True, True]
    assert len(caplog.records) == 1


# ---- codings ---------------------------------------------------------------------------------------------------------


def test_a_response_is_requested_in_a_coding_that_can_be_read():
    caller = Caller(USAGE)
    caller.send(body={"model": "m"}, headers={"accept-encoding": "gzip, deflate, br, zstd"})
    assert caller.arrived[-1].headers["accept-encoding"] == "gzip, deflate"
    caller.send(body={"model": "m"}, headers={"accept-encoding": "identity"})
    assert caller.arrived[-1].headers["accept-encoding"] == "identity"
