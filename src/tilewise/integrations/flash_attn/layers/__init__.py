"""flash-attn's layers that have a place here: the rotary embedding."""

from tilewise.integrations.flash_attn.layers import rotary

__all__ = ["rotary"]
