"""The service over HTTP: a plain ASGI application, without a framework."""

from tidegate.service._http.app import App

__all__ = ["App"]
