"""The RESP port: any Redis client is a client of the service. docs/reference/resp.md describes its commands."""
