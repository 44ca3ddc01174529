"""Attention beyond one device: sequences spread over the ranks of a torch.distributed group.

    from tilewise.distributed import context_parallel_attention, shard
    seqlen = q.shape[2]
    q, k, v = (shard(t, mesh, pad=0) for t in (q, k, v))
    out = context_parallel_attention(q, k, v, mesh, seqlen=seqlen, causal=True)

`context_parallel_decode` serves from pages that are dealt out to the ranks. `predict` estimates time and memory of a
step on 1 to 1024 devices, and which method is better for a link.
"""

from tilewise.distributed.attention import context_parallel_attention
from tilewise.distributed.decoding import context_parallel_decode, local_seqlens, local_slots
from tilewise.distributed.scaling import LINKS, Prediction, compare, predict
from tilewise.distributed.sharding import position_ids, shard, unshard
from tilewise.distributed.transport import PeerFailure

__all__ = [
    "LINKS",
    "PeerFailure",
    "Prediction",
    "compare",
    "context_parallel_attention",
    "context_parallel_decode",
    "local_seqlens",
    "local_slots",
    "position_ids",
    "predict",
    "shard",
    "unshard",
]
