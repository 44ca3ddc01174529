"""The operators of flash-attn 3, `torch.ops.flash_attn_3`, for code that calls them by those names.

    tilewise.integrations.flash_attn_3.register_ops()
    torch.ops.flash_attn_3.fwd(q, k, v, is_causal=True)

Schemas are those of FA3: `fwd`, `bwd`, `fwd_combine` and `get_scheduler_metadata`. They run on CPUs too and have no
gradient, as in FA3. Nor can torch.compile trace them: an output that may be an input (`out`) is in FA3's schema.
Importing this module registers nothing; `flash_attn_interface.install()` does.
"""

from __future__ import annotations

from tilewise.errors import TilewiseError
from tilewise.integrations import flash_attn_interface, flash_operators

__all__ = ["register_ops", "unregister_ops"]


def register_ops() -> None:
    """Register the operators until `unregister_ops`; a second call does nothing.

    Refuses if flash-attn 3 is installed, imported or not: its own operators have these names.
    """
    if not flash_attn_interface.register_operators():
        raise TilewiseError(
            "flash-attn 3 is installed, and torch.ops.flash_attn_3 is its own. Call "
            "tilewise.integrations.flash_attn_interface, or uninstall flash-attn 3."
        )


def unregister_ops() -> None:
    """Undo `register_ops`. Harmless when nothing is registered."""
    flash_operators.unregister()
