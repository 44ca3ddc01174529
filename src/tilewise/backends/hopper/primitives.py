"""Single instructions and small register arithmetic that Gluon has no name for, and memory order between CTAs through
global memory, because mbarriers work only within a CTA.

Figures: bench/results/hopper-forward-choices.csv.
"""

# Device code: Triton reads the bodies, Python types mean nothing to it, and constexprs are in capitals.
# mypy: disable-error-code="misc, no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806, RET505

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gpu.releases import barrier

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NEG_INF = gl.constexpr(float("-inf"))
# The backward treats rows with a larger |lse| (in nats) as empty. Such an lse is a multiple of 4, so the rounding of
# score - lse makes P meaningless.
LARGEST_LSE = gl.constexpr(2.0**25)


@gluon.jit
def exp2(x):
    """2^x as one MUFU.EX2; subnormal results become 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    """log2 of a normal x as one MUFU.LG2, off by at most 2^-22."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def power_over(x):
    """The smallest power of two that is at least x, for x > 0."""
    bits = gl.cast(gl.to_tensor(x), gl.int32, bitcast=True)
    return gl.cast((bits + 0x7FFFFF) & 0x7F800000, gl.float32, bitcast=True)


@gluon.jit
def tanh(x):
    """1 - 2 / (1 + e^2x), with an absolute error below 2e-7. tanh.approx is off by 5e-4, too much for a softcap."""
    e = exp2(x * (2.0 * LOG2E))
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], dtype=gl.float32, is_pure=True, pack=1
    )
    return 1.0 - 2.0 * inverse


@gluon.jit
def pin(x):
    """X >= 0, unchanged, with a side effect that depends on x but never happens.

    It keeps ptxas from hoisting the next wgmma wait above the computation of x.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred q; setp.lt.f32 q, $1, 0fBF800000; @q bar.arrive 15, 128; mov.f32 $0, $1; }",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def widened(codes):
    """e4m3 or int8 numbers in fp16. int8: a code + 128 in the last bits of 1024 gives 1152 + code, exactly."""
    if codes.dtype == gl.int8:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 code, low, high, zero;
            xor.b32 code, $2, 0x80808080;
            mov.b32 zero, 0x64806480;
            prmt.b32 low, code, 0x64646464, 0x4140;
            prmt.b32 high, code, 0x64646464, 0x4342;
            sub.rn.f16x2 $0, low, zero;
            sub.rn.f16x2 $1, high, zero;
            }""",
            "=r,=r,r",
            [codes],
            dtype=gl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return codes.to(gl.float16)


@gluon.jit
def uniform(x):
    """x, which ptxas then knows to be equal in the whole warp and keeps in uniform registers."""
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def rebuilt(index, slot, WANTED: gl.constexpr):
    """index, unchanged. If WANTED it seems to depend on a ring's slot: slot >> 16 is added, which is 0.

    A tile that stays during a loop has a wgmma descriptor of 64 bits for every 16 columns. As loop invariants, they are
    computed once and take registers from the accumulators. With this index the loop rebuilds them on the uniform
    datapath.
    """
    if WANTED:
        index += gl.inline_asm_elementwise("shr.u32 $0, $1, 16;", "=r,r", [slot], dtype=gl.int32, is_pure=True, pack=1)
    return index


@gluon.constexpr_function
def _or_asm(count):
    """PTX of a, the OR of $0 .. $count-1, in four chains, because the steps of a chain depend on each other."""
    chains = [f"or.b32 o{i}, ${i}, ${i + 4};" for i in range(4)]
    chains += [f"lop3.b32 o{i // 2 % 4}, o{i // 2 % 4}, ${i}, ${i + 1}, 0xFE;" for i in range(8, count, 2)]
    return ".reg .b32 o<4>; " + " ".join(chains) + " lop3.b32 o0, o0, o1, o2, 0xFE; or.b32 a, o0, o3;"


@gluon.constexpr_function
def _count_asm(count, marks):
    """PTX of integers $0.. from products of $count.. and $2count..; marks: store NaN for rows $3count.. at $4count.."""
    x, units, rows, ptr = (count * i for i in (1, 2, 3, 4))
    quick = " ".join(f"fma.rn.f32 ${i}, ${x + i}, ${units + i}, 0f40400000;" for i in range(count))
    exact = " ".join(
        f"fma.rn.f32 c, ${x + i}, ${units + i}, 0f44C00000; sub.f32 d, 0f44C06000, c; "
        f"fma.rn.f32 d, ${x + i}, ${units + i}, d; mov.b32 a, c; mov.b32 b, d; mad.lo.u32 a, a, 512, b; "
        f"xor.b32 ${i}, a, 0x80000000;"
        for i in range(count)
    )
    marked = " ".join(
        f"abs.f32 c, ${x + i}; setp.geu.f32 p, c, 0f7F800000; mad.wide.s32 at, ${rows + i}, 4, ${ptr}; "
        "@p st.global.b32 [at], 0x7FFFFFFF;"
        for i in (0, 2)
        if marks
    )
    return (
        f"{{ .reg .pred p; .reg .b32 a, b; .reg .f32 c, d; .reg .b64 at; {quick} {_or_asm(count)} "
        "and.b32 a, a, 0xFF800000; setp.ne.u32 p, a, 0x40000000; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE; {exact} {marked} DONE: }}"
    )


