"""Validates shapes, dtypes and devices against tables, and describes valid operands as an `AttentionProblem`.

A shape is written as the names of its dimensions. The first tensor with a name fixes its size; a later one that
disagrees is the error, which names both. Works on real, fake and meta tensors, and on anything with shape, dtype and
device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from tilewise.arguments import ARGUMENTS
from tilewise.errors import InvalidProblem
from tilewise.operands import Flags, Operands
from tilewise.problem import MAX_HEAD_DIM, MAX_HEAD_DIM_V, MAX_SEQLEN, AttentionProblem, Kind, Layout
from tilewise.symbolic import is_integer
from tilewise.tiles import num_tiles
from tilewise.units import counted

# A seed followed by the batch entry, head, row and key at which dropout starts counting.
SEED_WITH_ORIGIN = 5
E4M3 = torch.float8_e4m3fn
# Index tensors may be int32 or int64; int64 is converted in every call.
INDICES = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k")
INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The scales of operands in 8 bits.
SCALES = {
    "q_scale": "batch num_heads q_blocks",
    "k_scale": "batch num_kv_heads k_blocks",
    "v_scale": "batch num_kv_heads v_blocks",
}
# The dimensions of every tensor, by kind of problem and layout.
SHAPES: dict[str, dict[str, str]] = {
    "dense bhsd": {
        "q": "batch num_heads seqlen_q head_dim",
        "k": "batch num_kv_heads seqlen_k head_dim",
        "v": "batch num_kv_heads seqlen_k head_dim_v",
        **SCALES,
        "out": "batch num_heads seqlen_q head_dim_v",
    },
    "dense bshd": {
        "q": "batch seqlen_q num_heads head_dim",
        "k": "batch seqlen_k num_kv_heads head_dim",
        "v": "batch seqlen_k num_kv_heads head_dim_v",
        **SCALES,
        "out": "batch seqlen_q num_heads head_dim_v",
    },
    "varlen": {
        "q": "total_q num_heads head_dim",
        "k": "total_k num_kv_heads head_dim",
        "v": "total_k num_kv_heads head_dim_v",
        "cu_seqlens_q": "batch+1",
        "cu_seqlens_k": "batch+1",
        **SCALES,
        "out": "total_q num_heads head_dim_v",
    },
    "paged": {
        "q": "total_q num_heads head_dim",
        "k": "num_pages page_size num_kv_heads head_dim",
        "v": "num_pages page_size num_kv_heads head_dim_v",
        "block_table": "batch max_pages",
        "seqlens_k": "batch",
        "cu_seqlens_q": "batch+1",
        "q_scale": SCALES["q_scale"],
        "k_scale": "num_pages num_kv_heads k_blocks",
        "v_scale": "num_pages num_kv_heads v_blocks",
        "out": "total_q num_heads head_dim_v",
    },
}

# The dtypes each operand may have, and the advice for another one.
DTYPES: dict[str, tuple[tuple[torch.dtype, ...], str]] = {
    **dict.fromkeys(SCALES, ((torch.float32,), "Scales are fp32: see tilewise.fp8.")),
    **dict.fromkeys(INDICES, (INTEGERS, "Convert it with .to(torch.int32).")),
    "bias": (FLOATS, "A boolean tensor belongs in mask= (True = attend)."),
    "mask": (
        (torch.bool,),
        "0 and 1 become a mask by .bool(); a float tensor that is added to the scores belongs in bias=.",
    ),
    **dict.fromkeys(("tiles", "tile_bits", "tile_lists"), ((torch.int32,), "Make it with tilewise.tile_mask.")),
    "alibi_slopes": ((torch.float32,), "Convert it with .float()."),
    "sinks": (FLOATS, "Convert it to a floating dtype."),
    "seed": ((torch.int64,), "Convert it with .to(torch.int64)."),
}

# The tensors of a tile mask, by the caller's name.
TILE_MASK = dict.fromkeys(("tiles", "tile_bits", "tile_lists"), "mask")
# Minimum sizes: a model with zero heads is a mistake, while an empty batch or sequence is legal.
LEAST: dict[str, int] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "head_dim_v": 1, "page_size": 1}
# The advice for wider heads: columns of v are independent of one another, those of q and k are not.
WIDER = {
    "head_dim": "No backend takes more; torch.nn.functional.scaled_dot_product_attention does.",
    "head_dim_v": "Attend to parts of v's columns and join the results with torch.cat.",
}
# The numbers that multiply or bound scores.
FACTORS = tuple(row.name for row in ARGUMENTS if row.is_factor)
# Magnitudes that fp32 holds in full precision, even times log2(e).
SCALARS = (1e-37, 1e37)


class TensorSpec(NamedTuple):
    """The properties of a tensor that validation uses."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


