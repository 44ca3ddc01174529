"""From canonical operands to kernel launches: what depends on the problem alone is planned once and cached, the rest
is strides.

Nothing here waits for the device, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise import device as devices
from tilewise.backends.triton import backward as bwd
from tilewise.backends.triton import bias_gradient, configs, decode, forward, pages
from tilewise.backends.triton.configs import Config, Pass
from tilewise.backends.triton.traits import (
    Band,
    Box,
    Grid4,
    Lengths,
    Rows,
    ScoreScalars,
    Sizes,
    Traits,
    is_rich,
    padded,
    traits_of,
)
from tilewise.device import DeviceSpec
from tilewise.numerics import LN2, LOG2E, dropout_threshold
from tilewise.operands import Gradients, Operands, Wanted
from tilewise.problem import AttentionProblem

__all__ = ["Launch", "Plan", "plan_for", "run_backward", "run_forward"]

# Query rows (tokens times heads of a group) that decode takes in one tile, and the keys below which splitting is not
# worth a second kernel.
MAX_DECODE_ROWS = 64
MIN_DECODE_KEYS = 256
STATS_ROWS = 64
PAGE_SLOTS = 16


class Launch(NamedTuple):
    """A kernel and everything it is started with; kept apart from starting it so that it can be compiled without a
    GPU.
    """

    kernel: Any
    programs: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int

    def start(self) -> None:
        """Queue the kernel on the current stream, unless there is nothing to do."""
        if 0 not in self.programs:
            self.kernel[self.programs](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


class Plan(NamedTuple):
    """What every call with a problem shares."""

    problem: AttentionProblem
    device: DeviceSpec
    traits: Traits
    sizes: Sizes
    band: Band
    scalars: ScoreScalars
    num_splits: int

    def config(self, direction: Pass) -> Config:
        """The tile of one pass."""
        width = max(self.traits.BLOCK_D, self.traits.BLOCK_DV)
        return configs.choose(direction, self.device, self.problem.dtype.itemsize, width, is_rich(self.problem))

    def sizes_streaming(self, config: Config, bytes_per_head: int, group_size: int) -> Sizes:
        """Sizes with the number of heads that run side by side."""
        heads = config.heads_per_wave or configs.heads_per_wave(self.device, bytes_per_head, group_size)
        return self.sizes._replace(heads_per_wave=heads)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


@functools.lru_cache(maxsize=4096)
def plan_for(problem: AttentionProblem, device: DeviceSpec, packed_q: bool, precision: str = "ieee") -> Plan:
    """Everything about a call that needs no tensor."""
    left, right = problem.band
    traits = traits_of(problem, packed_q=packed_q, precision=precision, interpreted=interpreted())
    sizes = Sizes(
        batch=problem.batch,
        num_heads=problem.num_heads,
        seqlen_q=problem.seqlen_q if packed_q or problem.kind == "dense" else 1,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q if problem.kind != "dense" else problem.batch * problem.seqlen_q,
        total_k=problem.total_k,
        heads_per_wave=1,
    )
    scalars = ScoreScalars(
        scale=float(problem.scale),
        softcap=float(problem.softcap or 0.0),
        keep_scale=1.0 / (1.0 - problem.dropout) if problem.dropout < 1.0 else 0.0,
        drop_below=dropout_threshold(problem.dropout),
    )
    plan = Plan(problem, device, traits, sizes, Band(left or 0, right or 0), scalars, 0)
    if sizes.seqlen_q * problem.group_size > MAX_DECODE_ROWS or problem.seqlen_k < MIN_DECODE_KEYS:
        return plan
    tiles = triton.cdiv(problem.seqlen_k, plan.config("decode").block_n)
    return plan._replace(num_splits=configs.num_splits(device, problem.batch * problem.num_kv_heads, tiles))


def run_forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of canonical operands."""
    out = _empty_like_rows(problem, operands.q, problem.num_heads, problem.seqlen_q, problem.head_dim_v)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=operands.q.device)
    if problem.batch == 0 or problem.seqlen_q == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    plan = plan_for(problem, devices.of(operands.q.device), operands.cu_seqlens_q is not None)
    with _on_device_of(operands.q):
        launches = decode_launches if plan.num_splits > 0 else forward_launches
        for launch in launches(plan, operands, out, lse):
            launch.start()
    return out, lse


