"""The memory store: states in this process."""
