"""`torch.nn.MultiheadAttention` and the function behind it on tilewise: same parameters, state_dict and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tilewise.api import attention
from tilewise.errors import InvalidProblem
from tilewise.units import counted
from tilewise.validation import check_class


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Drop-in for `torch.nn.MultiheadAttention`; checkpoints load both ways.

    `need_weights=False` runs tiled and never makes the weights. `need_weights=True` is torch's own code, because the
    weights are the matrix that tiling avoids. As in torch, True in `key_padding_mask` and in a boolean `attn_mask`
    means "do not attend". A row with every key masked gives the output projection of 0. `is_causal` needs no
    `attn_mask` here; one that is given with it is assumed to be the causal mask. Rejects nested tensors.

        >>> layer = MultiheadAttention(8, 2, batch_first=True)
        >>> layer(*[torch.ones(1, 4, 8)] * 3, need_weights=False)[0].shape
        torch.Size([1, 4, 8])
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights), weights None unless `need_weights`; shapes as in torch."""
        if query.is_nested or key.is_nested or value.is_nested:
            fix = "Pass padded tensors and key_padding_mask, or call tilewise.attention_varlen on packed ones."
            raise InvalidProblem("query, key, value", "plain tensors", "nested tensors", fix)
        if need_weights:
            if is_causal and attn_mask is None:
                # In torch's sense: True above the diagonal is not attended.
                dim = 1 if query.dim() == 3 and self.batch_first else 0
                triangle = torch.ones(query.shape[dim], key.shape[dim], dtype=torch.bool, device=query.device)
                attn_mask = triangle.triu_(1)
            out, weights = super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
            return out, weights
        own = not self._qkv_same_embed_dim
        _check_inputs(query, key, value, self.embed_dim, self.num_heads, separate=own)
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        matrices = separate if own else self.in_proj_weight
        projected = _projected(query, key, value, matrices, self.in_proj_bias)
        batched = query.dim() == 3
        q, k, v = (_heads(t, self.num_heads, batch_first=self.batch_first) for t in projected)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        k, v, extra = _with_extra_keys(k, v, self.bias_k, self.bias_v, self.add_zero_attn)
        mask, dropout = None if is_causal else attn_mask, self.dropout if self.training else 0.0
        out = _attend(q, k, v, extra, key_padding_mask, mask, is_causal=is_causal, dropout=dropout)
        out = self.out_proj(out.flatten(2))
        if not batched:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Drop-in for `torch.nn.functional.multi_head_attention_forward`, which torch's own layers call.

    Query (seqlen_q, batch, embed_dim), key and value (seqlen_k, batch, ...), or without the batch. With
    `need_weights=True` it is torch's own function. `is_causal` means what it means there: it needs an `attn_mask`,
    which it replaces where there is no `key_padding_mask`, and then also hides the keys of `bias_k` and
    `add_zero_attn` from the queries before them.
    """
    if need_weights:
        return F.multi_head_attention_forward(
            query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
            add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights,
            attn_mask, use_separate_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v,
            average_attn_weights, is_causal,
        )  # fmt: skip
    _check_inputs(query, key, value, embed_dim_to_check, num_heads, separate=use_separate_proj_weight)
    if is_causal and attn_mask is None:
        fix = "torch.nn.Transformer.generate_square_subsequent_mask makes it."
        raise InvalidProblem("attn_mask", "the triangle, because is_causal is True", None, fix)
    if (bias_k is None) != (bias_v is None):
        given = "bias_v" if bias_k is None else "bias_k"
        raise InvalidProblem("bias_k, bias_v", "both or neither", f"{given} alone", "Pass the other one, too.")
    named = {"in_proj_weight": in_proj_weight}
    if use_separate_proj_weight:
        named = {"q_proj_weight": q_proj_weight, "k_proj_weight": k_proj_weight, "v_proj_weight": v_proj_weight}
    for name, weight in named.items():
        if weight is None:
            raise InvalidProblem(name, "a tensor", None, "use_separate_proj_weight says which weights are read.")
    matrices: Any = tuple(named.values()) if use_separate_proj_weight else in_proj_weight
    projected = _projected(query, key, value, matrices, in_proj_bias)
    q, k, v = (_heads(t, num_heads, batch_first=False) for t in projected)
    k, v = _static("static_k", static_k, bias_k, q, k), _static("static_v", static_v, bias_v, q, v)
    batched = query.dim() == 3
    if key_padding_mask is not None and not batched:
        key_padding_mask = key_padding_mask.unsqueeze(0)
    k, v, extra = _with_extra_keys(k, v, bias_k, bias_v, add_zero_attn)
    if is_causal and key_padding_mask is None:
        # The extra keys come last in the triangle.
        attn_mask, extra = None, 0
    else:
        is_causal = False
    out = _attend(
        q, k, v, extra, key_padding_mask, attn_mask, is_causal=is_causal, dropout=dropout_p if training else 0.0
    )
    # Sequences first and contiguous, as torch returns them.
    out = F.linear(out.transpose(0, 1).flatten(2), out_proj_weight, out_proj_bias)
    return out if batched else out.squeeze(1), None


def _check_inputs(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, *, separate: bool) -> None:
    if query.dim() not in (2, 3):
        got = f"shape {tuple(query.shape)}"
        raise InvalidProblem("query", "2 dimensions, or 3 with a batch", got, "Reshape it.")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != query.dim():
            expected = f"{counted(query.dim(), 'dimension')} as query has"
            raise InvalidProblem(name, expected, f"shape {tuple(tensor.shape)}", "Reshape it.")
    if query.shape[-1] != embed_dim or embed_dim % num_heads:
        expected = f"an embedding of {embed_dim}, a multiple of {counted(num_heads, 'head')}"
        raise InvalidProblem("query", expected, query.shape[-1], "Use the layer's embed_dim.")
    same = slice(-1) if separate else slice(None)
    if key.shape[same] != value.shape[same]:
        expected = f"shape {tuple(key.shape)} as key has" + (", but for the embedding" if separate else "")
        raise InvalidProblem("value", expected, tuple(value.shape), "Each key has one value.")


def _projected(
    query: Tensor, key: Tensor, value: Tensor, weights: Tensor | Sequence[Tensor], bias: Tensor | None
) -> Sequence[Tensor]:
    """By three weights, or the three parts of one; by one in a single product if the inputs are the same."""
    if isinstance(weights, Tensor):
        if query is key is value:
            return F.linear(query, weights, bias).chunk(3, -1)
        weights = weights.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _heads(rows: Tensor, num_heads: int, *, batch_first: bool) -> Tensor:
    """Projected rows as (batch, seqlen, heads, dim), without a copy."""
    heads: Tensor = rows.unflatten(-1, (num_heads, -1))
    if heads.dim() == 3:
        return heads.unsqueeze(0)
    return heads if batch_first else heads.transpose(0, 1)


def _static(name: str, static: Tensor | None, bias: Tensor | None, q: Tensor, projected: Tensor) -> Tensor:
    """Given keys or values, (batch * heads, seqlen_k, dim), instead of the projected ones."""
    if static is None:
        return projected
    if bias is not None:
        expected = "None together with bias_k and bias_v"
        raise InvalidProblem(name, expected, tuple(static.shape), "Append the bias to it.")
    check_class(name, static)
    batch, _, num_heads, head_dim = q.shape
    if static.dim() != 3 or static.shape[0] != batch * num_heads or static.shape[2] != head_dim:
        expected = f"shape ({batch * num_heads}, seqlen_k, {head_dim})"
        raise InvalidProblem(name, expected, tuple(static.shape), "It holds the heads of all sequences in turn.")
    heads: Tensor = static.unflatten(0, (batch, num_heads))
    return heads.transpose(1, 2)


def _with_extra_keys(
    k: Tensor, v: Tensor, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool
) -> tuple[Tensor, Tensor, int]:
    """Append the learned key (`add_bias_kv`) and the zero key (`add_zero_attn`); also returns how many there are."""
    batch, before, *head = k.shape
    if bias_k is not None and bias_v is not None:
        k = torch.cat((k, bias_k.reshape(1, 1, *head).expand(batch, -1, -1, -1)), 1)
        v = torch.cat((v, bias_v.reshape(1, 1, *head).expand(batch, -1, -1, -1)), 1)
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
    return k, v, k.shape[1] - before


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    *,
    is_causal: bool,
    dropout: float,
) -> Tensor:
    """Attention of heads (batch, seqlen, heads, dim) under torch's masks, none of which hides the last `extra` keys."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1] - extra
    mask, bias = _masks(q, seqlen_k, extra, key_padding_mask, attn_mask)
    window: tuple[int | None, int | None] | None = None
    if is_causal:
        # Aligned with the top-left corner, as in torch.
        if not extra and seqlen_q >= seqlen_k:
            window = (None, seqlen_q - seqlen_k)
        elif not extra and mask is None and bias is None:
            # No query sees the keys past the last query.
            k, v, window = k[:, :seqlen_q], v[:, :seqlen_q], (None, 0)
        else:
            triangle = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).tril()
            triangle = F.pad(triangle, (0, extra), value=True)
            mask = triangle if mask is None else mask & triangle
    return attention(q, k, v, mask=mask, bias=bias, window=window, dropout=dropout, layout="bshd")