def forward_launches(plan: Plan, operands: Operands, out: Tensor, lse: Tensor) -> list[Launch]:
    """The forward kernel."""
    problem, config = plan.problem, plan.config("forward")
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize // problem.group_size
    arguments = _score_arguments(plan, operands) | {
        "sinks": None if operands.sinks is None else operands.sinks.contiguous(),
        "out": _query_rows(plan, out),
        "lse": _stat_rows(plan, lse),
        "sizes": plan.sizes_streaming(config, kv_bytes, problem.group_size),
    }
    arguments |= _key_descriptors(plan, arguments, config)
    programs = triton.cdiv(plan.sizes.seqlen_q, config.block_m) * problem.num_heads * problem.batch
    return [_tiled(forward.forward_kernel, (programs,), arguments, config)]


def decode_launches(plan: Plan, operands: Operands, out: Tensor, lse: Tensor) -> list[Launch]:
    """The split kernel and, if its results are partial, the one that merges them."""
    problem, config, splits = plan.problem, plan.config("decode"), plan.num_splits
    # Packed rows past the last sequence are filled in by the merge.
    partial = splits > 1 or plan.traits.PACKED_Q
    parts = (splits, plan.sizes.total_q, problem.num_heads)
    out_parts = torch.empty((*parts, problem.head_dim_v), dtype=torch.float32, device=out.device) if partial else None
    lse_parts = torch.empty(parts, dtype=torch.float32, device=out.device) if partial else None
    rows = plan.sizes.seqlen_q * problem.group_size
    arguments = _score_arguments(plan, operands) | {
        "sinks": None if operands.sinks is None else operands.sinks.contiguous(),
        "out": _query_rows(plan, out),
        "lse": _stat_rows(plan, lse),
        "out_parts": out_parts,
        "lse_parts": lse_parts,
        "num_splits": splits,
        "SPLIT": partial,
    }
    config = Config(
        max(config.block_m, triton.next_power_of_2(rows)), config.block_n, config.num_warps, config.num_stages
    )
    launch = _tiled(decode.decode_kernel, (splits * problem.num_kv_heads * problem.batch,), arguments, config)
    return [launch, _combine_launch(plan, operands, out, lse, out_parts, lse_parts)] if partial else [launch]


def _combine_launch(
    plan: Plan, operands: Operands, out: Tensor, lse: Tensor, out_parts: Tensor | None, lse_parts: Tensor | None
) -> Launch:
    arguments = {
        "out_parts": out_parts,
        "lse_parts": lse_parts,
        "out": _query_rows(plan, out),
        "lse": _stat_rows(plan, lse),
        "cu_seqlens_q": operands.cu_seqlens_q,
        "total_q": plan.sizes.total_q,
        # Packed tokens are addressed as one long sequence.
        "seqlen_q": plan.sizes.total_q if plan.traits.PACKED_Q else plan.sizes.seqlen_q,
        "num_heads": plan.problem.num_heads,
        "num_splits": plan.num_splits,
        "batch": plan.problem.batch,
        "T": plan.traits,
        "BLOCK_SPLITS": triton.next_power_of_2(plan.num_splits),
    }
    return Launch(decode.combine_kernel, (plan.sizes.total_q * plan.problem.num_heads,), arguments, 4, 1)


def run_backward(
    problem: AttentionProblem,
    operands: Operands,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Wanted,
) -> Gradients:
    """The wanted gradients of canonical operands."""
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if problem.batch == 0:
        return _zero_gradients(problem, operands, wanted)
    plan = plan_for(problem, devices.of(operands.q.device), operands.cu_seqlens_q is not None)
    with _on_device_of(operands.q):
        lse_unit, delta = torch.empty_like(lse), torch.empty_like(lse)
        _stats_launch(plan, out, dout, lse, dlse, lse_unit, delta).start()
        shared = _score_arguments(plan, operands) | {
            "dout": _query_rows(plan, dout),
            "lse_unit": _stat_rows(plan, lse_unit),
            "delta": _stat_rows(plan, delta),
        }
        dk, dv = _key_gradients(plan, operands, shared) if wanted.dk or wanted.dv else (None, None)
        return Gradients(
            dq=_query_gradient(plan, operands, shared) if wanted.dq else None,
            dk=dk,
            dv=dv,
            dbias=_bias_gradient(plan, operands, shared) if wanted.dbias else None,
            dsinks=_sink_gradient(plan, operands, lse_unit, delta) if wanted.dsinks else None,
        )


