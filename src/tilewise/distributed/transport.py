"""Communication between ranks: point-to-point rings, gathers and all-to-alls over one process group.

With NCCL a wait only orders streams; the host runs on. gloo carries CPU memory; CUDA tensors on a gloo group (two ranks
on one GPU, where NCCL refuses) are staged through the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tilewise.errors import InvalidProblem, TilewiseError

Group = ProcessGroup
MeshOrGroup = ProcessGroup | DeviceMesh | None
# The name from torch 2.13 on, where the old one warns.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PeerFailure(TilewiseError, RuntimeError):
    """Another rank died, or did not take part within the group's timeout."""


def group_of(mesh_or_group: MeshOrGroup) -> Group:
    """The process group of a group, a one-dimensional mesh, or None for all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        fix = "Start with torchrun and call torch.distributed.init_process_group first."
        raise InvalidProblem("mesh_or_group", "an initialised process group", "torch.distributed not initialised", fix)
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            fix = 'Take the dimension that splits the sequence: mesh["context"].'
            raise InvalidProblem("mesh_or_group", "a one-dimensional mesh", f"{mesh_or_group.ndim} dimensions", fix)
        return mesh_or_group.get_group()
    group = dist.group.WORLD if mesh_or_group is None else mesh_or_group
    if not isinstance(group, ProcessGroup):
        fix = "A rank outside of a sub-group must not call; pass the group that new_group returned to its members."
        raise InvalidProblem("mesh_or_group", "a ProcessGroup, a DeviceMesh or None", repr(group), fix)
    return group


def group_named(name: str) -> Group:
    """The group with the name that an op was given."""
    c10d: Any = torch.distributed.distributed_c10d
    return cast("Group", c10d._resolve_process_group(name))  # noqa: SLF001


class Transfer(NamedTuple):
    """A running exchange. `wait` returns the received tensors; `sent` is kept alive until then."""

    works: list[dist.Work]
    received: list[Tensor]
    staged: list[Tensor]
    sent: list[Tensor]
    what: str

    def wait(self) -> list[Tensor]:
        """The received tensors, usable on the current stream."""
        with failures_named(self.what):
            for work in self.works:
                work.wait()
        for target, source in zip(self.received, self.staged, strict=False):
            target.copy_(source)
        return self.received


def rotate(tensors: Sequence[Tensor], into: Sequence[Tensor], shift: int, group: Group, what: str) -> Transfer:
    """Start sending tensors to the rank `shift` further on and receiving into others from the one `shift` before."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    staging = _staged(group, tensors[0])
    sent = [t.cpu() if staging else t for t in tensors]
    targets = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in into] if staging else list(into)
    ahead = dist.get_global_rank(group, (rank + shift) % world)
    behind = dist.get_global_rank(group, (rank - shift) % world)
    transfers = [dist.P2POp(dist.isend, t, ahead, group) for t in sent]
    transfers += [dist.P2POp(dist.irecv, t, behind, group) for t in targets]
    with failures_named(what):
        works = dist.batch_isend_irecv(transfers)
    return Transfer(works, list(into), targets if staging else [], sent, what)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """The contiguous tensors of all ranks one after another along the first dimension."""
    return start_all_gather(tensor, group).wait()[0]


def start_all_gather(tensor: Tensor, group: Group) -> Transfer:
    """A started `all_gather`."""
    world = dist.get_world_size(group)
    shape = (world * tensor.shape[0], *tensor.shape[1:]) if tensor.dim() else (world,)
    whole = tensor.new_empty(shape)
    if world == 1:
        return Transfer([], [whole.copy_(tensor)], [], [], "")
    staging = _staged(group, tensor)
    sent = tensor.cpu() if staging else tensor
    target = torch.empty(shape, dtype=tensor.dtype, device="cpu") if staging else whole
    with failures_named("gathering"):
        work = _GATHER(target, sent, group=group, async_op=True)
    return Transfer([work], [whole], [target] if staging else [], [sent], "gathering")


def all_to_all(tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send `send[r]` rows of a contiguous tensor to each rank r and receive `receive[r]` rows from it."""
    staging = _staged(group, tensor)
    sent = tensor.cpu() if staging else tensor
    target = sent.new_empty((sum(receive), *tensor.shape[1:]))
    if dist.get_world_size(group) == 1:
        return tensor.clone()
    with failures_named("exchanging heads"):
        dist.all_to_all_single(target, sent, list(receive), list(send), group=group)
    return target.to(tensor.device)


def _staged(group: Group, tensor: Tensor) -> bool:
    """Whether the group's backend for this device cannot carry its memory."""
    if not tensor.is_cuda:
        return False
    with contextlib.suppress(RuntimeError):
        backend: Any = group._get_backend(tensor.device)  # noqa: SLF001
        return "nccl" not in str(backend.name()).lower()
    return True


@contextlib.contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Adds what was being done to the error if the group fails."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, TilewiseError):
            raise
        raise PeerFailure(
            f"context parallel attention failed while {what}: a peer died, or ranks called with different arguments "
            f"and one did not answer within the group's timeout ({error})"
        ) from error
