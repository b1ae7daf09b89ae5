"""How a request is charged to the quota of its provider."""
