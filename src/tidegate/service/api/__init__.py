"""The verbs of the service in one table, with their fields. HTTP, OpenAPI, clients and command line read it."""
