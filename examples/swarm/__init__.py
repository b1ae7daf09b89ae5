"""Five agents in processes of their own, against a server with a limit that they do not know."""
