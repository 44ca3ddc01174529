"""The Hopper backend: TMA, wgmma and warp specialisation in Gluon, for H100 and H200.

docs/kernels/hopper.md explains the kernels. The portable Triton backend serves every problem that this one refuses.
bench/results/hopper-decode-choices.csv holds the figures behind the limits of decoding, by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import torch

from tilewise.backends.base import TileShape
from tilewise.backends.gpu import releases, trial
from tilewise.backends.gpu.backend import GpuBackend, too_long
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem
from tilewise.units import counted

__all__ = ["BACKEND", "HopperBackend", "computes_gradients", "decodes", "reads_latents"]

DTYPES = (torch.float16, torch.bfloat16)
# TMA needs strides that are multiples of 16 bytes: 8 elements of 16 bits.
HEAD_DIM_STEP = 8
# Narrower heads would be mostly padding in a 64-column tile.
MIN_HEAD_DIM, MAX_HEAD_DIM = 40, 512
# Heads with more columns have a forward (forward_wide.py) and decoding; Triton's kernels compute their gradients.
MAX_COLUMNS = 256
# The decode kernel serves calls without gradients with at most FEW_ROWS query rows per K/V head and at least MANY_KEYS
# keys. The forward kernel cannot saturate memory with so few rows.
FEW_ROWS, MANY_KEYS = 64, 256
# Decoding keeps O in registers: with V wider than WIDE_HEAD_DIM, only FEW_WIDE_ROWS rows fit.
WIDE_HEAD_DIM, FEW_WIDE_ROWS = 128, 32
# With e4m3 pages a converted tile of wide keys is in registers too: V wider than this does not fit next to it.
NARROW_HEAD_DIM = 64
# The page size must be a multiple of the rows of a TMA box: 64 in the forward kernel, in the decode kernel 8, where the
# swizzle pattern repeats.
PAGE_STEP, DECODE_PAGE_STEP = 64, 8
# Wider heads have tiles of 64 keys, half of a tile mask's.
LISTED_HEAD_DIM = 128
# e4m3: head dims are multiples of 16 bytes, padded to one of these widths; a scale covers one key tile of 128 rows.
FP8_HEAD_DIM_STEP, FP8_WIDTHS, FP8_BLOCK = 16, (64, 128, 256), 128


# Latents: V is LATENT_DIM_V columns of keys that have up to LATENT_REST more. CTAs of 64 rows read them for up to
# MAX_LATENT_ROWS query rows a K/V head at the same time.
LATENT_DIM_V, LATENT_REST, MAX_LATENT_ROWS = 512, 64, 512
# Up to FEW_LATENT_ROWS the decode kernel reads them; e4m3 ones up to FEW_E4M3_ROWS, whose O fits next to a converted
# piece of V.
FEW_LATENT_ROWS, FEW_E4M3_ROWS = 32, 16


class HopperBackend(GpuBackend):
    """Dense and packed attention in fp16 and bf16, forward and backward; paged forward and decoding; dense and packed
    forward in e4m3; decoding from e4m3 pages.
    """

    name = "hopper"
    # The rows of a tile belong to one sequence, and its size does not depend on the batch. Warpgroups raise the largest
    # score of their head with the maximum of their rows.
    honours = frozenset(
        (
            "causal", "window", "gqa", "head_dim_v", "softcap", "tile mask", "sinks", "fp8", "int8", "max_logits",
            "batch-invariant", "latent",
        )
    )  # fmt: skip
    many_keys = MANY_KEYS

    def unavailable(self) -> str | None:
        """What is missing on this machine, if anything."""
        if (missing := releases.missing()) is not None:
            return missing
        if not torch.cuda.is_available():
            return "no CUDA device is visible to torch"
        return trial.failure(self)

    def supports(self, problem: AttentionProblem, device: DeviceSpec) -> str | None:
        """The first reason why these kernels cannot compute the problem; None if they can."""
        return next(_refusals(problem, device), None)

    def tile_shape(self, problem: AttentionProblem, device: DeviceSpec) -> TileShape:
        """(query rows, keys) of a forward tile."""
        del device
        latents = reads_latents(problem)
        if latents and problem.seqlen_q * problem.group_size > FEW_LATENT_ROWS:
            return TileShape(64, 64)
        if latents or decodes(problem):
            module = importlib.import_module("tilewise.backends.hopper.decode_configs")
            tile = module.decode_config(problem, packed_queries=True)
            return TileShape(tile.ROWS, tile.BLOCK_N)
        if problem.fp8:
            config = importlib.import_module("tilewise.backends.hopper.fp8_configs").fp8_config(problem)
        else:
            config = importlib.import_module("tilewise.backends.hopper.configs").forward_config(problem)
        return TileShape(64 * config.NUM_WARPGROUPS, config.BLOCK_N)

    def fp8_path(self, problem: AttentionProblem) -> str:
        """How 8-bit operands are computed with, for `explain()`."""
        if decodes(problem) or reads_latents(problem):
            read = f"{', '.join(problem.fp8)} read as {problem.codes}"
            return f"{read} and widened to fp16 in registers, probabilities in fp16"
        pays = "" if max(problem.head_dim, problem.head_dim_v) > 64 else "; hardly faster than 16 bits at this head_dim"
        return f"{', '.join(problem.fp8)} multiplied as e4m3 by FP8 tensor cores, probabilities rounded to e4m3{pays}"

    def skips_tiles(self, problem: AttentionProblem) -> str:
        """How tile masks are read, for `explain()`."""
        other = "; gradients that repeat bit for bit are computed by the kernels of the triton backend"
        rest = other if problem.needs_grad and problem.deterministic else ""
        return f"blocks walk the tiles that the mask lists, those with bits first{rest}"

    def _gradients(self, problem: AttentionProblem) -> ModuleType:
        if computes_gradients(problem):
            return super()._gradients(problem)
        return importlib.import_module("tilewise.backends.triton.launch")

    def unordered(self, problem: AttentionProblem) -> str | None:
        """Which gradient is summed in no fixed order, for `explain()`; None if all results repeat bit for bit."""
        if not problem.needs_grad or not computes_gradients(problem):
            return None
        config = importlib.import_module("tilewise.backends.hopper.configs").backward_config(problem)
        if config.WIDE or config.FIXED_POINT:
            return None
        return "of dq differ from run to run: key tiles add to it as they finish; deterministic=True makes them repeat"


def decodes(problem: AttentionProblem) -> bool:
    """Whether the decode kernel serves a problem: few query rows, many keys, no gradient."""
    few = problem.seqlen_q * problem.group_size <= FEW_ROWS
    return few and problem.seqlen_k >= MANY_KEYS and not problem.needs_grad


def computes_gradients(problem: AttentionProblem) -> bool:
    """Whether the backward kernels of this backend serve a problem; otherwise Triton's do, which have a fixed order.

    Sums of dQ in fixed point need to know how many key tiles add to a query tile, and whether one that is not finite
    does; a tile mask tells neither.
    """
    if max(problem.head_dim, problem.head_dim_v) > MAX_COLUMNS:
        return False
    return problem.tiles_shape is None or not problem.deterministic


def reads_latents(problem: AttentionProblem) -> bool:
    """Whether kernels serve a problem that read latents once: V is the first columns of K."""
    wide = 0 < problem.head_dim - problem.head_dim_v <= LATENT_REST and problem.head_dim_v == LATENT_DIM_V
    few = problem.fp8 == ("k", "v") and problem.seqlen_q * problem.group_size <= FEW_E4M3_ROWS
    return problem.latent and wide and not problem.needs_grad and (few or not problem.fp8)


def _latent_refusals(problem: AttentionProblem) -> Iterator[str]:
    rows = problem.seqlen_q * problem.group_size
    if rows > MAX_LATENT_ROWS:
        yield f"{rows} query rows a K/V head: latents are read for at most {MAX_LATENT_ROWS} at once"
    if problem.page_size is not None and problem.page_size % DECODE_PAGE_STEP:
        yield f"pages of {counted(problem.page_size, 'row')}: TMA fetches {DECODE_PAGE_STEP} rows of a page at a time"
    if problem.fp8 and problem.page_size is None:
        yield "e4m3 latents that are not in pages: their scales are those of pages"
    step = FP8_HEAD_DIM_STEP if problem.fp8 else HEAD_DIM_STEP
    if problem.head_dim % step:
        yield f"head_dim {problem.head_dim} is not a multiple of {step}"
    if problem.tiles_shape is not None:
        yield "tile mask of latents: their kernel has none"
    if problem.batch_invariant:
        yield "deterministic='batch' of latents: shares of the keys that programs read depend on the batch"
    if problem.max_logits:
        yield "max_logits of latents: their kernel does not write them"


def _refusals(problem: AttentionProblem, device: DeviceSpec) -> Iterator[str]:
    if (outdated := releases.outdated()) is not None:
        yield outdated
    if not device.has_wgmma:
        yield f"{device.name} has no wgmma (compute capability 9.0: H100, H200)"
    if problem.higher:
        yield "has no tangents (jvp) and no second derivatives: the Triton backend computes them"
    if problem.dtype not in DTYPES:
        yield f"dtype {problem.dtype} is not float16 or bfloat16"
    if (reason := too_long(problem)) is not None:
        yield reason
    latents = reads_latents(problem)
    if latents:
        yield from _latent_refusals(problem)
    elif decodes(problem):
        yield from _decode_refusals(problem)
    elif problem.page_size is not None:
        yield from _paged_refusals(problem, problem.page_size)
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.total_q, problem.total_k):
        yield "there is nothing to compute (no sequence, no query or no key)"
    few = latents or decodes(problem)
    if problem.int8 and not few:
        yield "k, v in int8: only the decode kernel widens them"
    if problem.fp8 and not few:
        yield from _fp8_refusals(problem)
    for name in problem.features:
        if name not in HopperBackend.honours:
            yield f"{name} is not compiled into these kernels"
    if problem.scale <= 0:
        yield f"scale {problem.scale} is not positive (keys are hidden and the maximum is taken before scaling)"
    if latents:
        return
    if problem.tiles_shape is not None:
        yield from _tile_mask_refusals(problem)
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size % HEAD_DIM_STEP or not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            yield f"{name} {size} is not a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if (problem.head_dim > MAX_COLUMNS) != (problem.head_dim_v > MAX_COLUMNS):
        sizes = f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v}"
        yield f"{sizes}: kernels for more than {MAX_COLUMNS} columns take both above that"
    if problem.batch_invariant:
        yield from _invariant_refusals(problem)
    if problem.max_logits and (decodes(problem) or problem.fp8):
        yield "max_logits of few query rows or e4m3 operands: these kernels refer to another number than the maximum"
    few = not problem.needs_grad and problem.seqlen_q * problem.group_size <= FEW_ROWS
    if few and not decodes(problem):
        yield f"at most {FEW_ROWS} query rows a K/V head fill no warpgroup, and under {MANY_KEYS} keys no decode kernel"


def _invariant_refusals(problem: AttentionProblem) -> Iterator[str]:
    if decodes(problem):
        yield "deterministic='batch' of few query rows: shares of the keys that its programs read depend on the batch"
    if problem.fp8:
        yield "deterministic='batch' of e4m3 operands: that was not tested with these kernels"
    if problem.needs_grad:
        yield "deterministic='batch' is for results without gradients, whose sums are cut by the batch"


def _tile_mask_refusals(problem: AttentionProblem) -> Iterator[str]:
    if problem.kind != "dense":
        yield f"tile mask of {problem.kind} sequences: these kernels take those of dense ones"
    if problem.band != (None, None):
        yield "tile mask next to causal or a window: as a part of the mask (mask & ...) they would run here"
    if max(problem.head_dim, problem.head_dim_v) > LISTED_HEAD_DIM:
        yield f"tile mask of heads wider than {LISTED_HEAD_DIM}: their blocks are smaller than a tile"
    if decodes(problem):
        yield "tile mask of few query rows: the decode kernel has none"
    if problem.fp8:
        yield "tile mask of e4m3 operands: the FP8 kernel has none"


def _decode_refusals(problem: AttentionProblem) -> Iterator[str]:
    rows, items = problem.seqlen_q * problem.group_size, problem.batch * problem.num_kv_heads
    # One CTA merges all parts of an item. With many rows and few items, too few CTAs merge, and Triton's kernel is
    # faster.
    if rows > items:
        yield "more query rows a K/V head than (sequence, K/V head) pairs: too many for one program to merge"
    if rows > FEW_WIDE_ROWS and problem.head_dim_v > WIDE_HEAD_DIM:
        yield f"over {FEW_WIDE_ROWS} query rows of {problem.head_dim_v} columns do not fit the registers of a warpgroup"
    wide_keys = problem.head_dim > WIDE_HEAD_DIM and problem.head_dim_v > NARROW_HEAD_DIM
    if problem.fp8 and rows > FEW_WIDE_ROWS and wide_keys:
        yield f"over {FEW_WIDE_ROWS} query rows and converted keys of {problem.head_dim} columns do not fit registers"
    if problem.page_size is not None and problem.page_size % DECODE_PAGE_STEP:
        yield f"pages of {counted(problem.page_size, 'row')}: TMA fetches {DECODE_PAGE_STEP} rows of a page at a time"
    if problem.fp8 and max(problem.head_dim, problem.head_dim_v) > MAX_COLUMNS:
        latents = f", except latents of {LATENT_DIM_V} + {LATENT_REST} for at most {FEW_E4M3_ROWS} query rows"
        yield f"e4m3 pages of more than {MAX_COLUMNS} columns do not fit the registers{latents} a K/V head"
    if problem.fp8 and (problem.fp8 != ("k", "v") or problem.page_size is None):
        yield f"{', '.join(problem.fp8)} in e4m3: decoding takes e4m3 keys and values in pages, beside q in 16 bits"
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if problem.fp8 and size % FP8_HEAD_DIM_STEP:
            yield f"{name} {size} of 8-bit numbers is not a multiple of {FP8_HEAD_DIM_STEP}"


def _fp8_refusals(problem: AttentionProblem) -> Iterator[str]:
    if problem.fp8 != ("q", "k", "v"):
        yield f"{', '.join(problem.fp8)} in e4m3 beside q in {problem.dtype}: FP8 products take both sides in e4m3"
    if problem.page_size is not None:
        yield "e4m3 pages: values are transposed by a pass over contiguous rows"
    if problem.softcap is not None:
        yield "softcap is not compiled into the FP8 kernel"
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size % FP8_HEAD_DIM_STEP or size > FP8_WIDTHS[-1]:
            yield f"{name} {size} of 8-bit numbers is not a multiple of {FP8_HEAD_DIM_STEP} up to {FP8_WIDTHS[-1]}"
    if len({next((w for w in FP8_WIDTHS if size <= w), 0) for size in (problem.head_dim, problem.head_dim_v)}) > 1:
        yield f"head_dim {problem.head_dim} and head_dim_v {problem.head_dim_v} are padded to different widths"
    if any(block not in (None, FP8_BLOCK) for block in problem.scale_blocks):
        yield f"scales per {problem.scale_blocks} rows of q, k, v: tiles of keys have {FP8_BLOCK} rows"


def _paged_refusals(problem: AttentionProblem, page_size: int) -> Iterator[str]:
    if page_size % PAGE_STEP:
        yield f"pages of {counted(page_size, 'row')}: TMA fetches {PAGE_STEP} rows of a page at a time"
    if problem.seqlen_q == 1:
        yield "one query row a sequence: split-KV decoding serves those"
    if problem.needs_grad:
        yield "paged keys have no gradient in these kernels"


BACKEND = HopperBackend()
