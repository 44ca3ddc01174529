"""`explain` and the `Plan` it returns: what a call would run and what it would cost."""

from tilewise.plan.planning import Plan, explain

__all__ = ["Plan", "explain"]
