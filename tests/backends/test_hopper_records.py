"""No shipped Hopper configuration without a record: what the tables can choose is held against what is compiled.

Nothing is compiled here; test_hopper_aot.py, test_decode_aot.py and test_fp8_aot.py do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from hopper_choices import backward_choices, decode_choices, forward_choices, fp8_choices, missing, taken, variants
from hopper_spills import ALLOWED, hold
from machine_code import LocalAccesses
from test_decode_aot import RECORDS as DECODE_RECORDS
from test_decode_aot import described as decode_problem
from test_fp8_aot import RECORDS as FP8_RECORDS
from test_fp8_aot import name_of as fp8_name_of
from test_fp8_aot import problem as fp8_problem
from test_hopper_aot import BACKWARD, FORWARD, QUERIES, RECORDS, name_of
from test_hopper_aot import problem as plain_problem
from tilewise.backends.gpu import releases
from tilewise.backends.hopper import configs, decode_configs, decodes, fp8_configs
from tilewise.problem import AttentionProblem

Options = list[dict[str, Any]]

DTYPES: Options = [{"dtype": torch.bfloat16}, {"dtype": torch.float16}]
MASKS: Options = [{}, {"causal": True}, {"window_left": 100, "window_right": 50}]
SCORES: Options = [{}, {"softcap": 30.0}, {"has_sinks": True}]
# Of unequal ones, a wider V and a narrower one, in column parts and without.
UNEQUAL = ((64, 128), (192, 128), (256, 64))
DIMS: Options = [{"d": d} for d in (64, 96, 128, 192, 256)] + [{"d": d, "dv": dv} for d, dv in UNEQUAL]
LENGTHS: Options = [{"seqlen_q": n, "seqlen_k": n} for n in (1024, 2048, 4096, 8192)]
EVERY_LENGTH: Options = [*LENGTHS, {"seqlen_q": 4000, "seqlen_k": 4000}]
DENSE, PACKED = {"kind": "dense"}, {"kind": "varlen"}
PAGES: Options = [{"kind": "paged", "page_size": size} for size in (64, 128, 256)]
ROWS: Options = [DENSE, PACKED, {**PACKED, "batch": 8}, *PAGES, {**PAGES[0], "batch": 32}]
GRADIENTS: Options = [{"needs_grad": True, "num_kv_heads": heads} for heads in (2, 4)]
ORDERS: Options = [{}, {"deterministic": True}]

SMALL_PAGES: Options = [{"kind": "paged", "page_size": size} for size in (8, 16, 32, 64, 128)]
DECODE_ROWS: Options = [DENSE, PACKED, *SMALL_PAGES, *[{**pages, "fp8": ("k", "v")} for pages in SMALL_PAGES]]
DECODE_DIMS: Options = [{"d": 64}, {"d": 128}, {"d": 256}, {"d": 192, "head_dim_v": 128}]
TOKENS: Options = [
    {}, {"window_left": 999}, {"seqlen_q": 4, "causal": True}, {"seqlen_q": 4, "causal": True, "window_left": 999},
]  # fmt: skip
GROUPS: Options = [{"num_kv_heads": heads} for heads in (8, 4, 2)]
BATCHES: Options = [{"batch": batch} for batch in (16, 1, 2, 4)]

FP8_DIMS: Options = [{"d": 64}, {"d": 128}, {"d": 256}]
SCALES: Options = [{}, {"scale_blocks": (128, 128, 128)}]


def described(make: Callable[..., AttentionProblem], *options: Options) -> list[AttentionProblem]:
    """Every combination that the backend takes."""
    return taken(make(**features) for features in variants(*options))


def recorded(kernel: str) -> list[AttentionProblem]:
    return [plain_problem(**dict(record.features)) for record in RECORDS if record.kernel == kernel]


def complaint(found: dict[Any, dict[str, str]]) -> str:
    """What to record: a problem for each, with all it chooses."""
    lines = [
        f"{' with '.join(f'{k} {v}' for k, v in sorted(pair))}, as in {problem}" for pair, problem in found.items()
    ]
    return "no record holds\n  " + "\n  ".join(lines)


def test_forward() -> None:
    problems = described(plain_problem, DIMS, DTYPES, MASKS, ROWS, SCORES, LENGTHS)
    forward = [problem for problem in problems if not decodes(problem)]
    found = missing(forward, recorded(FORWARD), forward_choices)
    assert not found, complaint(found)
    rows = {name for name, row in vars(configs).items() if isinstance(row, configs.ForwardTile)}
    assert {forward_choices(problem)["tile"] for problem in forward} == rows


def test_backward() -> None:
    """Its kernels know nothing of sinks."""
    problems = described(
        plain_problem, GRADIENTS, DIMS, DTYPES, MASKS, [DENSE, PACKED], SCORES[:2], EVERY_LENGTH, ORDERS
    )
    found = missing(problems, recorded(BACKWARD), backward_choices)
    assert not found, complaint(found)
    wide = [problem for problem in problems if configs.backward_config(problem).WIDE]
    found = missing(wide, recorded(QUERIES), backward_choices)
    assert not found, complaint(found)


def test_decoding() -> None:
    problems = described(decode_problem, DECODE_DIMS, DTYPES, TOKENS, GROUPS, DECODE_ROWS, BATCHES, SCORES)
    records = [decode_problem(**record.features) for record in DECODE_RECORDS.values()]
    decoding = [problem for problem in problems if decodes(problem)]
    found = missing(decoding, records, decode_choices)
    assert not found, complaint(found)
    tiles = {decode_choices(problem)["tile"] for problem in decoding}
    rows = {(tile, "16 bits") for tile in decode_configs.TILES} | {(tile, "e4m3") for tile in decode_configs.FP8_TILES}
    # One lane of 128 keys in e4m3 fits nowhere that two of 64 do not, which come first.
    rows -= {(decode_configs.DecodeTile(128, 1), "e4m3")}
    assert tiles == {f"{tile.LANES} x {tile.BLOCK_N} keys of {bits}" for tile, bits in rows}


def test_fp8_forward() -> None:
    problems = described(fp8_problem, FP8_DIMS, DTYPES, MASKS, [DENSE, PACKED], SCORES, SCALES)
    found = missing(problems, [fp8_problem(**record.features) for record in FP8_RECORDS], fp8_choices)
    assert not found, complaint(found)
    rows = {name for name, row in vars(fp8_configs).items() if isinstance(row, fp8_configs.Fp8Tile)}
    assert {fp8_choices(problem)["tile"] for problem in problems} == rows


def test_spills_that_are_allowed_are_few_and_have_a_reason() -> None:
    """Every name is a record's, so that its number is read from the machine code; every reason has a figure."""
    names = {name_of(record) for record in RECORDS} | {fp8_name_of(record) for record in FP8_RECORDS}
    assert ALLOWED.keys() <= names | {f"decode {name}" for name in DECODE_RECORDS}
    assert len(ALLOWED) <= 12
    for allowed in ALLOWED.values():
        assert allowed.number > 0
        assert any(character.isdigit() for character in allowed.reason)


