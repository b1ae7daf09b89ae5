"""The bodies of language-model APIs: answers, streams of server-sent events, and refusals.

Sources: platform.openai.com/docs/api-reference (chat, responses, streaming; rate-limits guide),
docs.anthropic.com/en/api (messages, streaming, errors), ai.google.dev/api (generateContent),
docs.mistral.ai/api (chat completions).
"""

from __future__ import annotations

import json
from typing import Any

WORDS = ("Hello", " from", " the", " model", ".")
REPLY = "".join(WORDS)
CHAT_USAGE = {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42}
RESPONSE_USAGE = {
    "input_tokens": 12,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 30,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 42,
}
MESSAGE_USAGE = {
    "input_tokens": 12,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 30,
    "service_tier": "standard",
}
GEMINI_USAGE = {"promptTokenCount": 12, "candidatesTokenCount": 30, "totalTokenCount": 42}


def event(data: dict[str, Any], name: str = "") -> bytes:
    """Return one server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


# ---- OpenAI's chat completions, and Mistral's ------------------------------------------------------------------------


def chat(content: dict[str, Any]) -> dict[str, Any]:
    """Return a chat completion."""
    message = {"role": "assistant", "content": REPLY, "refusal": None, "annotations": []}
    return {
        "id": "chatcmpl-B9MBs8CjcvOU2jLn4n570S5qMJKcT",
        "object": "chat.completion",
        "created": 1_741_569_952,
        "model": content["model"],
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": CHAT_USAGE,
        "service_tier": "default",
    }


def chat_stream(content: dict[str, Any]) -> list[bytes]:
    """Return the pieces of a streamed chat completion; OpenAI sends the usage only if asked, Mistral always."""
    common = {
        "id": "chatcmpl-123",
        "object": "chat.completion.chunk",
        "created": 1_694_268_190,
        "model": content["model"],
    }

    def chunk(delta: dict[str, Any], finish: str | None = None, usage: dict[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return event({**common, "choices": [choice], **({"usage": usage} if usage else {})})

    is_mistral = content["model"].startswith("mistral")
    pieces = [chunk({"role": "assistant", "content": ""}), *(chunk({"content": word}) for word in WORDS)]
    pieces.append(chunk({"content": ""} if is_mistral else {}, "stop", CHAT_USAGE if is_mistral else None))
    if (content.get("stream_options") or {}).get("include_usage"):
        pieces.append(event({**common, "choices": [], "usage": CHAT_USAGE}))
    return [*pieces, b"data: [DONE]\n\n"]


# ---- OpenAI's responses ----------------------------------------------------------------------------------------------


def response(content: dict[str, Any], *, done: bool = True) -> dict[str, Any]:
    """Return a response object, completed or in progress."""
    return {
        "id": "resp_67ccd2bed1ec8190b14f964abc0542670bb6a6b452d3795b",
        "object": "response",
        "created_at": 1_741_476_542,
        "status": "completed" if done else "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": content.get("max_output_tokens"),
        "model": content["model"],
        "output": [_message_item(REPLY)] if done else [],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": RESPONSE_USAGE if done else None,
        "metadata": {},
    }


def _message_item(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_67ccd2bf", "status": "completed", "role": "assistant", "content": [part]}


def response_stream(content: dict[str, Any]) -> list[bytes]:
    """Return the events of a streamed response."""
    place = {"item_id": "msg_67ccd2bf", "output_index": 0, "content_index": 0}
    started = {**_message_item(""), "status": "in_progress", "content": []}
    empty = {"type": "output_text", "text": "", "annotations": []}
    steps: list[dict[str, Any]] = [
        {"type": "response.created", "response": response(content, done=False)},
        {"type": "response.in_progress", "response": response(content, done=False)},
        {"type": "response.output_item.added", "output_index": 0, "item": started},
        {"type": "response.content_part.added", **place, "part": empty},
        *({"type": "response.output_text.delta", **place, "delta": word, "logprobs": []} for word in WORDS),
        {"type": "response.output_text.done", **place, "text": REPLY, "logprobs": []},
        {"type": "response.content_part.done", **place, "part": {**empty, "text": REPLY}},
        {"type": "response.output_item.done", "output_index": 0, "item": _message_item(REPLY)},
        {"type": "response.completed", "response": response(content)},
    ]
    return [event({**step, "sequence_number": i}, step["type"]) for i, step in enumerate(steps)]


# ---- Anthropic's messages --------------------------------------------------------------------------------------------


def message(content: dict[str, Any]) -> dict[str, Any]:
    """Return a message."""
    return {
        "id": "msg_013Zva2CMHLNnXjNJJKqJ2EF",
        "type": "message",
        "role": "assistant",
        "model": content["model"],
        "content": [{"type": "text", "text": REPLY}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": MESSAGE_USAGE,
    }


def message_stream(content: dict[str, Any]) -> list[bytes]:
    """Return the events of a streamed message."""
    begun = {**message(content), "content": [], "stop_reason": None, "usage": {**MESSAGE_USAGE, "output_tokens": 1}}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in WORDS
    ]
    end = {"stop_reason": "end_turn", "stop_sequence": None}
    steps: list[dict[str, Any]] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 30}},
        {"type": "message_stop"},
    ]
    return [event(step, step["type"]) for step in steps]


# ---- Gemini ----------------------------------------------------------------------------------------------------------


def _gemini(text: str, finish: dict[str, Any]) -> dict[str, Any]:
    content = {"parts": [{"text": text}], "role": "model"}
    return {
        "candidates": [{"content": content, "index": 0, **finish}],
        "usageMetadata": GEMINI_USAGE,
        "modelVersion": "gemini-2.5-flash",
        "responseId": "pUZdaPqWJ7-",
    }


def gemini() -> dict[str, Any]:
    """Return the answer of generateContent."""
    return _gemini(REPLY, {"finishReason": "STOP"})


def gemini_stream() -> list[bytes]:
    """Return the events of streamGenerateContent."""
    last = len(WORDS) - 1
    return [event(_gemini(word, {"finishReason": "STOP"} if i == last else {})) for i, word in enumerate(WORDS)]


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(host: str, limit: int, wait: int) -> dict[str, Any]:
    """Return the body of a 429."""
    if host == "api.openai.com":
        text = (
            "Rate limit reached for gpt-4o-mini in organization org-abc on requests per min (RPM): "
            f"Limit {limit}, Used {limit}, Requested 1. Please try again in {wait}s. "
            "Visit https://platform.openai.com/account/rate-limits to learn more."
        )
        return {"error": {"message": text, "type": "requests", "param": None, "code": "rate_limit_exceeded"}}
    if host == "api.anthropic.com":
        text = f"This request would exceed your organization's rate limit of {limit} requests per minute."
        return {"type": "error", "error": {"type": "rate_limit_error", "message": text}, "request_id": "req_011CS"}
    if host == "api.mistral.ai":
        return {
            "object": "error",
            "message": "Rate limit exceeded",
            "type": "rate_limited",
            "param": None,
            "code": "1300",
        }
    quota = {
        "quotaMetric": "generativelanguage.googleapis.com/generate_content_requests",
        "quotaId": "GenerateRequestsPerMinutePerProjectPerModel",
        "quotaDimensions": {"location": "global", "model": "gemini-2.5-flash"},
        "quotaValue": str(limit),
    }
    details = [
        {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [quota]},
        {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{wait}s"},
    ]
    text = f"You exceeded your current quota. Please retry in {wait}s."
    return {"error": {"code": 429, "message": text, "status": "RESOURCE_EXHAUSTED", "details": details}}
