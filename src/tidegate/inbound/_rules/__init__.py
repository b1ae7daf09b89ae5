"""The rules: categories, endpoints and costs, and the configuration file that defines them."""
