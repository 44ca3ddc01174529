"""`TileMask`: any mask as data. Empty tiles are not computed, full ones need no mask, the others hold one bit a pair.

A mask is evaluated once, into a map of tiles of 128 x 128 and the bits of those that are visible in part. Every kernel
reads that form, so that no mask is compiled. Nothing here is ever as large as seqlen_q * seqlen_k, except `dense()`.

    >>> mask = tile_mask(lambda b, h, i, j: (i >= j) | (j < 64), 300, 300)
    >>> mask.counts
    TileCounts(full=3, partial=3, skipped=3)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise import settings
from tilewise.errors import InvalidProblem
from tilewise.masks import TileCounts
from tilewise.memory import check_allocated
from tilewise.subclasses import check_class
from tilewise.tiles import (
    EMPTY,
    FULL,
    TILE,
    WORDS,
    at_once,
    bits_by_keys,
    bits_by_queries,
    is_visible,
    no_bits,
    num_tiles,
    packed,
    unwrapped,
    visible,
)
from tilewise.totals import check_totals
from tilewise.units import counted, format_bytes

# A tile that is still to be evaluated.
UNKNOWN = -3
# Of a map of 1 GiB.
MAX_TILES = 2**28
# Rows and columns of the picture that a mask prints.
PICTURE = 32
# The same of a plot.
PLOT = 128

# Bits of the tiles at (batch, head, row of tiles, column of tiles), each an index tensor (number,).
Evaluate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Whether query i sees key j, as index tensors that broadcast against each other.
Pairs = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Device = torch.device | str | None


class Promise(NamedTuple):
    """What is said of a mask by what made it, and which arguments of a call would silently undo it."""

    by: str
    what: str
    fix: str
    # The left bound of a window, and its right bound, of which `causal` is one.
    left: bool = False
    right: bool = False
    # Sequences of different lengths; the same, but only if the mask has not as many queries as keys.
    lengths: bool = False
    unequal: bool = False
    # Said of the last key. Not of pages, whose sequences end before the mask does.
    ends: bool = False


# By name. Masks have names, not promises, so that pickled ones follow later releases.
PROMISES = {
    "prefix": Promise(
        "TileMask.prefix",
        "every query sees the whole prefix",
        "Leave the flag out: behind the prefix the mask is causal. A prefix beside a window is a tile_mask of a "
        "function.",
        left=True,
        right=True,
    ),
    "neighbourhood": Promise(
        "TileMask.neighbourhood",
        "every token sees all of its neighbours",
        "The last n tokens are window=(n - 1, 0) without a mask. For the part of a neighbourhood that a flag leaves, "
        "join a tile_mask of a function by &.",
        left=True,
        right=True,
    ),
    "documents": Promise(
        "TileMask.documents whose queries are not the last keys",
        "the flag is aligned with the end of the row and not of each document",
        "attention_varlen aligns each sequence; other rules are a tile_mask of a function.",
        left=True,
        right=True,
        ends=True,
    ),
    "tree": Promise(
        "TileMask.tree",
        "a node's position is its depth, and a window counts nodes",
        "Join a tile_mask of a function that knows the depths by &.",
        left=True,
    ),
    "unordered tree": Promise(
        "TileMask.tree",
        "some parents come after their children",
        "Leave the flag out, or put parents before their children.",
        right=True,
    ),
    "aligned": Promise(
        "TileMask.prefix, chunks or tree",
        "its queries have fixed positions among the keys, and sequences may end before",
        "Make one for the lengths of each sequence, and pass TileMask.stack(masks).",
        unequal=True,
    ),
    "edges": Promise(
        "TileMask.neighbourhood",
        "its windows are moved inside at its own edges, not at those of shorter sequences",
        "Make one for each sequence, and pass TileMask.stack(masks). Equal lengths are a dense call.",
        lengths=True,
    ),
    "moved": Promise(
        "TileMask.cut or grow",
        "the last query and the last key do not belong together as in the whole mask",
        "Let rows and keys end at the same token, or join a tile_mask of a function by &.",
        left=True,
        right=True,
        ends=True,
    ),
}
# What depends on lengths holds for the inverse too, and not once each sequence has a mask of its own.
OF_LENGTHS = frozenset(name for name, promise in PROMISES.items() if promise.lengths or promise.unequal)


@dataclass(frozen=True, eq=False, repr=False)
class TileMask:
    """Which keys each query sees: `mask=` of the calls. Made by `tile_mask` or one of the class methods.

    Immutable; equal to itself only. `tiles` is the map (batch or 1, heads or 1, tiles of queries, tiles of keys) and
    `bits` holds the tiles that are visible in part (see tilewise.tiles). A mask of batch 1 or of one head serves all of
    them. `a & b`, `a | b` and `~a` are masks. Everything is on one device; reusing a mask never waits for it.
    `promises` names what calls may not undo (see PROMISES).
    """

    tiles: Tensor
    bits: Tensor
    seqlen_q: int
    seqlen_k: int
    promises: tuple[str, ...] = ()
    # On a GPU, where kernels walk them: the tiles that are not empty, by row and by column.
    lists: Tensor | None = dataclasses.field(init=False, default=None)
    # On a GPU, whose kernels check no number: a copy of `tiles`, into which nobody writes.
    _map: Tensor | None = dataclasses.field(init=False, default=None)
    # torch's counts of writes into tiles, bits and lists; None if a compiler traced the making, which has no counts.
    _writes: tuple[int, int, int] | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        _check_parts(self)
        is_traced = torch.compiler.is_compiling()
        # Torch counts no writes into tensors that are made in inference mode, and does not save them for a backward.
        with contextlib.nullcontext() if is_traced else torch.inference_mode(False):
            self._store(is_traced)

    def _store(self, is_traced: bool) -> None:
        # Here and not when first asked for, so that a compiler sees one kind of mask.
        ordered = bits_by_keys if self.tiles.device.type == "cpu" else bits_by_queries
        tiles, bits = unwrapped("TileMask.tiles", self.tiles), unwrapped("TileMask.bits", ordered(self.bits))
        if not is_traced:
            tiles, bits = (part.clone() if part.is_inference() else part for part in (tiles, bits))
        object.__setattr__(self, "tiles", tiles)
        object.__setattr__(self, "bits", bits)
        if tiles.is_cuda:
            from tilewise.backends.gpu import tile_lists

            object.__setattr__(self, "lists", unwrapped("TileMask.lists", tile_lists.made(tiles)))
            object.__setattr__(self, "_map", unwrapped("TileMask.tiles", tiles.clone()))
        if not is_traced:
            object.__setattr__(self, "_writes", _counted(tiles, bits, self.lists))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tiles, bits and lists, as kernels read them. An error if somebody has written into them, where torch counts
        writes: not those through `.data` or NumPy, and none in a graph. A CPU's kernels hide tiles without bits; a
        GPU's read the map as it was.
        """
        tiles, bits, lists, writes = self.tiles, self.bits, self.lists, self._writes
        if writes is not None and not torch.compiler.is_compiling() and writes != _counted(tiles, bits, lists):
            fix = "Masks never change: make another one."
            raise InvalidProblem("mask", "a tile mask as it was made", "one whose tensors were written into", fix)
        return tiles if self._map is None else self._map, bits, lists

    @property
    def _stored(self) -> tuple[Tensor, Tensor]:
        """Tiles and bits for torch's operators, which read freed storage. Calls check theirs themselves."""
        tiles, bits, _ = self.parts
        check_allocated(("TileMask.tiles", "TileMask.bits"), (tiles, bits))
        return tiles, bits

    def __reduce__(self) -> tuple[type[TileMask], tuple[Tensor, Tensor, int, int, tuple[str, ...]]]:
        # Lists are made again: a mask may be loaded on another device.
        return TileMask, (*self._stored, self.seqlen_q, self.seqlen_k, self.promises)

    # Making masks

    @classmethod
    def from_dense(cls, mask: Tensor) -> TileMask:
        """Of a boolean tensor (..., seqlen_q, seqlen_k), True where a query sees a key: 2 to 4 dimensions."""
        _check_boolean("mask", "(..., seqlen_q, seqlen_k)", mask)
        four = mask[(None,) * (4 - mask.dim())]
        lengths = four.shape[2], four.shape[3]
        tiles = _unknown(four.shape[:2], lengths, mask.device)
        if tiles.numel() == 0:
            return TileMask(tiles, no_bits(mask.device), *lengths)
        for dim, length in zip((2, 3), lengths, strict=True):
            if length % TILE:
                at = torch.arange(num_tiles(length) * TILE, device=mask.device).clamp_max(length - 1)
                four = four.index_select(dim, at)
        blocks = four.reshape(*tiles.shape[:3], TILE, tiles.shape[3], TILE).transpose(3, 4)
        return _evaluated(tiles, lambda b, h, m, n: packed(blocks[b, h, m, n]), *lengths)

    @classmethod
    def from_intervals(
        cls, starts: Tensor, ends: Tensor, seqlen: int, *, of: str = "keys", device: Device = None
    ) -> TileMask:
        """Each query sees the keys start .. end-1. `starts` and `ends` are integers (..., seqlen_q), or
        (..., seqlen_q, ranges) for the union of several ranges; `seqlen` is the number of keys.

        With `of="queries"` the ranges are of queries: each key is seen by the queries start .. end-1, the tensors are
        (..., seqlen_k), or (..., seqlen_k, ranges), and `seqlen` is the number of queries. Give all four dimensions
        (batch, heads, seqlen, ranges), or fewer from the left: (seqlen,), (batch, seqlen), (batch, heads, seqlen).
        """
        if of not in ("keys", "queries"):
            raise InvalidProblem("of", "'keys' or 'queries'", repr(of), "Say what the ranges are of.")
        starts, ends = (_ranges(name, x) for name, x in (("starts", starts), ("ends", ends)))
        ends = _together("ends", ends, "starts", starts, device)
        if starts.shape != ends.shape:
            fix = "Give one end for every start."
            raise InvalidProblem("ends", f"shape {tuple(starts.shape)} as starts has", tuple(ends.shape), fix)
        _check_length("seqlen", seqlen)
        by_keys = of == "queries"
        where = _device_of(starts, device)
        lengths = (seqlen, starts.shape[2]) if by_keys else (starts.shape[2], seqlen)
        # A range without members is put where no tile meets it.
        nothing = starts >= ends
        both = torch.stack([starts.masked_fill(nothing, seqlen), ends.masked_fill(nothing, 0)])
        both = both.transpose(3, 4).contiguous().to(where)
        making = _kernels(both, starts.shape[:2], lengths)
        if making is not None:
            tiles, found = making.ranges(*both, seqlen, of_queries=by_keys)
            return cls(tiles, found, *lengths)
        bounds = _in_tiles(both)
        tiles = _by_ranges(bounds, seqlen)

        def bits(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            mine, other = (n, m) if by_keys else (m, n)
            at = _indices(other, seqlen)[:, None].unsqueeze(-1 if by_keys else -2)
            start, end = bounds[:, b, h, :, mine].unsqueeze(-2 if by_keys else -1).unbind(1)
            inside = (at >= start) & (at < end)
            return packed(inside[:, 0] if inside.shape[1] == 1 else inside.any(1))

        return _evaluated(tiles.transpose(2, 3) if by_keys else tiles, bits, *lengths)

    @classmethod
    def documents(cls, ids: Tensor, ids_k: Tensor | None = None, *, device: Device = None) -> TileMask:
        """Queries see the keys of their own document. `ids` are integers (seqlen,) or (batch, seqlen), `ids_k` those of
        the keys if they differ. A negative id is padding: it sees nothing and nothing sees it. `causal` and `window`
        of the call join it if the queries are the last keys.
        """
        q = _ids("ids", ids)
        k = q if ids_k is None else _together("ids_k", _ids("ids_k", ids_k), "ids", q, device)
        if q.shape[0] != k.shape[0] and 1 not in (q.shape[0], k.shape[0]):
            raise InvalidProblem("ids_k", f"batch {q.shape[0]} as ids has", k.shape[0], "Give both the same batch.")
        batch = max(q.shape[0], k.shape[0])
        q, k = q.expand(batch, -1), k.expand(batch, -1)
        lengths = q.shape[1], k.shape[1]
        q = q.to(_device_of(q, device))
        k = q if ids_k is None else k.to(q.device)
        are_last = ids_k is None or (lengths[0] <= lengths[1] and torch.equal(q, k[:, lengths[1] - lengths[0] :]))
        promises = () if are_last else ("documents",)
        making = _kernels(q, (batch, 1), lengths)
        if making is not None:
            tiles, found = making.documents(q, k)
            return cls(tiles, found, *lengths, promises)
        tiles, q_tiles, k_tiles = _unknown((batch, 1), lengths, q.device), _in_tiles(q), _in_tiles(k)
        if tiles.numel():
            q_low, q_high = (x[:, :, None] for x in q_tiles.aminmax(dim=-1))
            k_low, k_high = (x[:, None] for x in k_tiles.aminmax(dim=-1))
            same = torch.minimum(q_low, k_low) == torch.maximum(q_high, k_high)
            # Also where all ids of one side are negative, and they may be the same.
            apart = torch.minimum(q_high, k_high) < torch.maximum(q_low, k_low).clamp_min(0)
            tiles.masked_fill_(same[:, None], FULL).masked_fill_(apart[:, None], EMPTY)

        def bits(b: Tensor, _h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            mine = q_tiles[b, m][:, :, None]
            return packed((mine == k_tiles[b, n][:, None]) & (mine >= 0))

        return _promising(_evaluated(tiles, bits, *lengths), *promises)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, seqlen: int, *, device: Device = None) -> TileMask:
        """Documents one after the other within a row of `seqlen` tokens; `cu_seqlens` are running totals from 0.
        Tokens past the last total are padding.
        """
        _check_length("seqlen", seqlen)
        totals = _totals(cu_seqlens, seqlen)
        position = torch.arange(seqlen, dtype=torch.int64, device="cpu")
        ids = torch.bucketize(position, totals[1:].contiguous(), right=True)
        return cls.documents(ids.masked_fill_(ids == len(totals) - 1, -1), device=_device_of(cu_seqlens, device))

    @classmethod
    def prefix(
        cls, lengths: int | Sequence[int] | Tensor, seqlen_q: int, seqlen_k: int | None = None, *, device: Device = None
    ) -> TileMask:
        """Prefix-LM: all queries see the first `lengths` keys (one number, or one per sequence), and the other keys
        causally, the last query aligned with the last key. Calls with `causal` or `window`, which would hide the
        prefix, are refused.
        """
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        rows = _positions(seqlen_q, seqlen_k)
        ends = torch.maximum(_prefixes(lengths), rows + 1)
        mask = cls.from_intervals(torch.zeros_like(ends), ends, seqlen_k, device=_device_of(lengths, device))
        return _promising(mask, "prefix", "aligned")

    @classmethod
    def chunks(cls, size: int, seqlen_q: int, seqlen_k: int | None = None, *, device: Device = None) -> TileMask:
        """Chunks: a query sees all keys of its own chunk of `size` keys, later ones too, the last query aligned with
        the last key. Chunked attention of decoders, which is causal inside a chunk, is this mask with `causal=True`.
        """
        _check_length("size", size, least=1)
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        starts = _positions(seqlen_q, seqlen_k) // size * size
        mask = cls.from_intervals(starts, starts + size, seqlen_k, device=device)
        return _promising(mask, "aligned")

    @classmethod
    def neighbourhood(
        cls, shape: int | tuple[int, int], window: int | tuple[int, int], *, device: Device = None
    ) -> TileMask:
        """Each token sees the `window` nearest tokens along each axis, itself among them: of a sequence of `shape`
        tokens, or of a grid (height, width) read row by row. At an edge the window is moved inside. Calls with
        `causal` or `window`, which would hide neighbours, are refused.
        """
        sizes = shape if isinstance(shape, tuple) else (shape,)
        windows = window if isinstance(window, tuple) else (window,) * len(sizes)
        if len(windows) != len(sizes) or len(sizes) > 2:
            fix = "Sequences and grids of two dimensions have neighbourhoods; others are a tile_mask of a function."
            raise InvalidProblem("window", f"one number per axis of shape {sizes}", windows, fix)
        bounds = []
        for size, width in zip(sizes, windows, strict=True):
            _check_length("shape", size, least=1)
            _check_length("window", width, least=1)
            width = min(width, size)
            position = torch.arange(size, dtype=torch.int64, device="cpu")
            start = (position - width // 2).clamp(0, size - width)
            bounds.append(torch.stack([start, start + width]))
        if len(sizes) == 1:
            start, end = bounds[0].unbind()
            return _promising(cls.from_intervals(start, end, sizes[0], device=device), "neighbourhood", "edges")
        height, width = sizes
        # From the first neighbour to the last: tiles outside are empty.
        ends = (bounds[0] - torch.tensor([[0], [1]], device="cpu"))[:, :, None] * width + bounds[1][:, None]
        where = torch.device(device or "cpu")
        tiles = _by_ranges(_in_tiles(ends.view(2, 1, 1, 1, -1).to(where)), height * width)
        (top, bottom), (left, right) = (x.to(where).unbind() for x in bounds)

        def pairs(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            y, x = i // width, i % width
            ky, kx = j // width, j % width
            return (ky >= top[y]) & (ky < bottom[y]) & (kx >= left[x]) & (kx < right[x])

        tiles = torch.where(tiles == EMPTY, EMPTY, UNKNOWN).to(torch.int32)
        return _promising(_of_pairs(pairs, height * width, height * width, tiles), "neighbourhood", "edges")

    @classmethod
    def tree(cls, parents: Sequence[int] | Tensor, context: int = 0, *, device: Device = None) -> TileMask:
        """The nodes of a tree, as in speculative decoding: each sees itself, its ancestors, and `context` keys before
        the tree. `parents` are integers (nodes,) or (batch, nodes); a root's is negative. `causal` changes nothing if
        parents come before their children, and is refused if not; so is a window, which would count nodes.
        """
        given: Any = parents
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            given = torch.as_tensor(parents, device=_device_of(parents, device))
        up = _ids("parents", given)
        _check_length("context", context)
        nodes = up.shape[1]
        seen = torch.eye(nodes, dtype=torch.bool, device=up.device).repeat(up.shape[0], 1, 1)
        batch, node = (torch.arange(n, device=up.device) for n in up.shape)
        at = up
        for _ in range(nodes):
            if bool((at >= nodes).any()):
                fix = "A parent is the index of another node, or -1."
                raise InvalidProblem("parents", f"indices below {nodes}", int(at.max()), fix)
            if not bool((at >= 0).any()):
                break
            seen[batch[:, None], node, at.clamp_min(0)] |= at >= 0
            at = torch.where(at >= 0, up.gather(1, at.clamp_min(0)), -1)
        if bool((at >= 0).any()):
            raise InvalidProblem("parents", "a tree", "a cycle", "Following parents must end at a root, -1.")

        def pairs(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j < context) | seen[b, i, (j - context).clamp_min(0)]

        lengths = nodes, context + nodes
        mask = _of_pairs(pairs, *lengths, _unknown((up.shape[0], 1), lengths, up.device))
        order = () if bool((up < node).all()) else ("unordered tree",)
        return _promising(mask, "tree", *order, "aligned")

    @classmethod
    def from_block_mask(cls, block_mask: Any, *, batch: int = 1, heads: int = 1) -> TileMask:
        """Of `torch.nn.attention.flex_attention.BlockMask`: its lists of blocks, its mask_mod inside partial ones.

        Lists may be shared by sequences or heads while the mask_mod depends on them: it is then evaluated for each of
        the `batch` and `heads` of the call.
        """
        from torch.nn.attention.flex_attention import BlockMask

        if not isinstance(block_mask, BlockMask):
            fix = "Make one with torch.nn.attention.flex_attention.create_block_mask."
            raise InvalidProblem("block_mask", "a BlockMask", type(block_mask).__name__, fix)
        lengths = block_mask.seq_lengths
        rows, cols = block_mask.BLOCK_SIZE
        partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
        if partial.shape[2] * rows < lengths[0] or partial.shape[3] * cols < lengths[1]:
            fix = "A slice of a BlockMask keeps the lengths of the whole: set its seq_lengths, too."
            raise InvalidProblem("block_mask", f"blocks for seq_lengths {lengths}", tuple(partial.shape[2:]), fix)
        if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":  # torch's, which raises
            fix = "Set the part's mask_mod to one for its own positions, and set its seq_lengths, too."
            raise InvalidProblem("block_mask", "a BlockMask with a mask_mod", "a slice of one, which has none", fix)
        full = torch.zeros_like(partial)
        if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
            full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        sizes = list(partial.shape[:2])
        for place, size in enumerate((batch, heads)):
            if sizes[place] == 1 < size and 0 not in lengths and _depends(block_mask.mask_mod, place, partial.device):
                sizes[place] = size
        partial, full = (lists.expand(*sizes, -1, -1) for lists in (partial, full))
        tiles = _unknown(partial.shape[:2], lengths, partial.device)
        if (rows, cols) == (TILE, TILE):
            some = partial[:, :, : tiles.shape[2], : tiles.shape[3]]
            every = full[:, :, : tiles.shape[2], : tiles.shape[3]]
            tiles = tiles.masked_fill(~some, EMPTY).masked_fill(every, FULL)
        inside = _vmapped(block_mask.mask_mod)

        def bits(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            i, j = _indices(m, lengths[0]), _indices(n, lengths[1])
            at = b[:, None, None], h[:, None, None], i[:, :, None] // rows, j[:, None, :] // cols
            return packed(full[at] | (partial[at] & inside(b, h, i, j)))

        return _evaluated(tiles, bits, *lengths)

    @classmethod
    def stack(cls, masks: Sequence[TileMask], *, seqlen_q: int | None = None, seqlen_k: int | None = None) -> TileMask:
        """One mask per sequence as one mask of their batch: for `attention_varlen`. It is as long as the longest of
        them, or as `seqlen_q` and `seqlen_k` say; rows and keys past a mask's own are hidden.
        """
        given: list[Any] = list(masks)
        if not given or any(not isinstance(mask, TileMask) or mask.tiles.shape[0] != 1 for mask in given):
            fix = "A mask of a whole batch is given as it is."
            got = [mask.shape if isinstance(mask, TileMask) else _shown(mask) for mask in given]
            raise InvalidProblem("masks", "one or more tile masks of batch 1", got, fix)
        masks, heads = given, max(mask.tiles.shape[1] for mask in given)
        if any(mask.tiles.shape[1] not in (1, heads) for mask in masks):
            got = [mask.tiles.shape[1] for mask in masks]
            raise InvalidProblem(
                "masks", f"masks of {counted(heads, 'head')}, or 1", got, "Share one, or give one each."
            )
        longest_q, longest_k = max(m.seqlen_q for m in masks), max(m.seqlen_k for m in masks)
        lengths = longest_q if seqlen_q is None else seqlen_q, longest_k if seqlen_k is None else seqlen_k
        for name, length in zip(("seqlen_q", "seqlen_k"), lengths, strict=True):
            _check_length(name, length)
        if lengths[0] < longest_q or lengths[1] < longest_k:
            expected = f"lengths of at least {longest_q} and {longest_k}"
            raise InvalidProblem("seqlen_q, seqlen_k", expected, lengths, "Cut the masks with mask.cut.")
        tiles = _unknown((len(masks), heads), lengths, masks[0].tiles.device).fill_(EMPTY)
        parts, count = [], 0
        for index, mask in enumerate(masks):
            _check_same_device(masks[0], mask)
            clean, bits = mask._hidden_past_its_lengths(*lengths)._stored  # noqa: SLF001
            own = clean[0].expand(heads, -1, -1)
            tiles[index, :, : own.shape[1], : own.shape[2]] = torch.where(own >= 0, own + count, own)
            parts.append(bits)
            count += len(bits)
        kept = {name for mask in masks for name in mask.promises} - OF_LENGTHS
        return _promising(TileMask(tiles, torch.cat(parts), *lengths), *kept)

    # What it is

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, heads or 1, seqlen_q, seqlen_k)."""
        return self.tiles.shape[0], self.tiles.shape[1], self.seqlen_q, self.seqlen_k

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.tiles.device

    @property
    def nbytes(self) -> int:
        """Bytes of the map, the bits, and on a GPU the lists."""
        return self.tiles.nbytes + self.bits.nbytes + (0 if self.lists is None else self.lists.nbytes)

    @functools.cached_property
    def counts(self) -> TileCounts:
        """Tiles of the map that are computed without and with bits, and tiles that are skipped. Reads the device."""
        check_allocated(("TileMask.tiles",), (self.tiles,))
        full, skipped = (int((self.tiles == kind).sum()) for kind in (FULL, EMPTY))
        return TileCounts(full, self.tiles.numel() - full - skipped, skipped)

    @property
    def density(self) -> float:
        """The share of the tiles that is computed. Reads the device, once."""
        return self.counts.visited / max(1, self.tiles.numel())

    def dense(self) -> Tensor:
        """The boolean tensor (batch or 1, heads or 1, seqlen_q, seqlen_k): as `mask=` it takes the general path, which
        computes every pair.
        """
        return visible(*self._stored, self.seqlen_q, self.seqlen_k)

    def __repr__(self) -> str:
        batch, heads, seqlen_q, seqlen_k = self.shape
        counts = self.counts
        head = (
            f"TileMask(batch {batch}, heads {heads}, {seqlen_q} x {seqlen_k} on {self.device}: "
            f"{100 * self.density:.1f} % of {counted(self.tiles.numel(), 'tile', spec=',')}, {counts.full:,} full, "
            f"{counts.partial:,} partial, {format_bytes(self.nbytes)})"
        )
        # The tiles of the first sequence and head, several in a character where there are many.
        rows = self._shares(0, 0, PICTURE)
        return "\n".join([head, *("".join("█" if x == 1.0 else "·" if x == 0.0 else "▒" for x in row) for row in rows)])

    def plot(self, batch: int = 0, head: int = 0) -> str:
        """The tiles of one sequence and head as an SVG: full ones dark, partial ones light."""
        shares = self._shares(batch, head, PLOT)
        width, height = 8 * len(shares[0]) if shares else 0, 8 * len(shares)
        tiles = "".join(
            f'<rect x="{8 * x}" y="{8 * y}" width="8" height="8" fill-opacity="{1.0 if share == 1.0 else 0.4}"/>'
            for y, row in enumerate(shares)
            for x, share in enumerate(row)
            if share > 0.0
        )
        frame = f'<rect width="{width}" height="{height}" fill="none" stroke="#868e96"/>'
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><g fill="#1c7ed6">{tiles}</g>{frame}</svg>'

    def _shares(self, batch: int, head: int, most: int) -> list[list[float]]:
        """0 for empty tiles, 1 for full ones, between for others, averaged to at most so many rows and columns."""
        if self.tiles.numel() == 0:
            return []
        check_allocated(("TileMask.tiles",), (self.tiles,))
        kinds = self.tiles[batch, head]
        share = torch.where(kinds == EMPTY, 0.0, torch.where(kinds == FULL, 1.0, 0.5)).cpu()
        sides = min(most, share.shape[0]), min(most, share.shape[1])
        drawn: list[list[float]] = torch.nn.functional.adaptive_avg_pool2d(share[None], sides)[0].tolist()
        return drawn

    # Other masks of it

    def to(self, device: torch.device | str) -> TileMask:
        """The mask on another device."""
        target = torch.device(device)
        if target == self.device or (target.type == self.device.type and target.index is None):
            return self
        tiles, bits = self._stored
        return TileMask(tiles.to(target), bits.to(target), self.seqlen_q, self.seqlen_k, self.promises)

    def __and__(self, other: TileMask) -> TileMask:
        return self._combined(other, torch.bitwise_and, absorbing=EMPTY, neutral=FULL)

    def __or__(self, other: TileMask) -> TileMask:
        return self._combined(other, torch.bitwise_or, absorbing=FULL, neutral=EMPTY)

    def __invert__(self) -> TileMask:
        tiles, bits = self._stored
        tiles = torch.where(tiles == FULL, EMPTY, torch.where(tiles == EMPTY, FULL, tiles))
        kept = tuple(name for name in self.promises if name in OF_LENGTHS)
        return TileMask(tiles, ~bits, self.seqlen_q, self.seqlen_k, kept)

    def _combined(
        self, other: TileMask, combine: Callable[[Tensor, Tensor], Tensor], *, absorbing: int, neutral: int
    ) -> TileMask:
        if not isinstance(other, TileMask):
            return NotImplemented
        _check_same_device(self, other)
        if (self.seqlen_q, self.seqlen_k) != (other.seqlen_q, other.seqlen_k):
            expected = f"a mask of {self.seqlen_q} x {self.seqlen_k}"
            raise InvalidProblem("mask", expected, f"one of {other.seqlen_q} x {other.seqlen_k}", "Cut the longer one.")
        (my_tiles, my_bits), (their_tiles, their_bits) = self._stored, other._stored
        try:
            mine, theirs = torch.broadcast_tensors(my_tiles, their_tiles)
        except RuntimeError:
            fix = "Batch and heads must be equal, or 1."
            raise InvalidProblem("mask", f"a shape that broadcasts to {self.shape}", other.shape, fix) from None
        tiles = torch.full_like(mine, UNKNOWN, memory_format=torch.contiguous_format)
        tiles[(mine == absorbing) | (theirs == absorbing)] = absorbing
        tiles[(mine == neutral) & (theirs == neutral)] = neutral

        def bits(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            return combine(_bits_of(mine[b, h, m, n], my_bits), _bits_of(theirs[b, h, m, n], their_bits))

        found = _evaluated(tiles, bits, self.seqlen_q, self.seqlen_k)
        return _promising(found, *self.promises, *other.promises)

    def cut(self, rows: tuple[int, int], keys: tuple[int, int]) -> TileMask:
        """The mask of queries rows[0] .. rows[1]-1 and keys keys[0] .. keys[1]-1. Nothing is evaluated again where both
        start at a multiple of 128.
        """
        given: tuple[tuple[str, Any, int], ...] = ("rows", rows, self.seqlen_q), ("keys", keys, self.seqlen_k)
        for name, ends, length in given:
            pair = isinstance(ends, tuple) and len(ends) == 2 and all(type(end) is int for end in ends)
            if not pair or not 0 <= ends[0] <= ends[1] <= length:
                expected = f"a tuple (start, end) with 0 <= start <= end <= {length}"
                raise InvalidProblem(name, expected, ends, "A mask is made longer by grow or stack.")
        (row, end_row), (key, end_key) = rows, keys
        lengths = end_row - row, end_key - key
        tiles, bits = self._stored
        if row % TILE == 0 and key % TILE == 0:
            m, n = slice(row // TILE, num_tiles(end_row)), slice(key // TILE, num_tiles(end_key))
            found = TileMask(tiles[:, :, m, n], bits, *lengths)
        else:
            found = _of_pairs(
                lambda b, h, i, j: is_visible(tiles, bits, b, h, i + row, j + key),
                *lengths,
                _unknown(tiles.shape[:2], lengths, self.device),
            )
        return _promising(found, *self.promises, *self._moved(end_row, end_key))

    def grow(self, rows: Tensor) -> TileMask:
        """The mask with more queries, as decoding adds them: `rows` is boolean (..., new queries, keys), with as many
        keys as this mask or more. New keys are hidden from the old queries. Only tiles at the new edges are evaluated.
        """
        _check_boolean("rows", "(..., new queries, keys)", rows)
        new = rows[(None,) * (4 - rows.dim())].to(self.device)
        seqlen_q, seqlen_k = self.seqlen_q + new.shape[2], new.shape[3]
        batch, heads = (max(a, b) for a, b in zip(self.tiles.shape[:2], new.shape[:2], strict=True))
        shared = [size for x in (self.tiles, new) for size in zip(x.shape[:2], (batch, heads), strict=True)]
        if seqlen_k < self.seqlen_k or any(size not in (1, most) for size, most in shared):
            expected = f"a shape that fits (..., new queries, {counted(self.seqlen_k, 'key')} or more) of {self.shape}"
            raise InvalidProblem("rows", expected, tuple(rows.shape), "Give whole rows: one bool per key.")
        old_tiles, old_bits = self._stored
        old = old_tiles.expand(batch, heads, -1, -1)
        more = new.expand(batch, heads, -1, -1)
        tiles = _unknown((batch, heads), (seqlen_q, seqlen_k), self.device)
        whole, kept = self.seqlen_q // TILE, old.shape[3]
        tiles[:, :, :whole] = EMPTY
        tiles[:, :, :whole, :kept] = old[:, :, :whole]
        if seqlen_k > self.seqlen_k and self.seqlen_k % TILE:
            # The last tiles of keys said nothing of the keys that are new.
            edge = tiles[:, :, :whole, kept - 1]
            tiles[:, :, :whole, kept - 1] = torch.where(edge == EMPTY, EMPTY, UNKNOWN)

        def pairs(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if self.seqlen_q == 0 or self.seqlen_k == 0:
                before = torch.zeros((), dtype=torch.bool, device=self.device)
            else:
                at = i.clamp_max(self.seqlen_q - 1), j.clamp_max(self.seqlen_k - 1)
                before = is_visible(old, old_bits, b, h, *at) & (j < self.seqlen_k)
            if more.shape[2] == 0:
                return before
            return torch.where(i < self.seqlen_q, before, more[b, h, (i - self.seqlen_q).clamp_min(0), j])

        grown = _of_pairs(pairs, seqlen_q, seqlen_k, tiles, old_bits)
        return _promising(grown._compact(), *self.promises, *self._moved(seqlen_q, seqlen_k))  # noqa: SLF001

    def _moved(self, end_row: int, end_key: int) -> tuple[str, ...]:
        """What is to say of a mask that ends at another row and key, with which flags would be aligned."""
        return () if end_key - end_row == self.seqlen_k - self.seqlen_q else ("moved",)

    def _compact(self) -> TileMask:
        """Without the bits that no tile names."""
        partial = self.tiles >= 0
        used, index = torch.unique(self.tiles[partial], return_inverse=True)
        tiles = self.tiles.clone()
        tiles[partial] = index.to(torch.int32)
        return TileMask(tiles, self.bits[used.long()], self.seqlen_q, self.seqlen_k)

    def _hidden_past_its_lengths(self, seqlen_q: int, seqlen_k: int) -> TileMask:
        """The mask with pairs past its lengths hidden, where another one is longer."""
        if (seqlen_q <= self.seqlen_q or self.seqlen_q % TILE == 0) and (
            seqlen_k <= self.seqlen_k or self.seqlen_k % TILE == 0
        ):
            return self
        own, own_bits = self._stored
        tiles = own.clone()
        for edge in (tiles[:, :, -1:], tiles[:, :, :, -1:]):
            edge.copy_(torch.where(edge == EMPTY, EMPTY, UNKNOWN))

        def bits(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            i, j = (x[:, None] * TILE + torch.arange(TILE, device=self.device) for x in (m, n))
            inside = (i < self.seqlen_q)[:, :, None] & (j < self.seqlen_k)[:, None, :]
            return _bits_of(own[b, h, m, n], own_bits) & packed(inside)

        return _evaluated(tiles, bits, self.seqlen_q, self.seqlen_k, own_bits)


def tile_mask(
    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: Device = "cpu",
) -> TileMask:
    """The mask of a function: `fn(b, h, i, j)` says whether query i of head h and sequence b sees key j.

    The function gets integer tensors without dimensions and returns a boolean one, as a mask_mod of FlexAttention; it
    is called under `torch.vmap`, for some hundred tiles at a time. Give `batch` and `heads` only if it depends on them;
    without them a function that does is refused.

        >>> tile_mask(lambda b, h, i, j: i >= j, 256, 256).counts
        TileCounts(full=1, partial=2, skipped=1)
    """
    if not callable(fn):
        fix = "A mask that is a tensor is TileMask.from_dense."
        raise InvalidProblem("fn", "a function of b, h, i, j", type(fn).__name__, fix)
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    given = {"batch": batch, "heads": heads}
    for name, size in sizes.items():
        _check_length(name, size)
    for name, number in given.items():
        if number is not None:
            _check_length(name, number, least=1)
    tiles = _unknown((batch or 1, heads or 1), (seqlen_q, seqlen_k), torch.device(device or "cpu"))
    for place, (name, number) in enumerate(given.items()):
        if number is None and tiles.numel() and _depends(fn, place, tiles.device):
            fix = "Without it the mask of the first would be that of all."
            raise InvalidProblem(name, "a number, because the function depends on it", None, fix)
    inside = _vmapped(fn)

    def bits(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return packed(inside(b, h, _indices(m, seqlen_q), _indices(n, seqlen_k)))

    return _evaluated(tiles, bits, seqlen_q, seqlen_k)


# Evaluation


def _evaluated(tiles: Tensor, evaluate: Evaluate, seqlen_q: int, seqlen_k: int, bits: Tensor | None = None) -> TileMask:
    """The mask of a map with unknown tiles. `bits` are those of tiles that are known."""
    tiles = tiles.contiguous()
    parts = [] if bits is None else [bits]
    count = sum(map(len, parts))
    unknown = (tiles == UNKNOWN).nonzero()
    for some in unknown.split(at_once(tiles.device)) if len(unknown) else ():
        found = evaluate(*some.unbind(1))
        least, most = found.flatten(1).aminmax(dim=1)
        same = least == most
        empty, full = same & (least == 0), same & (least == -1)
        partial = ~(empty | full)
        kinds = partial.cumsum(0, dtype=torch.int32).add_(count - 1)
        tiles[some.unbind(1)] = kinds.masked_fill_(empty, EMPTY).masked_fill_(full, FULL)
        parts.append(found[partial])
        count += len(parts[-1])
    joined = no_bits(tiles.device) if count == 0 else parts[0] if len(parts) == 1 else torch.cat(parts)
    return TileMask(tiles, joined, seqlen_q, seqlen_k)


def _kernels(numbers: Tensor, shared: Sequence[int], lengths: Sequence[int]) -> Any:
    """The module whose kernels make a mask of these numbers; None if they cannot."""
    if not numbers.is_cuda or numbers.numel() == 0 or 0 in (*shared, *lengths):
        return None
    _check_count(shared, lengths)
    from tilewise.backends.gpu import tile_lists

    if not tile_lists.has_kernels(numbers):
        return None
    from tilewise.backends.gpu import mask_making

    return mask_making


def _of_pairs(pairs: Pairs, seqlen_q: int, seqlen_k: int, tiles: Tensor, bits: Tensor | None = None) -> TileMask:
    """`_evaluated` by a function of pairs."""

    def evaluate(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        i, j = _indices(m, seqlen_q)[:, :, None], _indices(n, seqlen_k)[:, None, :]
        return packed(pairs(b[:, None, None], h[:, None, None], i, j).expand(len(b), TILE, TILE))

    return _evaluated(tiles, evaluate, seqlen_q, seqlen_k, bits)


def _indices(tile: Tensor, length: int) -> Tensor:
    """The indices (number, 128) in these tiles. Past the length the last one is repeated, which leaves empty and full
    tiles what they are.
    """
    at = torch.add(torch.arange(TILE, device=tile.device), tile[:, None], alpha=TILE)
    return at if length % TILE == 0 else at.clamp_max(length - 1)


def _unknown(shared: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """A map of tiles that are all to be evaluated; `shared` are batch and heads."""
    return torch.full(_check_count(shared, lengths), UNKNOWN, dtype=torch.int32, device=device)


def _check_count(shared: Sequence[int], lengths: Sequence[int]) -> tuple[int, int, int, int]:
    """The shape of a map."""
    shape = shared[0], shared[1], num_tiles(lengths[0]), num_tiles(lengths[1])
    count = shape[0] * shape[1] * shape[2] * shape[3]
    if count > MAX_TILES:
        expected = f"a map of at most {MAX_TILES:,} tiles of {TILE} x {TILE} pairs"
        fix = "Share the mask between heads or sequences, or attend to parts of the keys and join them with merge."
        raise InvalidProblem("seqlen_q, seqlen_k", expected, f"{count:,} tiles", fix)
    return shape


def _vmapped(fn: Callable[..., Any]) -> Pairs:
    """The function for tiles: b, h (number,), i and j (number, 128)."""

    def checked(*at: Tensor) -> Tensor:
        try:
            found = fn(*at)
        except RuntimeError as error:
            if "data-dependent control flow" not in str(error):
                raise
            expected, fix = "a function without `if`, `and`, `or` and `not` of indices", "Use torch.where, &, | and ~."
            raise InvalidProblem("fn", expected, "one that asks whether a tensor is true", fix) from error
        if not isinstance(found, Tensor) or found.dtype != torch.bool or found.dim() != 0:
            got = f"{found.dtype} of {counted(found.dim(), 'dimension')}" if isinstance(found, Tensor) else repr(found)
            fix = "Compare the indices with each other or with entries of tensors; & and | join conditions."
            raise InvalidProblem("fn", "a function that returns one boolean tensor without dimensions", got, fix)
        return found

    each: Any = checked
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        each = torch.vmap(each, in_dims=dims)
    return each  # type: ignore[no-any-return]


class _Likeness(TorchFunctionMode):
    """Within it, a tensor made like an index, as `b.new_ones(())` of torch's and_masks, does not depend on it."""

    MAKERS = (
        Tensor.new_ones, Tensor.new_zeros, Tensor.new_full, torch.ones_like, torch.zeros_like, torch.full_like,
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in self.MAKERS and args and isinstance(args[0], Tensor):
            like = args[0]
            args = (torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:])
        return func(*args, **(kwargs or {}))


def _depends(fn: Callable[..., Any], place: int, device: torch.device) -> bool:
    """Whether a mask_mod makes something of the value at this place: then vmap over it maps the result, too."""
    at = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
    at[place] = at[place].unsqueeze(0)
    found = False

    def probe(*args: Tensor) -> Tensor:
        nonlocal found
        with _Likeness():
            made = fn(*args)
        found = isinstance(made, Tensor) and torch._C._functorch.is_batchedtensor(made)  # noqa: SLF001
        return args[place]

    # What goes wrong in the function is reported when the mask is evaluated.
    with contextlib.suppress(Exception):
        torch.vmap(probe, in_dims=tuple(0 if index == place else None for index in range(4)))(*at)
    return found


def _by_ranges(bounds: Tensor, seqlen: int) -> Tensor:
    """The map of starts and ends (2, batch, heads, ranges, tiles, 128): tiles that no range meets are empty, and full
    where a range of every row covers them.
    """
    tiles = _unknown(bounds.shape[1:3], (bounds.shape[4] * TILE, seqlen), bounds.device)
    if tiles.numel() == 0:
        return tiles
    (low, low_end), (high_start, high) = (x[..., None] for x in bounds.aminmax(dim=-1))
    first = torch.arange(0, tiles.shape[3] * TILE, TILE, dtype=torch.int64, device=tiles.device)
    last = (first + TILE).clamp_max(seqlen)
    missed = (low >= last) | (high <= first)
    covered = (high_start <= first) & (low_end >= last)
    return tiles.masked_fill_(missed.all(2), EMPTY).masked_fill_(covered.any(2), FULL)


def _in_tiles(numbers: Tensor) -> Tensor:
    """The last dimension as (tiles, 128). Past its end the last number is repeated, as by _indices."""
    length = numbers.shape[-1]
    if length % TILE:
        numbers = torch.cat([numbers, numbers[..., -1:].expand(*numbers.shape[:-1], -length % TILE)], -1)
    return numbers.view(*numbers.shape[:-1], num_tiles(length), TILE)


def _listed(count: Tensor, indices: Tensor) -> Tensor:
    """Which blocks (batch, heads, rows, columns) are among the first `count` of each row's indices."""
    here = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
    listed = torch.zeros(*indices.shape[:-1], indices.shape[-1] + 1, dtype=torch.bool, device=indices.device)
    # What is not listed goes to a column that is dropped.
    return listed.scatter_(-1, torch.where(here, indices.long(), indices.shape[-1]), value=True)[..., :-1]


def _bits_of(kinds: Tensor, bits: Tensor) -> Tensor:
    """The bits of tiles of any kind; as in kernels, a tile that names none is empty."""
    words = (1,) * (bits.dim() - 1)
    whole = (kinds == FULL).to(torch.int32).neg().view(-1, *words).expand(-1, *bits.shape[1:])
    if len(bits) == 0:
        return whole
    has_bits = (kinds >= 0) & (kinds < len(bits))
    return torch.where(has_bits.view(-1, *words), bits[torch.where(has_bits, kinds, 0).long()], whole)


# Arguments

INTEGERS = (torch.int32, torch.int64)


def _check_length(name: str, length: Any, *, least: int = 0) -> None:
    if not isinstance(length, int) or isinstance(length, bool) or not least <= length < 2**31:
        raise InvalidProblem(name, f"an integer from {least} to 2^31 - 1", repr(length), "Pass a Python int.")


def _promising(mask: TileMask, *names: str) -> TileMask:
    """A mask that was just made, with promises."""
    object.__setattr__(mask, "promises", tuple(sorted(set(names))))
    return mask


def _counted(tiles: Tensor, bits: Tensor, lists: Tensor | None) -> tuple[int, int, int]:
    """How many writes torch has counted into each."""
    return tiles._version, bits._version, 0 if lists is None else lists._version  # noqa: SLF001


def _check_parts(mask: TileMask) -> None:
    """Kernels read the bits that the map names, so an index past them would read other memory."""
    fix = "Use tile_mask or a class method of TileMask, such as TileMask.from_dense."
    parts: dict[str, Any] = {"tiles": mask.tiles, "bits": mask.bits}
    for name, part in parts.items():
        if not isinstance(part, Tensor) or part.dtype != torch.int32:
            got = part.dtype if isinstance(part, Tensor) else type(part).__name__
            raise InvalidProblem(f"TileMask.{name}", "an int32 tensor", got, fix)
        check_allocated((f"TileMask.{name}",), (part,))
    for name, length in (("seqlen_q", mask.seqlen_q), ("seqlen_k", mask.seqlen_k)):
        _check_length(name, length)
    rows, columns = num_tiles(mask.seqlen_q), num_tiles(mask.seqlen_k)
    if mask.tiles.dim() != 4 or mask.tiles.shape[2:] != (rows, columns):
        expected = f"shape (batch or 1, heads or 1, {rows}, {columns}) for {mask.seqlen_q} x {mask.seqlen_k}"
        raise InvalidProblem("TileMask.tiles", expected, tuple(mask.tiles.shape), fix)
    if mask.bits.shape[1:] not in ((WORDS, TILE), (WORDS * TILE,)):
        expected = f"shape (number, {WORDS}, {TILE}) or (number, {WORDS * TILE})"
        raise InvalidProblem("TileMask.bits", expected, tuple(mask.bits.shape), fix)
    if mask.bits.device != mask.tiles.device:
        raise InvalidProblem("TileMask.bits", f"device {mask.tiles.device} as tiles has", mask.bits.device, fix)
    if not PROMISES.keys() >= set(mask.promises):
        raise InvalidProblem("TileMask.promises", f"names among {', '.join(PROMISES)}", mask.promises, fix)
    is_read = mask.tiles.device.type == "cpu" or (mask.tiles.is_cuda and settings.current().check_values)
    if is_read and type(mask.tiles) is Tensor and mask.tiles.numel():
        least, most = (int(end) for end in torch.aminmax(mask.tiles))
        if least < EMPTY or most >= len(mask.bits):
            expected = f"{EMPTY} (empty), {FULL} (full) or an index below {len(mask.bits)}, the number of bits"
            raise InvalidProblem("TileMask.tiles", expected, f"{least} to {most}", fix)


def _check_boolean(name: str, shape: str, mask: Any) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not 2 <= mask.dim() <= 4:
        expected = f"a boolean tensor {shape} of 2 to 4 dimensions"
        raise InvalidProblem(name, expected, _shown(mask), "0 and 1 become a mask by .bool().")
    check_class(name, mask)
    check_allocated((name,), (mask,))


def _totals(cu_seqlens: Any, seqlen: int) -> Tensor:
    """Checked, on the CPU."""
    is_integer = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in INTEGERS
    if not is_integer or cu_seqlens.is_meta or cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        expected, fix = "a 1-D int32 or int64 tensor with contents, of one entry or more", "Give running totals from 0."
        raise InvalidProblem("cu_seqlens", expected, _shown(cu_seqlens), fix)
    check_class("cu_seqlens", cu_seqlens)
    check_allocated(("cu_seqlens",), (cu_seqlens,))
    totals: Tensor = unwrapped("cu_seqlens", cu_seqlens).to(device="cpu", dtype=torch.int64)
    # Under torch.func only single numbers can be read.
    is_wrapped = torch._C._are_functorch_transforms_active()  # noqa: SLF001
    check_totals("cu_seqlens", [int(total) for total in totals] if is_wrapped else totals.tolist(), seqlen)
    return totals


def _together(name: str, own: Tensor, other: str, theirs: Tensor, device: Device) -> Tensor:
    """The tensor where the other is."""
    if device is None and own.device != theirs.device:
        fix = "Move it, or name a device for both."
        raise InvalidProblem(name, f"a tensor on {theirs.device} as {other} is", own.device, fix)
    return own.to(theirs.device)


def _check_same_device(one: TileMask, other: TileMask) -> None:
    if one.device != other.device:
        fix = "Move it with .to()."
        raise InvalidProblem("mask", f"a mask on {one.device}", f"one on {other.device}", fix)


def _shown(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _device_of(value: Any, device: Device) -> torch.device:
    if device is not None:
        return torch.device(device)
    return value.device if isinstance(value, Tensor) else torch.device("cpu")


def _prefixes(lengths: Any) -> Tensor:
    """Integers as (batch, 1, 1), on the CPU."""
    try:
        found = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        found = None
    others = found is None or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool
    if found is None or others or found.dim() > 1:
        fix = "Give an integer, or one for each sequence."
        raise InvalidProblem("lengths", "integers", _shown(lengths) if found is None else _shown(found), fix)
    return unwrapped("lengths", found).to(torch.int64).reshape(-1, 1, 1)


def _ids(name: str, ids: Any) -> Tensor:
    """Integers as (batch, seqlen)."""
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS or ids.dim() not in (1, 2):
        fix = "Convert it with torch.as_tensor or .long()."
        raise InvalidProblem(name, "an int32 or int64 tensor (seqlen,) or (batch, seqlen)", _shown(ids), fix)
    check_class(name, ids)
    check_allocated((name,), (ids,))
    found = unwrapped(name, ids).to(torch.int64)
    return found if found.dim() == 2 else found[None]


def _ranges(name: str, ends: Any) -> Tensor:
    """Integers as (batch, heads, length, ranges)."""
    if not isinstance(ends, Tensor) or ends.dtype not in INTEGERS or not 1 <= ends.dim() <= 4:
        fix = "Give one number per row."
        raise InvalidProblem(name, "an int32 or int64 tensor of 1 to 4 dimensions", _shown(ends), fix)
    check_class(name, ends)
    check_allocated((name,), (ends,))
    found = unwrapped(name, ends).to(torch.int64)
    if found.dim() == 4:
        return found
    # (length,), (batch, length) or (batch, heads, length).
    batched = found[None] if found.dim() == 1 else found
    return (batched[:, None] if batched.dim() == 2 else batched)[..., None]


def _positions(seqlen_q: int, seqlen_k: int) -> Tensor:
    """The key that each query is aligned with, (1, 1, seqlen_q), on the CPU."""
    _check_length("seqlen_q", seqlen_q)
    _check_length("seqlen_k", seqlen_k)
    return torch.arange(seqlen_k - seqlen_q, seqlen_k, dtype=torch.int64, device="cpu")[None, None]
