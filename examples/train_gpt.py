"""Train a small GPT on the text of this repository, three times from the same seed: eager, SDPA and tilewise attention.

    python examples/train_gpt.py                       # CPU: a minute or two; a GPU is used when there is one
    python examples/train_gpt.py --plot curves.png     # also draws the loss curves (needs matplotlib)

Same weights, same batches, so the loss curves must lie on each other up to rounding. Each run has a process of its own:
that is what makes its peak memory measurable.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import tilewise as tw
from tilewise.nn import rotary_table, rotate

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("eager", "sdpa", "tilewise")
VOCABULARY = 256
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Setup:
    """What is trained and for how long."""

    steps: int = 40
    batch: int = 1
    seqlen: int = 1024
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Run:
    """What came out."""

    kind: str
    losses: tuple[float, ...]
    tokens_per_second: float
    peak_bytes: int


def attend(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, seqlen, heads, head_dim) tensors; k and v have fewer heads."""
    if kind == "tilewise":
        return tw.attention(q, k, v, causal=True, layout="bshd")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if kind == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores: Tensor = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    out: Tensor = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return out.transpose(1, 2)


class Block(nn.Module):
    """Attention and a feed-forward network, each on the normalised residual stream."""

    def __init__(self, setup: Setup, kind: str) -> None:
        super().__init__()
        self.kind, self.head_dim = kind, setup.head_dim
        self.split = [setup.heads, setup.kv_heads, setup.kv_heads]
        self.norm_1, self.norm_2 = nn.LayerNorm(setup.width), nn.LayerNorm(setup.width)
        self.qkv = nn.Linear(setup.width, sum(self.split) * setup.head_dim, bias=False)
        self.out = nn.Linear(setup.width, setup.width, bias=False)
        self.up, self.down = nn.Linear(setup.width, 4 * setup.width), nn.Linear(4 * setup.width, setup.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The stream x (batch, seqlen, width) with what this block adds to it."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.head_dim)).split(self.split, 2)
        x = x + self.out(attend(self.kind, rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(2))
        feed_forward: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + feed_forward


class GPT(nn.Module):
    """Bytes in, the logits of the next byte out."""

    def __init__(self, setup: Setup, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, setup.width)
        self.blocks = nn.ModuleList(Block(setup, kind) for _ in range(setup.layers))
        self.norm, self.head = nn.LayerNorm(setup.width), nn.Linear(setup.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, seqlen, 256) of tokens (batch, seqlen)."""
        x = self.embed(tokens)
        head_dim = self.blocks[0].head_dim
        assert isinstance(head_dim, int)
        cos, sin = rotary_table(tokens.shape[1], head_dim, device=tokens.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def text() -> Tensor:
    """Every Markdown page and Python file of the repository, as bytes."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")])
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batches(corpus: Tensor, setup: Setup, device: str) -> list[Tensor]:
    """Random stretches of the corpus, (batch, seqlen + 1) a step: the same for every kind of attention."""
    generator = torch.Generator().manual_seed(setup.seed)
    starts = torch.randint(len(corpus) - setup.seqlen - 1, (setup.steps, setup.batch, 1), generator=generator)
    return list(corpus[starts + torch.arange(setup.seqlen + 1)].long().to(device))


def train(kind: str, setup: Setup, corpus: Tensor, device: str) -> Run:
    """Train one model. A first pass is no step: it compiles kernels, and is counted neither as time nor as memory."""
    torch.manual_seed(setup.seed)
    model = GPT(setup, kind).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), setup.learning_rate)
    data = batches(corpus, setup, device)
    loss_of(model, data[0]).backward()
    optimizer.zero_grad()
    before = held(device)
    reset_peak(device)
    losses = []
    start = time.perf_counter()
    for tokens in data:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - start
    return Run(kind, tuple(losses), setup.steps * setup.batch * setup.seqlen / seconds, peak(device) - before)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of every next byte."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def reset_peak(device: str) -> None:
    """Forget earlier peaks; Linux lets a process do that with its own."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif CLEAR.exists():
        CLEAR.write_text("5")


def held(device: str) -> int:
    """Bytes in use now, without what the C library keeps of freed memory, where it can give that back."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    return peak(device) if not CLEAR.exists() else 1024 * process_status("VmRSS")


def peak(device: str) -> int:
    """Most bytes in use since the last reset: of the GPU's allocator, or of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if not CLEAR.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 1024 * process_status("VmHWM")


def process_status(field: str) -> int:
    """KiB that Linux states of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0])


def report(runs: list[Run], setup: Setup) -> str:
    """A table, and how far the curves are apart."""
    lines = [f"{'attention':10} {'first loss':>10} {'last loss':>10} {'tokens/s':>10} {'peak MiB':>10}"]
    lines += [
        f"{r.kind:10} {r.losses[0]:10.4f} {r.losses[-1]:10.4f} {r.tokens_per_second:10.0f} {r.peak_bytes / 2**20:10.0f}"
        for r in runs
    ]
    if len(runs) > 1:
        apart = max(abs(a - b) for r in runs[1:] for a, b in zip(r.losses, runs[0].losses, strict=True))
        lines.append(f"largest difference of a loss from {runs[0].kind}'s in {setup.steps} steps: {apart:.1e}")
    return "\n".join(lines)


def draw(runs: list[Run], path: Path) -> None:
    """The loss curves as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for run, style in zip(runs, ("-", "--", ":"), strict=False):
        axes.plot(run.losses, style, label=f"{run.kind}, {run.tokens_per_second:,.0f} tokens/s", linewidth=2)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="The same training, three ways to attend")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def count(text: str) -> int:
    """A number of the command line that cannot be less than one."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def main() -> None:
    """Parse the command line, train, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("steps", "batch", "seqlen", "layers"):
        parser.add_argument(f"--{name}", type=count, default=getattr(Setup, name), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=Setup.seed)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all of them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plot", type=Path, help="write the loss curves to this file")
    given = vars(parser.parse_args())
    kinds, device, plot = given.pop("kinds"), given.pop("device"), given.pop("plot")
    setup, corpus = Setup(**given), text()
    # One process a run, and a fresh one: the peak of a process never goes down again.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        runs = [pool.apply(train, (kind, setup, corpus, device)) for kind in kinds]
    sizes = f"{setup.layers} layers, {setup.heads} heads of {setup.head_dim}, {setup.seqlen} tokens"
    print(f"{sizes}, batch {setup.batch}, {device}; memory above what the process had after a first pass")
    print(report(runs, setup))
    if plot is not None:
        draw(runs, plot)


if __name__ == "__main__":
    main()
