"""Which category a request belongs to, what it costs, and the configuration file that says so."""
