"""Compares the arguments of all ranks on first use: ranks that call with different arguments would deadlock.

Every rank describes its call in words, the function's name first. The first time a rank sees a description, one number
per rank is exchanged; only if they differ are the descriptions exchanged, and the error names the first argument that
differs and on which ranks.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tilewise.distributed.transport import Group, all_gather, failures_named
from tilewise.errors import InvalidProblem, TilewiseError

# The arguments of a rank by name; hashable, so that they are compared once.
Description = tuple[tuple[str, str], ...]

# Descriptions cached per group. Packed batches bring new documents, and so a new description, every step. The oldest
# are evicted in the order of the calls, which is the same on every rank.
MAX_REMEMBERED = 1024

# A rank whose own arguments are invalid tells its peers under this name.
FAILED = "arguments"


@functools.cache
def _agreed() -> WeakKeyDictionary[Group, OrderedDict[int, None]]:
    """The digests each group has agreed on. Weak: a group that outlives the interpreter aborts the process."""
    return WeakKeyDictionary()


def agree(description: Description, group: Group, where: torch.device) -> None:
    """Return if every rank of the group makes the same call, else raise InvalidProblem on all of them; cached."""
    known = _agreed().setdefault(group, OrderedDict())
    digest = _digest(description)
    if digest in known:
        known.move_to_end(digest)
        return
    _compare(description, group, where)
    known[digest] = None
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)


def refuse(error: TilewiseError, group: Group, where: torch.device, flags: Description = ()) -> NoReturn:
    """Tell the peers, if they are comparing too, that this rank cannot take part; then raise its own error, or what
    explains it: `flags` that differ from the peers'.
    """
    # Once calls have agreed, peers may be past comparing: they time out, and this rank should not wait for them.
    # A compiler that traces this runs it again outside of its graph, or says what was raised.
    if not torch.compiler.is_compiling() and not _agreed().get(group):
        try:
            _compare((*flags, (FAILED, f"{type(error).__name__}: {error}")), group, where)
        except TilewiseError as joint:
            if isinstance(joint, InvalidProblem) and joint.argument != FAILED:
                raise joint from error
            raise error from joint
    raise error


def _compare(description: Description, group: Group, where: torch.device) -> None:
    world = dist.get_world_size(group)
    if world == 1:
        return
    digest = _digest(description)
    with failures_named("comparing the arguments of all ranks"):
        digests = all_gather(torch.tensor([digest], device=where), group).tolist()
        if len(set(digests)) == 1:
            return
        texts: list[Description] = [()] * world
        dist.all_gather_object(texts, description, group=group)
    raise _difference(texts)


def _digest(description: Description) -> int:
    return int.from_bytes(hashlib.blake2b(repr(description).encode(), digest_size=8).digest(), "big", signed=True)


def _difference(texts: list[Description]) -> InvalidProblem:
    tables = [dict(text) for text in texts]
    failed = {rank: table[FAILED] for rank, table in enumerate(tables) if FAILED in table}
    names = list(dict.fromkeys(name for table in tables for name in table))
    if failed:
        # A flag that differs explains why a rank failed: with another layout it takes heads for rows.
        names = [name for name in names if name != FAILED and all(name in table for table in tables)]
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            values.setdefault(table.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            got = ", ".join(
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in values.items()
            )
            return InvalidProblem(name, "the same on every rank of the group", got, "Call with equal arguments.")
    if failed:
        rank, reason = next(iter(failed.items()))
        got = f"on rank {rank} {reason.removesuffix('.')}"
        return InvalidProblem(FAILED, "valid ones on every rank", got, "Correct them there.")
    return InvalidProblem(FAILED, "the same on every rank", "digests that differ", "Call with equal arguments.")
