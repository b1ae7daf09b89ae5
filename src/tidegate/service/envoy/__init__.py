"""Envoy's rate limit service, version 3, over gRPC."""
