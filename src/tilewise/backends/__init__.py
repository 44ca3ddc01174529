"""Who computes: one package per backend, each exposing `BACKEND`, an object that satisfies `base.Backend`."""

# In order of preference: `backend="auto"` takes the first that supports the problem.
NAMES = ("hopper", "triton", "cpu", "reference")
