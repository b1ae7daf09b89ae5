"""Logic shared by the adapters of several client libraries."""
