"""Attention for vLLM: a backend that vLLM finds by itself where tilewise is installed.

    vllm serve MODEL --attention-backend CUSTOM             on a GPU
    TILEWISE_VLLM_CPU=1 vllm serve MODEL                    on a CPU, whose platform ignores that option

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`. Importing this module
imports nothing of vLLM. `backend` has the classes that vLLM asks for, `tilewise.integrations.engines` the calls.
docs/serving.md says what is refused.
"""

from __future__ import annotations

from tilewise import settings

__all__ = ["BACKEND", "register"]

BACKEND = "tilewise.integrations.vllm.backend.TilewiseBackend"


def register() -> None:
    """Offer tilewise to vLLM as the backend CUSTOM and, with TILEWISE_VLLM_CPU=1, in place of CPU_ATTN."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if settings.current().vllm_cpu:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
