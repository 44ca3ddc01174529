"""Latent attention (DeepSeek V2 and V3, Kimi, GLM 4 MoE Lite, LongCat, MiniCPM 3 and others) in its absorbed form.

These models cache one latent a token, and expand all of them into keys and values of every head in every step. After
`absorb(model)` a step of few queries attends to the latents instead: the key projection moves to the queries and the
value projection to the results,

    q . (W_k c) = (W_k^T q) . c            sum_j p_j (W_v c_j) = W_v (sum_j p_j c_j)

so a latent is read once for all heads. Prompts and training still expand, which takes fewer multiplications there.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations.cache import latent_of
from tilewise.integrations.transformers.forward import attention_forward
from tilewise.integrations.transformers.routing import NAMES
from tilewise.problem import MAX_HEAD_DIM, MAX_HEAD_DIM_V

__all__ = ["absorb", "attend", "latent_cache"]


def absorb(model: nn.Module) -> int:
    """Let the latent attention of a model attend to latents where that is cheaper; returns its number of layers.

    It acts under `attn_implementation="tilewise"` and `"tilewise_flash"`, without gradients. Results change by rounding
    only. With `past_key_values=latent_cache(model.config, max_cache_len)` latents are read where they are cached, else
    each step puts their two parts together. A model without such layers is refused, and so are projections that are
    not plain `nn.Linear`s (quantised ones, adapters).
    """
    if not isinstance(model, nn.Module):
        raise InvalidProblem("model", "a model of transformers", type(model).__name__, "Load one, then absorb it.")
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "expand_kv")]
    if not layers:
        raise Unsupported(f"{type(model).__name__} has no layer with latents (a method expand_kv): nothing to absorb")
    for name, layer in layers:
        reason = _why_not(layer)
        if reason is not None:
            raise Unsupported(f"{name}: {reason}; leave absorb() out, and the model expands its latents as before")
    for _, layer in layers:
        layer.expand_kv = functools.partial(_latents, layer)
    return len(layers)


def latent_cache(config: Any, max_cache_len: int) -> Any:
    """A `StaticCache` that stores both parts of a latent in one row, where `absorb` reads them in place. Layers of
    another kind (linear attention) are the model's own.
    """
    from transformers import PretrainedConfig, StaticCache
    from transformers.cache_utils import StaticLayer

    if not isinstance(config, PretrainedConfig):
        raise InvalidProblem("config", "the model's config", type(config).__name__, "Pass model.config.")
    tokens: Any = max_cache_len
    if not isinstance(tokens, int) or tokens < 1:
        raise InvalidProblem("max_cache_len", "a whole number from 1 on", repr(max_cache_len), "Pass the most tokens.")

    class LatentLayer(StaticLayer):  # type: ignore[misc]
        """A layer whose keys and values are columns of the same rows."""

        # Compiled graphs copy the rows, so `generate` need not compile.
        is_compileable = False

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
                raise Unsupported("latent_cache has no gradients: call the model under torch.no_grad()")
            return super().update(key_states, value_states, *args, **kwargs)

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            width = key_states.shape[-1]
            shape = (*key_states.shape[:2], self.max_cache_len, width + value_states.shape[-1])
            rows = key_states.new_zeros(shape)
            self.keys, self.values = rows[..., :width], rows[..., width:]

    cache = StaticCache(config, max_cache_len)
    cache.layers = [LatentLayer(max_cache_len) if type(layer) is StaticLayer else layer for layer in cache.layers]
    return cache


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """`attention_forward`. `key` of an absorbed layer are latents, which are attended to or expanded here."""
    if not _is_absorbed(module):
        return attention_forward(module, query, key, value, attention_mask, **kwargs)
    layer: Any = module
    rank = layer.kv_lora_rank
    if kwargs.get("cache") is not None or not _pays(layer, query.shape[2], key.shape[2]):
        key, value = type(layer).expand_kv(layer, key[..., :rank], key[..., rank:])
        return attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("scaling") is None:
        kwargs["scaling"] = query.shape[-1] ** -0.5
    weight = layer.kv_b_proj.weight.view(query.shape[1], -1, rank)
    to_keys, to_values = weight.split((layer.qk_nope_head_dim, layer.v_head_dim), 1)
    unrotated, rotated = query.split((layer.qk_nope_head_dim, layer.qk_rope_head_dim), -1)
    absorbed = torch.cat((torch.einsum("bhsd,hdr->bhsr", unrotated, to_keys), rotated), -1)
    out, _ = attention_forward(module, absorbed, key, key[..., :rank], attention_mask, **kwargs)
    return torch.einsum("bshr,hdr->bshd", out, to_values), None


def _latents(layer: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """In place of `expand_kv`: the rows [kv_nope | k_rot], and a view of their first columns."""
    if layer.config._attn_implementation not in NAMES:  # noqa: SLF001
        expanded: tuple[Tensor, Tensor] = type(layer).expand_kv(layer, kv_nope, k_rot)
        return expanded
    rows = None if torch.compiler.is_compiling() else latent_of(k_rot, kv_nope)
    rows = torch.cat((kv_nope, k_rot), -1) if rows is None else rows
    return rows, rows[..., : kv_nope.shape[-1]]


def _pays(layer: Any, queries: int, keys: int) -> bool:
    """Whether the absorbed form takes fewer multiplications, in a call that it is for."""
    if torch.is_grad_enabled() or not _is_plain(layer.kv_b_proj):
        return False
    rank, rotary, heads = layer.kv_lora_rank, layer.qk_rope_head_dim, layer.qk_nope_head_dim + layer.v_head_dim
    absorbed = queries * rank * heads + queries * keys * (2 * rank + rotary)
    return bool(absorbed < keys * rank * heads + queries * keys * (heads + rotary))


def _is_absorbed(layer: nn.Module) -> bool:
    own = vars(layer).get("expand_kv")
    return isinstance(own, functools.partial) and own.func is _latents


def _is_plain(linear: Any) -> bool:
    """Whether a projection is its weight and nothing else: no adapter, quantised weight, hook or sharding."""
    if torch.nn.modules.module._has_any_global_hook():  # noqa: SLF001
        return False
    if type(linear) is not nn.Linear or linear.bias is not None or "forward" in vars(linear):
        return False
    hooked = linear._forward_hooks or linear._forward_pre_hooks  # noqa: SLF001
    return not hooked and type(linear.weight) in (Tensor, nn.Parameter) and linear.weight.is_floating_point()


def _why_not(layer: Any) -> str | None:
    """The reason against absorbing a layer."""
    if list(inspect.signature(type(layer).expand_kv).parameters) != ["self", "kv_nope", "k_rot"]:
        return "its expand_kv takes other arguments than (kv_nope, k_rot)"
    if "expand_kv" in vars(layer) and not _is_absorbed(layer):
        return "its expand_kv was replaced"
    if not _is_plain(layer.kv_b_proj):
        return "kv_b_proj is not a plain nn.Linear without bias, or modules have global hooks"
    if layer.kv_b_proj.weight.is_meta:
        return "its weights are not loaded"
    rank, width = layer.kv_lora_rank, layer.kv_lora_rank + layer.qk_rope_head_dim
    if rank > MAX_HEAD_DIM_V or width > MAX_HEAD_DIM:
        return f"latents of {width} columns, {rank} of them values: at most {MAX_HEAD_DIM} and {MAX_HEAD_DIM_V}"
    return None if _expands_by_weight(layer) else "its expand_kv does not give the products with kv_b_proj's weight"


@torch.no_grad()
def _expands_by_weight(layer: Any) -> bool:
    """Whether a layer's own expansion of a latent is what the absorbed form assumes."""
    weight, rank = layer.kv_b_proj.weight, layer.kv_lora_rank
    latent = torch.linspace(-1.0, 1.0, rank, dtype=weight.dtype, device=weight.device).expand(1, 1, 1, rank)
    rotated = latent.new_ones((1, 1, 1, layer.qk_rope_head_dim))
    key, value = type(layer).expand_kv(layer, latent, rotated)
    both = (
        nn.functional.linear(latent, weight).view(1, 1, -1, layer.qk_nope_head_dim + layer.v_head_dim).transpose(1, 2)
    )
    unrotated, values = both.split((layer.qk_nope_head_dim, layer.v_head_dim), -1)
    keys = torch.cat((unrotated, rotated.expand(*unrotated.shape[:-1], -1)), -1)
    return all(
        given.shape == wanted.shape and torch.allclose(given, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))
        for given, wanted in ((key, keys), (value, values))
    )