Specs = dict[str, TensorSpec]

# Dimensions that kernels are compiled for. The others are sizes, which change from call to call.
COMPILED = ("num_heads", "num_kv_heads", "head_dim", "head_dim_v", "page_size")


def open_sizes(kind: Kind, layout: str, name: str, rank: int) -> list[bool]:
    """Which sizes of an operand, of `dout` or of a statistic of rows may differ between calls of one meaning."""
    shapes = SHAPES[f"dense {layout}" if kind == "dense" else kind]
    dims = shapes.get("out" if name == "dout" else name, "").split() or ["any"] * rank
    return [dim not in COMPILED for dim in dims]


def describe(kind: Kind, operands: Sequence[TensorSpec | torch.Tensor | None], flags: Flags) -> AttentionProblem:
    """The problem of these operands (in the order of `Operands`) and flags. Raises InvalidProblem."""
    specs = {
        name: TensorSpec(t.shape, t.dtype, t.device)
        for name, t in zip(Operands._fields, operands, strict=True)
        if t is not None
    }
    public = public_names(kind) | TILE_MASK
    sizes = _bind_shapes(SHAPES[f"dense {flags.layout}" if kind == "dense" else kind], specs, public)
    _check_sizes(sizes)
    _check_dtypes(specs, public)
    _check_totals(specs, sizes)
    _check_scalars(specs["q"].dtype, flags)
    _check_devices(specs, public)
    lengths = _lengths(kind, sizes, specs, flags)
    _check_lengths(kind, lengths)
    scores = (lengths["batch"], sizes["num_heads"], lengths["seqlen_q"], lengths["seqlen_k"])
    bounds_known = _bounds_known(kind, specs, flags)
    for name, given in (("bias", "bias"), ("mask", "mask"), ("tiles", "a tile mask")):
        if name in specs and not bounds_known:
            fix = "Pass the longest lengths; reading them from the GPU would make the CPU wait."
            raise InvalidProblem("max_seqlen_q, max_seqlen_k", f"integers, because {given} is given", None, fix)
    _check_broadcast(specs, scores)
    _check_tiles(specs, scores, flags)
    _check_per_head(specs, lengths["batch"], sizes["num_heads"])
    if bounds_known or specs["q"].device.type != "cpu":
        _check_scales(kind, sizes, lengths, flags)
    problem = _problem(kind, sizes, lengths, specs, flags)
    if "out" in specs and specs["out"].dtype != problem.dtype:
        fix = "out has q's dtype: under torch.autocast that one, for q in e4m3 the dtype it was quantised from."
        raise InvalidProblem("out", f"dtype {problem.dtype}", specs["out"].dtype, fix)
    return problem


def public_names(kind: Kind) -> dict[str, str]:
    """The caller's name of each operand."""
    return {"k": "k_pages", "v": "v_pages"} if kind == "paged" else {}


def _rank_fix(name: str, expected: int, got: int) -> str:
    if name in ("q", "k", "v") and (expected, got) == (4, 3):
        return f"A single sequence is {name}[None]; packed ones belong in attention_varlen."
    if name in ("q", "k", "v") and (expected, got) == (4, 2):
        return f"A single head of a single sequence is {name}[None, None]."
    if name in ("q", "k", "v") and (expected, got) == (3, 4):
        return f"(batch, seqlen, heads, dim) is packed by {name}.flatten(0, 1)."
    return "Reshape it."


