"""Envoy's rate limit service v3, over gRPC."""
