"""Five agents in separate processes, against a server with a limit that they do not know."""