@gluon.constexpr_function
def _count_constraints(count, marks):
    return ",".join(["=&r"] * count + ["f"] * (2 * count) + (["r"] * count + ["l"] * count if marks else []))


@gluon.jit
def count_units(x, units, rows, ptr, COUNT: gl.constexpr):
    """COUNT_BIAS + the integer nearest to x * units * 2^22, for COUNT elements a thread at a time.

    Why not a conversion: its unit is an eighth as fast as an addition, and shared with exp2.

    Short path: floats between 2 and 4 are multiples of 2^-22. A multiply-add that adds 3 rounds to one of them, and its
    bits are the integer plus a bias. This is right if all results lie between 2 and 4, that is, if all biased exponents
    are 128. Their OR is 128 only if each is 128 or 0. (A result of 0 cannot occur: the last bit of units is set, so
    their product with x is never -3.)

    Long path, taken by a warp with an element beyond 2^22: a float near 1536 first counts multiples of 512, and then a
    second addition counts the remainder exactly. It is right up to 2^31.

    With ptr the long path also stores NaN at ptr + row for each of a thread's two rows (those of its first and third
    element) that is not finite.
    """
    MARKS: gl.constexpr = ptr is not None
    ASM: gl.constexpr = _count_asm(COUNT, MARKS)
    CONSTRAINTS: gl.constexpr = _count_constraints(COUNT, MARKS)
    if MARKS:
        return gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [x, units, rows, gl.cast(ptr, gl.int64)], dtype=gl.int32, is_pure=False, pack=COUNT
        )
    else:
        return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, units], dtype=gl.int32, is_pure=True, pack=COUNT)


@gluon.constexpr_function
def _barrier_asm(operation, index, threads):
    return f"bar.{operation} {index}, {threads}; mov.u32 $0, $1;"


