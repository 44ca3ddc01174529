"""explain(): which backend would run a call and why, what it would compute and move, and the estimated time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tilewise import cascade, dispatch, validation
from tilewise import device as devices
from tilewise.cascade import SharedPrefix
from tilewise.device import DeviceSpec
from tilewise.dispatch import Rejection
from tilewise.errors import InvalidProblem, Unsupported
from tilewise.fp8.container import Fp8Tensor
from tilewise.masks import Band, TileCounts, TileGrid
from tilewise.operands import Flags, Lengths, Operands, Options, Window
from tilewise.plan import cost, report
from tilewise.plan.advice import TileAdvice, advise
from tilewise.plan.roofline import Memory, Work, memory_of, naive_work, tiled_work
from tilewise.problem import AttentionProblem, Kind
from tilewise.tile_masks import TileMask
from tilewise.tiles import EMPTY, FULL, TILE
from tilewise.totals import lengths_of

# A device of this machine, the name of any known one, or its spec.
Where = str | torch.device | DeviceSpec | None

# The tile used if no tiled backend takes the problem.
TEXTBOOK_TILE = TileGrid(128, 128)


class Higher(NamedTuple):
    """Which backend would compute tangents (jvp) and second derivatives, and the backends that refused before it."""

    backend: str | None
    rejected: tuple[Rejection, ...]


class ListedTiles(NamedTuple):
    """The tiles of 128 x 128 that a tile mask lists, of all sequences and heads, and that lengths, causal and window
    leave.
    """

    tiles: TileCounts
    # Of the pairs that causal and window leave, and of the tiles that have any of them, the part that is visited.
    share: float
    tile_share: float
    nbytes: int
    path: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What `attention` would do with a problem on a device. `str(plan)` is the report, `to_dict()` is ready for JSON.

    `backend` is None if no backend takes the problem. `tiles` counts the tiles of one head over all sequences, and
    under a tile mask that can be read those of the mask, 128 x 128, of all heads.
    `lengths_read` is False if the lengths of packed sequences could not be read and their bounds are used instead.
    `tile` is the backend's own, chosen by measurement; `advice` says which tiles fit the device, and why. `cascade`
    says what happens to a shared prefix that was given; figures still count every sequence's keys. `quantised` says how
    the backend computes with 8-bit operands, `unordered` what differs from run to run, if anything. `higher` says who
    would compute tangents and second derivatives of the call. `mask` says what a tile mask leaves; FLOPs, bytes moved
    and times count visited tiles.
    """

    problem: AttentionProblem
    device: DeviceSpec
    backend: str | None
    rejected: tuple[Rejection, ...]
    materialises: bool
    tile: TileGrid
    tiles: TileCounts
    lengths_read: bool
    flops_forward: int
    flops_backward: int
    memory: Memory
    naive: Work
    tiled: Work
    advice: TileAdvice
    higher: Higher
    cascade: str | None = None
    quantised: str | None = None
    unordered: str | None = None
    mask: ListedTiles | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all K/V heads, without scales; a latent counts once."""
        return self.problem.kv_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain dicts, lists, strings and numbers."""
        plain: dict[str, Any] = _plain(self)
        plain["bytes_per_token"] = self.bytes_per_token
        plain["features"] = list(self.problem.features)
        plain["tiles"]["visited"] = self.tiles.visited
        for way, work in (("naive", self.naive), ("tiled", self.tiled)):
            plain[way]["intensity"] = work.intensity
        return plain

    def __str__(self) -> str:
        return report.render(self)


