"""Draws the diagrams of docs/kernels: `python docs/images/diagrams.py` writes the SVG files beside this script.

Colours are CSS classes with a second set for dark mode, so that a picture is legible on both.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
STYLE = """
  text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #24292f; text-anchor: middle }
  .start { text-anchor: start } .small { font-size: 11.5px } .bold { font-weight: 600 }
  .panel { fill: #ffffff } .frame { fill: none; stroke: #8c959f; stroke-dasharray: 5 4 }
  .q { fill: #b6e3ff; stroke: #54aeff } .kv { fill: #ffd8b5; stroke: #e0823d } .p { fill: #c9f0d1; stroke: #4ac26b }
  .o { fill: #e5d5fb; stroke: #a475f9 } .idle { fill: #eaeef2; stroke: #afb8c1 }
  .arrow { stroke: #57606a; stroke-width: 1.6; fill: none; marker-end: url(#tip) } .tip { fill: #57606a }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .panel { fill: #0d1117 } .frame { stroke: #6e7681 }
    .q { fill: #0c2d6b; stroke: #388bfd } .kv { fill: #5a1e02; stroke: #db6d28 } .p { fill: #033a16; stroke: #2ea043 }
    .o { fill: #3c1e70; stroke: #8957e5 } .idle { fill: #21262d; stroke: #484f58 }
    .arrow { stroke: #9198a1 } .tip { fill: #9198a1 }
  }
"""


class Picture:
    """Shapes of one SVG file, in the order in which they are drawn."""

    def __init__(self, width: int, height: int, label: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(label)}">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
            f'<rect class="panel" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        """One line of text; `style` names classes."""
        self.parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, style: str, words: str = "") -> None:
        """A rectangle with lines of text in its middle."""
        self.parts.append(f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        lines = words.split("\n") if words else []
        for number, line in enumerate(lines):
            middle = y + height / 2 + 4.5 + 16 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line, "small")

    def arrow(self, *points: float) -> None:
        """A line through points (x, y, x, y, ...) with a tip at its end."""
        path = " L".join(f"{x:g} {y:g}" for x, y in zip(points[::2], points[1::2], strict=True))
        self.parts.append(f'<path class="arrow" d="M{path}"/>')

    def write(self, name: str) -> None:
        """The file, beside this script."""
        (HERE / name).write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def draw_cta() -> None:
    """One CTA of the forward: who owns which memory."""
    picture = Picture(900, 400, "One CTA of the Hopper forward: a producer warp, rings in shared memory, consumers")
    for x, width, title in ((20, 160, "global memory"), (215, 365, "shared memory"), (615, 265, "registers")):
        picture.box(x, 45, width, 335, "frame")
        picture.text(x + width / 2, 32, title, "bold")
    for y, style, name in ((90, "q", "Q"), (150, "kv", "K"), (210, "kv", "V"), (270, "o", "out, lse")):
        picture.box(40, y, 120, 34, style, name)
    picture.box(40, 330, 120, 34, "idle", "tile counter")
    picture.box(235, 58, 325, 24, "idle", "producer: 1 warp, 24 registers a thread")
    for slot in range(2):
        picture.box(235 + 92 * slot, 92, 84, 30, "q", f"Q, slot {slot}")
    for y, name in ((150, "K"), (210, "V")):
        for slot in range(2):
            picture.box(235 + 92 * slot, y, 84, 34, "kv", f"{name}, slot {slot}")
        picture.text(430, y + 13, "ready: TMA has delivered", "start small")
        picture.text(430, y + 30, "empty: all have read", "start small")
    picture.box(235, 270, 176, 34, "o", "output staging")
    picture.box(235, 330, 176, 34, "idle", "mailbox: next tile")
    for group in range(2):
        y = 90 + 140 * group
        picture.box(630, y, 235, 120, "frame")
        picture.text(748, y + 18, f"consumer warpgroup {group}, 64 rows", "small bold")
        picture.box(645, y + 28, 64, 36, "p", "S, P")
        picture.box(715, y + 28, 64, 36, "o", "O")
        picture.box(785, y + 28, 66, 36, "idle", "max, sum")
        picture.text(748, y + 84, "wgmma reads Q, K, V from slots", "small")
        picture.text(748, y + 104, "P is already an operand", "small")
    for y, slot_y in ((107, 107), (167, 167), (227, 227)):
        picture.arrow(160, y, 232, slot_y)
    picture.arrow(235, 287, 163, 287)
    picture.arrow(160, 347, 232, 347)
    picture.arrow(585, 197, 627, 167)
    picture.arrow(585, 227, 627, 277)
    picture.arrow(630, 320, 590, 320, 590, 287, 414, 287)
    picture.text(220, 100, "TMA", "small")
    picture.text(198, 281, "TMA", "small")
    picture.write("hopper-cta.svg")


def draw_overlap() -> None:
    """What the tensor cores do while a warpgroup takes exponentials."""
    picture = Picture(900, 280, "Products of one warpgroup run under the exponentials of the other, and under its own")
    rows = (("tensor cores", 50), ("warpgroup 0", 115), ("warpgroup 1", 180))
    for name, y in rows:
        picture.text(20, y + 25, name, "start bold")
    unit = 62
    first = 130
    for step in range(3):
        x = first + step * 4 * unit
        tile = f"i+{step}" if step else "i"
        before = "i-1" if step == 0 else "i" if step == 1 else f"i+{step - 1}"
        picture.box(x, 50, unit - 3, 40, "kv", f"S {tile}\nof 0")
        picture.box(x + unit, 50, unit - 3, 40, "o", f"P V {before}\nof 0")
        picture.box(x, 115, unit - 3, 40, "idle", "waits\nfor S")
        picture.box(x + unit, 115, 3 * unit - 3, 40, "p", f"softmax {tile}, then O *= alpha")
        picture.box(x + 2 * unit, 50, unit - 3, 40, "kv", f"S {tile}\nof 1")
        picture.box(x + 3 * unit, 50, unit - 3, 40, "o", f"P V {before}\nof 1")
        picture.box(x + 2 * unit, 180, unit - 3, 40, "idle", "waits\nfor S")
        width = min(3 * unit, 874 - x - 3 * unit) - 3
        picture.box(x + 3 * unit, 180, width, 40, "p", f"softmax {tile}" if width > unit else "softmax")
    picture.box(130, 180, unit * 2 - 3, 40, "p", "softmax i-1")
    picture.arrow(130, 248, 880, 248)
    picture.text(
        505, 268, "time (schematic): the products of one warpgroup run while the other computes exponentials", "small"
    )
    picture.write("hopper-overlap.svg")


def draw_backward() -> None:
    """The five products of a key tile."""
    picture = Picture(900, 380, "The backward of one key tile: five products, two in registers, dQ through TMA")
    picture.box(20, 45, 150, 300, "frame")
    picture.text(95, 32, "stays: 128 keys", "bold")
    picture.box(40, 90, 110, 44, "kv", "K")
    picture.box(40, 230, 110, 44, "kv", "V")
    picture.box(200, 45, 150, 300, "frame")
    picture.text(275, 32, "streams: queries", "bold")
    picture.box(220, 90, 110, 44, "q", "Q")
    picture.box(220, 160, 110, 44, "idle", "lse, delta = d")
    picture.box(220, 230, 110, 44, "q", "dO")
    picture.box(380, 45, 330, 300, "frame")
    picture.text(545, 32, "two warpgroups of 64 keys: registers", "bold")
    picture.box(400, 90, 130, 44, "p", "S^T = K Q^T\nP^T = 2^(S^T - lse)")
    picture.box(400, 230, 130, 44, "p", "dP^T = V dO^T\ndS^T = P^T(dP^T - d)")
    picture.box(565, 90, 130, 44, "o", "dV += P^T dO")
    picture.box(565, 230, 130, 44, "o", "dK += dS^T Q")
    picture.box(400, 300, 130, 34, "idle", "dS, shared memory")
    picture.box(565, 300, 130, 34, "p", "dQ = dS K")
    picture.box(740, 290, 145, 54, "o", "dQ accumulator\nfp32 or int32")
    picture.box(740, 90, 145, 44, "o", "dV, 16 bits")
    picture.box(740, 230, 145, 44, "o", "dK, 16 bits")
    picture.arrow(330, 112, 397, 112)
    picture.arrow(330, 252, 397, 252)
    picture.arrow(330, 182, 365, 182, 365, 130, 397, 130)
    picture.arrow(365, 182, 365, 235, 397, 240)
    picture.arrow(530, 112, 562, 112)
    picture.arrow(530, 252, 562, 252)
    picture.arrow(465, 134, 465, 227)
    picture.arrow(465, 274, 465, 297)
    picture.arrow(530, 317, 562, 317)
    picture.arrow(695, 317, 737, 317)
    picture.arrow(695, 112, 737, 112)
    picture.arrow(695, 252, 737, 252)
    picture.text(812, 365, "TMA adds all key tiles", "small")
    picture.text(812, 75, "once, after the last query", "small")
    picture.write("hopper-backward.svg")


def draw_decode() -> None:
    """Key tiles of all items in one line, cut into equal shares."""
    picture = Picture(900, 240, "Decoding: all key tiles in one line, one equal share for each CTA")
    lengths = (("sequence 0, head 0", 7), ("seq. 0, head 1", 7), ("1, 0", 4), ("1, 1", 4), ("sequence 2, head 0", 14))
    tile = 24
    x = 30.0
    picture.text(30, 32, "items: (sequence, K/V head), each of so many key tiles", "start bold")
    for number, (name, count) in enumerate(lengths):
        for index in range(count):
            picture.box(x + index * tile, 48, tile - 2, 34, "kv" if number % 2 else "q")
        picture.text(x + count * tile / 2, 100, name, "small")
        x += count * tile
    picture.text(30, 132, "shares: 9 tiles each, whatever the lengths are", "start bold")
    for cta in range(4):
        picture.box(30 + cta * 9 * tile, 145, 9 * tile - 3, 34, "p", f"CTA {cta}")
    picture.text(
        30, 206, "CTA 0 finishes its first item alone. The second one lies in the shares of CTA 0 and 1:", "start small"
    )
    picture.text(
        30,
        224,
        "both leave a part, and the CTA that arrives last merges the parts in the order of the keys.",
        "start small",
    )
    picture.write("hopper-decode.svg")


def draw_panel() -> None:
    """The CPU's tile loop: scores are transposed, lanes are queries."""
    picture = Picture(900, 330, "The CPU kernel: a panel of queries, transposed scores, lanes are queries")
    picture.box(20, 90, 120, 190, "kv")
    picture.text(80, 80, "K tile: 64 keys", "bold")
    picture.text(80, 190, "keys x head_dim", "small")
    picture.box(175, 60, 190, 40, "q", "Q^T: head_dim x 32 queries")
    picture.text(270, 48, "stays for all keys", "small")
    picture.box(175, 125, 190, 155, "p")
    picture.text(270, 118, "S^T: 64 keys x 32 queries, 8 KiB", "small bold")
    for lane in range(1, 8):
        picture.arrow(175 + lane * 23.7, 140, 175 + lane * 23.7, 265)
    picture.text(270, 302, "maximum and sum run down the lanes:", "small")
    picture.text(270, 318, "no shuffles", "small")
    picture.arrow(140, 190, 172, 190)
    picture.arrow(365, 200, 425, 200)
    picture.text(395, 190, "softmax", "small")
    picture.box(430, 125, 190, 155, "p", "P^T: the order in which\nthe next product\nreads it")
    picture.box(655, 125, 110, 155, "kv", "V tile\n64 keys")
    picture.arrow(620, 200, 652, 200)
    picture.box(790, 125, 95, 155, "o", "acc\n8 rows x\n2 vectors\nat a time")
    picture.arrow(765, 200, 787, 200)
    picture.text(770, 302, "acc = alpha * acc + P V", "small")
    picture.write("cpu-panel.svg")


def main() -> None:
    """Draw all of them."""
    for draw in (draw_cta, draw_overlap, draw_backward, draw_decode, draw_panel):
        draw()


if __name__ == "__main__":
    main()
