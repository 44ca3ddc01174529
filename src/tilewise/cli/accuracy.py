"""`tilewise accuracy`: what fp16, bf16, FP8 and caches in FP8 or int8 lose against fp64, by granularity, rotation and
distribution.

Everything is rounded as the kernels round it, on a subset of query rows against all keys. Quantising is that of
tilewise.fp8; probabilities are rounded as docs/contract.md says for tensor cores of that dtype, sums are fp32. So a CPU
reproduces the rounding of an FP8 GPU, but not the order of its sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tilewise import attention, figures, fp8
from tilewise.cli.console import JsonOption, Step, check_plot, print_json, progress, write_plot
from tilewise.errors import InvalidProblem
from tilewise.units import counted

__all__ = ["EXAMPLE", "command"]

EXAMPLE = "tilewise accuracy --seqlen 8192 --plot accuracy.svg"
DISTRIBUTIONS = ("normal", "outliers", "model")
COLOURS = dict(zip(DISTRIBUTIONS, (figures.OTHERS[0], figures.OURS[0], figures.OTHERS[1]), strict=True))

HALF, BRAIN, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
# Tokens of a page in caches.
PAGE_SIZE = 16
# P is rounded as 2^8 P / max P.
P_UNIT = 2.0**8
# Rows of q at a time, which bounds the memory of fp64 scores.
ROWS_AT_ONCE = 256
# As in the published comparison: one value in a thousand has a standard deviation of 10 on top.
OUTLIER_SHARE, OUTLIER_SIGMA = 0.001, 10.0
# The model, its small language, and its training.
VOCABULARY, WIDTH, LAYERS, MODEL_HEAD_DIM = 32, 128, 2, 64
WORDS, LETTERS = 40, 6
TRAIN_STEPS, TRAIN_BATCH, TRAIN_TOKENS, LEARNING_RATE = 60, 8, 96, 3e-3


class Recipe(NamedTuple):
    """How q, k and v are stored. Granularities "page" and "token" are those of caches, attended by q in fp16."""

    dtype: str
    granularity: str = ""
    rotation: bool = False

    @property
    def name(self) -> str:
        """Name in tables and plots."""
        return " ".join(
            filter(None, (self.dtype, self.granularity and f"per {self.granularity}", "rotated" * self.rotation))
        )


class Measured(NamedTuple):
    """RMS and largest error of one recipe on one distribution, and the magnitude of the exact output."""

    distribution: str
    recipe: Recipe
    rmse: float
    largest: float
    rms_out: float


class Sample(NamedTuple):
    """q, k and v (1, heads, seqlen, head_dim) in fp32, and the flags of the attention call."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    note: str


