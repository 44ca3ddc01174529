"""What kernels hand to the next one through memory that the stream keeps, without a GPU: nobody gets it meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fake_cuda import FakeCuda, fake_cuda
from test_gpu_launch import h200, problem_of
from tilewise.backends.triton import BACKEND as TRITON
from tilewise.operands import Operands

__all__ = ["fake_cuda", "h200"]

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16


def parts_given(bound: Any, ready: Operands) -> int:
    """Where the kernels of a call found the parts of decoding."""
    seen: list[int] = []
    plain = bound._launches.filled

    def filled(stream: int, addresses: Any) -> Any:
        seen[:] = addresses
        return plain(stream, addresses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(bound._launches), "filled", lambda _, *arguments: filled(*arguments))
        bound._started.clear()
        assert bound(ready) is not None
    return seen[list(bound._launches.used).index("workspace")]


def test_what_kernels_hand_on_is_theirs_until_the_last_one(h200: FakeCuda) -> None:
    """A call that comes between the kernels of another one (of a thread, a hook, a finaliser) takes other memory, and
    does not wait; so it is for all passes of a stream together.
    """
    q, k = torch.zeros(1, 8, 1, 64, dtype=BF16), torch.zeros(1, 2, 4096, 64, dtype=BF16)
    problem, ready = problem_of(Operands(q, k, k))
    bound: Any = TRITON.bind_forward(problem, ready, want_lse=False)
    more: Any = TRITON.bind_forward(*problem_of(Operands(q, k[:, :, :3000], k[:, :, :3000])), want_lse=False)
    assert [call.kernel.__name__ for call in bound.calls] == ["decode_kernel", "combine_kernel"]
    kept = parts_given(bound, ready)
    assert parts_given(bound, ready) == parts_given(more, ready) == kept
    (lock,) = {started.lock for started in bound._started.values()}
    # In the middle of a call the lock is held, whoever calls.
    inner: list[int] = []
    launch = bound._launches._direct[0]._launch

    def between(*arguments: Any) -> int:
        if not inner:
            assert lock.locked()
            inner.append(parts_given(more, ready))
        return int(launch(*arguments))

    bound._launches._direct[1]._launch = between
    bound._started.clear()
    h200.expect()
    assert bound(ready) is not None
    assert h200.seen().launches == 4
    assert not lock.locked()
    assert inner != [kept]
    # What was taken once is not remembered.
    assert parts_given(more, ready) == kept
    # A launch that is refused gives it back.
    h200.refuse(2)
    with pytest.raises(RuntimeError, match="fake"):
        bound(ready)
    assert not lock.locked()
    assert parts_given(bound, ready) == kept
