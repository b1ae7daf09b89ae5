"""Policies and keys."""

from tidegate.policy.key import Key, join_key, normal_key
from tidegate.policy.model import Cost, Policy, Rules

__all__ = ["Cost", "Key", "Policy", "Rules", "join_key", "normal_key"]
