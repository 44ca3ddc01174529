"""Synchronisation of producer and consumers: rings of shared-memory slots, and a mailbox for the next tile.

Every slot has two mbarriers. `ready` completes when TMA has delivered the bytes that `acquire` announced. `empty`
completes when every consumer has called `release`. A `Cursor` carries the parity that tells this round's completion of
a barrier from the last round's; no other code touches parities. Producer and consumers each walk the ring with their
own cursor. The cursors agree because both visit every slot in order.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return,misc"
# ruff: noqa: N803, N806, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.gpu.releases import aggregate, barrier


@aggregate
class Cursor:
    """A position in a ring: the slot, and the parity of the current round."""

    slot: gl.tensor
    parity: gl.tensor
    NUM_SLOTS: gl.constexpr

    @gluon.jit
    def next(self):
        """The following slot; a new round begins after the last one."""
        NUM_SLOTS: gl.constexpr = self.NUM_SLOTS
        if NUM_SLOTS == 1:
            return Cursor(self.slot, self.parity ^ 1, self.NUM_SLOTS)
        else:
            following = self.slot + 1
            wraps = following == NUM_SLOTS
            slot = gl.where(wraps, 0, following)
            parity = gl.where(wraps, self.parity ^ 1, self.parity)
            return Cursor(slot, parity, self.NUM_SLOTS)

    @gluon.jit
    def lane(self, LANE: gl.constexpr, NUM_LANES: gl.constexpr):
        """The slot of one of NUM_LANES warpgroups, each of which has its own slot at this cursor's position."""
        return Cursor(self.slot * NUM_LANES + LANE, self.parity, self.NUM_SLOTS)


@gluon.jit
def start(NUM_SLOTS: gl.constexpr):
    """A cursor at the first slot of the first round."""
    return Cursor(gl.to_tensor(0), gl.to_tensor(0), NUM_SLOTS)


@aggregate
class Ring:
    """The barriers of a ring of slots; the caller owns the slots' memory."""

    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def acquire(self, at, NUM_BYTES: gl.constexpr):
        """Producer: wait until the slot is free, announce NUM_BYTES, return the barrier that TMA reports to."""
        mbarrier.wait(self.empty.index(at.slot), at.parity ^ 1)
        mbarrier.expect(self.ready.index(at.slot), NUM_BYTES)
        return self.ready.index(at.slot)

    @gluon.jit
    def await_free(self, at):
        """A producer that stores by itself: wait until the slot is free."""
        mbarrier.wait(self.empty.index(at.slot), at.parity ^ 1)

    @gluon.jit
    def signal(self, at):
        """A producer that stores by itself: what it stored may be read."""
        mbarrier.arrive(self.ready.index(at.slot), count=1)

    @gluon.jit
    def wait(self, at):
        """Consumer: wait until the slot's bytes have arrived."""
        mbarrier.wait(self.ready.index(at.slot), at.parity)

    @gluon.jit
    def release(self, at):
        """Consumer: this warpgroup has read the slot for the last time in this round."""
        mbarrier.arrive(self.empty.index(at.slot), count=1)


@gluon.jit
def make_ring(NUM_SLOTS: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    """Allocate and initialise the barriers of a ring. The caller must fence before the roles start. With NUM_CONSUMERS
    of 0 nobody releases a slot, and there is no `empty`.

    Make no barrier that no role uses: the compiler gives its memory to something else. An SM keeps barriers in a cache,
    and writes that one back over it when the kernel is interrupted, as on a GPU that other processes use as well.
    """
    ready = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS, 1], mbarrier.MBarrierLayout())
    empty = ready
    if NUM_CONSUMERS:
        empty = gl.allocate_shared_memory(gl.int64, [NUM_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_SLOTS):
        mbarrier.init(ready.index(i), count=1)
        if NUM_CONSUMERS:
            mbarrier.init(empty.index(i), count=NUM_CONSUMERS)
    return Ring(ready, empty)


@aggregate
class Mailbox:
    """A few integers from the producer to every consumer, in shared memory: a tile's number or its list words."""

    values: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def send(self, at, words):
        """Producer (one warp): wait until all consumers have released the slot, then send words, or one number."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        NUM_WORDS: gl.constexpr = self.values.shape[1]
        mbarrier.wait(self.empty.index(at.slot), at.parity ^ 1)
        self.values.index(at.slot).store(gl.full([NUM_WORDS], 0, gl.int32, LAYOUT) + words)
        mbarrier.arrive(self.ready.index(at.slot), count=1)

    @gluon.jit
    def leave(self, at, words):
        """Producer: store words without waiting or signalling. The slot must be released already, and readers must wait
        for something that the producer signals later.
        """
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        NUM_WORDS: gl.constexpr = self.values.shape[1]
        self.values.index(at.slot).store(gl.full([NUM_WORDS], 0, gl.int32, LAYOUT) + words)
        barrier()  # every lane has stored its word before one of them signals

    @gluon.jit
    def wait(self, at):
        """Consumer: wait until the words are there."""
        mbarrier.wait(self.ready.index(at.slot), at.parity)

    @gluon.jit
    def word(self, at, WORD: gl.constexpr, NUM_WARPS: gl.constexpr):
        """One of the slot's words, for a role of NUM_WARPS warps; call `wait` first."""
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        return gl.max(self.values.index(at.slot).slice(WORD, 1).load(LAYOUT), axis=0)

    @gluon.jit
    def release(self, at):
        """Consumer: this warpgroup has read the words it needs."""
        mbarrier.arrive(self.empty.index(at.slot), count=1)

    @gluon.jit
    def receive(self, at):
        """Consumer (four warps): wait for the first word, read it and release the slot."""
        self.wait(at)
        number = self.word(at, 0, 4)
        self.release(at)
        return number


@gluon.jit
def make_mailbox(NUM_CONSUMERS: gl.constexpr, NUM_SLOTS: gl.constexpr = 1, NUM_WORDS: gl.constexpr = 1):
    """Allocate and initialise an empty mailbox. With NUM_CONSUMERS of 0 it has no barriers: nobody waits for words."""
    values = gl.allocate_shared_memory(gl.int32, [NUM_SLOTS, NUM_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if NUM_CONSUMERS:
        ring = make_ring(NUM_SLOTS, NUM_CONSUMERS)
        return Mailbox(values, ring.ready, ring.empty)
    else:
        return Mailbox(values, values, values)
