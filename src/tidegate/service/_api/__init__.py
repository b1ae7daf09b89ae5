"""The verbs of the service in one table, with the types of their requests and responses.

HTTP, OpenAPI, both clients, the command line and the tests of the docs read it.

verbs        the table
requests     the type of each request, and the checks that a type cannot express
responses    the type of each response
decoding     JSON into a request; describes the first invalid field
fields       errors about fields
"""

from tidegate.errors import ConfigError

try:
    import msgspec  # noqa: F401 - checked here, for all modules of this package
except ImportError as _error:
    message = "the service and its clients need msgspec: pip install 'tidegate[client]', or 'tidegate[service]'"
    raise ConfigError(message) from _error
