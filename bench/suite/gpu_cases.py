"""The GPU's cases: bf16 at B * N = 16384 tokens and H * D = 2048, decode, and what else is promised."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from suite.cases import Bar, Case
from suite.inputs import SCORES

__all__ = ["gpu_cases"]

TRITON, HOPPER, DETERMINISTIC = "tilewise-triton", "tilewise-hopper", "tilewise-hopper-deterministic"
FLASH, CUDNN = "sdpa-flash", "sdpa-cudnn"
PEERS = (FLASH, CUDNN, "fa2", "fa3", "fa4")
OURS = (TRITON, HOPPER)
TOKENS, MODEL_DIM = 16384, 2048
LENGTHS = (1024, 4096, 16384)
H200 = "H200"

# FlexAttention's best known TFLOP/s on an H200 at N = 4096 and 16384 with D=128: (direction, causal).
FLEX_KNOWN = {
    ("forward", False): (478, 489),
    ("forward", True): (364, 404),
    ("backward", False): (399, 419),
    ("backward", True): (354, 391),
}
# Batch, keys, and GB/s of K and V that an H200 should reach.
DECODE = ((1, 8192, 1500), (1, 131072, 3900), (16, 8192, 4000), (64, 8192, 4450), (16, 65536, 4600))
# One packed batch of TOKENS tokens, from a few words to a long document.
MIXED = (4096, 2816, 2048, 1792, 1536, 1024, 1000, 640, 512, 333, 256, 128, 100, 64, 32, 7)
# Of the dense rate per FLOP.
VARLEN_LIMITS = ((TRITON, 0.9), (HOPPER, 0.95))
# Of the host, for any call.
CALL_SECONDS = 30e-6
# Equal sequences with as many FLOPs, and within 2 % as many tokens: sequences, length.
AS_MIXED = (7, 2304)


def gpu_cases() -> tuple[Case, ...]:
    """All cases."""
    return (
        *_table(),
        *_other_head_dims(),
        *_half(),
        *_real_scores(),
        *_window(),
        *_shared_heads(),
        *_varlen(),
        *_short(),
        *_decode(),
        *_paged(),
        *_fp8_pages(),
        *_cascade(),
        *_overhead(),
        *_flex(),
    )


def _case(name: str, group: str, *, implementations: tuple[str, ...] = (*OURS, *PEERS), **fields: Any) -> Case:
    """bf16, TOKENS tokens in all, MODEL_DIM wide unless said otherwise."""
    length = fields.pop("seqlen", 0)
    head_dim = fields.get("head_dim", 128)
    heads = fields.get("num_heads", MODEL_DIM // head_dim)
    defaults: dict[str, Any] = {
        "measure": "forward",
        "device": "cuda",
        "dtype": "bfloat16",
        "batch": TOKENS // length if length else 1,
        "num_heads": heads,
        "num_kv_heads": heads,
        "seqlen_q": length,
        "seqlen_k": length,
        "head_dim": head_dim,
        "implementations": implementations,
    }
    return Case(name=name, group=group, **(defaults | fields))


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def _table() -> Iterator[Case]:
    for direction in ("forward", "backward"):
        for head_dim in (64, 128, 256):
            for causal in (False, True):
                for seqlen in LENGTHS:
                    flex = _in_table(head_dim, seqlen)
                    both = _is_repeated(direction, head_dim)
                    yield _case(
                        f"{direction}-d{head_dim}-{_mask(causal)}-n{seqlen}", direction, measure=direction,
                        head_dim=head_dim, causal=causal, seqlen=seqlen, quick=(head_dim, seqlen) == (128, 4096),
                        implementations=(*OURS, *(DETERMINISTIC,) * both, *PEERS, *("flex",) * flex),
                        bars=tuple(_table_bars(direction, head_dim, causal, seqlen)),
                    )  # fmt: skip


def _in_table(head_dim: int, seqlen: int) -> bool:
    """Whether FlexAttention takes part in a cell: it compiles for seconds in each; `_flex` has the others."""
    return head_dim == 128 and seqlen >= 4096


def _table_bars(direction: str, head_dim: int, causal: bool, seqlen: int) -> Iterator[Bar]:
    if _in_table(head_dim, seqlen):
        yield Bar(TRITON, 1.0, against=("flex",))
        published = FLEX_KNOWN[direction, causal][LENGTHS.index(seqlen) - 1]
        yield Bar(TRITON, published * 1e12, by="rate", machine=H200)
    yield Bar(HOPPER, 1.0, against=(CUDNN, "fa4"))
    if direction == "forward" and causal and seqlen == 16384:
        # At most 0.54 of the full matrix's time.
        yield Bar(HOPPER, 1 / 0.54, case=f"forward-d{head_dim}-full-n{seqlen}", by="speed")
    if _is_repeated(direction, head_dim):
        yield Bar(DETERMINISTIC, 0.85, against=(HOPPER,))


def _is_repeated(direction: str, head_dim: int) -> bool:
    """Whether the repeatable backward takes part in a cell: over 128 columns every backward is repeatable."""
    return direction == "backward" and head_dim <= 128


def _other_head_dims() -> Iterator[Case]:
    for head_dim, limit in ((96, 1.05), (192, 1.0)):
        for causal in (False, True):
            shared: dict[str, Any] = {"head_dim": head_dim, "causal": causal, "seqlen": 4096}
            bars = (Bar(HOPPER, limit, against=(CUDNN,)),)
            yield _case(
                f"forward-d{head_dim}-{_mask(causal)}-n4096", "forward", bars=bars,
                quick=(head_dim, causal) == (96, True), **shared,
            )  # fmt: skip
            # Not named as the table's cells are: the backward's mean is theirs alone, and D=192 would lift it.
            yield _case(
                f"d{head_dim}-backward-{_mask(causal)}-n4096", "backward", measure="backward", bars=bars,
                implementations=(HOPPER, CUDNN), **shared,
            )  # fmt: skip


def _half() -> Iterator[Case]:
    for direction in ("forward", "backward"):
        yield _case(
            f"fp16-{direction}-d128-causal-n4096", direction, measure=direction, dtype="float16", causal=True,
            seqlen=4096, implementations=(HOPPER, CUDNN), bars=(Bar(HOPPER, 1.0, against=(CUDNN,)),),
        )  # fmt: skip


def _real_scores() -> Iterator[Case]:
    """Scores that are not those of normal data: far apart, with a sink, or peaked at the diagonal."""
    for kind, head_dim, causal in itertools.product(SCORES, (64, 128), (False, True)):
        yield _case(
            f"{kind}-d{head_dim}-{_mask(causal)}-n4096", "scores", head_dim=head_dim, causal=causal, seqlen=4096,
            scores=kind, implementations=(HOPPER, FLASH, CUDNN, "fa4"),
            bars=(Bar(HOPPER, 1.0, against=(CUDNN, "fa4")),),
        )  # fmt: skip


def _window() -> Iterator[Case]:
    yield _case(
        "window-1024-n16384", "forward", causal=True, window=(1024, 0), seqlen=16384, quick=False,
        implementations=(*OURS, "fa2", "fa3", "fa4", "flex"),
        bars=(Bar(TRITON, 6.0, case="forward-d128-causal-n16384", by="speed"),),
    )  # fmt: skip


def _shared_heads() -> Iterator[Case]:
    for direction in ("forward", "backward"):
        # 32 heads of 128 at half the tokens cost what 16 do.
        yield _case(
            f"gqa-32-8-{direction}-causal-n4096", "gqa", measure=direction, num_heads=32, num_kv_heads=8, batch=2,
            seqlen=4096, causal=True, quick=direction == "forward",
            bars=(Bar(HOPPER, 0.95, case=f"{direction}-d128-causal-n4096", by="rate"),),
        )  # fmt: skip


def _varlen() -> Iterator[Case]:
    for direction in ("forward", "backward"):
        # Sequences of the same work are about 2,300 long: the dense rate of N=4096 is a demanding yardstick, the other
        # says what packing itself costs.
        dense, equal = (f"{direction}-d128-causal-n{seqlen}" for seqlen in (4096, AS_MIXED[1]))
        batch, seqlen = AS_MIXED
        yield _case(equal, "varlen", measure=direction, batch=batch, seqlen=seqlen, causal=True)
        yield _case(
            f"varlen-mixed-{direction}-causal", "varlen", measure=direction, kind="varlen", batch=len(MIXED),
            seqlens=MIXED, seqlen_q=max(MIXED), seqlen_k=max(MIXED), causal=True, quick=direction == "forward",
            implementations=(*OURS, "fa2", "fa3", "sdpa-padded"),
            bars=tuple(Bar(who, limit, case=c, by="rate") for who, limit in VARLEN_LIMITS for c in (dense, equal)),
        )  # fmt: skip
        # What packing itself costs: by the rate of the dense case, and in turn with the same rows as dense tensors. The
        # clock follows who takes part: dense ones had 718 TFLOP/s in their case, beside packed ones 681, and these 678.
        grouped = f"gqa-32-8-{direction}-causal-n4096"
        for heads, lengths, same in (
            ((16, 16), (4096,) * 4, dense), ((16, 16), (seqlen,) * batch, equal), ((32, 8), (4096,) * 2, grouped),
        ):  # fmt: skip
            yield _case(
                f"varlen-{same}", "varlen", measure=direction, kind="varlen", batch=len(lengths), num_heads=heads[0],
                num_kv_heads=heads[1], seqlens=lengths, seqlen_q=lengths[0], seqlen_k=lengths[0], causal=True,
                implementations=(*OURS, "tilewise-dense"),
                bars=(Bar(HOPPER, 0.95, case=same, by="rate"), Bar(HOPPER, 0.95, against=("tilewise-dense",))),
            )  # fmt: skip


def _short() -> Iterator[Case]:
    best = (CUDNN, FLASH, "fa2", "naive")
    shapes = itertools.product((False, True), (64, 128), (False, True), (128, 256, 512))
    for direction, (graph, head_dim, causal, seqlen) in itertools.product(("forward", "backward"), shapes):
        suffix = ("" if direction == "forward" else "-backward") + ("-graph" if graph else "")
        yield _case(
            f"short-d{head_dim}-{_mask(causal)}-n{seqlen}{suffix}", "short", measure=direction, seqlen=seqlen,
            head_dim=head_dim, causal=causal, graph=graph, quick=seqlen == 256 and head_dim == 128 and not causal,
            implementations=(*OURS, *PEERS, "naive"),
            bars=(Bar(TRITON, 0.9, against=(CUDNN, FLASH)), Bar(HOPPER, 0.97, against=best)),
        )  # fmt: skip


def _decode() -> Iterator[Case]:
    for batch, keys, goal in DECODE:
        bars = [Bar(TRITON, 0.9, against=(CUDNN,))] if batch >= 16 else []
        if keys == 131072:
            bars.append(Bar(TRITON, 3400e9, by="rate", machine=H200))
        yield _case(
            f"decode-b{batch}-n{keys}", "decode", num_heads=32, num_kv_heads=8, batch=batch, seqlen_q=1, seqlen_k=keys,
            graph=True, quick=(batch, keys) in ((1, 8192), (16, 8192)),
            bars=(*bars, Bar("tilewise", goal * 1e9, by="rate", machine=H200)),
        )  # fmt: skip


def _paged() -> Iterator[Case]:
    for page_size in (16, 32, 64, 128, 256):
        yield _case(
            f"decode-b16-n8192-paged-{page_size}", "decode", kind="paged", page_size=page_size, num_heads=32,
            num_kv_heads=8, batch=16, seqlen_q=1, seqlen_k=8192, graph=True, quick=page_size in (16, 256),
            implementations=(*OURS, "fa3", "sdpa-gather"),
            bars=(Bar("tilewise", 0.95, case="decode-b16-n8192", by="rate"),),
        )  # fmt: skip


def _fp8_pages() -> Iterator[Case]:
    """GB/s count 16-bit keys for both, so that ratios are those of time."""
    for keys, page_size in ((32768, 16), (32768, 64), (32768, 256), (65536, 64)):
        yield _case(
            f"decode-b16-n{keys}-fp8-paged-{page_size}", "decode", kind="paged", page_size=page_size, num_heads=32,
            num_kv_heads=8, batch=16, seqlen_q=1, seqlen_k=keys, graph=True, e4m3_values=True,
            implementations=(*OURS, "tilewise-fp8-pages"), bars=(Bar("tilewise-fp8-pages", 1.7, against=OURS),),
        )  # fmt: skip


def _cascade() -> Iterator[Case]:
    """Decoding of sequences with keys in common and 256 of their own, which are counted for each of them."""
    for batch, shared in ((64, 4096), (16, 4096), (64, 512), (8, 1024)):
        # Where little is shared the hint is refused, and must not cost anything.
        limit = 2.0 if (batch, shared) == (64, 4096) else 0.97
        yield _case(
            f"cascade-b{batch}-n{shared}", "cascade", kind="paged", page_size=64, num_heads=32, num_kv_heads=8,
            batch=batch, seqlen_q=1, seqlen_k=shared + 256, shared_keys=shared, graph=True, quick=batch == 64,
            implementations=(*OURS, "tilewise-cascade"), bars=(Bar("tilewise-cascade", limit, against=OURS),),
        )  # fmt: skip


def _overhead() -> Iterator[Case]:
    peers = (FLASH, CUDNN)
    yield _case(
        "overhead-forward", "latency", measure="overhead", batch=1, num_heads=16, seqlen_q=128, seqlen_k=128,
        implementations=(*OURS, *peers), quick=True,
        bars=(Bar(TRITON, 40e-6, by="seconds"), Bar(HOPPER, CALL_SECONDS, by="seconds")),
    )  # fmt: skip
    yield _case(
        "overhead-decode", "latency", measure="overhead", batch=1, num_heads=32, num_kv_heads=8, seqlen_q=1,
        seqlen_k=512, implementations=(*OURS, *peers), quick=True, bars=(Bar("tilewise", 25e-6, by="seconds"),),
    )  # fmt: skip
    square: dict[str, Any] = {"measure": "overhead", "batch": 1, "num_heads": 16, "seqlen_q": 128, "seqlen_k": 128}
    yield _case(
        "overhead-recorded", "latency", **square, recorded=True, causal=True, implementations=(*OURS, *peers),
        bars=(Bar(HOPPER, CALL_SECONDS, by="seconds"),),
    )  # fmt: skip
    # Several blocks of rows, each with a scale of its own.
    yield _case(
        "overhead-fp8", "latency", **square | {"seqlen_q": 1024, "seqlen_k": 1024}, causal=True, e4m3_values=True,
        implementations=(HOPPER, "tilewise-fp8"), bars=(Bar("tilewise-fp8", CALL_SECONDS, by="seconds"),),
    )  # fmt: skip
    yield _case(
        "overhead-packed", "latency", measure="overhead", kind="varlen", batch=2, num_heads=16, seqlens=(100, 156),
        seqlen_q=156, seqlen_k=156, causal=True, implementations=OURS, bars=(Bar(HOPPER, CALL_SECONDS, by="seconds"),),
    )  # fmt: skip
    yield _case(
        "overhead-cascade", "latency", measure="overhead", kind="paged", page_size=64, num_heads=32, num_kv_heads=8,
        batch=64, seqlen_q=1, seqlen_k=2048 + 64, shared_keys=2048, implementations=(HOPPER, "tilewise-cascade"),
        bars=(Bar("tilewise-cascade", CALL_SECONDS, by="seconds"),),
    )  # fmt: skip


def _flex() -> Iterator[Case]:
    """The Triton backend beside FlexAttention in the cells where the table leaves it out: last, if there is time."""
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for seqlen in LENGTHS:
                if not _in_table(head_dim, seqlen):
                    for direction in ("forward", "backward"):
                        yield _case(
                            f"flex-d{head_dim}-{_mask(causal)}-n{seqlen}-{direction}", "flex", measure=direction,
                            head_dim=head_dim, causal=causal, seqlen=seqlen, implementations=(TRITON, "flex"),
                            bars=(Bar(TRITON, 1.0, against=("flex",)),),
                        )  # fmt: skip
