"""Policies and keys."""

from tidegate._policy.explanation import ApplicableLimit, ExplainedDenial, Explanation, RuleVerdict
from tidegate._policy.key import Key, join_key, normal_key
from tidegate._policy.model import Cost, Mode, OnStoreError, Policy, Rules

__all__ = [
    "ApplicableLimit",
    "Cost",
    "ExplainedDenial",
    "Explanation",
    "Key",
    "Mode",
    "OnStoreError",
    "Policy",
    "RuleVerdict",
    "Rules",
    "join_key",
    "normal_key",
]
