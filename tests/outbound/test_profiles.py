"""Profiles: how each provider counts, the profile of a user, and the message that each mistake must give."""

import base64
import json
import struct
from pathlib import Path

import pytest

from tests.cases import cases
from tidegate import ConfigError
from tidegate.outbound import Providers
from tidegate.outbound._providers.file import read_provider
from tidegate.outbound._providers.profile_file import read_profile, shipped_names, shipped_profile
from tidegate.outbound._quota.refusal_body import read_duration, read_refusal
from tidegate.outbound._quota.request_tokens import estimate, read_request
from tidegate.outbound._quota.token_usage import UsageReader, usage

BAD_PROFILES = sorted((Path(__file__).parent / "bad_profiles").glob("*.yaml"))
CHAT = "https://api.openai.com/v1/chat/completions"


def test_the_shipped_profiles():
    assert shipped_names() == [
        "anthropic", "azure", "bedrock", "google", "groq", "mistral", "openai", "openrouter", "together"
    ]  # fmt: skip
    for name in shipped_names():
        profile = shipped_profile(name)
        assert profile.bounds, name
        assert {"tokens", "input-tokens", "output-tokens"} <= profile.counts.keys(), name


@cases("path", BAD_PROFILES)
def test_each_bad_profile_is_refused_with_line_and_message(path):
    """The first line of a file says which message its mistake must give: `# LINE: the message`."""
    line, _, message = path.read_text().splitlines()[0].removeprefix("# ").partition(": ")
    with pytest.raises(ConfigError) as error:
        read_profile(path)
    assert str(error.value) == f"{path}:{line}: {message}"


def test_the_bad_profiles_are_found():
    assert len(BAD_PROFILES) >= 10


# ---- the bound of the output ----------------------------------------------------------------------------------------


@cases(
    ("profile", "body", "tokens"),
    [
        ("openai", {"max_completion_tokens": 1, "max_tokens": 5000}, 5000),
        ("openai", {"max_tokens": 100, "n": 5}, 500),
        ("openai", {"max_tokens": 100, "n": 2, "best_of": 7}, 700),
        ("openai", {"max_tokens": 100, "n": 0}, 100),
        ("openai", {"max_tokens": 100, "n": "many"}, 100),
        ("openai", {"max_tokens": True}, 1000),
        ("openai", {"max_tokens": -5}, 1000),
        ("google", {"generationConfig": {"maxOutputTokens": 300, "candidateCount": 4}}, 1200),
        ("google", {"generationConfig": []}, 8192),
        ("bedrock", {"inferenceConfig": {"maxTokens": 512}}, 512),
        ("anthropic", {"max_tokens": 64_000}, 64_000),
        ("default", {"max_completion_tokens": 1, "max_tokens": 5000, "n": 2}, 10_000),
    ],
)
def test_the_largest_claim_of_a_request_counts(profile, body, tokens):
    found = estimate(json.dumps(body).encode(), shipped_profile(profile))
    assert found["output-tokens"] == tokens


def test_each_token_of_output_counts_five_with_some_models_of_bedrock():
    url = "https://bedrock-runtime.us-east-1.amazonaws.com/model/us.anthropic.claude-sonnet-4-20250514-v1%3A0/converse"
    body = json.dumps({"inferenceConfig": {"maxTokens": 100}}).encode()
    found = estimate(body, shipped_profile("bedrock"), url)
    assert found["output-tokens"] == 500
    used = (
        b'{"usage": {"inputTokens": 10, "outputTokens": 20, "cacheReadInputTokens": 999, "cacheWriteInputTokens": 3}}'
    )
    model = read_request(shipped_profile("bedrock"), url, body).model
    assert usage(used, shipped_profile("bedrock"), model) == {
        "tokens": 113, "input-tokens": 13, "output-tokens": 100
    }  # fmt: skip


@pytest.mark.parametrize(
    ("profile", "url", "model"),
    [
        ("openai", CHAT, "named"),
        ("google", "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-pro:generateContent",
         "gemini-2.5-pro"),
        ("google", "https://generativelanguage.googleapis.com/v1beta/openai/chat/completions", "named"),
        ("azure", "https://x.openai.azure.com/openai/deployments/mine/chat/completions?api-version=1", "mine"),
        ("bedrock", "https://bedrock-runtime.eu-west-1.amazonaws.com/model/amazon.nova-pro-v1%3A0/converse",
         "amazon.nova-pro-v1:0"),
    ],
)  # fmt: skip
def test_where_the_model_is_named(profile, url, model):
    assert read_request(shipped_profile(profile), url, b'{"model": "named"}').model == model