def _bind_shapes(shapes: dict[str, str], specs: Specs, public: dict[str, str]) -> dict[str, int]:
    """The size of every named dimension. Raises for wrong ranks and disagreeing sizes."""
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for operand, dims in shapes.items():
        if operand not in specs:
            continue
        name, names, shape = public.get(operand, operand), dims.split(), specs[operand].shape
        if len(shape) != len(names):
            expected = f"{counted(len(names), 'dimension')} ({', '.join(names)})"
            raise InvalidProblem(name, expected, f"shape {tuple(shape)}", _rank_fix(name, len(names), len(shape)))
        for dim, size in zip(names, shape, strict=True):
            if dim == "batch+1":
                dim, size = "batch", size - 1
                if size < 0:
                    raise InvalidProblem(name, "batch + 1 entries, starting with 0", "an empty tensor", "Prepend a 0.")
            if sizes.setdefault(dim, size) != size:
                expected = f"{dim} {sizes[dim]} as in {owner[dim]}"
                raise InvalidProblem(name, expected, f"{size} in shape {tuple(shape)}", _fix_for(name, dim))
            owner.setdefault(dim, name)
    return sizes


def _fix_for(name: str, dim: str) -> str:
    if name == "out":
        return "out has the shape of q, with the head_dim of v."
    if dim in ("head_dim", "head_dim_v"):
        return "q and k share head_dim; only v may have another one."
    if dim == "num_kv_heads":
        return "k and v have the same heads; do not repeat one of them for grouped-query attention."
    return f"Make their {dim} agree."


def _check_sizes(sizes: dict[str, int]) -> None:
    for dim, least in LEAST.items():
        if dim in sizes and sizes[dim] < least:
            raise InvalidProblem(dim, f"at least {least}", sizes[dim], "Check the shapes of q, k and v.")
    for dim, most in (("head_dim", MAX_HEAD_DIM), ("head_dim_v", MAX_HEAD_DIM_V)):
        if sizes[dim] > most:
            raise InvalidProblem(dim, f"at most {most}", sizes[dim], WIDER[dim])
    if sizes["num_heads"] % sizes["num_kv_heads"] != 0:
        expected = f"a multiple of num_kv_heads ({sizes['num_kv_heads']})"
        where = ", with layout='bshd' 2"
        if "total_q" in sizes:
            where = " of q and 2 of pages" if "num_pages" in sizes else ""
        fix = f"Each K/V head serves equally many query heads; heads are dimension 1{where}."
        raise InvalidProblem("num_heads", expected, sizes["num_heads"], fix)


def _check_dtypes(specs: Specs, public: dict[str, str]) -> None:
    for operand, (allowed, fix) in DTYPES.items():
        if operand in specs and specs[operand].dtype not in allowed:
            expected = "dtype " + " or ".join(str(d).removeprefix("torch.") for d in allowed)
            raise InvalidProblem(public.get(operand, operand), expected, specs[operand].dtype, fix)
    common: tuple[torch.dtype, ...] = FLOATS
    for operand in ("q", "k", "v"):
        given = specs[operand].dtype
        if f"{operand}_scale" in specs:
            _check_quantised(operand, specs, public)
            continue
        if given not in common:
            names = " or ".join(str(d).removeprefix("torch.") for d in common)
            expected = f"dtype {names}" if operand == "q" else f"dtype {common[0]} as q has"
            fix = _dtype_fix(given)
            if operand == "k" and "block_table" in specs and given in FLOATS:
                fix = "Convert q to the dtype of the pages."
            raise InvalidProblem(public.get(operand, operand), expected, given, fix)
        common = (given,)


