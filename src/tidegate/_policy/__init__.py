"""Policies and keys."""

from tidegate._policy.key import Key, join_key, normal_key
from tidegate._policy.model import Cost, Mode, OnStoreError, Policy, Rules

__all__ = ["Cost", "Key", "Mode", "OnStoreError", "Policy", "Rules", "join_key", "normal_key"]