@pytest.mark.parametrize("body", [None, b"", b"[]", b"no json", b'{"model": 5}', b'{"model": ""}', b"[" * 100_000])
def test_a_request_without_a_model(body):
    request = read_request(shipped_profile("openai"), CHAT, body)
    assert (request.model, request.bound, request.times) == (None, 1000, 1)


@pytest.mark.parametrize(
    ("profile", "path", "found"),
    [("openai", "/v1/embeddings", (25, 0)), ("openai", "/v1/batches", (0, 0)), ("openai", "/v1/files/x", (0, 0)),
     ("google", "/v1beta/models/e:embedContent", (25, 0)), ("anthropic", "/v1/messages/batches", (0, 0)),
     ("anthropic", "/v1/messages/count_tokens", (0, 0)), ("openai", "/v1/chat/completions", (25, 1000))],
)  # fmt: skip
def test_embeddings_have_no_output_and_batches_do_not_count(profile, path, found):
    units = estimate(b" " * 100, shipped_profile(profile), f"https://a.test{path}")
    assert (units["input-tokens"], units["output-tokens"]) == found


# ---- media -----------------------------------------------------------------------------------------------------------


def content(*parts):
    return json.dumps({"max_tokens": 10, "messages": [{"role": "user", "content": list(parts)}]}).encode()


@pytest.mark.parametrize(
    ("profile", "part", "tokens"),
    [
        ("openai", {"type": "image_url", "image_url": {"url": "data:image/png;base64,DATA"}}, 1105),
        ("openai", {"type": "input_image", "image_url": "data:image/png;base64,DATA"}, 1105),
        ("openai", {"type": "input_audio", "input_audio": {"data": "DATA", "format": "mp3"}}, 2001),
        ("anthropic", {"type": "image", "source": {"type": "base64", "data": "DATA"}}, 1600),
        ("google", {"inlineData": {"mimeType": "image/png", "data": "DATA"}}, 4001),
        ("bedrock", {"image": {"format": "png", "source": {"bytes": "DATA"}}}, 1600),
        ("default", {"type": "image", "source": {"type": "base64", "data": "DATA"}}, 1600),
    ],
)
def test_an_image_is_not_counted_by_its_length(profile, part, tokens):
    data = base64.b64encode(bytes(1_500_000)).decode()
    body = content(json.loads(json.dumps(part).replace("DATA", data)))
    found = estimate(body, shipped_profile(profile))["input-tokens"]
    assert tokens <= found <= tokens + 80


def test_a_url_of_an_image_costs_as_much_as_the_image():
    part = {"type": "image_url", "image_url": {"url": "https://a.test/i.png"}}
    assert estimate(content(part), shipped_profile("openai"))["input-tokens"] > 1105


def test_tools_add_what_the_provider_adds():
    plain, with_tools = b'{"tools": []}', b'{"tools": [{}]}'
    anthropic = shipped_profile("anthropic")
    assert estimate(plain, anthropic)["input-tokens"] == 4
    assert estimate(with_tools, anthropic)["input-tokens"] == 4 + 346


def test_media_in_a_request_of_any_shape_do_not_raise():
    openai = shipped_profile("openai")
    for body in (b'{"image_url": null}', b'{"a": {"type": ["image_url"]}}', b'["image_url"]', b'"image_url"',
                 b'{"image_url": ' + b'{"a":' * 900 + b"1" + b"}" * 901):  # fmt: skip
        assert estimate(body, openai)["input-tokens"] >= 1


# ---- usage -----------------------------------------------------------------------------------------------------------

CACHED = {"prompt_tokens_details": {"cached_tokens": 5}}
GEMINI = {"usageMetadata": {"promptTokenCount": 12, "cachedContentTokenCount": 4, "candidatesTokenCount": 30,
                            "thoughtsTokenCount": 8, "totalTokenCount": 50}}  # fmt: skip


@cases(("profile", "body", "units"), [
        ("openai", {"usage": {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42,
                              "prompt_tokens_details": {"cached_tokens": 10}}}, (42, 12, 30)),
        ("openai", {"usage": {"prompt_tokens": 8, "total_tokens": 8}}, (8, 8, 0)),
        ("anthropic", {"usage": {"input_tokens": 10, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 999,
                                 "output_tokens": 30}}, (42, 12, 30)),
        ("google", GEMINI, (12, 12, 38)),
        ("google", [{}, {"usageMetadata": {"promptTokenCount": 12}}, GEMINI], (12, 12, 38)),
        ("groq", {"usage": {"prompt_tokens": 12, "completion_tokens": 30, **CACHED}}, (37, 7, 30)),
        ("bedrock", {"usage": {"inputTokens": 12, "outputTokens": 30, "totalTokens": 42}}, (42, 12, 30)),
        ("groq", {"x_groq": {"usage": {"prompt_tokens": 12, "completion_tokens": 30}}}, (42, 12, 30)),
    ])  # fmt: skip