def explain(
    q: Tensor | Fp8Tensor,
    k: Tensor | Fp8Tensor,
    v: Tensor | Fp8Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    shared_prefix: SharedPrefix | None = None,
    causal: bool = False,
    window: Window | None = None,
    bias: Tensor | None = None,
    mask: Tensor | TileMask | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    deterministic: bool | Literal["batch"] | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    return_max_logits: bool = False,
    device: Where = None,
    **unknown: Any,
) -> Plan:
    """What `attention`, `attention_varlen` (with cu_seqlens) or `attention_paged` (with a block_table) would do.

    Computes nothing: takes real, fake and meta tensors, and plans for another machine with `device="h200"`. Raises
    InvalidProblem as the call itself would. If no backend takes the problem, the plan says why.

        >>> q = k = v = torch.empty(1, 8, 4096, 128, dtype=torch.bfloat16, device="meta")
        >>> explain(q, k, v, causal=True, device="h200").tiled.flops
        34368126976
    """
    if unknown:
        raise validation.unexpected(explain, unknown)
    options = Options(*itemgetter(*Options._fields)(locals()))  # each argument of that name
    data: tuple[Any, Any, Any] = (q, k, v)
    # A mask with contents counts for meta tensors, too.
    read = mask if isinstance(mask, TileMask) and isinstance(q, Tensor) and q.is_meta else None
    hidden: Any = mask if read is None else read.to("meta")
    given = Operands(*data, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, bias, hidden, alibi_slopes, sinks)
    kind = _kind_of(given, dropout, layout)
    # Without a seed none is drawn: planning leaves torch's generator alone.
    lengths = Lengths(max_seqlen_q, max_seqlen_k)
    tensors, flags = validation.checked(kind, given, options, lengths, 0 if seed is None else seed)
    tensors = tensors._replace(seed=None) if seed is None else tensors
    plan = plan_of(kind, tensors, flags, device, read)
    if shared_prefix is None:
        return plan
    return dataclasses.replace(plan, cascade=cascade.describe(shared_prefix, tensors, flags, plan.device))


def plan_of(kind: Kind, operands: Operands, flags: Flags, where: Where = None, mask: TileMask | None = None) -> Plan:
    """The plan for operands and flags as the ops take them; `mask` is a tile mask to be read instead of theirs."""
    readable = _readable(operands)
    if readable:
        problem = validation.problem_of(kind, operands, flags)
    else:
        latent = validation.is_latent(operands.k, operands.v)
        problem = dataclasses.replace(validation.describe(kind, operands, flags), latent=latent)
    spec, here = _locate(operands.q.device, where)
    backend, rejected = _choose(problem, spec, flags.backend, here=here)
    materialises = backend in (None, "reference")
    shape = TEXTBOOK_TILE if backend is None or materialises else dispatch.load(backend).tile_shape(problem, spec)
    grid = TileGrid(*shape)
    sequences = _sequences(problem, operands if readable else None)
    bands = Counter({band: len(indices) for band, indices in sequences.items()})
    rated = devices.measured_cpu() if spec == devices.this_cpu() else spec
    if mask is not None:
        operands = operands._replace(tiles=mask.tiles, tile_bits=mask.bits, tile_lists=mask.lists)
    listed = _listed(problem, operands, backend, sequences)
    share, tile_share = (1.0, 1.0) if listed is None else (listed.share, listed.tile_share)
    pairs = round(sum(band.count_pairs() * times for band, times in bands.items()) * problem.num_heads * share)
    dims = problem.head_dim, problem.head_dim_v
    quantised, unordered = _reported(problem, backend)
    stored = operands[:2] + operands[3:] if problem.latent else operands
    learnt = [t for t in (operands.bias, operands.sinks) if t is not None and t.requires_grad]
    memory = memory_of(
        problem, *([t.numel() * t.dtype.itemsize for t in some if t is not None] for some in (stored, learnt))
    )
    return Plan(
        problem=problem,
        device=rated,
        backend=backend,
        rejected=rejected,
        materialises=materialises,
        tile=grid,
        tiles=_count_tiles(bands, grid) if listed is None else listed.tiles,
        lengths_read=readable or kind == "dense",
        flops_forward=cost.forward_flops(pairs, *dims),
        flops_backward=cost.backward_flops(pairs, *dims) if problem.needs_grad else 0,
        memory=memory,
        naive=naive_work(problem, bands, memory, rated),
        tiled=tiled_work(problem, bands, grid, memory, rated, share, tile_share),
        advice=advise(problem, rated),
        higher=Higher(*_choose(dataclasses.replace(problem, higher=True), spec, flags.backend, here=here)),
        quantised=quantised,
        unordered=unordered,
        mask=listed,
    )


