"""The layers of flash-attn that are provided: the rotary embedding."""

from tilewise.integrations.flash_attn.layers import rotary

__all__ = ["rotary"]
