"""Paged KV cache for serving: the pool of pages, the requests that hold them, and the cache of K and V in them."""

from tilewise.kv.book import CacheStats, PageBook
from tilewise.kv.cache import PagedKVCache
from tilewise.kv.rotated import append_rotated, rotary_table

__all__ = ["CacheStats", "PageBook", "PagedKVCache", "append_rotated", "rotary_table"]
