# ruff: noqa: INP001 - an example, not a package
"""A stand-in for a provider of language models: POST /v1/chat/completions, in the format of OpenAI."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ModelHandler(BaseHTTPRequestHandler):
    """Answers every prompt, and reports the tokens."""

    def do_POST(self) -> None:
        """Answer a prompt."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = request["messages"][-1]["content"]
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": 40}
        usage["total_tokens"] = sum(usage.values())
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": f"About {prompt}: …"},
            "finish_reason": "stop",
        }
        body = json.dumps({"model": request["model"], "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), ModelHandler).serve_forever()
