"""The rules of the test sites: small limits that tests can reach."""

CONFIG = {
    "categories": {
        "read": {"limit": 5, "window_minutes": 60},
        "chat": {"limit": 3, "window": "1h", "endpoints": [{"path": "/ws", "methods": ["MESSAGE"]}]},
    },
    "exempt": ["/health"],
}
