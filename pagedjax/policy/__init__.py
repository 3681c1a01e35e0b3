"""Who goes first: score functions shared by the scheduler and the simulator."""

from pagedjax.policy.scores import POLICIES, Features, Policy, Score, by_priority, first_come

__all__ = ["POLICIES", "Features", "Policy", "Score", "by_priority", "first_come"]
