"""The rules of every site here: small, so that a test reaches the end of them."""

CONFIG = {
    "categories": {
        "read": {"limit": 5, "window_minutes": 60},
        "chat": {"limit": 3, "window": "1h", "endpoints": [{"path": "/ws", "methods": ["MESSAGE"]}]},
    },
    "exempt": ["/health"],
}