def _stats_launch(
    plan: Plan, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, lse_unit: Tensor, delta: Tensor
) -> Launch:
    problem = plan.problem
    dense = problem.kind == "dense"
    num_rows, batch = (problem.seqlen_q, problem.batch) if dense else (problem.total_q, 1)
    rows = _dense_rows if dense else _packed_rows
    stats = _dense_rows if dense else _packed_stats
    arguments = {
        "out": rows(out),
        "dout": rows(dout),
        "lse": stats(lse),
        "dlse": None if dlse is None else stats(dlse),
        "lse_unit": stats(lse_unit),
        "delta": stats(delta),
        "num_rows": num_rows,
        "num_heads": problem.num_heads,
        "T": plan.traits,
        "BLOCK_M": STATS_ROWS if plan.traits.BLOCK_DV <= 256 else STATS_ROWS // 4,
    }
    blocks = triton.cdiv(num_rows, arguments["BLOCK_M"])
    return Launch(bwd.row_stats_kernel, (blocks * problem.num_heads * batch,), arguments, 4, 1)


def key_gradient_launch(plan: Plan, shared: dict[str, Any], dk: Rows, dv: Rows) -> Launch:
    """The kernel that writes dK and dV."""
    problem, config = plan.problem, plan.config("dkdv")
    bytes_per_head = (
        problem.seqlen_q * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize * problem.group_size
    )
    sizes = plan.sizes_streaming(config, bytes_per_head, 1)
    programs = triton.cdiv(problem.seqlen_k, config.block_n) * problem.num_kv_heads * problem.batch
    arguments = shared | {"dk": dk, "dv": dv, "sizes": sizes, "EARLY_DP": config.early_dp}
    arguments |= _query_descriptors(plan, shared, config)
    return _tiled(bwd.key_gradient_kernel, (programs,), arguments, config)


def _key_gradients(plan: Plan, operands: Operands, shared: dict[str, Any]) -> tuple[Tensor, Tensor]:
    problem = plan.problem
    if problem.kind != "paged":
        dk = _empty_like_rows(problem, operands.k, problem.num_kv_heads, problem.seqlen_k, problem.head_dim)
        dv = _empty_like_rows(problem, operands.v, problem.num_kv_heads, problem.seqlen_k, problem.head_dim_v)
        if problem.seqlen_k == 0:
            return dk.zero_(), dv.zero_()
        rows = _dense_rows if problem.kind == "dense" else _packed_rows
        key_gradient_launch(plan, shared, rows(dk), rows(dv)).start()
        return dk, dv
    shape = (problem.batch, problem.num_kv_heads, problem.seqlen_k)
    device = operands.q.device
    dk_rows = torch.empty((*shape, problem.head_dim), dtype=torch.float32, device=device)
    dv_rows = torch.empty((*shape, problem.head_dim_v), dtype=torch.float32, device=device)
    key_gradient_launch(plan, shared, _dense_rows(dk_rows), _dense_rows(dv_rows)).start()
    return _into_pages(operands.k, dk_rows, operands), _into_pages(operands.v, dv_rows, operands)


def _into_pages(like: Tensor, rows: Tensor, operands: Operands) -> Tensor:
    assert operands.block_table is not None
    assert operands.seqlens_k is not None
    num_pages, page_size, num_kv_heads, dim = like.shape
    grad = torch.empty_like(like, memory_format=torch.contiguous_format)
    order, ends = pages.entries_by_page(operands.block_table, operands.seqlens_k, num_pages, page_size)
    arguments = {
        "rows": _dense_rows(rows),
        "pages": _page_rows(grad),
        "order": order,
        "page_ends": ends,
        "seqlens_k": operands.seqlens_k,
        "num_kv_heads": num_kv_heads,
        "max_pages": operands.block_table.shape[1],
        "PAGE_SIZE": page_size,
        "BLOCK_S": min(PAGE_SLOTS, triton.next_power_of_2(page_size)),
        "DIM": dim,
        "BLOCK_D": padded(dim),
    }
    Launch(pages.gather_pages_kernel, (num_pages * num_kv_heads,), arguments, 4, 1).start()
    return grad


def query_gradient_launch(plan: Plan, shared: dict[str, Any], dq: Tensor) -> Launch:
    """The kernel that writes dQ."""
    problem, config = plan.problem, plan.config("dq")
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize // problem.group_size
    sizes = plan.sizes_streaming(config, kv_bytes, problem.group_size)
    programs = triton.cdiv(plan.sizes.seqlen_q, config.block_m) * problem.num_heads * problem.batch
    arguments = shared | {"dq": _query_rows(plan, dq), "sizes": sizes} | _key_descriptors(plan, shared, config)
    return _tiled(bwd.query_gradient_kernel, (programs,), arguments, config)


