"""Walks the models of transformers under tilewise's attention and says of each: right, refused, wrong or unclear.

    PYTHONPATH=src:tools python -m zoo                                  # every type, both names
    PYTHONPATH=src:tools python -m zoo --types xglm,mpnet --name tilewise
    ... --classes all: every class of a type, not the main ones; --jobs 2; --limit 60 (seconds a type)
    ... --output FILE.json: what was found, which `python -m zoo.table` makes docs/transformers.md of

Put another release of transformers first on PYTHONPATH to walk that one. The exit status is 1 if a model is wrong or
fails with an unclear error. Each type runs in a process of its own.
"""

from __future__ import annotations

import sys

from zoo.walk import main

sys.exit(main())
