"""Query, key and value vectors for accuracy measurements: drawn, or taken from a small model that has been trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilewise import attention

__all__ = ["DISTRIBUTIONS", "Sample", "make_sample"]

# As in the published comparison: one value in a thousand has a standard deviation of 10 on top.
OUTLIER_SHARE, OUTLIER_SIGMA = 0.001, 10.0
VOCABULARY, WIDTH, LAYERS, MODEL_HEAD_DIM = 32, 128, 2, 64
WORDS, LETTERS = 40, 6
TRAIN_STEPS, TRAIN_BATCH, TRAIN_TOKENS, LEARNING_RATE = 60, 8, 96, 3e-3


class Sample(NamedTuple):
    """q, k and v (1, heads, seqlen, head_dim) in fp32, and the flags of the attention call."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    note: str


class Layer(nn.Module):
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


class Model(nn.Module):
    """A language model without positions: causal attention is enough to learn to spell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits

    def last_heads(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the last layer."""
        last = self.layers[-1]
        assert isinstance(last, Layer)
        return last.heads(last.before_attention(self.layers[:-1](self.embedding(tokens))))


def make_sample(
    name: str, seqlen: int, heads: int, head_dim: int, seed: int, announce: Callable[[str], None]
) -> Sample:
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


DISTRIBUTIONS = ("normal", "outliers", "model")


def _trained(seqlen: int, seed: int, announce: Callable[[str], None]) -> Sample:
    """The last layer of a model that was just trained to spell a small language."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        words = torch.randint(0, VOCABULARY, (WORDS, LETTERS))
        model = Model()
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