def _check_quantised(operand: str, specs: Specs, public: dict[str, str]) -> None:
    """An operand with scales is e4m3. K and V in pages may both be int8, which plain queries attend."""
    given, name = specs[operand].dtype, public.get(operand, operand)
    if operand == "q" and specs["k"].dtype == torch.int8:
        fix = "int8 pages are attended by queries in fp16, bf16 or fp32; e4m3 ones take e4m3 pages."
        raise InvalidProblem(name, "a plain tensor, as k_pages are int8", given, fix)
    if operand == "v" and given != specs["k"].dtype:
        raise InvalidProblem(name, f"{specs['k'].dtype} as k has", given, "Quantise k and v alike.")
    if given != E4M3 and not (given == torch.int8 and operand != "q" and "block_table" in specs):
        fix = "Make both with tilewise.fp8.quantize; int8 is for pages, made by quantize_pages or PagedKVCache."
        raise InvalidProblem(name, "float8_e4m3fn with its scales", given, fix)


def _check_totals(specs: Specs, sizes: dict[str, int]) -> None:
    """int64 running totals are read as int32, which must hold the number of rows. If a compiler does not know that
    number yet, the op checks again.
    """
    for name, rows in (("cu_seqlens_q", sizes.get("total_q")), ("cu_seqlens_k", sizes.get("total_k"))):
        wide = name in specs and specs[name].dtype == torch.int64
        if wide and isinstance(rows, int) and rows >= 2**31:
            fix = "Attend the sequences in several calls."
            raise InvalidProblem(name, "running totals of fewer than 2^31 rows", f"{rows} rows", fix)


def _dtype_fix(given: torch.dtype) -> str:
    if given == E4M3:
        return "FP8 data comes with its scales, in a tilewise.fp8.Fp8Tensor."
    if given == torch.int8:
        return "Only pages of k and v are int8, with their scales: see tilewise.fp8.quantize_pages."
    if given not in FLOATS:
        return "Convert q, k and v to float16, bfloat16 or float32."
    return "Convert q, k and v to one dtype (torch.autocast does it for you)."


def _check_devices(specs: Specs, public: dict[str, str]) -> None:
    device = specs["q"].device
    for operand, spec in specs.items():
        if spec.device != device and not (operand == "seed" and spec.device.type == "cpu"):
            name = public.get(operand, operand)
            raise InvalidProblem(
                name, f"a tensor on {device} as q is", spec.device, f"Move it with .to({str(device)!r})."
            )


def _lengths(kind: Kind, sizes: dict[str, int], specs: Specs, flags: Flags) -> dict[str, int]:
    """Batch size and longest sequences. Without a bound from the caller, the number of stored rows is the bound."""
    if kind == "dense":
        batch, seqlen_q, seqlen_k = sizes["batch"], sizes["seqlen_q"], sizes["seqlen_k"]
        total_q, total_k = batch * seqlen_q, batch * seqlen_k
    elif kind == "varlen":
        batch, total_q, total_k = sizes["batch"], sizes["total_q"], sizes["total_k"]
        seqlen_q = total_q if flags.max_seqlen_q is None else flags.max_seqlen_q
        seqlen_k = total_k if flags.max_seqlen_k is None else flags.max_seqlen_k
    else:
        batch, total_q = sizes["batch"], sizes["total_q"]
        seqlen_k, total_k = sizes["max_pages"] * sizes["page_size"], sizes["num_pages"] * sizes["page_size"]
        if "cu_seqlens_q" not in specs:
            if total_q != batch:
                fix = "Pass cu_seqlens_q to give a sequence more or fewer query tokens than one."
                raise InvalidProblem(
                    "q", f"one token a sequence, {counted(batch, 'row')}", f"{counted(total_q, 'row')}", fix
                )
            seqlen_q = 1
        else:
            seqlen_q = total_q if flags.max_seqlen_q is None else flags.max_seqlen_q
    return {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "total_q": total_q, "total_k": total_k}


def _check_lengths(kind: Kind, lengths: dict[str, int]) -> None:
    """Lengths must fit int32 positions. Symbolic lengths are checked when the op runs."""
    counted = {"dense": (), "varlen": ("total_q", "total_k"), "paged": ("total_q",)}[kind]
    for name in (*counted, "seqlen_q", "seqlen_k"):
        if is_integer(lengths[name]) and lengths[name] > MAX_SEQLEN:
            fix = "Rows are counted in 32 bits: attend to parts of the keys and join the results with tilewise.merge."
            raise InvalidProblem(name, f"at most {MAX_SEQLEN}", lengths[name], fix)


