"""Attention step by step over a modelled two-level memory: what is loaded, computed, rescaled, stored and skipped."""