@gluon.jit
def let_next_start():
    """Allow the next kernel to start once all programs have called this; it must wait for this kernel's end itself."""
    ASM: gl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_kernel_before():
    """Wait until the kernel before has ended and its writes are visible."""
    ASM: gl.constexpr = "griddepcontrol.wait; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_sync(INDEX: gl.constexpr, THREADS: gl.constexpr):
    """A named hardware barrier between warpgroups; 8 to 15 are not used by Triton's own lowering."""
    ASM: gl.constexpr = _barrier_asm("sync", INDEX, THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _barrier_at_asm(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def barrier_at(OPERATION: gl.constexpr, index, THREADS: gl.constexpr):
    """Call bar.OPERATION ("sync" or "arrive") on a named barrier whose number is known at run time."""
    ASM: gl.constexpr = _barrier_at_asm(OPERATION, THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [index], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(INDEX: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at a named barrier without waiting. Those who sync there see what this warpgroup has stored."""
    ASM: gl.constexpr = _barrier_asm("arrive", INDEX, THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _unless_asm(count):
    first, second = 2 * count, 2 * count + 2
    steps = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, ${first}, 0f3F800000; setp.neu.or.f32 q, ${second}, 0f3F800000, p; "
        f"vote.sync.any.pred q, q, 0xffffffff; @!q bra.uni DONE; {steps} DONE: }}"
    )


@gluon.constexpr_function
def _unless_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def unless_one(x, y, COUNT: gl.constexpr):
    """Compute x * y, except in a warp all of whose y, one for each row, are 1.

    A thread has COUNT registers of x, of two rows in accumulator order: registers 0 and 1 belong to the first row, 2
    and 3 to the second, and so on.
    """
    ASM: gl.constexpr = _unless_asm(COUNT)
    CONSTRAINTS: gl.constexpr = _unless_constraints(COUNT)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, y], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.constexpr_function
def _largest_asm(count):
    """PTX of $0.., the maxima of a thread's two rows of $count.., by which path is told by the rows' $2count.."""
    rows = [[i for i in range(count) if i // 2 % 2 == row] for row in (0, 1)]
    bits = " ".join(
        f"mov.b32 m{row}, ${count + first}; "
        + " ".join(f"mov.b32 t, ${count + i}; max.s32 m{row}, m{row}, t;" for i in others)
        + f" mov.b32 f{row}, m{row};"
        for row, (first, *others) in enumerate(rows)
    )
    floats = " ".join(
        f"mov.f32 f{row}, ${count + first}; " + " ".join(f"max.f32 f{row}, f{row}, ${count + i};" for i in others)
        for row, (first, *others) in enumerate(rows)
    )
    results = " ".join(f"mov.f32 ${i}, f{i // 2 % 2};" for i in range(count))
    return (
        "{ .reg .pred p, q; .reg .s32 t, m<2>; .reg .f32 f<2>; "
        f"setp.lt.f32 p, ${2 * count}, 0f00000000; setp.lt.or.f32 q, ${2 * count + 2}, 0f00000000, p; "
        f"vote.sync.any.pred q, q, 0xffffffff; @q bra.uni FLOATS; {bits} bra.uni DONE; FLOATS: {floats} "
        f"DONE: {results} }}"
    )


@gluon.constexpr_function
def _largest_constraints(count):
    return ",".join(["=f"] * count + ["f"] * (2 * count))


@gluon.jit
def largest(x, floor, COUNT: gl.constexpr):
    """The largest of floor, one for each row, and the thread's elements of the row, or anything below floor; in all of
    these elements. A thread has COUNT registers of x, in accumulator order as in unless_one.

    Integers have an instruction for the largest of three, floats only of two. The bits of floats, read as integers, are
    in order unless both are negative. So a warp whose floors are all 0 or more compares integers: of elements that are
    all negative they may give the wrong one, but none of these is above floor.
    """
    ASM: gl.constexpr = _largest_asm(COUNT)
    CONSTRAINTS: gl.constexpr = _largest_constraints(COUNT)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, floor], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def first(a, b):  # noqa: ARG001 - combines equal elements
    """A reduction of equal elements to one of them."""
    return a


@gluon.jit
def in_pairs(x, DTYPE: gl.constexpr):
    """X in 16 bits, columns 2i and 2i + 1 in integer i.

    A loop that carries 16-bit elements keeps each in a register of its own and must pack them for the next product.
    """
    ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $2;" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $1, $2;"
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [high, low], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def from_pairs(pairs, DTYPE: gl.constexpr):
    """What `in_pairs` has rounded."""
    ASM: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    if gl.bfloat16 == DTYPE:  # a tuple of constexprs is not taken as dtype
        low, high = gl.inline_asm_elementwise(
            ASM, "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            ASM, "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return gl.reshape(gl.join(low, high), [pairs.shape[0], pairs.shape[1] * 2])


@gluon.constexpr_function
def _seen_asm(count):
    words = range(count // 16)
    late = "abs.f32 x, $0; min.f32 x, x, 0f00000000; mov.b32 z, x; " + " ".join(
        f"or.b32 w{2 * k + row}, ${2 * count + 16 * k + 2 * row}, z;" for k in words for row in (0, 1)
    )
    steps = " ".join(
        f"and.b32 z, w{i // 16 * 2 + i // 2 % 2}, {1 << (i // 4 % 4 * 8 + i % 2)}; setp.ne.s32 p, z, 0; "
        f"selp.f32 ${i}, ${i}, 0fFF800000, p;"
        for i in range(count)
    )
    return f"{{ .reg .pred p; .reg .f32 x; .reg .b32 z, w<{2 * len(words)}>; {late} {steps} }}"


@gluon.constexpr_function
def _seen_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * count)


@gluon.jit
def only_seen(x, words, COUNT: gl.constexpr):
    """x, or -inf where a bit of words is 0. A thread has COUNT registers of x, in accumulator order as in unless_one;
    its bits for a row and 32 columns are bits 0, 1, 8, 9, 16, 17, 24 and 25 of one word.

    The words seem to depend on x: the smaller of |x| and 0 is added, which is 0. Otherwise ptxas tests the bits while
    x is still being multiplied, and as there are only seven predicates, packs the results into words again.
    """
    ASM: gl.constexpr = _seen_asm(COUNT)
    CONSTRAINTS: gl.constexpr = _seen_constraints(COUNT)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [x, words], dtype=gl.float32, is_pure=True, pack=COUNT)


@gluon.jit
def load_acquire(at):
    """Load a 32-bit integer with acquire order: what was published before it was written is visible afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def publish():
    """Let one thread signal for all of this role: its next atomic with release order makes their stores to global
    memory visible to other CTAs and their TMA.
    """
    FENCE: gl.constexpr = "fence.proxy.async; mov.u32 $0, $1;"  # inline assembly needs a result
    gl.inline_asm_elementwise(FENCE, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)
    barrier()
