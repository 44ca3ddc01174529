"""Attention for serving: a pool of pages, who holds them, and the cache that keeps K and V in them."""

from tilewise.kv.book import CacheStats, PageBook
from tilewise.kv.cache import PagedKVCache

__all__ = ["CacheStats", "PageBook", "PagedKVCache"]
