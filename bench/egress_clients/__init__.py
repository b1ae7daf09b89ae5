"""Unmodified clients of the egress gateway, for bench/egress_proof.py: curl, Node, Go and the Python SDKs.

Each is a program that is called with the base URL of the gateway, a token, a number of connections and a number of
seconds. It sends one call after another over each connection, finishes the last ones, and writes what it saw as JSON.
"""
