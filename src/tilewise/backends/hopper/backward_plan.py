"""The plan of a problem's backward: sizes, grid, and the layout of the workspace.

Figures: bench/results/hopper-backward-choices.csv.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise import tiles
from tilewise.backends.gpu.arguments import window_of
from tilewise.backends.gpu.launching import Allocation
from tilewise.backends.gpu.symbols import Address
from tilewise.backends.gpu.work_list import heads_per_wave, list_size, most_blocks, rows_together
from tilewise.backends.hopper.backward_pieces import Line
from tilewise.backends.hopper.backward_rows import BOUND_PARTS, NUM_BOUNDS
from tilewise.backends.hopper.configs import BackwardConfig, backward_config, cuts_last_round
from tilewise.backends.hopper.schedule import Sizes
from tilewise.device import DeviceSpec
from tilewise.problem import AttentionProblem
from tilewise.symbolic import at_run_time, largest, smallest

# A round: as many tiles as there are CTAs.
# A wave of heads under a mask: what their tiles stream (Q, dO, dQ; in query_gradient K, V) fits into so much of L2.
L2_BYTES = 32 << 20
# GQA at head_dim 128 uses half of it up to so many keys. A wave then has 128 tiles, about one round, which start
# together. Longer sequences were not timed.
GROUPED_SEQLEN_K = 4096
# Where idle warps prepare later heads, a wave has at most so many heads and half of the L2: the lead of the preparation
# is at least a wave, so a small wave keeps it short.
AHEAD_HEADS = 8
# No limit.
MAX_WAVE = 1 << 30
# The lead: how many rounds before its head is needed a share is prepared. CAUSAL_AHEAD_ROUNDS holds under a tile mask,
# and under a causal mask from CAUSAL_BLOCKS key tiles on.
AHEAD_ROUNDS, CAUSAL_AHEAD_ROUNDS = 2, 1
CAUSAL_BLOCKS = 8
# The same two for packed sequences, which are listed by heads: L2 of heads walked together, and the lead in rounds.
PACKED_L2_BYTES, PACKED_AHEAD_ROUNDS = 32 << 20, 1
# Queries of a block of query_gradient.py.
QUERY_BLOCK = 128
# A piece has at least PIECE_TILES query tiles, so that few pieces make a tile. The last round is cut only if all SMs
# then end at least PIECES_GAIN query tiles earlier: starting, ending and joining two pieces takes about half of that.
PIECE_TILES, PIECES_GAIN = 8, 30

# log2 of the units in a row's bound: MOST_BOUND_BITS is half of what 32 bits hold. Up to FEW_KEYS keys there are fewer
# units, so that most parts of a sum stay below 2^22 units and take the short path of primitives.count_units. The sum is
# still rounded by less than with more keys and more units (docs/log).
BOUND_BITS, MOST_BOUND_BITS, FEW_KEYS = 28.0, 30.0, 2048


class BackwardPlan(NamedTuple):
    """Sizes (for kernels over keys and over queries), grid and workspace layout of a problem's backward.

    Workspace, in order: row statistics, accumulator of dQ, units, the main kernel's copy of units, bounds, lists of
    packed blocks, counts of prepared shares, pieces of dK and dV. What a problem does not need has size 0.
    """

    problem: AttentionProblem
    config: BackwardConfig
    key_sizes: Sizes
    query_sizes: Sizes
    key_grid: tuple[int, int, int]

    @property
    def query_items(self) -> int:
        """Query heads with row statistics of their own: (batch, head) pairs or, packed, heads."""
        return self.problem.num_heads * (1 if self.config.IS_VARLEN else self.problem.batch)

    @property
    def num_rows(self) -> int:
        """Query rows of all items, padded to whole tiles."""
        return self.query_items * self.key_sizes.row_tiles * self.config.BLOCK_M

    @property
    def stats(self) -> Address:
        """The row statistics, with which the workspace begins."""
        return Address("workspace", torch.float32)

    @property
    def sums_width(self) -> int:
        """Columns of a row of dQ's accumulator."""
        return 0 if self.config.WIDE else self.config.D

    @property
    def bound_bits(self) -> float:
        """log2 of the units in a row's bound: see BOUND_BITS."""
        return BOUND_BITS if self.problem.seqlen_k <= FEW_KEYS else MOST_BOUND_BITS

    @property
    def watches_rows(self) -> bool:
        """Whether the main kernel checks for rows of dQ that are not finite, which integers would hide.

        It must where the bounds do not cover them: dS may exceed fp16, or a softcap may hide an infinite query from out
        and lse. In bf16 without softcap the bounds suffice.
        """
        return self.problem.dtype == torch.float16 or self.problem.softcap is not None

    @property
    def num_main_units(self) -> int:
        """Words of "main units". At head_dim 64 they are in register order: 8 per row, two for each of four threads."""
        return self.num_rows * (8 if self.config.D == 64 else 1) if self.config.FIXED_POINT else 0

    @property
    def num_bounds(self) -> int:
        """Words of bounds: of every K/V head in BOUND_PARTS parts, or of its blocks."""
        problem = self.problem
        places = self.bound_slots if self.bound_keys else problem.batch * int(BOUND_PARTS)
        return int(NUM_BOUNDS) * places * problem.num_kv_heads if self.config.FIXED_POINT else 0

    @property
    def bound_keys(self) -> int:
        """Keys of a block with bounds of its own, used with a left window edge; 0: bounds of whole heads.

        With a right edge alone it would save some bits of rows before a long key, but it costs time.
        """
        return self.config.BLOCK_N if self.config.HAS_LEFT else 0

    @property
    def bound_slots(self) -> int:
        """An upper bound of the key blocks of all sequences that have bounds; 0 without blocks."""
        problem, keys = self.problem, self.bound_keys
        if not keys:
            return 0
        if self.config.IS_VARLEN:
            return most_blocks(problem.total_k, keys, problem.batch)
        return problem.batch * -(-problem.seqlen_k // keys)

    @property
    def num_counts(self) -> int:
        """Words of "counts"; packed, two for every (sequence, head) (work_list.mark_beside)."""
        if not self.config.AHEAD:
            return 0
        if self.config.IS_VARLEN:
            return self.problem.batch * self.key_sizes.num_items * 2
        return self.key_sizes.num_items

    def together(self, *, of_keys: bool) -> int:
        """Queries (for query_gradient keys) of packed sequences of equal length that are walked together."""
        sizes = self.key_sizes if of_keys else self.query_sizes
        banded = self.config.HAS_RIGHT or self.config.HAS_LEFT
        row_bytes = streamed_bytes(self.problem, of_keys=of_keys)
        if not self.config.WIDE:
            return PACKED_L2_BYTES // row_bytes if banded else 0
        return rows_together(row_bytes, sizes.items_per_wave, banded=banded)

    @property
    def front_tiles(self) -> int:
        """The lead in tiles: a share is prepared so many tile numbers before its own. Packed: as many as the longest
        head, or the heads walked together, may have, and a round.
        """
        if self.config.IS_VARLEN:
            rows = max(self.problem.seqlen_k, self.together(of_keys=True))
            return -(-rows // self.config.BLOCK_N) + PACKED_AHEAD_ROUNDS * self.key_grid[0]
        return self.front_items * self.key_sizes.num_blocks

    @property
    def front_items(self) -> int:
        """K/V heads that prepare_rows_kernel prepares before the main kernel starts: whole waves, with at least as many
        tiles as the largest wave and the lead in rounds. If that leaves nothing to idle warps, all heads.
        """
        sizes = self.key_sizes
        if self.config.IS_VARLEN:  # only the device knows which sequences these are
            return sizes.num_items
        if not self.config.AHEAD:
            return sizes.num_items
        long = 0 if self.config.IS_LISTED else CAUSAL_BLOCKS if self.config.HAS_RIGHT else None
        front: int = _front_items(
            sizes.num_items, sizes.items_per_wave, sizes.num_blocks, self.last_items, self.key_grid[0], long
        )
        return front

    @property
    def last_items(self) -> int:
        """K/V heads of the last wave, into which ENDING waves are merged (schedule.place_of)."""
        last: int = _last_items(self.key_sizes.num_items, self.key_sizes.items_per_wave, self.config.ENDING)
        return last

    @property
    def main_sizes(self) -> Sizes:
        """Sizes of the main kernel, which leaves out the last round if that is cut into pieces."""
        line = self.line
        return self.key_sizes if line is None else self.key_sizes._replace(num_tiles=line.first_tile)

    @property
    def line(self) -> Line | None:
        """The last round of tiles and how it is cut (backward_pieces.py); None if it is not."""
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
            "sums": (self.sums_width * self.num_rows, i32 if fixed else f32),
            # Units of sums in fixed point, the same as the main kernel reads them (dq_tiles.py), and the bounds that
            # they are derived from.
            "units": (self.num_rows if fixed else 0, f32),
            "main units": (self.num_main_units, f32),
            "bounds": (self.num_bounds, i32),
            # Lists of packed blocks: of keys, and of queries where dQ has a kernel of its own.
            "key list": (list_size(self.key_sizes.num_blocks) if packed else 0, i32),
            "query list": (list_size(self.query_sizes.num_blocks) if packed and config.WIDE else 0, i32),
            # How many shares of every K/V head are prepared (preparing.py).
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
    """The plan of a problem on a device; it needs no tensors."""
    config = backward_config(problem)
    keys = _sizes(problem, config, of_keys=True)
    queries = _sizes(problem, config, of_keys=False)
    programs = min(device.num_sms, keys.num_tiles)
    return BackwardPlan(problem, config, keys, queries, (programs, 1, 1))


@at_run_time
def _front_items(
    num_items: int, items_per_wave: int, num_blocks: int, last_items: int, programs: int, long: int | None
) -> int:
    """See BackwardPlan.front_items. From `long` key tiles on, CAUSAL_AHEAD_ROUNDS holds; None: never."""
    rounds = AHEAD_ROUNDS if long is None or num_blocks < long else CAUSAL_AHEAD_ROUNDS
    largest = max(items_per_wave, last_items) * num_blocks
    items = -(-(largest + rounds * programs) // (items_per_wave * num_blocks)) * items_per_wave
    return items if items <= num_items - last_items else num_items


def _last_items(num_items: int, items_per_wave: int, ending: int) -> int:
    return num_items - largest(-(-num_items // items_per_wave) - ending, 0) * items_per_wave


def _items_per_wave(num_items: int, most: int, l2_bytes: int, streamed: int) -> int:
    return largest(1, smallest(num_items, most, l2_bytes // streamed))


def whole_vectors(words: int) -> int:
    """Words rounded up to a multiple of 16 bytes.

    >>> whole_vectors(0), whole_vectors(5)
    (0, 8)
    """
    return -(-words // 4) * 4


def line_of(sizes: Sizes, programs: int) -> Line | None:
    """The tiles that are left after whole rounds, cut into equal lengths; None if that gains too little."""
    left = sizes.num_tiles % programs
    total = left * sizes.row_tiles
    length = max(-(-total // programs), PIECE_TILES)
    if left == 0 or left == sizes.num_tiles or sizes.row_tiles - length < PIECES_GAIN:
        return None
    return Line(sizes.num_tiles - left, sizes.row_tiles, total, length)


def _sizes(problem: AttentionProblem, config: BackwardConfig, *, of_keys: bool) -> Sizes:
    packed = config.IS_VARLEN
    heads = problem.num_kv_heads if of_keys else problem.num_heads
    longest, total, block = problem.seqlen_q, problem.total_q, QUERY_BLOCK
    if of_keys:
        longest, total, block = problem.seqlen_k, problem.total_k, config.BLOCK_N
    num_items = heads if packed else problem.batch * heads
    num_blocks = -(-longest // block)
    streamed = streamed_bytes(problem, of_keys=of_keys) * (problem.seqlen_q if of_keys else problem.seqlen_k)
    halved = config.AHEAD or (of_keys and _walks_groups(problem, config))
    wave = 1
    if config.HAS_RIGHT or config.HAS_LEFT or config.IS_LISTED:
        most = AHEAD_HEADS if config.AHEAD else MAX_WAVE
        wave = _items_per_wave(num_items, most, L2_BYTES // 2 if halved else L2_BYTES, streamed)
    if packed:
        wave = heads_per_wave(heads, num_blocks, streamed)
        num_blocks = most_blocks(total, block, problem.batch)
    num_tiles = num_blocks * num_items
    if packed and of_keys and not config.WIDE:  # every head has list entries of its own
        num_blocks, wave = num_tiles, 1
    rows = config.BLOCK_M
    row_tiles = -(-problem.seqlen_q // rows)
    if packed:
        row_tiles = most_blocks(problem.total_q, rows, problem.batch)
    elif config.IS_LISTED:  # whole tiles of the mask
        row_tiles = tiles.num_tiles(problem.seqlen_q) * (tiles.TILE // rows)
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
        row_tiles=row_tiles,
        window=window_of(problem),
    )


def _walks_groups(problem: AttentionProblem, config: BackwardConfig) -> bool:
    """Whether a wave is about one round: see GROUPED_SEQLEN_K."""
    dense = problem.kind == "dense" and config.HAS_RIGHT and not config.HAS_LEFT
    narrow = config.D == 128 and not config.WIDE
    return dense and narrow and problem.group_size > 1 and problem.seqlen_k <= GROUPED_SEQLEN_K


def streamed_bytes(problem: AttentionProblem, *, of_keys: bool) -> int:
    """Bytes of a row that is streamed past a block and shared by the blocks of a head.

    Blocks of keys: Q and dO in 16 bits and dQ in 32. One query head counts, not the group, because the CTAs of a group
    walk through its heads together. Blocks of queries: K and V in 16 bits.
    """
    if of_keys:
        return problem.head_dim * 6 + problem.head_dim_v * 2
    return (problem.head_dim + problem.head_dim_v) * 2
