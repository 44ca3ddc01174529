"""Train a small GPT on one sequence that is spread over ranks: context parallelism under torchrun.

    torchrun --nproc-per-node 2 examples/long_context.py                       # CPUs (gloo), or GPUs (NCCL) if there
    torchrun --nproc-per-node 4 examples/long_context.py --seqlen 32768 --method ring --check
    python examples/long_context.py                                            # one rank

Every rank holds its zigzag shard of the tokens and all of the weights; attention is the only layer that looks beyond
the shard. Gradients are averaged by DistributedDataParallel, as in any data-parallel training. `--check` compares the
first loss with that of the whole sequence on one device. Data is the text of this repository.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the group of the moment it is imported as a default argument. DistributedDataParallel imports it:
# after init_process_group the group would outlive destroy_process_group, and gloo's threads the interpreter.
import torch.distributed.nn
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import tilewise as tw
from tilewise.distributed import context_parallel_attention, position_ids, shard
from tilewise.nn import rotate

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 256
IGNORED = -100
ROTARY_BASE = 10000.0

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setup:
    """What is trained and for how long."""

    steps: int = 10
    seqlen: int = 8192
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    learning_rate: float = 1e-3

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """Attention and a feed-forward network, each on the normalised residual stream."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.head_dim = setup.head_dim
        self.split = [setup.heads, setup.kv_heads, setup.kv_heads]
        self.norm_1, self.norm_2 = nn.LayerNorm(setup.width), nn.LayerNorm(setup.width)
        self.qkv = nn.Linear(setup.width, sum(self.split) * setup.head_dim, bias=False)
        self.out = nn.Linear(setup.width, setup.width, bias=False)
        self.up, self.down = nn.Linear(setup.width, 4 * setup.width), nn.Linear(4 * setup.width, setup.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The stream x (batch, rows, width) with what this block adds to it."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.head_dim)).split(self.split, 2)
        x = x + self.out(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(2))
        feed_forward: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + feed_forward


class GPT(nn.Module):
    """Bytes in, the logits of the next byte out; the rows may be any part of a sequence."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.embed = nn.Embedding(VOCABULARY, setup.width)
        self.blocks = nn.ModuleList(Block(setup) for _ in range(setup.layers))
        self.norm, self.head = nn.LayerNorm(setup.width), nn.Linear(setup.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits (batch, rows, 256) of tokens (batch, rows) that stand at these positions."""
        # Of this rank's positions only: a table of all of them would grow with the whole sequence.
        pairs = torch.arange(0, self.setup.head_dim, 2, device=tokens.device)
        angles = positions[:, None] * ROTARY_BASE ** (-pairs / self.setup.head_dim)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, attend)
        logits: Tensor = self.head(self.norm(x))
        return logits


def sequences(setup: Setup, device: torch.device) -> Iterator[Tensor]:
    """Stretches of the repository's text, (1, seqlen + 1), the same on every rank."""
    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")])
    corpus = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    corpus = corpus.repeat(1 + setup.seqlen // len(corpus))
    generator = torch.Generator().manual_seed(0)
    while True:
        start = int(torch.randint(len(corpus) - setup.seqlen, (), generator=generator))
        yield corpus[start : start + setup.seqlen + 1].long()[None].to(device)


def spread(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's inputs, targets and positions; padding has no target."""
    inputs, targets = shard(tokens[:, :-1], dim=1, pad=0), shard(tokens[:, 1:], dim=1, pad=IGNORED)
    return inputs, targets, position_ids(inputs.shape[1], device=tokens.device)


def loss_of(logits: Tensor, targets: Tensor, total: int) -> Tensor:
    """This rank's part of the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum") / total


def train(setup: Setup, method: Any, device: torch.device, *, check: bool) -> list[float]:
    """Losses of every step; prints what it cost on rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(setup).to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), setup.learning_rate)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, causal=True, layout="bshd", method=method, seqlen=setup.seqlen)

    data = sequences(setup, device)
    losses: list[float] = []
    with progress_bar(disable=rank != 0) as bar:
        task = bar.add_task("training", total=setup.steps, loss="", speed="")
        for step in range(setup.steps):
            tokens = next(data)
            if check and step == 0 and rank == 0:
                print(f"first loss on one device: {whole_loss(model, tokens, setup):.6f}")
            start = time.perf_counter()
            inputs, targets, positions = spread(tokens)
            # DDP averages over ranks; the parts of a mean are summed.
            loss = loss_of(parallel(inputs, positions, attend), targets, setup.seqlen)
            (loss * world).backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            losses.append(float(whole))
            speed = setup.seqlen / (time.perf_counter() - start)
            bar.update(task, advance=1, loss=f"loss {losses[-1]:.4f}", speed=f"{speed:,.0f} tokens/s")
    return losses


def whole_loss(model: GPT, tokens: Tensor, setup: Setup) -> float:
    """The loss of the whole sequence without other ranks."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, causal=True, layout="bshd")

    with torch.no_grad():
        logits = model(tokens[:, :-1], torch.arange(setup.seqlen, device=tokens.device), attend)
        return float(loss_of(logits, tokens[:, 1:], setup.seqlen))


def progress_bar(*, disable: bool) -> Progress:
    """Step, loss, tokens per second, time left."""
    columns = ("{task.fields[loss]}", "{task.fields[speed]}")
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        *(TextColumn(column) for column in columns), TimeRemainingColumn(), disable=disable,
    )  # fmt: skip


def peak_bytes(device: torch.device) -> int:
    """The most memory this rank had in use."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def start_ranks() -> torch.device:
    """Join the group that torchrun made (or be alone), with NCCL where every rank has a GPU of its own."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    return torch.device("cpu")


def count(text: str) -> int:
    """A number of the command line that cannot be less than one."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def main() -> None:
    """Parse the command line, train, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("steps", "seqlen", "layers"):
        parser.add_argument(f"--{name}", type=count, default=getattr(Setup, name), help="default: %(default)s")
    parser.add_argument("--method", choices=("auto", "ring", "all_gather", "heads"), default="auto")
    parser.add_argument("--check", action="store_true", help="compare the first loss with one device")
    given = vars(parser.parse_args())
    method, check = given.pop("method"), given.pop("check")
    setup = Setup(**given)
    device = start_ranks()
    start = time.perf_counter()
    losses = train(setup, method, device, check=check)
    seconds = time.perf_counter() - start
    memory: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(memory, peak_bytes(device))
    if dist.get_rank() == 0:
        ranks = "1 rank" if dist.get_world_size() == 1 else f"{dist.get_world_size()} ranks"
        print(f"{setup.seqlen} tokens over {ranks} on {device.type}, {setup.steps} steps")
        print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}, {setup.steps * setup.seqlen / seconds:,.0f} tokens/s")
        print("peak memory a rank: " + ", ".join(f"{size / 2**20:.0f} MiB" for size in memory))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