def _bounds_known(kind: Kind, specs: Specs, flags: Flags) -> bool:
    """Whether seqlen_q and seqlen_k are the longest lengths themselves, not just the number of rows."""
    q_known = kind == "dense" or flags.max_seqlen_q is not None or (kind == "paged" and "cu_seqlens_q" not in specs)
    return q_known and (kind != "varlen" or flags.max_seqlen_k is not None)


def _check_broadcast(specs: Specs, scores: tuple[int, int, int, int]) -> None:
    for name in ("bias", "mask"):
        if name not in specs:
            continue
        shape = specs[name].shape
        broadcasts = len(shape) <= 4 and all(map(_broadcasts, reversed(shape), reversed(scores)))
        if not broadcasts:
            expected = f"a shape that broadcasts to (batch, num_heads, seqlen_q, seqlen_k) = {scores}"
            fix = "Use size 1 along the dimensions it does not vary over."
            if tuple(shape) == (scores[0], scores[3]):
                fix = f"A {name} of (batch, seqlen_k) is {name}[:, None, None, :]."
            elif len(shape) == 3 and shape[0] == scores[0]:
                fix = f"A {name} of (batch, seqlen_q, seqlen_k) is {name}[:, None]."
            raise InvalidProblem(name, expected, tuple(shape), fix)


def _check_tiles(specs: Specs, scores: tuple[int, int, int, int], flags: Flags) -> None:
    if "tiles" not in specs:
        return
    batch, heads, seqlen_q, seqlen_k = scores
    made_for = flags.mask_seqlen_q, flags.mask_seqlen_k
    if made_for != (seqlen_q, seqlen_k):
        expected = f"a tile mask of {counted(seqlen_q, 'query', 'queries')} x {counted(seqlen_k, 'key')}"
        fix = "Cut it with mask.cut(rows, keys), or make it longer with mask.grow or TileMask.stack."
        raise InvalidProblem("mask", expected, f"one of {made_for[0]} x {made_for[1]}", fix)
    shape = specs["tiles"].shape
    shared = zip(shape[:2], (batch, heads), strict=True)
    if len(shape) != 4 or not all(_broadcasts(size, full) for size, full in shared):
        expected = f"a tile mask of batch {batch} and {counted(heads, 'head')}, or 1 of either"
        raise InvalidProblem("mask", expected, f"{shape[0]} and {shape[1]}", "Share one, or give one each.")
    if tuple(shape[2:]) != (num_tiles(seqlen_q), num_tiles(seqlen_k)):
        expected = f"a map of {num_tiles(seqlen_q)} x {num_tiles(seqlen_k)} tiles"
        raise InvalidProblem("mask", expected, tuple(shape[2:]), "Make it with tilewise.tile_mask.")


def _broadcasts(size: int | torch.SymInt, full: int) -> bool:
    # In this order an unbacked SymInt is compared with nothing but itself.
    return size in ((1, full) if is_integer(size) else (full, 1))


def _check_per_head(specs: Specs, batch: int, num_heads: int) -> None:
    if "sinks" in specs and specs["sinks"].shape != (num_heads,):
        got = tuple(specs["sinks"].shape)
        raise InvalidProblem("sinks", f"shape (num_heads,) = ({num_heads},)", got, "Give one logit per query head.")
    if "alibi_slopes" in specs and specs["alibi_slopes"].shape not in ((num_heads,), (batch, num_heads)):
        expected = f"shape ({num_heads},) or ({batch}, {num_heads})"
        got = tuple(specs["alibi_slopes"].shape)
        raise InvalidProblem("alibi_slopes", expected, got, "Give one slope per query head, or per sequence and head.")
    if "seed" in specs and math.prod(specs["seed"].shape) not in (1, SEED_WITH_ORIGIN):
        raise InvalidProblem("seed", "one element", tuple(specs["seed"].shape), "Pass a single int64.")


