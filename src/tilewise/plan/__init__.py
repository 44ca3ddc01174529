"""What will run and what it will cost: `explain` and the `Plan` it returns."""

from tilewise.plan.planning import Plan, explain

__all__ = ["Plan", "explain"]