def _query_gradient(plan: Plan, operands: Operands, shared: dict[str, Any]) -> Tensor:
    problem = plan.problem
    dq = _empty_like_rows(problem, operands.q, problem.num_heads, problem.seqlen_q, problem.head_dim)
    if problem.seqlen_q == 0:
        return dq.zero_()
    query_gradient_launch(plan, shared, dq).start()
    return dq


def _bias_gradient(plan: Plan, operands: Operands, shared: dict[str, Any]) -> Tensor:
    problem, config = plan.problem, plan.config("dbias")
    shape = problem.bias_shape
    assert shape is not None
    assert operands.bias is not None
    tiles = shape[0] * shape[1] * triton.cdiv(shape[2], config.block_m) * triton.cdiv(shape[3], config.block_n)
    # Enough programs for two waves; the partial sums stay below the size of the bias times that.
    shares = max(1, min(64, 2 * plan.device.num_sms // max(1, tiles)))
    dtype = operands.bias.dtype if shares == 1 else torch.float32
    parts = torch.empty((shares, *shape), dtype=dtype, device=operands.bias.device)
    arguments = shared | {"dbias": parts, "shape": shape, "num_shares": shares}
    _tiled(bias_gradient.bias_gradient_kernel, (shares * tiles,), arguments, config).start()
    return parts[0] if shares == 1 else parts.sum(0).to(operands.bias.dtype)


def _sink_gradient(plan: Plan, operands: Operands, lse_unit: Tensor, delta: Tensor) -> Tensor:
    """-sum over rows of exp(sink - lse) * delta, in a fixed order."""
    assert operands.sinks is not None
    unit = 1.0 if plan.traits.TRANSFORMED else LN2
    by_head = (0, 2) if plan.problem.kind == "dense" else (1,)
    sinks = (
        operands.sinks.to(torch.float32).view(1, -1, 1)
        if plan.problem.kind == "dense"
        else operands.sinks.float().view(-1, 1)
    )
    weight = torch.exp2((sinks - lse_unit * unit) * LOG2E)
    return -(weight * delta).sum(by_head).to(operands.sinks.dtype)


def _zero_gradients(problem: AttentionProblem, operands: Operands, wanted: Wanted) -> Gradients:
    q, k, v = (torch.zeros_like(t) for t in operands[:3])
    bias = operands.bias
    dbias = None if bias is None or problem.bias_shape is None else bias.new_zeros(problem.bias_shape)
    dsinks = None if operands.sinks is None else torch.zeros_like(operands.sinks)
    return Gradients(q, k, v, dbias if wanted.dbias else None, dsinks if wanted.dsinks else None)


def _tiled(kernel: Any, programs: tuple[int, ...], arguments: dict[str, Any], config: Config) -> Launch:
    tiles = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    return Launch(kernel, programs, arguments | tiles, config.num_warps, config.num_stages)


def _key_descriptors(plan: Plan, arguments: dict[str, Any], config: Config) -> dict[str, Any]:
    """Descriptors of K and V, or None for both."""
    problem = plan.problem
    on = config.descriptors and problem.kind != "paged"
    rows = problem.seqlen_k if problem.kind == "dense" else problem.total_k
    k = _described(plan, arguments["k"], problem.num_kv_heads, rows, config.block_n) if on else None
    v = _described(plan, arguments["v"], problem.num_kv_heads, rows, config.block_n) if on else None
    return _pair("k", k, "v", v)


def _query_descriptors(plan: Plan, arguments: dict[str, Any], config: Config) -> dict[str, Any]:
    """Descriptors of q and dout, or None for both."""
    problem = plan.problem
    on = config.descriptors and (problem.kind == "dense" or plan.traits.PACKED_Q)
    rows = problem.seqlen_q if problem.kind == "dense" else problem.total_q
    q = _described(plan, arguments["q"], problem.num_heads, rows, config.block_m) if on else None
    dout = _described(plan, arguments["dout"], problem.num_heads, rows, config.block_m) if on else None
    return _pair("q", q, "dout", dout)


Described = tuple[TensorDescriptor, Box]


def _pair(a: str, described_a: Described | None, b: str, described_b: Described | None) -> dict[str, Any]:
    """Both or neither: one compiled kernel less."""
    if described_a is None or described_b is None:
        return dict.fromkeys((f"{a}_desc", f"{a}_box", f"{b}_desc", f"{b}_box"))
    return {
        f"{a}_desc": described_a[0],
        f"{a}_box": described_a[1],
        f"{b}_desc": described_b[0],
        f"{b}_box": described_b[1],
    }


def _described(plan: Plan, rows: Rows, heads: int, num_rows: int, block: int) -> Described | None:
    """A view of the rows as one matrix, if they have one row stride, TMA's alignment and no padding of head_dim."""
    tensor, dim = rows.ptr, rows.ptr.shape[-1]
    align = 16 // tensor.element_size()
    if rows.stride_row % align or rows.stride_row < dim or tensor.data_ptr() % 16 or padded(dim) != dim:
        return None
    if rows.stride_batch % rows.stride_row:
        return None
    per_batch = rows.stride_batch // rows.stride_row
    if rows.stride_head % rows.stride_row == 0:
        box, width = Box(per_batch, rows.stride_head // rows.stride_row, 0), dim
    elif rows.stride_head % align == 0 and rows.stride_head * (heads - 1) + dim <= rows.stride_row:
        box, width = Box(per_batch, 0, rows.stride_head), rows.stride_row
    else:
        return None
    height = (plan.problem.batch - 1) * box.rows_per_batch + (heads - 1) * box.rows_per_head + num_rows
    if num_rows == 0 or height >= 2**31:
        return None
    return TensorDescriptor(tensor, [height, width], [rows.stride_row, 1], [block, dim]), box


def _score_arguments(plan: Plan, operands: Operands) -> dict[str, Any]:
    """What every kernel that computes scores is given."""
    kind = plan.problem.kind
    keys = _page_rows if kind == "paged" else _packed_rows if kind == "varlen" else _dense_rows
    slopes, mask, table = operands.alibi_slopes, operands.mask, operands.block_table
    return {
        "q": _query_rows(plan, operands.q),
        "k": keys(operands.k),
        "v": keys(operands.v),
        "bias": None if operands.bias is None else Grid4(operands.bias, *operands.bias.stride()),
        "mask": None if mask is None else Grid4(mask.view(torch.uint8), *mask.stride()),
        "alibi_slopes": None if slopes is None else Rows(slopes, slopes.stride(0), slopes.stride(1), 0),
        "seed_ptr": _seed_on_device(operands) if plan.problem.dropout > 0.0 else None,
        "lengths": Lengths(
            operands.cu_seqlens_q,
            operands.cu_seqlens_k,
            table,
            operands.seqlens_k,
            None if table is None else table.stride(0),
        ),
        "sizes": plan.sizes,
        "band": plan.band,
        "scalars": plan.scalars,
        "T": plan.traits,
    }


def _seed_on_device(operands: Operands) -> Tensor:
    seed = operands.seed
    assert seed is not None
    if seed.device == operands.q.device:
        return seed
    # A fill, not a copy: it needs no pinned memory and can be captured in a graph.
    return torch.full((), int(seed), dtype=torch.int64, device=operands.q.device)


def _dense_rows(tensor: Tensor) -> Rows:
    return Rows(tensor, *tensor.stride()[:3])


def _packed_rows(tensor: Tensor) -> Rows:
    return Rows(tensor, 0, tensor.stride(1), tensor.stride(0))


def _packed_stats(tensor: Tensor) -> Rows:
    return Rows(tensor, 0, tensor.stride(0), tensor.stride(1))


def _page_rows(tensor: Tensor) -> Rows:
    return Rows(tensor, tensor.stride(0), tensor.stride(2), tensor.stride(1))


def _query_rows(plan: Plan, tensor: Tensor) -> Rows:
    """Rows of q, out, dout or dq. Paged queries of one token a sequence are a batch of sequences of length 1."""
    if plan.problem.kind == "dense":
        return _dense_rows(tensor)
    return _packed_rows(tensor) if plan.traits.PACKED_Q else Rows(tensor, tensor.stride(0), tensor.stride(1), 0)


def _stat_rows(plan: Plan, tensor: Tensor) -> Rows:
    """Rows of lse or delta, likewise."""
    if plan.problem.kind == "dense":
        return _dense_rows(tensor)
    return _packed_stats(tensor) if plan.traits.PACKED_Q else Rows(tensor, tensor.stride(1), tensor.stride(0), 0)


def _empty_like_rows(problem: AttentionProblem, like: Tensor, heads: int, seqlen: int, dim: int) -> Tensor:
    """A new tensor with the rows of `like`, heads first over the memory order of the problem's layout."""
    if problem.kind != "dense":
        return like.new_empty((like.shape[0], heads, dim))
    if problem.layout == "bshd":
        return like.new_empty((problem.batch, seqlen, heads, dim)).transpose(1, 2)
    return like.new_empty((problem.batch, heads, seqlen, dim))


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels start on the current device; switching costs microseconds, so only where it is another one."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
