"""What plans consist of (tilewise.native) and the executor understands (tilewise.executor).

An operation has four 32-bit numbers: its own, where the result goes, and two operands x and y. The last three are
positions of 64-bit words, unless the table says otherwise. Where a result would not be the number that Python computes,
because it takes more than 64 bits or Python raises, the plan does not apply.
"""

STEP = 4
# What an execution returns: the plan does not apply, it does, or it does if storages are there. ASK + n: of the trace's
# operations, function n must be called first; of the others, the driver refused the map whose call begins at word n.
# -1 - n: launch n was refused.
NO, YES, DOUBTFUL, ASK = range(4)

OPERATIONS = (
    # The end, with the status `out`.
    "end",
    # Numbers. Those of floats begin with their type.
    "move", "+", "-", "*", "//", "%", "<<", ">>", "|", "&", "bit_length", "smallest", "largest",
    "float", "float +", "float -", "float *", "float /",
    # The plan does not apply unless the comparison is as `out` says: 0 or 1.
    "<", "<=", "==", "float <", "float <=", "float ==",
    # Sizes, strides and address of the tensor of rank `right` that word `left` refers to.
    "tensor",
    # Function `out` must be called unless x == y. Storages are to be looked at if x < y.
    "same", "doubt",
    # The plan does not apply unless x is an int32; store x as a uint32 at half word `out`; as the bits of an fp32.
    "narrow", "half", "single",
    # Launch nothing unless x is 0.
    "watched",
    # A tensor map: `left` begins the driver's function and arguments, `right` the `out` words that it is encoded from,
    # and as many of the last time. Of word `out`, clear the bits y[1] if x < y[0].
    "encode", "clear",
    # Launch number `out`: `left` begins the driver's function and arguments.
    "launch",
)  # fmt: skip