@pytest.mark.parametrize("name", ["forward d=64", "backward d=128"])
def test_other_spills_than_recorded_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More or fewer in hot loops, more at edges or aside; those outside do not matter."""
    monkeypatch.setattr(releases, "installed", lambda: "3.6.0")
    number = ALLOWED[name].number if name in ALLOWED else 0
    hold(name, LocalAccesses(hot=number, aside=1, edges=2, outside=9), edges=3)
    for hot, edges in ((number + 1, 2), (number - 1, 2), (number, 3)):
        with pytest.raises(AssertionError, match=f"{name}: .* recorded"):
            hold(name, LocalAccesses(hot=hot, aside=1, edges=edges, outside=0), edges=3)


@pytest.mark.parametrize("lost", ["dtype", "tile"])
def test_a_missing_record_is_named(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dtype of a tile, and a row that is new to the table."""
    problems = described(plain_problem, [{"d": 128}], DTYPES, LENGTHS)
    records: Iterable[AttentionProblem] = described(plain_problem, [{"d": 128}], DTYPES, LENGTHS)
    assert not missing(problems, records, forward_choices)
    if lost == "dtype":
        records = described(plain_problem, [{"d": 128}], DTYPES[:1], LENGTHS)
        found = missing(problems, records, forward_choices)
        assert complaint(found).splitlines()[1].startswith("  dtype fp16 with tile D128_FULL, as in {'tile'")
    else:
        monkeypatch.setattr(configs, "D128_FULL", configs.ForwardTile(NUM_STAGES=3))
        fresh = {choices["tile"] for choices in missing(problems, [], forward_choices).values()}
        assert fresh == {"D128_FULL", "D128_MENDED"}
