"""Attention for SGLang: a backend that SGLang finds by itself where tilewise is installed.

    python -m sglang.launch_server --model-path MODEL --attention-backend tilewise --page-size 64

SGLang calls `register` in each of its processes, through the entry point `sglang.srt.plugins`. Importing this module
imports nothing of SGLang. `backend` has the class that SGLang asks for, `tilewise.integrations.engines` the calls.
docs/serving.md says what is refused.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "register"]

NAME = "tilewise"


def register() -> None:
    """Offer tilewise to SGLang as `--attention-backend tilewise`."""
    try:
        from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("sglang"):
            raise
        message = f"tilewise offers itself to SGLang 0.5.23, but {error}; pip install sglang"
        raise ModuleNotFoundError(message, name=error.name) from error
    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
    register_attention_backend(NAME)(_create)


def _create(model_runner: Any) -> Any:
    from tilewise.integrations.sglang.backend import TilewiseAttnBackend

    return TilewiseAttnBackend(model_runner)
