"""Unmodified clients: curl and Node's fetch call through the gateway, as through the provider."""

import asyncio
import json
import shutil

import pytest

from tests.egress.harness import TOKEN, running
from tests.outbound.server import Answer, QuotaServer
from tests.recipes import bodies
from tests.servers.process import need

CONTENT = {"model": "gpt-4o-mini", "max_tokens": 500, "messages": [{"role": "user", "content": "Hello"}]}
SETTINGS = {"callers": {"a": {"token": TOKEN}}, "tunnels": "allow"}
FIELDS = {"limits": ["1000/1m", "100_000/1m unit=tokens name=tpm"], "profile": "openai"}
NODE = """
const [url, token, content] = process.argv.slice(1);
const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
const whole = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body: content });
const answer = await whole.json();
const body = JSON.stringify({ ...JSON.parse(content), stream: true, stream_options: { include_usage: true } });
const streamed = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body });
let text = "";
for await (const chunk of streamed.body) text += new TextDecoder().decode(chunk);
const upload = { method: "POST", headers: { Authorization: headers.Authorization }, body: new Uint8Array(3276800) };
const sent = await fetch(`${url}/v1/files`, upload);
console.log(JSON.stringify({ answer, text, left: whole.headers.get("x-tidegate-remaining"), sent: await sent.json() }));
"""


def answer(request):
    if request.path == "/v1/files":
        return Answer(
            200, (("Content-Type", "application/json"),), (json.dumps({"bytes": len(request.body)}).encode(),)
        )
    content = json.loads(request.body)
    if content.get("stream"):
        return Answer(200, (("Content-Type", "text/event-stream"),), tuple(bodies.chat_stream(content)))
    return Answer(200, (("Content-Type", "application/json"),), (json.dumps(bodies.chat(content)).encode(),))


@pytest.fixture(scope="module")
def upstream():
    with QuotaServer(respond=answer) as server:
        yield server


async def output(*command):
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def used(gateway):
    (account,) = gateway.gateway.gate.accounts
    return {name: usage.used for name, usage in (await account.limiter.usage(account.key)).items()}


async def test_curl_calls_and_streams(upstream):
    curl = need(shutil.which("curl"), "curl", "install curl")
    async with running(upstream.url, SETTINGS, **FIELDS) as gateway:
        url, header = f"{gateway.url}/up/v1/chat/completions", f"Authorization: Bearer {TOKEN}"
        whole = await output(curl, "-sS", "-H", header, "--json", json.dumps(CONTENT), url)
        assert json.loads(whole)["usage"] == bodies.CHAT_USAGE
        content = {**CONTENT, "stream": True, "stream_options": {"include_usage": True}}
        streamed = await output(curl, "-sSN", "-H", header, "--json", json.dumps(content), url)
        assert streamed.encode() == b"".join(bodies.chat_stream(content))
        assert await used(gateway) == {"1m": 2, "tpm": 84}


async def test_curl_through_the_proxy_and_through_a_tunnel(upstream):
    curl = need(shutil.which("curl"), "curl", "install curl")
    proxy = f"http://agent:{TOKEN}@127.0.0.1"
    async with running(upstream.url, SETTINGS) as gateway:
        for more in ((), ("--proxytunnel",)):
            command = [
                curl,
                "-sS",
                "--noproxy",
                "",
                "-x",
                f"{proxy}:{gateway.port}",
                *more,
                "--json",
                json.dumps(CONTENT),
            ]
            found = await output(*command, f"{upstream.url}/v1/chat/completions")
            assert json.loads(found)["usage"] == bodies.CHAT_USAGE
        assert TOKEN not in str(upstream.requests)
        assert gateway.gateway.gate.metrics()["sent"] == 2
        assert gateway.gateway.stats.counts("a", "up").tunnels == 1


async def test_curl_uploads_a_file(upstream, tmp_path):
    curl = need(shutil.which("curl"), "curl", "install curl")
    file = tmp_path / "file"
    file.write_bytes(b"x" * 3_000_000)
    async with running(upstream.url, SETTINGS, **FIELDS) as gateway:
        command = [curl, "-sS", "-H", f"X-Api-Key: {TOKEN}", "-H", "Content-Type: application/octet-stream"]
        found = await output(*command, "--data-binary", f"@{file}", f"{gateway.url}/up/v1/files")
        assert json.loads(found) == {"bytes": 3_000_000}


async def test_nodes_fetch_calls_streams_and_uploads(upstream):
    node = need(shutil.which("node"), "Node", "install nodejs")
    async with running(upstream.url, SETTINGS, **FIELDS) as gateway:
        command = [node, "--input-type=module", "-e", NODE, "--"]
        found = json.loads(await output(*command, f"{gateway.url}/up", TOKEN, json.dumps(CONTENT)))
        assert found["answer"]["usage"] == bodies.CHAT_USAGE
        assert found["text"].endswith("data: [DONE]\n\n")
        assert found["left"].startswith("1m=999, tpm=99")
        assert found["sent"] == {"bytes": 3_276_800}
        assert (await used(gateway))["1m"] == 3
