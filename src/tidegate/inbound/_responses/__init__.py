"""Responses: rate limit headers, denials, and the admin endpoint."""