def _kind_of(given: Operands, dropout: float, layout: str) -> Kind:
    """The kind of problem of the given tensors. Raises for what a call of this kind does not take."""
    kind: Kind = "dense"
    if given.block_table is not None or given.seqlens_k is not None:
        kind = "paged"
        if given.cu_seqlens_k is not None:
            fix = "Keys in pages have their lengths in seqlens_k."
            raise InvalidProblem("cu_seqlens_k", "None together with block_table", "a tensor", fix)
        if dropout != 0.0:
            fix = "Dropout is for training, pages for serving."
            raise InvalidProblem("dropout", "0.0 together with block_table", dropout, fix)
    elif given.cu_seqlens_q is not None or given.cu_seqlens_k is not None:
        kind = "varlen"
        if given.cu_seqlens_q is None:
            fix = "Packed sequences need the lengths of both sides."
            raise InvalidProblem("cu_seqlens_q", "a torch.Tensor, because cu_seqlens_k is given", None, fix)
    if kind != "dense" and layout != "bhsd":
        raise InvalidProblem("layout", "'bhsd' for packed and paged tensors", repr(layout), "Leave layout out.")
    return kind


def _readable(operands: Iterable[Tensor | None]) -> bool:
    """Whether index tensors have contents: they are neither meta nor fake."""
    return not any(isinstance(t, FakeTensor) or t.is_meta for t in operands if t is not None)


def _locate(own: torch.device, where: Where) -> tuple[DeviceSpec, bool]:
    """The device to plan for, and whether it is one of this machine, so that installed packages count."""
    if isinstance(where, DeviceSpec):
        return where, False
    if isinstance(where, str) and where.partition(":")[0] not in ("cpu", "cuda"):
        return devices.named(where), False
    if not (where is None or isinstance(where, (str, torch.device))):
        fix = f"Name one: {', '.join(devices.DEVICES)}."
        raise InvalidProblem("device", "a device, the name of one, or a DeviceSpec", repr(where), fix)
    target = own if where is None else torch.device(where)
    if target.type == "cuda" and not torch.cuda.is_available():
        fix = 'Name the device to plan for, such as device="h200".'
        raise InvalidProblem("device", "a device that is here, or a name", str(target), fix)
    return devices.of(target), True


def _choose(
    problem: AttentionProblem, spec: DeviceSpec, requested: str, *, here: bool
) -> tuple[str | None, tuple[Rejection, ...]]:
    try:
        selection = dispatch.select(problem, spec, requested, here=here)
    except Unsupported as refusal:
        return None, tuple(Rejection(*reason) for reason in refusal.reasons)
    return selection.backend.name, selection.rejected


def _reported(problem: AttentionProblem, name: str | None) -> tuple[str | None, str | None]:
    """What the backend says about 8-bit operands, and what it sums in no fixed order."""
    if name is None:
        return None, None
    backend = dispatch.load(name)
    return (backend.fp8_path(problem) if problem.fp8 else None), backend.unordered(problem)


