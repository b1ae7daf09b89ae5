# ruff: noqa: INP001 - an example, not a package
"""An API with limits: logins, searches and everything else, by the address of the client."""

import uvicorn
from fastapi import FastAPI

from tidegate.inbound.asgi import RateLimitMiddleware

app = FastAPI()


@app.post("/login")
def login() -> dict[str, str]:
    """Log in."""
    return {"hello": "you"}


@app.get("/search")
def search() -> dict[str, list[str]]:
    """Search for items."""
    return {"found": []}


@app.get("/health")
def health() -> dict[str, str]:
    """Say that the application works; never limited."""
    return {"status": "ok"}


limited = RateLimitMiddleware(app, config="config.yaml")

if __name__ == "__main__":
    uvicorn.run(limited, host="127.0.0.1", port=8101, log_level="warning")
