"""The CPU's cases: every row of the goal table, with the bars that hold for the processor at hand."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

from suite.cases import Bar, Case

__all__ = ["cpu_cases"]

OURS = "tilewise"
MIB = 1 << 20
# On x86 with wide vectors torch's kernels use them too: other figures are fair there than on NEON.
X86 = ("x86_64", "amd64")
# Lengths of one ragged batch: few long sequences, many short ones, 4,288 tokens where padding makes 16,384.
RAGGED = (2048, 97, 640, 33, 911, 256, 128, 175)


def cpu_cases(machine: str | None = None) -> tuple[Case, ...]:
    """All cases, with the bars for `machine` (as platform.machine() names it; this one by default)."""
    x86 = (machine or platform.machine()).lower() in X86
    return (
        *_forward(x86),
        *_sixteen_bit(x86),
        *_shared_heads(x86),
        *_backward(),
        *_decode(),
        *_cascade(),
        *_varlen(),
        *_memory(),
        *_latency(),
    )


def _case(name: str, group: str, **fields: Any) -> Case:
    """Batch 1, fp32, as many queries as keys and K/V heads as heads, against torch's SDPA and naive attention."""
    length, heads = fields.pop("seqlen", 0), fields["num_heads"]
    defaults: dict[str, Any] = {
        "measure": "forward",
        "device": "cpu",
        "dtype": "float32",
        "batch": 1,
        "num_kv_heads": heads,
        "seqlen_q": length,
        "seqlen_k": length,
        "head_dim": 64,
        "implementations": (OURS, "sdpa", "naive"),
    }
    return Case(name=name, group=group, **(defaults | fields))


def _sdpa(limit: float) -> Bar:
    return Bar(OURS, limit, against=("sdpa",))


def _forward(x86: bool) -> Iterator[Case]:
    flex = (OURS, "sdpa", "naive", "flex")
    for head_dim, limit in ((64, 1.15), (128, 1.15 if x86 else 1.10)):
        for seqlen in (512, 1024, 2048, 4096):
            # Half the heads at the longest: 34 GFLOP at D=128, half a second a call on two cores.
            yield _case(
                f"forward-d{head_dim}-full-n{seqlen}", "forward", num_heads=8 if seqlen < 4096 else 4, seqlen=seqlen,
                head_dim=head_dim, bars=(_sdpa(limit),), quick=seqlen == 1024,
                implementations=flex if (head_dim, seqlen) == (64, 2048) else flex[:3],
            )  # fmt: skip
    bars = {512: 1.3, 2048: 1.3, 4096: 1.3} if x86 else {512: 2.0, 2048: 1.4, 4096: 1.25}
    for head_dim in (64, 128):
        for seqlen, limit in bars.items():
            yield _case(
                f"forward-d{head_dim}-causal-n{seqlen}", "forward", num_heads=8 if seqlen < 4096 else 4, seqlen=seqlen,
                head_dim=head_dim, causal=True, bars=(_sdpa(limit),), quick=(head_dim, seqlen) == (64, 512),
                implementations=flex if (head_dim, seqlen) == (64, 2048) else flex[:3],
            )  # fmt: skip
    yield _case(
        "window-256-n8192", "forward", num_heads=2, seqlen=8192, causal=True, window=(256, 0), bars=(_sdpa(30.0),),
        implementations=(OURS, "sdpa", "flex"),
    )  # fmt: skip


def _sixteen_bit(x86: bool) -> Iterator[Case]:
    limits = {"bfloat16": 1.0, "float16": 1.2} if x86 else {"bfloat16": 100.0, "float16": 10.0}
    for dtype, limit in limits.items():
        for causal in (False, True):
            # torch's bf16 takes 200 times as long as fp32 on processors without bf16 instructions: keep it small.
            yield _case(
                f"forward-{dtype}-{'causal' if causal else 'full'}-n1024", "16-bit", num_heads=4, seqlen=1024,
                dtype=dtype, causal=causal, bars=(_sdpa(limit), Bar(OURS, 1.1, against=("sdpa-fp32",))),
                implementations=(OURS, "sdpa", "sdpa-fp32", "naive"), quick=not causal,
            )  # fmt: skip


def _shared_heads(x86: bool) -> Iterator[Case]:
    for causal, limit in ((False, 1.15), (True, 1.3 if x86 else 1.45)):
        yield _case(
            f"gqa-8-2-{'causal' if causal else 'full'}-n2048", "gqa", num_heads=8, num_kv_heads=2, seqlen=2048,
            causal=causal, bars=(_sdpa(limit),),
        )  # fmt: skip