def _listed(
    problem: AttentionProblem, operands: Operands, name: str | None, sequences: Mapping[Band, Sequence[int]]
) -> ListedTiles | None:
    """What a tile mask leaves, if there is one and it can be read."""
    if operands.tiles is None or operands.tile_bits is None or not _readable([operands.tiles]):
        return None
    path = "no backend takes it" if name is None else dispatch.load(name).skips_tiles(problem)
    stored = operands.tiles.cpu()
    full = visited = tiles = pairs = total = banded = 0
    for band, indices in sequences.items():
        visible, every = _visible_pairs(band)
        shared = len(stored) == 1
        own = (stored if shared else stored[list(indices)])[:, :, : visible.shape[0], : visible.shape[1]]
        # Sequences and heads that share an entry of the map.
        times = (len(indices) if shared else 1) * (problem.num_heads // stored.shape[1])
        listed = (own != EMPTY).sum((0, 1)) * times
        full += int(((own == FULL).sum((0, 1)) * times)[visible == every].sum())
        visited += int(listed[visible > 0].sum())
        pairs += int((listed * visible).sum())
        tiles += visible.numel() * problem.num_heads * len(indices)
        banded += int((visible > 0).sum()) * problem.num_heads * len(indices)
        total += band.count_pairs() * problem.num_heads * len(indices)
    nbytes = sum(t.nbytes for t in (operands.tiles, operands.tile_bits, operands.tile_lists) if t is not None)
    counts = TileCounts(full, visited - full, tiles - visited)
    return ListedTiles(counts, pairs / max(1, total), visited / max(1, banded), nbytes, path)


def _visible_pairs(band: Band) -> tuple[Tensor, Tensor]:
    """The pairs of each tile of 128 x 128 that a band leaves, and all pairs of the tile."""
    rows, keys = (torch.arange(-(-n // TILE) + 1, device="cpu").mul(TILE).clamp_max(n) for n in band[:2])
    left, right = (band.seqlen_q + band.seqlen_k if side is None else side for side in (band.left, band.right))
    every = torch.zeros(len(rows) - 1, len(keys) - 1, dtype=torch.int64, device="cpu")
    for m_block in range(len(every)):
        at = torch.arange(int(rows[m_block]), int(rows[m_block + 1]), device="cpu")[:, None] + band.offset
        upto = torch.minimum(keys, at + right + 1) - (at - left).clamp_min(0)
        every[m_block] = upto.clamp_min(0).sum(0).diff()
    return every, rows.diff()[:, None] * keys.diff()


def _sequences(problem: AttentionProblem, operands: Operands | None) -> dict[Band, Sequence[int]]:
    """The score matrices, and the sequences that have each."""
    if problem.kind == "dense":
        return {Band(problem.seqlen_q, problem.seqlen_k, *problem.band): range(problem.batch)}
    found: dict[Band, list[int]] = {}
    for index, pair in enumerate(_lengths(problem, operands)):
        found.setdefault(Band(*pair, *problem.band), []).append(index)
    return dict(found)


def _lengths(problem: AttentionProblem, operands: Operands | None) -> list[tuple[int, int]]:
    """(seqlen_q, seqlen_k) of every packed sequence. If unread, the fewest and longest that the bounds allow."""
    if operands is None:
        queries = _longest_split(problem.total_q, problem.seqlen_q, problem.batch)
        if problem.kind == "paged":
            return [(seqlen_q, problem.seqlen_k) for seqlen_q in queries]
        return list(zip(queries, _longest_split(problem.total_k, problem.seqlen_k, problem.batch), strict=True))
    totals_q, totals_k = operands.cu_seqlens_q, operands.cu_seqlens_k
    queries = [1] * problem.batch if totals_q is None else lengths_of(totals_q.tolist())
    keys = lengths_of(totals_k.tolist()) if totals_k is not None else cast("Tensor", operands.seqlens_k).tolist()
    return list(zip(queries, keys, strict=True))


def _longest_split(total: int, longest: int, batch: int) -> list[int]:
    return [min(longest, max(0, total - longest * index)) for index in range(batch)]


def _count_tiles(bands: Counter[Band], grid: TileGrid) -> TileCounts:
    counts = [(band.count_tiles(grid), times) for band, times in bands.items()]
    full, partial, skipped = (sum(count[i] * times for count, times in counts) for i in range(3))
    return TileCounts(full, partial, skipped)


def _plain(value: Any) -> Any:
    """Dataclasses and named tuples as dicts, dtypes by name, for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return _plain(value._asdict()) if hasattr(value, "_asdict") else [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
