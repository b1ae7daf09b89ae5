"""Tests. A package, so that no installed one of that name takes its place; folders need no __init__."""
