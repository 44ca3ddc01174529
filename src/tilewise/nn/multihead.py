"""`torch.nn.MultiheadAttention` on tilewise: same constructor, parameters, state_dict and call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tilewise.api import attention
from tilewise.errors import InvalidProblem

__all__ = ["MultiheadAttention"]


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Drop-in for `torch.nn.MultiheadAttention`; checkpoints load both ways.

    `need_weights=False` runs tiled and never makes the weights. `need_weights=True` is torch's own code, because the
    weights are the matrix that tiling avoids. As in torch, True in `key_padding_mask` and in a boolean `attn_mask`
    means "do not attend". A row with every key masked gives the output projection of 0. `is_causal` needs no
    `attn_mask` here; if one is given with it, it is taken for the triangle it is said to be. Rejects nested tensors.

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
                attn_mask = _not_attended(query, key, batch_first=self.batch_first)
            out, weights = super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
            return out, weights
        batched = query.dim() == 3
        if not batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        out = self._attend(query, key, value, key_padding_mask, None if is_causal else attn_mask, is_causal)
        if not batched:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """Batch-first projections, attention, output projection."""
        q, k, v = self._projected(query, key, value)
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        k, v, extra = self._with_extra_keys(k, v)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)) for t in (q, k, v))
        mask, bias = self._masks(q, seqlen_k, extra, key_padding_mask, attn_mask)
        window: tuple[int | None, int | None] | None = None
        if is_causal:
            # Top-left aligned as in torch; extra keys at the end stay visible, which no window can say.
            if extra or seqlen_q < seqlen_k:
                triangle = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).tril()
                triangle = F.pad(triangle, (0, extra), value=True)
                mask = triangle if mask is None else mask & triangle
            else:
                window = (None, seqlen_q - seqlen_k)
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask=mask, bias=bias, window=window, dropout=dropout, layout="bshd")
        projected: Tensor = self.out_proj(out.flatten(2))
        return projected

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self._qkv_same_embed_dim and query is key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        bias: Tensor | None = self.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _with_extra_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append the learned key (`add_bias_kv`) and the zero key (`add_zero_attn`); also how many there are."""
        before = k.shape[1]
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat((k, self.bias_k.expand(k.shape[0], -1, -1)), 1)
            v = torch.cat((v, self.bias_v.expand(v.shape[0], -1, -1)), 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return k, v, k.shape[1] - before

    def _masks(
        self, q: Tensor, seqlen_k: int, extra: int, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(mask, bias) in tilewise's sense: boolean masks joined and inverted, floating ones added."""
        batch, seqlen_q = q.shape[:2]
        given: list[Tensor] = []
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, [(batch, seqlen_k)])
            given.append(key_padding_mask[:, None, None, :])
        if attn_mask is not None:
            shapes = [(seqlen_q, seqlen_k), (batch * self.num_heads, seqlen_q, seqlen_k)]
            _check_mask("attn_mask", attn_mask, shapes)
            given.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, self.num_heads)))
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
    if tensor.dtype != torch.bool and not tensor.is_floating_point():
        fix = "0 and 1 become a mask by .bool(), where True means: do not attend."
        raise InvalidProblem(name, "a bool or floating-point tensor", tensor.dtype, fix)
    if tuple(tensor.shape) not in allowed:
        expected = "shape " + " or ".join(map(str, allowed))
        raise InvalidProblem(name, expected, tuple(tensor.shape), "Reshape it.")


def _not_attended(query: Tensor, key: Tensor, *, batch_first: bool) -> Tensor:
    """The triangle as torch wants it: True above the diagonal."""
    dim = 1 if query.dim() == 3 and batch_first else 0
    return torch.ones(query.shape[dim], key.shape[dim], dtype=torch.bool, device=query.device).triu(1)
