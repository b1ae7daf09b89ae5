"""Settings and policy files of the service."""
