"""What the calls of one problem's backward share: sizes, grid, and who lies where in the workspace."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.backends.gpu.launching import Allocation
from tilewise.backends.gpu.listing import heads_per_wave, list_size, most_blocks, rows_together
from tilewise.backends.gpu.symbols import Address
from tilewise.backends.hopper.backward_pieces import Line
from tilewise.backends.hopper.backward_rows import BOUND_PARTS, NUM_BOUNDS
from tilewise.backends.hopper.configs import BackwardConfig, backward_config, cuts_last_round
from tilewise.backends.hopper.schedule import Sizes
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem

__all__ = ["QUERY_BLOCK", "BackwardPlan", "backward_plan"]

# Heads walked together under a causal mask: what their key tiles (query tiles, for dQ alone) share, in this much of L2.
L2_BYTES = 32 << 20
# Of groups at D=128 in half of it: 128 tiles, a round of CTAs, which begin together. N=4096, 32 query heads on 8, 8 K/V
# heads a wave and 4: 562 -> 583 and 563 -> 585 TFLOP/s, deterministic 541 -> 560. Longer ones were not timed, and by
# count wait 0.6 % more for the last tiles.
GROUPED_SEQLEN_K = 4096
# At most so many where later heads are prepared beside the main kernel, and in half of L2: a small wave has a short
# front. D=128 causal, N=1024, 4/8/16: 340/357/349 TFLOP/s; N=4096, 4/8: 525/523.
AHEAD_HEADS = 8
# How many rounds of CTAs a share is prepared before its head is needed, and under a causal mask from CAUSAL_BLOCKS key
# tiles on. D=128 full, N=1024, 1/2/4: 403/475/473; causal, N=512, 1/2: 218/223, N=1024 357/353; D=64 330/323.
AHEAD_ROUNDS, CAUSAL_AHEAD_ROUNDS = 2, 1
CAUSAL_BLOCKS = 8
# The same of packed sequences, listed by heads: what heads that are walked together share, and how many rounds of
# CTAs a head is prepared before it is needed. D=128 causal, the next tile taken early, 16/32/64 MiB: mix 450/455/449
# TFLOP/s, 4 x 4096 486/504/- and -/507/503, 7 x 2304 440/461/- and -/454/449; half a round: mix 417 instead of 458.
PACKED_L2_BYTES, PACKED_AHEAD_ROUNDS = 32 << 20, 1
# How many rounds after a wave a share of dQ is finished, and how many after that its place in the ring is used again:
# more or fewer, at N=1024, where dQ is no longer finished beside, had 288 to 329 TFLOP/s, these 329.
FINISH_ROUNDS = 1.5
REUSE_ROUNDS = 1.5
# Queries of a block of the kernel that computes dQ alone.
QUERY_BLOCK = 128
# Query tiles of a piece at least, so that a tile is joined of few. And how many query tiles earlier all SMs have to end
# for the last round to be cut: two pieces of a program begin and end, and are joined, in the time of about 15. The
# least that was timed is 31 (D=128, N=4096: 1.014 and 1.016 times as fast).
PIECE_TILES, PIECES_GAIN = 8, 30

# log2 of the units in a row's bound, half of what 32 bits hold. Up to FEW_KEYS fewer, because parts of a sum that are
# under 2^22 of them are counted faster (primitives.count_units): of rows of N(0, 1) with over 150 keys all are then,
# with 2^30 units those of over 600 keys. And less is lost there than with more keys and units (docs/log).
BOUND_BITS, MOST_BOUND_BITS, FEW_KEYS = 28.0, 30.0, 2048


class BackwardPlan(NamedTuple):
    """What every call with a problem shares: sizes seen from the keys and from the queries."""

    problem: AttentionProblem
    config: BackwardConfig
    key_sizes: Sizes
    query_sizes: Sizes
    key_grid: tuple[int, int, int]

    @property
    def query_items(self) -> int:
        """What has row statistics of its own: (batch, head) pairs or, packed, heads."""
        return self.problem.num_heads * (1 if self.config.IS_VARLEN else self.problem.batch)

    @property
    def num_rows(self) -> int:
        """Query rows in whole tiles."""
        return self.query_items * self.key_sizes.row_tiles * self.config.BLOCK_M

    @property
    def stats(self) -> Address:
        """The row statistics, with which the workspace begins."""
        return Address("workspace", torch.float32)

    @property
    def sums_width(self) -> int:
        """Columns of dQ that are summed."""
        return 0 if self.config.WIDE else self.config.D

    @property
    def bound_bits(self) -> float:
        """log2 of the units that make a row's bound: see BOUND_BITS."""
        return BOUND_BITS if self.problem.seqlen_k <= FEW_KEYS else MOST_BOUND_BITS

    @property
    def watches_rows(self) -> bool:
        """Whether the main kernel looks for rows of dQ that are not finite, which integers would hide.

        That may be where no bound tells: dS passes the end of fp16, or a softcap hides an infinite query from out and
        lse. In bf16 bounds tell.
        """
        return self.problem.dtype == torch.float16 or self.problem.softcap is not None

    @property
    def num_main_units(self) -> int:
        """At D=64 in the order of registers: 8 of a row, two for each of four threads."""
        return self.num_rows * (8 if self.config.D == 64 else 1) if self.config.FIXED_POINT else 0

    @property
    def num_bounds(self) -> int:
        """Of every head of keys, or of its blocks."""
        problem = self.problem
        places = self.bound_slots if self.bound_keys else problem.batch * int(BOUND_PARTS)
        return int(NUM_BOUNDS) * places * problem.num_kv_heads if self.config.FIXED_POINT else 0

    @property
    def bound_keys(self) -> int:
        """Keys of a block that has bounds of its own, where queries do not see all keys before them; 0 without.

        Not for a right edge alone: D=64 causal, N = 1024/4096 577/1476 -> 592/1489 us, where it would save bits of the
        rows before a long key. With a window of 1024 keys at 16384 1003 -> 1009.
        """
        return self.config.BLOCK_N if self.config.HAS_LEFT else 0

    @property
    def bound_slots(self) -> int:
        """Blocks of keys of all sequences that may have bounds."""
        problem, keys = self.problem, self.bound_keys
        if not keys:
            return 0
        if self.config.IS_VARLEN:
            return most_blocks(problem.total_k, keys, problem.batch)
        return problem.batch * -(-problem.seqlen_k // keys)

    @property
    def num_counts(self) -> int:
        """Of both; packed, two of every head of a sequence (work_list.mark_beside)."""
        if not self.config.AHEAD:
            return 0
        if self.config.IS_VARLEN:
            return self.problem.batch * self.key_sizes.num_items * 2
        return self.key_sizes.num_items * (1 + self.config.FINISHES)

    def together(self, *, of_keys: bool) -> int:
        """Queries (keys, for dQ alone) of packed sequences of one length that are walked together."""
        sizes = self.key_sizes if of_keys else self.query_sizes
        banded = self.config.HAS_RIGHT or self.config.HAS_LEFT
        row_bytes = streamed_bytes(self.problem, of_keys=of_keys)
        if not self.config.WIDE:
            return PACKED_L2_BYTES // row_bytes if banded else 0
        return rows_together(row_bytes, sizes.items_per_wave, banded=banded)

    @property
    def front_tiles(self) -> int:
        """How many tiles before its own a share is prepared: packed, as many as the longest head has, and those that
        are walked together, and a round of CTAs.
        """
        if self.config.IS_VARLEN:
            rows = max(self.problem.seqlen_k, self.together(of_keys=True))
            return -(-rows // self.config.BLOCK_N) + int(PACKED_AHEAD_ROUNDS * self.key_grid[0])
        return self.front_items * self.key_sizes.num_blocks

    @property
    def front_items(self) -> int:
        """K/V heads that the row kernel prepares: whole waves, the largest and AHEAD_ROUNDS of all CTAs at least."""
        sizes = self.key_sizes
        if self.config.IS_VARLEN:  # which sequences these are, the device knows
            return sizes.num_items
        banded = self.config.HAS_RIGHT and sizes.num_blocks >= CAUSAL_BLOCKS
        rounds = CAUSAL_AHEAD_ROUNDS if banded else AHEAD_ROUNDS
        largest = max(sizes.items_per_wave, self.last_items) * sizes.num_blocks
        items = -(-(largest + int(rounds * self.key_grid[0])) // self.wave_tiles) * sizes.items_per_wave
        return items if self.config.AHEAD and items <= sizes.num_items - self.last_items else sizes.num_items

    @property
    def last_items(self) -> int:
        """K/V heads of the last wave, which is ENDING of them (schedule.place_of)."""
        sizes = self.key_sizes
        waves = -(-sizes.num_items // sizes.items_per_wave)
        return sizes.num_items - max(waves - self.config.ENDING, 0) * sizes.items_per_wave

    @property
    def wave_tiles(self) -> int:
        """Tiles of a wave of heads."""
        return self.key_sizes.items_per_wave * self.key_sizes.num_blocks

    @property
    def lag(self) -> int:
        """How many tiles later the share of dQ that belongs to a tile is finished: a wave at least (finishing.py).

        And all CTAs, which take numbers past the last tile: no share past the last one.
        """
        return max(self.wave_tiles + int(FINISH_ROUNDS * self.key_grid[0]), self.key_grid[0])

    @property
    def ring_items(self) -> int:
        """Heads that have room for sums of dQ: a wave and the lag at least.

        In whole waves, as heads of a wave are begun together: with a part of one a head would wait for shares whose
        numbers are not yet given out (1024 queries on 16384 keys, 8 heads a wave: for numbers 186 later).
        """
        if not self.config.FINISHES:
            return self.key_sizes.num_items
        tiles = self.wave_tiles + self.lag + int(REUSE_ROUNDS * self.key_grid[0])
        waves = -(-tiles // self.wave_tiles)
        return min(waves * self.key_sizes.items_per_wave, self.key_sizes.num_items)

    @property
    def finished_items(self) -> int:
        """Heads whose dQ the main kernel finishes: all whose shares get a number from the counter."""
        numbers = self.key_sizes.num_tiles + self.key_grid[0] - self.lag
        waves = max(numbers, 0) // self.wave_tiles if self.config.FINISHES else 0
        return min(waves * self.key_sizes.items_per_wave, self.key_sizes.num_items)

    @property
    def sums_rows(self) -> int:
        """Query rows that have room for sums of dQ."""
        return self.ring_items * self.problem.group_size * self.key_sizes.row_tiles * self.config.BLOCK_M

    @property
    def main_sizes(self) -> Sizes:
        """Of the main kernel, which leaves the last round over where that is cut."""
        line = self.line
        return self.key_sizes if line is None else self.key_sizes._replace(num_tiles=line.first_tile)

    @property
    def line(self) -> Line | None:
        """The last round of tiles and how it is cut (backward_pieces.py)."""
        return line_of(self.key_sizes, self.key_grid[0]) if cuts_last_round(self.problem) else None

    @property
    def piece_words(self) -> int:
        """Of as many pieces as there are ends of tiles and of programs."""
        line = self.line
        pieces = 0 if line is None else self.key_sizes.num_tiles - line.first_tile + line.programs
        return pieces * 2 * self.config.BLOCK_N * self.config.D

    @property
    def sections(self) -> dict[str, tuple[int, torch.dtype]]:
        """What the workspace holds, in order: words of 4 bytes and what they are; 0 words where a call needs none."""
        config, f32, i32 = self.config, torch.float32, torch.int32
        fixed, packed = config.FIXED_POINT, config.IS_VARLEN
        return {
            # [lse * log2(e) | delta] of every query tile.
            "stats": (2 * self.num_rows, f32),
            # Sums of dQ.
            "sums": (self.sums_width * self.sums_rows, i32 if fixed else f32),
            # Units of sums in fixed point, the same as the main kernel reads them (dq_tiles.py), and the bounds that
            # they are derived from.
            "units": (self.num_rows if fixed else 0, f32),
            "main units": (self.num_main_units, f32),
            "bounds": (self.num_bounds, i32),
            # Lists of packed blocks: of keys, and of queries where dQ has a kernel of its own.
            "key list": (list_size(self.key_sizes.num_blocks) if packed else 0, i32),
            "query list": (list_size(self.query_sizes.num_blocks) if packed and config.WIDE else 0, i32),
            # How many shares of every K/V head are prepared (preparing.py), then how many warpgroups are done with it
            # where the main kernel finishes dQ (finishing.py).
            "counts": (self.num_counts, i32),
            # Pieces of dK and dV.
            "pieces": (self.piece_words, f32),
        }

    def at(self, name: str) -> Address | None:
        """Where a section of the workspace begins, None if it is not there."""
        begin = 0
        for section, (words, dtype) in self.sections.items():
            if section == name:
                return Address("workspace", dtype, offset=4 * begin) if words else None
            begin += whole_vectors(words)
        raise KeyError(name)

    @property
    def workspace(self) -> Allocation:
        """Room for all sections, each of which begins at a multiple of 16 bytes."""
        words = sum(whole_vectors(words) for words, _ in self.sections.values())
        return Allocation.contiguous((words,), torch.float32)


def backward_plan(problem: AttentionProblem, device: DeviceSpec) -> BackwardPlan:
    """Everything about a call that needs no tensor."""
    config = backward_config(problem)
    keys = _sizes(problem, config, of_keys=True)
    queries = _sizes(problem, config, of_keys=False)
    programs = min(device.num_sms, keys.num_tiles)
    return BackwardPlan(problem, config, keys, queries, (programs, 1, 1))


def whole_vectors(words: int) -> int:
    """So many words and those up to a multiple of 16 bytes.

    >>> whole_vectors(0), whole_vectors(5)
    (0, 8)
    """
    return -(-words // 4) * 4


def line_of(sizes: Sizes, programs: int) -> Line | None:
    """What is left of whole rounds of tiles, in equal lengths; None if too little is to be gained."""
    left = sizes.num_tiles % programs
    total = left * sizes.row_tiles
    length = max(-(-total // programs), PIECE_TILES)
    if left == 0 or left == sizes.num_tiles or sizes.row_tiles - length < PIECES_GAIN:
        return None
    return Line(sizes.num_tiles - left, sizes.row_tiles, total, length)


def _sizes(problem: AttentionProblem, config: BackwardConfig, *, of_keys: bool) -> Sizes:
    left, right = problem.band
    packed = config.IS_VARLEN
    heads = problem.num_kv_heads if of_keys else problem.num_heads
    longest, total, block = problem.seqlen_q, problem.total_q, QUERY_BLOCK
    if of_keys:
        longest, total, block = problem.seqlen_k, problem.total_k, config.BLOCK_N
    num_items = heads if packed else problem.batch * heads
    num_blocks = -(-longest // block)
    streamed = streamed_bytes(problem, of_keys=of_keys) * (problem.seqlen_q if of_keys else problem.seqlen_k)
    most = min(num_items, AHEAD_HEADS) if config.AHEAD else num_items
    halved = config.AHEAD or (of_keys and _walks_groups(problem, config))
    most = min(most, (L2_BYTES // 2 if halved else L2_BYTES) // streamed)
    wave = max(1, most) if config.HAS_RIGHT or config.HAS_LEFT else 1
    if packed:
        wave = heads_per_wave(heads, num_blocks, streamed)
        num_blocks = most_blocks(total, block, problem.batch)
    num_tiles = num_blocks * num_items
    if packed and of_keys and not config.WIDE:  # listed for every head
        num_blocks, wave = num_tiles, 1
    rows = config.BLOCK_M
    return Sizes(
        num_heads=heads,
        group_size=problem.group_size,
        num_items=num_items,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        total_q=problem.total_q,
        num_blocks=num_blocks,
        num_tiles=num_tiles,
        items_per_wave=wave,
        row_tiles=most_blocks(problem.total_q, rows, problem.batch) if packed else -(-problem.seqlen_q // rows),
        window_left=(left or 0) if config.HAS_LEFT else 0,
        window_right=(right or 0) if config.HAS_RIGHT else 0,
    )


def _walks_groups(problem: AttentionProblem, config: BackwardConfig) -> bool:
    """Whether waves are a round of CTAs long: see GROUPED_SEQLEN_K."""
    dense = problem.kind == "dense" and config.HAS_RIGHT and not config.HAS_LEFT
    narrow = config.D == 128 and not config.WIDE
    return dense and narrow and problem.group_size > 1 and problem.seqlen_k <= GROUPED_SEQLEN_K


def streamed_bytes(problem: AttentionProblem, *, of_keys: bool) -> int:
    """Of a row that passes by a block of keys (of queries): what the blocks of a head share.

    Q and dO in 16 bits and dQ in 32, of one query head: the CTAs of a group walk through its heads side by side.
    Counted for the whole group, GQA 32/8 (4096 tokens) went two K/V heads a wave and waited for the last ones: 445
    TFLOP/s instead of 537. K and V in 16 bits.
    """
    if of_keys:
        return problem.head_dim * 6 + problem.head_dim_v * 2
    return (problem.head_dim + problem.head_dim_v) * 2
