"""Statistics of a paged cache."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CacheStats"]


class CacheStats(NamedTuple):
    """What a cache holds now, and its totals so far.

    `slots_wasted` are slots of held pages without a token; `utilisation` is the share of slots with one. `hit_rate` is
    the share of prompt tokens that were found in the cache when their request was added.
    """

    num_pages: int
    pages_free: int
    pages_idle: int
    pages_held: int
    pages_shared: int
    requests: int
    tokens_stored: int
    slots_wasted: int
    prompt_tokens: int
    hit_tokens: int
    evictions: int
    copies: int

    @property
    def hit_rate(self) -> float:
        """0 before the first prompt."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def utilisation(self) -> float:
        """1 where no page is held."""
        slots = self.tokens_stored + self.slots_wasted
        return self.tokens_stored / slots if slots else 1.0
