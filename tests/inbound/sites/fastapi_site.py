"""A site in FastAPI."""

from fastapi import FastAPI

from tests.inbound.sites.config import CONFIG
from tidegate.inbound.asgi import RateLimitMiddleware

app = FastAPI()
app.add_middleware(RateLimitMiddleware, config=CONFIG)


@app.get("/hello/{name}")
def hello(name: str) -> dict[str, str]:
    return {"hello": name}


@app.get("/health")
async def health() -> str:
    return "well"
