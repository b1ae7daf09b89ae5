"""The service over HTTP: its own asyncio protocol on the parser of httptools, and the routes."""

from tidegate.service._http.app import App

__all__ = ["App"]
