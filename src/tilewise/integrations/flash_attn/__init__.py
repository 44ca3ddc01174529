"""flash-attn 2 by its own names: change the import, keep the calls.

    from tilewise.integrations.flash_attn import flash_attn_func        # or, for code you cannot edit,
    tilewise.integrations.flash_attn.install()                          # `import flash_attn` finds this package

Names, argument order, defaults, shapes and return values are those of flash-attn 2.8; docs/migration.md lists where
more is accepted and what differs. Everything runs on CPUs too.
"""

from __future__ import annotations

import sys
from types import ModuleType

from tilewise.integrations import flash
from tilewise.integrations.flash_attn import bert_padding, cute, flash_attn_interface, layers
from tilewise.integrations.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# The release whose interface this is; callers compare it before they pass newer arguments.
__version__ = "2.8.3+tilewise"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]


def install(*, force: bool = False) -> None:
    """Make `import flash_attn` resolve to this package in this process, until `uninstall`.

    Rejects it when another flash_attn is already imported, unless `force`: names taken from that one stay what they
    are. Package metadata does not change, so libraries that ask pip which flash-attn is installed still see the
    truth.
    """
    flash.put_in_place(_modules(), force=force)


def uninstall() -> None:
    """Undo `install`; a displaced flash_attn comes back. Harmless when nothing is installed."""
    flash.take_out(_modules())


def _modules() -> dict[str, ModuleType]:
    return {
        "flash_attn": sys.modules[__name__],
        "flash_attn.flash_attn_interface": flash_attn_interface,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn.cute": cute,
        "flash_attn.cute.interface": cute.interface,
        "flash_attn.layers": layers,
        "flash_attn.layers.rotary": layers.rotary,
    }
