"""Who computes: one package per backend, each exposing `BACKEND`, an object that satisfies `base.Backend`."""
