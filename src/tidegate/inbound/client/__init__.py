"""Who sent a request: addresses, trusted proxies, keys, and the clients seen recently."""