def test_what_counts_of_a_usage(profile, body, units):
    assert usage(json.dumps(body).encode(), shipped_profile(profile)) == dict(
        zip(("tokens", "input-tokens", "output-tokens"), units, strict=True)
    )


def test_the_usage_of_streams_of_gemini():
    reader = UsageReader("", shipped_profile("google"))
    reader.feed(b'data: {"usageMetadata": {"promptTokenCount": 12}}\n\ndata: ' + json.dumps(GEMINI).encode() + b"\n\n")
    assert reader.result() == {"tokens": 12, "input-tokens": 12, "output-tokens": 38}


def frame(kind, document):
    """An event as AWS streams it: lengths, a checksum, headers, the document, another checksum."""
    headers = b"\x0b:event-type\x07" + struct.pack(">H", len(kind)) + kind.encode()
    payload = json.dumps(document).encode()
    return struct.pack(">III", 16 + len(headers) + len(payload), len(headers), 10) + headers + payload + b"\x0a\x0a{}"


def chunk(document):
    """An event that contains another document, as Bedrock's InvokeModelWithResponseStream streams it."""
    return frame("chunk", {"bytes": base64.b64encode(json.dumps(document).encode()).decode(), "p": "abcd"})


CONVERSED = frame("contentBlockDelta", {"delta": {"text": '"usage": {"outputTokens": 9}'}}) + frame(
    "metadata", {"metrics": {"latencyMs": 5}, "usage": {"inputTokens": 12, "outputTokens": 30, "totalTokens": 42,
                 "cacheDetails": [{"inputTokens": 0, "ttl": "5m"}], "serverToolUsage": {}}}
)  # fmt: skip
INVOKED = [chunk({"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 1}}}),
           chunk({"type": "message_delta", "usage": {"output_tokens": 30}}),
           chunk({"type": "message_stop", "amazon-bedrock-invocationMetrics": {"inputTokenCount": 12,
                                                                               "outputTokenCount": 30}})]  # fmt: skip
OTHERS = chunk({"generation": "", "amazon-bedrock-invocationMetrics": {"inputTokenCount": 12, "outputTokenCount": 30}})


@pytest.mark.parametrize("body", [CONVERSED, b"".join(INVOKED), OTHERS])
def test_the_usage_of_binary_events_of_bedrock(body):
    for size in (1, 50, 10_000):
        reader = UsageReader("", shipped_profile("bedrock"))
        for start in range(0, len(body), size):
            reader.feed(body[start : start + size])
        reader.end()
        assert reader.result() == {"tokens": 42, "input-tokens": 12, "output-tokens": 30}
        assert reader.complete


def test_binary_events_that_were_not_read_to_their_end_are_incomplete():
    reader = UsageReader("", shipped_profile("bedrock"))
    reader.feed(INVOKED[0] + INVOKED[1][:20])
    assert reader.result() == {"tokens": 13, "input-tokens": 12, "output-tokens": 1}
    assert not reader.complete


@pytest.mark.parametrize("body", [b"\0" * 100, b"\0\0\0\x20\0\0\0\xff" + b"x" * 50, frame("chunk", {"bytes": "%%%"})])
def test_malformed_binary_events_report_nothing(body):
    reader = UsageReader("", shipped_profile("bedrock"))
    reader.feed(body)
    assert reader.result() is None


@pytest.mark.parametrize(
    ("document", "units"),
    [({"generation": "x", "prompt_token_count": 12, "generation_token_count": 30}, (42, 12, 30)),
     ({"embedding": [0.5], "inputTextTokenCount": 12}, (12, 12, 0))],
)  # fmt: skip
def test_models_of_bedrock_that_report_their_usage_without_a_field_of_its_own(document, units):
    found = usage(json.dumps(document).encode(), shipped_profile("bedrock"))
    assert found == dict(zip(("tokens", "input-tokens", "output-tokens"), units, strict=True))


def test_the_usage_of_geminis_interactions():
    used = {"total_input_tokens": 12, "total_output_tokens": 30, "total_thought_tokens": 8, "total_tokens": 50}
    google, units = shipped_profile("google"), {"tokens": 12, "input-tokens": 12, "output-tokens": 38}
    assert usage(json.dumps({"usage": used}).encode(), google) == units
    reader = UsageReader("", google)
    event = {"event_type": "interaction.completed", "interaction": {"usage": used}}
    reader.feed(b"event: interaction.completed\ndata: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n")
    assert reader.result() == units


def test_the_usage_at_the_end_of_a_long_stream_in_which_every_event_mentions_it():
    reader = UsageReader("", shipped_profile("openai"))
    for _ in range(250):
        reader.feed(b'data: {"choices": [{"delta": {"content": "a"}}], "usage": null}\n\n' * 100)
    last = b'data: {"usage": {"prompt_tokens": 12, "completion_tokens": 25000}}\n\n'
    reader.feed(last + b'data: {"choices": [], "usage": null}\n\ndata: [DONE]\n\n')
    assert reader.result() == {"tokens": 25_012, "input-tokens": 12, "output-tokens": 25_000}


# ---- refusals --------------------------------------------------------------------------------------------------------

RETRY_INFO = {"error": {"code": 429, "details": [
    {"@type": "type.googleapis.com/google.rpc.QuotaFailure",
     "violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel-FreeTier", "quotaValue": "20"}]},
    {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"}]}}  # fmt: skip


@pytest.mark.parametrize(
    ("profile", "message", "seconds"),
    [("openai", "Rate limit reached for gpt-4o on tokens per min (TPM): Limit 30000. Please try again in 1.2s.", 1.2),
     ("openai", "Please try again in 20ms. Visit", 0.02), ("openai", "Please try again in 6m0s.", 360.0),
     ("openai", "Please try again later.", None), ("azure", "Please retry after 7 seconds.", 7.0),
     ("groq", "Please try again in 1h2m3.5s. Need more tokens?", 3723.5),
     ("openai", "Please try again in 99999999h", 86_400.0)],
)  # fmt: skip
def test_the_message_of_a_refusal_says_how_long_to_wait(profile, message, seconds):
    body = json.dumps({"error": {"message": message}}).encode()
    assert read_refusal(shipped_profile(profile), body).retry_after == pytest.approx(seconds)


@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: [each]])
def test_a_refusal_of_gemini_says_how_long_to_wait_and_which_quota_is_used_up(wrap):
    told = read_refusal(shipped_profile("google"), json.dumps(wrap(RETRY_INFO)).encode())
    assert told.retry_after == 34.5
    assert [(limit.unit, limit.window, limit.remaining) for limit in told.limits] == [("requests", 86_400.0, 0)]


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": 5}', b'{"error": {"details": {"a": 1}}}', b"\xff"])
def test_other_bodies_of_refusals_say_nothing(body):
    told = read_refusal(shipped_profile("google"), body)
    assert (told.limits, told.retry_after) == ((), None)


def test_durations():
    assert [read_duration(each) for each in ("1.2s", "5", "", "s", "1x", "1s2")] == [1.2, 5.0, None, None, None, 3.0]


# ---- profiles of users -----------------------------------------------------------------------------------------------


def test_a_profile_of_the_user_is_read_and_read_again_when_it_changes(tmp_path):
    (tmp_path / "mine.yaml").write_text("output: {bounds: [length], default: 7}\n")
    (tmp_path / "providers").mkdir()
    path = tmp_path / "providers" / "a.yaml"
    path.write_text("domain: a.test\nlimits: [5/1m, 100/1m unit=tokens name=t]\nprofile: ../mine.yaml\n")
    known = Providers.load(directories=[path.parent])
    assert known.match("https://a.test").profile.default_output == 7
    (tmp_path / "mine.yaml").write_text("output: {bounds: [length], default: 80}\n")
    assert known.reload() == ("a.test",)
    assert known.match("https://a.test").profile.default_output == 80
    (tmp_path / "mine.yaml").write_text("outputs: 5\n")
    assert known.reload() == ()
    assert known.problems == (f"{path.parent}/../mine.yaml:1: outputs: unknown setting: did you mean 'output'?",)
    assert known.match("https://a.test").profile.default_output == 80


def test_an_unknown_profile_is_refused():
    with pytest.raises(ConfigError, match=r"^profile: there is no profile 'opnai': did you mean 'openai'\?$"):
        read_provider({"domain": "a.test", "limit": 1, "period": "1m", "profile": "opnai"})
    with pytest.raises(ConfigError, match=r"^profile: there is no profile 'zzz': expected anthropic, azure, bedrock, "):
        read_provider({"domain": "a.test", "limit": 1, "period": "1m", "profile": "zzz"})
    with pytest.raises(ConfigError, match=r"^profile: cannot read missing/p\.yaml: there is no such file$"):
        read_provider({"domain": "a.test", "limit": 1, "period": "1m", "profile": "missing/p.yaml"})


@pytest.fixture
def added(tmp_path):
    """A folder with two profiles, and a provider file that names one of them."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    (folder / "acme.yaml").write_text("output: {bounds: [most]}\n")
    (folder / "openai.yaml").write_text("output: {bounds: [mine]}\n")
    return folder


def bounds(tmp_path, profile, *profiles):
    (tmp_path / "llm.yaml").write_text(f"domain: llm.test\nlimit: 5\nperiod: 1m\nprofile: {profile}\n")
    (provider,) = Providers.load([tmp_path / "llm.yaml"], profiles=profiles)
    return provider.profile.bounds


@pytest.mark.parametrize(("profile", "found"), [("acme", (("most",),)), ("openai", (("mine",),))])
def test_profiles_of_a_folder_are_named_without_a_path_and_replace_shipped_ones(tmp_path, added, profile, found):
    assert bounds(tmp_path, profile, added) == found
    assert bounds(tmp_path, profile, added / f"{profile}.yaml") == found


def test_an_added_profile_is_read_again_when_it_changes(tmp_path, added):
    (tmp_path / "llm.yaml").write_text("domain: llm.test\nlimit: 5\nperiod: 1m\nprofile: acme\n")
    providers = Providers.load([tmp_path / "llm.yaml"], profiles=[added])
    (added / "acme.yaml").write_text("output: {bounds: [other, longer]}\n")
    assert providers.reload() == ("llm.test",)
    assert next(iter(providers)).profile.bounds == (("other",), ("longer",))


def test_wrong_folders_of_profiles_are_refused(tmp_path, added):
    with pytest.raises(ConfigError, match=r"llm\.yaml:4: profile: there is no profile 'acmo': did you mean 'acme'"):
        bounds(tmp_path, "acmo", added)
    with pytest.raises(ConfigError, match=r"nowhere.*there is no such file or directory"):
        bounds(tmp_path, "acme", tmp_path / "nowhere")
    (tmp_path / "acme.yml").write_text("output: {bounds: [most]}\n")
    with pytest.raises(ConfigError, match=r"acme\.yml: .*acme\.yaml has the same name: rename one of them"):
        bounds(tmp_path, "acme", added, tmp_path / "acme.yml")


@cases(
    ("domain", "profile"),
    [
        ("api.openai.com", "openai"),
        ("eu.api.openai.com", "openai"),
        ("API.Anthropic.com", "anthropic"),
        ("generativelanguage.googleapis.com", "google"),
        ("me.openai.azure.com", "azure"),
        ("bedrock-runtime.eu-west-1.amazonaws.com", "bedrock"),
        ("s3.eu-west-1.amazonaws.com", None),
        ("api.openai.com.evil.example", None),
        ("openai.com", None),
        ("googleapis.com", None),
    ],
)
def test_the_domain_selects_the_profile(domain, profile):
    (provider,) = Providers.of({"domain": domain, "limit": 5, "period": "1m"})
    assert (provider.profile and provider.profile.name) == profile
    (named,) = Providers.of({"domain": domain, "limit": 5, "period": "1m", "profile": "mistral"})
    assert named.profile.name == "mistral"


def test_an_added_profile_takes_precedence_for_its_domains(tmp_path):
    (tmp_path / "own.yaml").write_text("domains: api.openai.com\noutput: {bounds: [max_tokens]}\n")
    (tmp_path / "up.yaml").write_text("domain: api.openai.com\nlimit: 5\nperiod: 1m\n")
    (provider,) = Providers.load(files=[tmp_path / "up.yaml"], profiles=[tmp_path / "own.yaml"])
    assert provider.profile.name == "own"


def test_the_usage_of_gemini_is_settled_without_being_asked():
    """The file names no profile; the wait of a 429 is in its body, and the usage in usageMetadata."""
    limits = ["100/1m", "100_000/1m unit=tokens name=tpm"]
    (provider,) = Providers.of({"domain": "generativelanguage.googleapis.com", "limits": limits})
    (asked,) = Providers.of({"domain": "generativelanguage.googleapis.com", "limits": limits, "profile": "google"})
    assert provider.counting == asked.counting