def command(
    *,
    seqlen: Annotated[int, typer.Option(min=16, help="Tokens.")] = 2048,
    heads: Annotated[int, typer.Option(min=1, help="Heads of the drawn distributions.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, max=512, help="Width of the drawn distributions' heads.")] = 128,
    rows: Annotated[int, typer.Option(min=1, help="Query rows compared, evenly spaced.")] = 256,
    distribution: Annotated[str | None, typer.Option(help=f"Only this one: {', '.join(DISTRIBUTIONS)}.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the table into this .svg (matplotlib).")] = None,
    json: JsonOption = False,
) -> None:
    """Measure the error of attention against fp64 in fp16, bf16, FP8 and with FP8 or int8 pages: every granularity of
    scales, with and without rotation, on normal numbers, on normal numbers with outliers, and on a small model trained
    for the purpose.
    """
    if distribution is not None and distribution not in DISTRIBUTIONS:
        raise InvalidProblem("distribution", "one of " + ", ".join(DISTRIBUTIONS), repr(distribution), "Or none: all.")
    if plot is not None:
        check_plot(plot)
    names = DISTRIBUTIONS if distribution is None else (distribution,)
    found: list[Measured] = []
    notes: dict[str, str] = {}
    with progress(None) as announce:
        for name in names:
            measured, notes[name] = measure(name, seqlen, heads, head_dim, rows, seed, announce)
            found += measured
    if plot is not None:
        write_plot(plot, _draw(found, seqlen))
    print_json(_as_dict(found, notes, seqlen)) if json else _show(found, notes, seqlen)


def _show(found: list[Measured], notes: dict[str, str], seqlen: int) -> None:
    console = Console()
    title = f"error against fp64, {counted(seqlen, 'token')}"
    table = Table(title=title, box=box.SIMPLE, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("q, k, v in", no_wrap=True)
    for name in notes:
        table.add_column(f"{name}\nRMSE", justify="right", no_wrap=True)
        table.add_column("\nof out", justify="right", no_wrap=True)
    for recipe in dict.fromkeys(m.recipe for m in found):
        cells = [m for m in found if m.recipe == recipe]
        table.add_row(recipe.name, *(text for m in cells for text in (f"{m.rmse:.2e}", f"{_share(m):.1%}")))
    console.print(table)
    for name, note in notes.items():
        console.print(f"{name}: {note}", highlight=False)


def _share(measured: Measured) -> float:
    return measured.rmse / measured.rms_out if measured.rms_out else 0.0


def _as_dict(found: list[Measured], notes: dict[str, str], seqlen: int) -> dict[str, Any]:
    rows = [m.recipe._asdict() | {k: v for k, v in m._asdict().items() if k != "recipe"} for m in found]
    return {"seqlen": seqlen, "distributions": notes, "errors": rows}


def _draw(found: list[Measured], seqlen: int) -> str:
    """Bars of RMSE, relative to the output, by recipe and distribution, as SVG text."""

    def on(figure: Any) -> None:
        axes = figure.subplots()
        recipes = list(dict.fromkeys(m.recipe for m in found))
        names = list(dict.fromkeys(m.distribution for m in found))
        thickness = 0.8 / len(names)
        for i, name in enumerate(names):
            shares = [_share(m) for m in found if m.distribution == name]
            places = [row + (i - (len(names) - 1) / 2) * thickness for row in range(len(recipes))]
            axes.barh(places, shares, thickness * 0.9, color=COLOURS[name], label=name)
        axes.set_yticks(range(len(recipes)), [recipe.name for recipe in recipes])
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel(f"RMS error / RMS of the exact output, {counted(seqlen, 'token')}")
        axes.legend(frameon=False)

    return figures.render(on, 7.0, 4.0)


def recipes() -> Iterator[Recipe]:
    """All recipes that are compared."""
    yield Recipe("fp16")
    yield Recipe("bf16")
    for granularity in ("tensor", "head", "block"):
        for rotation in (False, True):
            yield Recipe("fp8", granularity, rotation)
    yield Recipe("fp8", "page")
    yield Recipe("int8", "token")


def measure(
    distribution: str, seqlen: int, heads: int, head_dim: int, rows: int, seed: int, announce: Step
) -> tuple[list[Measured], str]:
    """Every recipe on one distribution, and a note that describes the tensors."""
    sample = make_sample(distribution, seqlen, heads, head_dim, seed, announce)
    step = max(1, seqlen // rows)
    chosen = torch.arange(step - 1, seqlen, step)
    truth = _attend(sample.q.double(), sample.k.double(), sample.v.double(), chosen, sample.causal, None)
    found = []
    for recipe in recipes():
        announce(f"{distribution}: {recipe.name}")
        error = _rounded(sample, recipe, chosen).double() - truth
        rmse, largest = float(error.square().mean().sqrt()), float(error.abs().max())
        found.append(Measured(distribution, recipe, rmse, largest, float(truth.square().mean().sqrt())))
    return found, sample.note


def _rounded(sample: Sample, recipe: Recipe, chosen: Tensor) -> Tensor:
    """The output rows as kernels would compute them, in fp16 (bf16 for bf16)."""
    if recipe.granularity in ("page", "token"):
        dtype = E4M3 if recipe.dtype == "fp8" else torch.int8
        k, v = (_through_pages(t, dtype) for t in (sample.k, sample.v))
        return _attend(sample.q.to(HALF).float(), k, v, chosen, sample.causal, HALF).to(HALF)
    if recipe.dtype != "fp8":
        dtype = HALF if recipe.dtype == "fp16" else BRAIN
        q, k, v = (t.to(dtype).float() for t in (sample.q, sample.k, sample.v))
        return _attend(q, k, v, chosen, sample.causal, dtype).to(dtype)
    options: dict[str, Any] = {"granularity": recipe.granularity}
    turned = options | {"rotation": recipe.rotation}
    q, k = (fp8.quantize(t, **turned).dequantize() for t in (sample.q, sample.k))
    v = fp8.quantize(sample.v, **options).dequantize()
    return _attend(q, k, v, chosen, sample.causal, E4M3).to(HALF)


def _through_pages(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values (1, heads, seqlen, dim) as pages hold them."""
    _, heads, seqlen, dim = x.shape
    padded = nn.functional.pad(x[0], (0, 0, 0, -seqlen % PAGE_SIZE))
    pages = padded.transpose(0, 1).reshape(-1, PAGE_SIZE, heads, dim)
    stored = fp8.quantize_pages(pages, dtype=dtype).dequantize()
    return stored.flatten(0, 1)[:seqlen].transpose(0, 1)[None]


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, causal: bool, p_dtype: torch.dtype | None) -> Tensor:
    """Attention of the chosen rows in the dtype of its operands, with P rounded to `p_dtype` before it meets V."""
    pieces = []
    keys = torch.arange(k.shape[2])
    for rows in chosen.split(ROWS_AT_ONCE):
        s = q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(keys > rows[:, None], -torch.inf)
        p = torch.exp(s - s.amax(-1, keepdim=True))
        total = p.sum(-1, keepdim=True)
        if p_dtype is E4M3:
            p = (p * P_UNIT).to(E4M3).to(p.dtype) / P_UNIT
        elif p_dtype is not None:
            p = p.to(p_dtype).to(p.dtype)
        pieces.append(p @ v / total)
    return torch.cat(pieces, 2)


class _Layer(nn.Module):
    """Attention and a multilayer perceptron, each after a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v (batch, heads, seqlen, dim) of the layer's input."""
        q, k, v = (t.unflatten(-1, (-1, MODEL_HEAD_DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        out = attention(*self.heads(self.before_attention(x)), causal=True).transpose(1, 2).flatten(-2)
        x = x + self.proj(out)
        result: Tensor = x + self.mlp(self.before_mlp(x))
        return result


class _Model(nn.Module):
    """A language model without positions: causal attention is enough to learn to spell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(_Layer() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits

    def last_heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the last layer."""
        last = self.layers[-1]
        assert isinstance(last, _Layer)
        return last.heads(last.before_attention(self.layers[:-1](self.embedding(tokens))))


def make_sample(name: str, seqlen: int, heads: int, head_dim: int, seed: int, announce: Step) -> Sample:
    """One of DISTRIBUTIONS, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if name == "model":
        return _trained(seqlen, seed, announce)
    shape = (3, 1, heads, seqlen, head_dim)
    x = torch.randn(shape, generator=generator)
    note = "N(0, 1)"
    if name == "outliers":
        hit = torch.rand(shape, generator=generator) < OUTLIER_SHARE
        x += OUTLIER_SIGMA * torch.randn(shape, generator=generator) * hit
        note += f" + N(0, 100) * Bernoulli({OUTLIER_SHARE})"
    return Sample(x[0], x[1], x[2], causal=False, note=note)


def _trained(seqlen: int, seed: int, announce: Step) -> Sample:
    """The last layer of a model that was just trained to spell a small language."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        words = torch.randint(0, VOCABULARY, (WORDS, LETTERS))
        model = _Model()
        optimiser = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        for step in range(TRAIN_STEPS):
            tokens = _text(words, TRAIN_BATCH, TRAIN_TOKENS)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if step % 20 == 0:
                announce(f"training the model, step {step} of {TRAIN_STEPS}, loss {loss.item():.2f}")
        with torch.no_grad():
            q, k, v = model.last_heads(_text(words, 1, seqlen))
    losses = f"loss {loss.item():.2f} (untrained {math.log(VOCABULARY):.2f})"
    note = f"layer {LAYERS} of a model after {TRAIN_STEPS} steps, {losses}"
    return Sample(q.contiguous(), k.contiguous(), v.contiguous(), causal=True, note=note)


def _text(words: Tensor, batch: int, tokens: int) -> Tensor:
    """Words of a small language in random order: letters within a word follow from those before, its first does not."""
    chosen = torch.randint(0, len(words), (batch, -(-tokens // words.shape[1])))
    return words[chosen].flatten(1)[:, :tokens]
