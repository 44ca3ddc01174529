"""What the tables of the Hopper backend choose between, as short words, and problems that cover all of it.

A kernel is compiled for a tile, head dims, a dtype, a mask, the way rows lie, and features. All combinations are some
thousand; `cover` has every tile together with every one of the other choices that some problem makes, and with sinks
one of them: those are added behind the loops.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tilewise import device
from tilewise.backends.hopper import BACKEND, configs, decode_configs, decodes, fp8_configs, reads_latents
from tilewise.problem import AttentionProblem

Choices = dict[str, Any]
# A tile, and another choice with its value.
Pair = tuple[str, str, Any]
Options = list[dict[str, Any]]
HOPPER = device.named("h200")

DTYPES: Options = [{"dtype": torch.bfloat16}, {"dtype": torch.float16}]
MASKS: Options = [{}, {"causal": True}, {"window_left": 100, "window_right": 50}]
EVERY_MASK: Options = [*MASKS, {"tiles_shape": (1, 1, 32, 32)}]
SCORES: Options = [{}, {"softcap": 30.0}, {"has_sinks": True}]
# Of unequal ones, a wider V and a narrower one, in column parts and without.
UNEQUAL = ((64, 128), (192, 128), (256, 64))
DIMS: Options = [{"d": d} for d in (64, 96, 128, 192, 256)] + [{"d": d, "head_dim_v": dv} for d, dv in UNEQUAL]
# The forward alone has them.
WIDE_DIMS: Options = [{"d": 512}, {"d": 384}, {"d": 320, "head_dim_v": 512}]
LENGTHS: Options = [{"seqlen_q": n, "seqlen_k": n} for n in (1024, 2048, 4096, 8192)]
EVERY_LENGTH: Options = [*LENGTHS, {"seqlen_q": 4000, "seqlen_k": 4000}]
DENSE, PACKED = {"kind": "dense"}, {"kind": "varlen"}
PAGES: Options = [{"kind": "paged", "page_size": size} for size in (64, 128, 256)]
ROWS: Options = [DENSE, PACKED, {**PACKED, "batch": 8}, *PAGES, {**PAGES[0], "batch": 32}]
GRADIENTS: Options = [{"needs_grad": True, "num_kv_heads": heads} for heads in (2, 4)]
ORDERS: Options = [{}, {"deterministic": True}]

SMALL_PAGES: Options = [{"kind": "paged", "page_size": size} for size in (8, 16, 32, 64, 128)]
E4M3, INT8 = {"fp8": ("k", "v")}, {"fp8": ("k", "v"), "int8": True, "scale_blocks": (None, 1, 1)}
CODES: Options = [pages | codes for pages in SMALL_PAGES for codes in (E4M3, INT8)]
DECODE_ROWS: Options = [DENSE, PACKED, *SMALL_PAGES, *CODES]
DECODE_DIMS: Options = [{"d": 64}, {"d": 128}, {"d": 256}, {"d": 512}, {"d": 192, "head_dim_v": 128}]
TOKENS: Options = [
    {}, {"window_left": 999}, {"seqlen_q": 4, "causal": True}, {"seqlen_q": 4, "causal": True, "window_left": 999},
]  # fmt: skip
GROUPS: Options = [{"num_kv_heads": heads} for heads in (8, 4, 2)]
BATCHES: Options = [{"batch": batch} for batch in (16, 1, 2, 4)]
FP8_DIMS: Options = [{"d": 64}, {"d": 128}, {"d": 256}]
SCALES: Options = [{}, {"scale_blocks": (128, 128, 128)}]


class Family(NamedTuple):
    """Kernels with one table: the problem of some features, what it chooses, what features there are, the tiles."""

    kernels: tuple[str, ...]
    problem: Callable[..., AttentionProblem]
    choices: Callable[[AttentionProblem], Choices]
    options: tuple[Options, ...]
    tiles: Callable[[], set[str]]


def plain_problem(d: int, **features: Any) -> AttentionProblem:
    """A problem of 4096 tokens a sequence; `d` is the head dim."""
    values: dict[str, Any] = {
        "kind": "dense", "dtype": torch.bfloat16, "batch": 2, "seqlen_q": 4096, "seqlen_k": 4096, "total_q": 8192,
        "total_k": 8192, "num_heads": 4, "num_kv_heads": 2, "head_dim": d, "head_dim_v": d, "scale": 1.0,
    }  # fmt: skip
    return AttentionProblem(**values | features)


def fp8_problem(**features: Any) -> AttentionProblem:
    """The same in e4m3."""
    return plain_problem(**{"fp8": ("q", "k", "v"), "scale_blocks": (128, 128, None)} | features)


def decode_problem(d: int = 128, **features: Any) -> AttentionProblem:
    """16 sequences of 8192 keys, one query each."""
    batch, seqlen_q = features.get("batch", 16), features.get("seqlen_q", 1)
    values: dict[str, Any] = {
        "kind": "dense", "dtype": torch.bfloat16, "batch": 16, "seqlen_q": 1, "seqlen_k": 8192,
        "total_q": batch * seqlen_q, "total_k": batch * 8192, "num_heads": 32, "num_kv_heads": 8, "head_dim": d,
        "head_dim_v": d, "scale": 1.0,
    }  # fmt: skip
    return AttentionProblem(**values | features)


def latent_problem(**features: Any) -> AttentionProblem:
    """128 query heads on 16 sequences of 8192 latents, one query each."""
    latents = {"num_heads": 128, "num_kv_heads": 1, "head_dim_v": 512, "latent": True}
    return decode_problem(576, **latents | features)


def _problems(family: Family) -> Iterator[AttentionProblem]:
    """Every combination of features that the backend takes, and these kernels compute."""
    for combination in itertools.product(*family.options):
        problem = family.problem(**{name: value for option in combination for name, value in option.items()})
        if problem.tiles_shape and problem.deterministic:  # Triton's kernels compute these gradients
            continue
        kernel = "latent" if reads_latents(problem) else "decode" if decodes(problem) else "others"
        wanted = next((name for name in ("latent", "decode") if family is FAMILIES[name]), "others")
        if BACKEND.supports(problem, HOPPER) is None and kernel == wanted:
            yield problem


@functools.cache
def cover(name: str) -> list[AttentionProblem]:
    """Few problems that between them make every pair of a tile and another choice: the next is always the one that
    adds most.
    """
    family = FAMILIES[name]
    # Of problems that choose alike, one.
    alike = {frozenset(_pairs(family.choices(problem))): problem for problem in _problems(family)}
    missing = frozenset[Pair]().union(*alike)
    chosen = []
    while missing:
        most = max(alike, key=lambda pairs: len(pairs & missing))
        chosen.append(alike[most])
        missing -= most
    return chosen


def _pairs(chosen: Choices) -> list[Pair]:
    tile = chosen["tile"]
    return [("" if name == "HAS_SINKS" else tile, name, value) for name, value in chosen.items()]


def _choices(config: Any, problem: AttentionProblem, tile: str) -> Choices:
    """The tile, and whatever else a kernel is compiled for."""
    return {**vars(config), "tile": tile, "dtype": problem.dtype, "rows": problem.kind}


def _name_of(row: Any, module: Any) -> str:
    return str(next(name for name, other in vars(module).items() if other is row))


def forward_choices(problem: AttentionProblem) -> Choices:
    """Of a forward in 16 bits."""
    return _choices(configs.forward_config(problem), problem, _name_of(configs._forward_tile(problem), configs))


def backward_choices(problem: AttentionProblem) -> Choices:
    """Of a backward."""
    config = configs.backward_config(problem)
    tile = f"{config.BLOCK_M} queries, {config.D}+{config.D_REST}, {config.DV}+{config.DV_REST}"
    return _choices(config, problem, tile)


def decode_choices(problem: AttentionProblem) -> Choices:
    """Of decoding."""
    config = decode_configs.decode_config(problem, packed_queries=problem.seqlen_q > 1)
    tile = f"{config.LANES} x {config.BLOCK_N} keys of {problem.codes if config.IS_FP8 else '16 bits'}"
    return _choices(config, problem, tile)


def latent_choices(problem: AttentionProblem) -> Choices:
    """Of reading latents."""
    config = decode_configs.latent_config(problem, packed_queries=problem.seqlen_q > 1)
    return _choices(config, problem, f"{config.BLOCK_N} keys of {'e4m3' if problem.fp8 else '16 bits'}")


def fp8_choices(problem: AttentionProblem) -> Choices:
    """Of a forward in e4m3."""
    config = fp8_configs.fp8_config(problem)
    return _choices(config, problem, _name_of(fp8_configs._tile(problem, config.D), fp8_configs))


def _rows_of(module: Any, kind: type) -> set[str]:
    return {name for name, row in vars(module).items() if isinstance(row, kind)}


def _decode_tiles() -> set[str]:
    rows = {(tile, "16 bits") for tile in decode_configs.TILES}
    # One lane of 128 keys in 8 bits fits nowhere that two of 64 do not, which come first.
    wide = decode_configs.DecodeTile(128, 1)
    rows |= {(tile, codes) for tile in decode_configs.FP8_TILES for codes in ("e4m3", "int8") if tile != wide}
    return {f"{tile.LANES} x {tile.BLOCK_N} keys of {bits}" for tile, bits in rows}


FAMILIES = {
    "forward": Family(
        ("forward_kernel", "forward_quad_kernel", "forward_wide_kernel"),
        plain_problem,
        forward_choices,
        (DIMS + WIDE_DIMS, DTYPES, EVERY_MASK, ROWS, [*SCORES, {"max_logits": True}], LENGTHS),
        lambda: _rows_of(configs, configs.ForwardTile),
    ),
    # Its kernels know nothing of sinks.
    "backward": Family(
        ("backward_kernel", "backward_wide_kernel", "backward_pieces_kernel", "query_gradient_kernel"),
        plain_problem,
        backward_choices,
        (GRADIENTS, DIMS, DTYPES, EVERY_MASK, [DENSE, PACKED], SCORES[:2], EVERY_LENGTH, ORDERS),
        set,
    ),
    "decode": Family(
        ("decode_kernel",),
        decode_problem,
        decode_choices,
        (DECODE_DIMS, DTYPES, TOKENS, GROUPS, DECODE_ROWS, BATCHES, SCORES),
        _decode_tiles,
    ),
    "latent": Family(
        ("latent_kernel", "decode_kernel"),
        latent_problem,
        latent_choices,
        ([{"num_heads": 128}, {"num_heads": 16}], DTYPES, TOKENS, DECODE_ROWS, BATCHES, SCORES),
        lambda: {"64 keys of 16 bits", "64 keys of e4m3"},
    ),
    "fp8": Family(
        ("fp8_forward_kernel",),
        fp8_problem,
        fp8_choices,
        (FP8_DIMS, DTYPES, MASKS, [DENSE, PACKED], SCORES, SCALES),
        lambda: _rows_of(fp8_configs, fp8_configs.Fp8Tile),
    ),
}
