"""Client identification: addresses, trusted proxies, keys, and recently seen clients."""
