"""Calls a running service: `Client` for threads, `AsyncClient` for tasks, with the same method names."""

from tidegate.service.client.client import AsyncClient, Client
from tidegate.service.client.protocol import ServiceDecision

__all__ = ["AsyncClient", "Client", "ServiceDecision"]