def _backward() -> Iterator[Case]:
    for head_dim, full, causal in ((64, 1.1, 1.35), (128, 1.0, 1.2)):
        for is_causal, limit in ((False, full), (True, causal)):
            for seqlen in (1024, 2048):
                yield _case(
                    f"backward-d{head_dim}-{'causal' if is_causal else 'full'}-n{seqlen}", "backward",
                    measure="backward", num_heads=8, seqlen=seqlen, head_dim=head_dim, causal=is_causal,
                    bars=(_sdpa(limit),), quick=(head_dim, seqlen) == (64, 1024),
                )  # fmt: skip


def _decode() -> Iterator[Case]:
    for heads, kv_heads, limit in ((32, 8, 3.0), (8, 8, 1.0)):
        shape = {"num_heads": heads, "num_kv_heads": kv_heads, "seqlen_q": 1, "seqlen_k": 16384, "head_dim": 128}
        dense = f"decode-{heads}-{kv_heads}-n16384"
        yield _case(dense, "decode", **shape, bars=(_sdpa(limit),), quick=heads == 32)
        # Dense keys run beside the pages, not in a case of their own, and gathering apart: it writes so much that the
        # caches are cold for whoever comes after it.
        for page_size in (16, 64, 256):
            yield _case(
                f"{dense}-paged-{page_size}", "decode", **shape, kind="paged", page_size=page_size,
                bars=(Bar(OURS, 0.95, against=("tilewise-dense",)),), implementations=(OURS, "tilewise-dense"),
                quick=(heads, page_size) == (32, 16),
            )  # fmt: skip
        yield _case(
            f"{dense}-gathered-64", "decode", **shape, kind="paged", page_size=64, implementations=(OURS, "sdpa-gather")
        )
        # GB/s count 16-bit keys for both, so that ratios are those of time.
        yield _case(
            f"{dense}-fp8-paged-64", "decode", **shape, dtype="bfloat16", kind="paged", page_size=64, e4m3_values=True,
            implementations=(OURS, "tilewise-fp8-pages"),
        )  # fmt: skip


def _cascade() -> Iterator[Case]:
    """Decoding of 64 sequences with 4096 keys in common and 128 of their own, which are counted for each of them."""
    for heads, dtype in ((2, "float32"), (8, "float32"), (8, "bfloat16")):
        yield _case(
            f"cascade-{heads}-2-{dtype}-b64-n4096", "cascade", num_heads=heads, num_kv_heads=2, batch=64, seqlen_q=1,
            seqlen_k=4096 + 128, head_dim=128, dtype=dtype, kind="paged", page_size=64, shared_keys=4096,
            implementations=(OURS, "tilewise-cascade"), bars=(Bar("tilewise-cascade", 2.0, against=(OURS,)),),
            quick=(heads, dtype) == (2, "float32"),
        )  # fmt: skip


def _varlen() -> Iterator[Case]:
    yield _case(
        "varlen-equal-4x1024", "varlen", kind="varlen", batch=4, num_heads=8, seqlen=1024, seqlens=(1024,) * 4,
        bars=(Bar(OURS, 0.95, case="forward-d64-full-n1024", by="rate"),), implementations=(OURS, "sdpa-padded"),
    )  # fmt: skip
    yield _case(
        "varlen-ragged-causal", "varlen", kind="varlen", batch=len(RAGGED), num_heads=8, seqlen=max(RAGGED),
        seqlens=RAGGED, causal=True, bars=(Bar(OURS, 3.0, against=("sdpa-padded",)),),
        implementations=(OURS, "sdpa-padded"), quick=True,
    )  # fmt: skip


def _memory() -> Iterator[Case]:
    bars = {
        2048: (Bar(OURS, 10.0, against=("naive",)),),
        4096: (Bar(OURS, 20.0, against=("naive",)),),
        8192: (),
        32768: (Bar(OURS, 64.0 * MIB, by="bytes"),),
    }
    for seqlen, bar in bars.items():
        yield _case(
            f"memory-n{seqlen}", "memory", measure="memory", num_heads=2, seqlen=seqlen, causal=True, bars=bar,
            quick=seqlen == 2048,
        )  # fmt: skip


def _latency() -> Iterator[Case]:
    yield _case(
        "overhead-n1", "latency", measure="overhead", num_heads=1, seqlen=1, bars=(Bar(OURS, 60e-6, by="seconds"),),
        implementations=(OURS, "sdpa"), quick=True,
    )  # fmt: skip
    # Short sequences: what a call costs and when a second thread is worth waking.
    for seqlen in (16, 64, 128):
        yield _case(
            f"latency-n{seqlen}", "latency", num_heads=8, seqlen=seqlen, implementations=(OURS, "sdpa"),
            quick=seqlen == 64,
        )  # fmt: skip
    for name, cold, limit in (("cold", True, 3.0), ("cached", False, 0.5)):
        yield _case(
            f"first-call-{name}", "latency", measure="first-call", num_heads=2, seqlen=256, cold=cold,
            bars=(Bar(OURS, limit, by="seconds"),), implementations=(OURS,), quick=True,
        )  # fmt: skip