def _check_scalars(dtype: torch.dtype, flags: Flags) -> None:
    """Below fp64 scores are computed in fp32: their factors, and the inverses, must be finite there."""
    if dtype == torch.float64:
        return
    expected = f"a magnitude from {SCALARS[0]} to {SCALARS[1]}, as scores are computed in float32"
    fix = "Scale q or k themselves, or pass float64 tensors."
    ratio = None if flags.scale is None or flags.softcap is None else flags.scale / flags.softcap
    factors = [(name, getattr(flags, name)) for name in FACTORS]
    for name, number in (*factors, ("softcap", ratio)):
        if number and not SCALARS[0] <= abs(number) <= SCALARS[1]:
            got = number if number is not ratio else f"{flags.softcap} with scale {flags.scale}"
            raise InvalidProblem(name, expected, got, fix)


def _check_scales(kind: Kind, sizes: dict[str, int], lengths: dict[str, int], flags: Flags) -> None:
    """One scale per block of the longest sequence, or one in all. A page is one block, or each of its rows is one."""
    for side, block in (("q", flags.q_block), ("k", flags.k_block), ("v", flags.v_block)):
        if f"{side}_blocks" not in sizes:
            continue
        paged = kind == "paged" and side != "q"
        length = lengths["seqlen_q" if side == "q" else "seqlen_k"]
        if paged:
            length = sizes["page_size"]
        least = 1 if block is None else -(-length // block)
        got = sizes[f"{side}_blocks"]
        # Without sequences no block is read: one token a sequence, or a max_seqlen, would still ask for some.
        is_short = got < least and (paged or lengths["batch"] != 0)
        if is_short or (got > 1 and block is None):
            fix = "Quantise with the same cu_seqlens and max_seqlen as the call's."
            raise InvalidProblem(f"{side}_scale", f"{counted(least, 'block')} a head", got, fix)


# The flags that a problem holds as they are: all of its fields but two, which depend on tensors.
_AS_FLAGGED = tuple(
    field.name
    for field in dataclasses.fields(AttentionProblem)
    if field.name in Flags._fields and field.name not in ("scale", "layout")
)


def _problem(
    kind: Kind, sizes: dict[str, int], lengths: dict[str, int], specs: Specs, flags: Flags
) -> AttentionProblem:
    return AttentionProblem(
        kind=kind,
        dtype=(flags.out_dtype or torch.bfloat16) if "q_scale" in specs else specs["q"].dtype,
        **lengths,  # type: ignore[arg-type]
        num_heads=sizes["num_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        head_dim_v=sizes["head_dim_v"],
        scale=1.0 / math.sqrt(sizes["head_dim"]) if flags.scale is None else flags.scale,
        **{name: getattr(flags, name) for name in _AS_FLAGGED},
        bias_shape=_four_dims(specs.get("bias")),
        bias_dtype=specs["bias"].dtype if "bias" in specs else None,
        mask_shape=_four_dims(specs.get("mask")),
        tiles_shape=_four_dims(specs.get("tiles")),
        has_alibi="alibi_slopes" in specs,
        has_sinks="sinks" in specs,
        layout=cast("Layout", flags.layout) if kind == "dense" else "bhsd",
        page_size=sizes.get("page_size"),
        dropout_origin="seed" in specs and math.prod(specs["seed"].shape) == SEED_WITH_ORIGIN,
        fp8=tuple(name for name in ("q", "k", "v") if f"{name}_scale" in specs),
        int8="k_scale" in specs and specs["k"].dtype == torch.int8,
        scale_blocks=(flags.q_block, flags.k_block, flags.v_block),
    )


def _four_dims(spec: TensorSpec | None) -> tuple[int, int, int, int] | None:
    if spec is None:
        return None
    batch, heads, rows, cols = (1,) * (4 - len(spec.shape)) + tuple(spec.shape)
    return batch, heads, rows, cols
