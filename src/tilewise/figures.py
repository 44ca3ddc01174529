"""Charts as SVG text that follows the reader's light or dark scheme. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from tilewise.errors import TilewiseError

# Text and lines are drawn in this colour, then follow the reader's scheme, because matplotlib cannot write
# "currentColor". The light scheme's grey has a contrast above 4 with white and with near-black, for a dark page on a
# light system.
INK = "#123456"
STYLE = "<style>svg{color:#6e7781}@media(prefers-color-scheme:dark){svg{color:#c9d1d9}}</style>"
# Legible on white and on black (contrast above 3 with both); tilewise is always the first.
OURS = ("#e8590c", "#d6336c", "#f08c00")
OTHERS = ("#1c7ed6", "#2b8a3e", "#9c36b5", "#0c8599", "#868e96", "#a07050", "#5f6fd0")
RULES = {
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.facecolor": "none", "figure.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": "tilewise",
    "axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "font.family": "sans-serif",
}  # fmt: skip


def render(draw: Callable[[Any], None], width: float, height: float) -> str:
    """The SVG of what `draw` puts on a matplotlib figure, size in inches. Equal drawings give equal text."""
    mpl = require()
    with mpl.rc_context(RULES):
        figure = mpl.figure.Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    head, body = buffer.getvalue().replace(INK, "currentColor").split("<defs>", 1)
    return f"{head}{STYLE}<defs>{body}"


def require() -> Any:
    """Import matplotlib, or raise an error that says how to get it."""
    try:
        import matplotlib as mpl
        import matplotlib.figure
    except ImportError as error:
        raise TilewiseError("plots need matplotlib: pip install 'tilewise[bench]'") from error
    return mpl
