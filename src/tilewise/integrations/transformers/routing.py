"""What models make of the names "tilewise" and "tilewise_flash".

transformers takes every registered name for every model, also for those whose modules never ask its AttentionInterface.
`watch` adds what is missing where a model is built and where the name is set:

- A model whose files have attention of their own, none of which asks the interface, is set to eager attention, which is
  what it computes, with a warning.
- A model that does not support flash-attn gets "tilewise" for "tilewise_flash", so that none of its branches for names
  that contain "flash" runs.
- A table of attention classes (`{"eager": ..., "sdpa": ...}`) gets the class of eager attention for both names.
- Which kind of mask the model reads is noted.
- `output_attentions=True` raises: tiling never forms the weights.

Libraries that ask transformers for the flash-attn functions behind "tilewise_flash" get tilewise's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from tilewise.errors import Unsupported
from tilewise.integrations.transformers.masks import READ_BOOLEANS

__all__ = ["FLASH_NAME", "NAME", "NAMES", "watch"]

NAME, FLASH_NAME = "tilewise", "tilewise_flash"
NAMES = (NAME, FLASH_NAME, f"paged|{NAME}", f"paged|{FLASH_NAME}")
MARK = "watched_by_tilewise"

READ_NUMBERS: set[type] = set()


def watch() -> None:
    """Make transformers ask here what to do with the names; may be called again."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    _wrap(PreTrainedModel, "_check_and_adjust_attn_implementation", _accept_flash_name)
    _wrap(PreTrainedModel, "get_correct_attn_implementation", _decide)
    _wrap(modeling_flash_attention_utils, "_lazy_imports", _offer_functions)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Call `around(function, ...)` where `function(...)` is called, once."""
    function = getattr(owner, name)
    if getattr(function, MARK, False):
        return

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(wrapped, MARK, True)
    setattr(owner, name, wrapped)


def _accept_flash_name(check: Callable[..., str], model: Any, name: str | None, *args: Any, **kwargs: Any) -> str:
    """Let models take "tilewise_flash" for what it is.

    transformers takes every other name that contains "flash" for a kernel to download, registered or not, and some
    models (GPT-OSS) put another one in its place.
    """
    if name in (FLASH_NAME, f"paged|{FLASH_NAME}"):
        correct: str = model.get_correct_attn_implementation(name)
        return correct
    return check(model, name, *args, **kwargs)


def _offer_functions(load: Callable[..., Any], implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """The functions of flash-attn behind a name, for libraries that look for them because it contains "flash"."""
    if implementation not in (FLASH_NAME, f"paged|{FLASH_NAME}"):
        return load(implementation, *args, **kwargs)
    from tilewise.integrations import flash_attn
    from tilewise.integrations.flash_attn.bert_padding import pad_input, unpad_input

    calls = (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache)
    return *calls, pad_input, unpad_input


def _decide(correct: Callable[..., str], model: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
    """The name that a model gets where one of ours is requested."""
    name = correct(model, requested, *args, **kwargs)
    if name not in NAMES:
        return name
    files = _files(type(model))
    if not _asks_the_interface(files):
        _warn(f"{type(model).__name__} computes its attention itself", name)
        return "eager"
    _note_masks(model)
    # Dictionaries by which modules choose the class of their attention.
    for value in [value for file in files for value in vars(file).values()]:
        if isinstance(value, dict) and isinstance(value.get("eager"), type):
            _add_entries(value)
    if _refuse_weights not in model._forward_pre_hooks.values():  # noqa: SLF001
        model.register_forward_pre_hook(_refuse_weights, with_kwargs=True)
    has_flash = any(getattr(model, flag, False) for flag in ("_supports_flash_attn", "_supports_flash_attn_2"))
    return name if has_flash else name.replace(FLASH_NAME, NAME)


def _note_masks(model: Any) -> None:
    """Some models read their masks, and are right only with the kind that sdpa or eager attention gets, their default.

    Numbers are right for every other model, so they win where the classes of one configuration disagree.
    """
    kind = type(model.config)
    if not getattr(model, "_supports_sdpa", False):
        READ_NUMBERS.add(kind)
        READ_BOOLEANS.discard(kind)
    elif kind not in READ_NUMBERS:
        READ_BOOLEANS.add(kind)


def _files(model_class: type) -> list[ModuleType]:
    """The files that define a model class and the classes it is made from."""
    names = {cls.__module__ for cls in model_class.__mro__}
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch")]


def _asks_the_interface(files: list[ModuleType]) -> bool:
    """Whether attention of these files goes through transformers' AttentionInterface, or there is none."""
    from transformers import AttentionInterface

    classes = [cls for file in files for cls in _attention_classes(file)]
    homes = {base.__module__ for cls in classes for base in cls.__mro__} & sys.modules.keys()
    values = [value for home in homes for value in vars(sys.modules[home]).values()]
    return not classes or any(isinstance(value, AttentionInterface) for value in values)


def _attention_classes(file: ModuleType) -> Iterator[type]:
    from transformers import PreTrainedModel

    for name, value in vars(file).items():
        is_module = isinstance(value, type) and issubclass(value, torch.nn.Module)
        if is_module and not issubclass(value, PreTrainedModel) and "attention" in name.lower():
            yield value


def _add_entries(table: dict[str, Any]) -> None:
    eager = table["eager"]

    def build(*args: Any, **kwargs: Any) -> Any:
        _warn(f"{eager.__name__} computes its attention itself", NAME)
        return eager(*args, **kwargs)

    for name in NAMES:
        table.setdefault(name, build)


def _warn(what: str, name: str) -> None:
    from transformers.utils import logging

    effect = f'attn_implementation="{name}" runs eager attention there'
    fix = 'attn_implementation="eager" does the same without this warning'
    logger = logging.get_logger("transformers.tilewise")
    logger.warning_once(f"{what}, not through transformers' AttentionInterface: {effect}. {fix}.")


def _refuse_weights(model: Any, args: Any, kwargs: dict[str, Any]) -> None:  # noqa: ARG001
    """A forward pre-hook."""
    asked = kwargs.get("output_attentions")
    asked = getattr(model.config, "output_attentions", False) if asked is None else asked
    if asked and model.config._attn_implementation in NAMES:  # noqa: SLF001
        fix = 'use attn_implementation="eager" to look at the weights, which tiling never forms'
        raise Unsupported(f"tilewise does not honour output_attentions=True of {type(model).__name__}; {fix}")
