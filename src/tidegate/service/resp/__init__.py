"""The RESP port: any Redis client is a client of the service. docs/resp.md describes the commands for users."""
