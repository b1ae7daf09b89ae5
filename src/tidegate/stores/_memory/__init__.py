"""The memory store: keeps states in this process."""
