"""Who goes first: score functions shared by the scheduler and the simulator."""

from pagedjax.policy.scores import (
    AGING_TOKENS,
    POLICIES,
    Features,
    Policy,
    Score,
    by_priority,
    earliest_deadline,
    fair_share,
    first_come,
    policy_named,
    shortest_prefix,
)
from pagedjax.policy.tenants import OUTPUT_WEIGHT, PROMPT_WEIGHT, Tenants

__all__ = [
    "AGING_TOKENS",
    "OUTPUT_WEIGHT",
    "POLICIES",
    "PROMPT_WEIGHT",
    "Features",
    "Policy",
    "Score",
    "Tenants",
    "by_priority",
    "earliest_deadline",
    "fair_share",
    "first_come",
    "policy_named",
    "shortest_prefix",
]