def _masks(
    q: Tensor, seqlen_k: int, extra: int, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(mask, bias) in tilewise's sense: boolean masks joined and inverted, floating ones added."""
    batch, seqlen_q, num_heads, _ = q.shape
    given: list[Tensor] = []
    if key_padding_mask is not None:
        _check_mask("key_padding_mask", key_padding_mask, [(batch, seqlen_k)])
        given.append(key_padding_mask[:, None, None, :])
    if attn_mask is not None:
        shapes = [(seqlen_q, seqlen_k), (batch * num_heads, seqlen_q, seqlen_k)]
        _check_mask("attn_mask", attn_mask, shapes)
        given.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, num_heads)))
    mask = bias = None
    for tensor in given:
        # Extra keys are always attended to: False in torch's sense of a mask, 0 in a bias.
        padded = F.pad(tensor, (0, extra)) if extra else tensor
        if padded.dtype == torch.bool:
            mask = ~padded if mask is None else mask & ~padded
        else:
            bias = padded if bias is None else bias + padded
    return mask, bias


def _check_mask(name: str, tensor: Tensor, allowed: list[tuple[int, ...]]) -> None:
    check_class(name, tensor)
    if tensor.dtype != torch.bool and not tensor.is_floating_point():
        fix = "0 and 1 become a mask by .bool(), where True means: do not attend."
        raise InvalidProblem(name, "a bool or floating-point tensor", tensor.dtype, fix)
    if tuple(tensor.shape) not in allowed:
        expected = "shape " + " or ".join(map(str, allowed))
        raise InvalidProblem(name, expected, tuple(tensor.shape), "Reshape it.")
