"""A fake model whose answers report their usage, streamed or not."""

import json

import httpx


def usage(prompt, completion, cached=0):
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


class StreamedModel:
    """A model that streams its answer, as long as the connection lasts and the request allows."""

    def __init__(self, length, piece=20):
        self.length, self.piece, self.sent = length, piece, 0

    def __call__(self, request):
        body = json.loads(request.content)
        self.sent = 0
        if not body.get("stream"):
            return httpx.Response(200, json={"usage": usage(100, min(self.length, body["max_tokens"]))})
        return httpx.Response(200, stream=self.pieces(min(self.length, body["max_tokens"])))

    def pieces(self, length):
        model = self

        class Body(httpx.SyncByteStream):
            def __iter__(self):
                while model.sent < length:
                    count = min(model.piece, length - model.sent)
                    model.sent += count
                    content = {"choices": [{"delta": {"content": "abc" * count}}]}
                    yield b"data: " + json.dumps(content).encode() + b"\n\n"
                yield b"data: " + json.dumps({"usage": usage(100, length)}).encode() + b"\n\ndata: [DONE]\n\n"

        return Body()
