"""Attention for vLLM: a backend that vLLM finds by itself where tilewise is installed.

    vllm serve MODEL --attention-backend CUSTOM             on a GPU
    vllm serve MODEL --attention-backend CUSTOM_MLA       the same for models with latent attention (MLA)
    TILEWISE_VLLM_CPU=1 vllm serve MODEL                    on a CPU, whose platform ignores that option

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`. Importing this module
imports nothing of vLLM. `backend` and `latent` have the classes that vLLM asks for, `tilewise.integrations.engines` the
calls.
docs/serving.md says what is refused.
"""

from __future__ import annotations

from tilewise import settings

__all__ = ["BACKEND", "LATENT_BACKEND", "LATENT_NAME", "register"]

BACKEND = "tilewise.integrations.vllm.backend.TilewiseBackend"
LATENT_BACKEND, LATENT_NAME = "tilewise.integrations.vllm.latent.TilewiseMLABackend", "CUSTOM_MLA"


def register() -> None:
    """Offer tilewise to vLLM as the backends CUSTOM and CUSTOM_MLA and, with TILEWISE_VLLM_CPU=1, in place of its
    backends for CPUs.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    # A name makes a member, which then is to be registered as such.
    register_backend(AttentionBackendEnum.__members__.get(LATENT_NAME, LATENT_NAME), LATENT_BACKEND)
    if settings.current().vllm_cpu:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
        register_backend(AttentionBackendEnum.CPU_MLA, LATENT_BACKEND)
        register_backend(AttentionBackendEnum.AMX_MLA, LATENT_BACKEND)
