"""Calls a running service: `Client` for threads, `AsyncClient` for tasks, with the same method names."""

from tidegate.service.client._client import AsyncClient, Client
from tidegate.service.client._protocol import ServiceDecision
from tidegate.service.client._reservation import AsyncServiceReservation, ServiceReservation

__all__ = ["AsyncClient", "AsyncServiceReservation", "Client", "ServiceDecision", "ServiceReservation"]
