"""flash-attn 4 by its own names, `flash_attn.cute`, for the features that tilewise has."""

from tilewise.integrations.flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

# The release whose interface this is.
__version__ = "4.0.0b27+tilewise"

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
