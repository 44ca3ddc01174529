"""The vLLM backend for latent attention, driven by metadata of vLLM's shape; `make test-vllm` runs the engine."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from vllm_stand_in import FullAttentionSpec, installed, metadata_of

HEADS, VALUES, ROTARY, BLOCK, BLOCKS, SCALE = 8, 64, 16, 16, 32, 0.17
E4M3 = torch.float8_e4m3fn
LATENTS: dict[str, Any] = {
    "q_lora_rank": None, "kv_lora_rank": VALUES, "qk_nope_head_dim": 24, "qk_rope_head_dim": ROTARY, "qk_head_dim": 40,
    "v_head_dim": 24, "kv_b_proj": None,
}  # fmt: skip
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture
def classes() -> Iterator[Any]:
    with installed():
        yield importlib.import_module("tilewise.integrations.vllm.latent")


def impl_of(classes: Any, kv_cache_dtype: str = "auto", **changes: Any) -> Any:
    plain = {"alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None, "attn_type": "decoder"}
    given: dict[str, Any] = plain | {"kv_sharing_target_layer_name": None} | LATENTS | changes
    head_size = given["kv_lora_rank"] + ROTARY
    return classes.TilewiseMLAImpl(HEADS, head_size, SCALE, 1, kv_cache_dtype=kv_cache_dtype, **given)


def builder_of(classes: Any, block_size: int = BLOCK, transfer: Any = None) -> Any:
    config = SimpleNamespace(kv_transfer_config=transfer)
    return classes.TilewiseMLABuilder(FullAttentionSpec(block_size), ["layer"], config, torch.device("cpu"))


class Engine:
    """Latents of some requests, stored through the backend."""

    def __init__(self, classes: Any, lengths: list[int], dtype: torch.dtype, *, fp8: bool = False) -> None:
        draw = torch.Generator().manual_seed(3)
        self.dtype, self.lengths = dtype, lengths
        self.impl, self.builder = impl_of(classes, "fp8" if fp8 else "auto"), builder_of(classes)
        columns = VALUES + ROTARY
        # What no request wrote is never read: NaN in every format.
        self.cache = torch.full(
            (BLOCKS, BLOCK, columns), 127 if fp8 else torch.nan, dtype=torch.uint8 if fp8 else dtype
        )
        self.layer = SimpleNamespace(_k_scale=torch.tensor(0.02 if fp8 else 1.0))
        self.table = torch.randperm(BLOCKS, generator=draw, dtype=torch.int32).view(len(lengths), -1)
        self.rows = [torch.randn(n, columns, generator=draw).to(dtype) for n in lengths]
        for rows, pages in zip(self.rows, self.table, strict=True):
            places = torch.arange(len(rows))
            slots = pages[places // BLOCK].long() * BLOCK + places % BLOCK
            slots = torch.cat((slots, torch.tensor([-1])))
            new = torch.cat((rows, rows[:1]))
            scale = self.layer._k_scale
            parts = new[:, :VALUES], new[:, None, VALUES:]
            self.impl.do_kv_cache_update(*parts, self.cache, slots, "auto", scale, False)

    def stored(self, rows: Tensor) -> Tensor:
        """What the cache holds of them."""
        if self.cache.dtype != torch.uint8:
            return rows
        scale = self.layer._k_scale
        kept: Tensor = (rows.float() / scale).clamp(-448, 448).to(E4M3).float() * scale
        return kept

    def check(self, counts: list[int], padding: int = 0) -> Any:
        common = metadata_of(self.lengths, counts, self.table, [], padding)
        metadata = self.builder.build(0, common)
        total = metadata.num_decode_tokens
        q = torch.randn(total, HEADS, VALUES + ROTARY, generator=torch.Generator().manual_seed(1)).to(self.dtype)
        cache = self.cache.view(E4M3) if self.cache.dtype == torch.uint8 else self.cache
        parts = q[..., :VALUES].contiguous(), q[..., VALUES:]
        out, lse = self.impl.forward_mqa(parts, cache, metadata, self.layer)
        assert lse is None
        assert tuple(out.shape) == (total, HEADS, VALUES)
        start = 0
        for rows, count in zip(self.rows[: len(metadata.decode.seq_lens) - padding], counts, strict=False):
            latent = self.stored(rows).double()[None, None]
            queries = q[start : start + count].double().transpose(0, 1)[None]
            exact = tw.attention(queries, latent, latent[..., :VALUES], causal=True, scale=SCALE, backend="reference")
            torch.testing.assert_close(
                out[start : start + count].double(),
                exact[0].transpose(0, 1),
                atol=TOLERANCE[self.dtype],
                rtol=TOLERANCE[self.dtype],
            )
            start += count
        return metadata


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_decoding_and_drafts(classes: Any, dtype: torch.dtype, fp8: bool) -> None:
    engine = Engine(classes, [40, 1, 100, 17], dtype, fp8=fp8)
    engine.check([1, 1, 1, 1])
    engine.builder.reorder_batch_threshold = 3  # what vLLM sets for two drafts
    engine.check([2, 1, 3, 2])
    engine.check([2, 1, 3, 2], padding=2)


def test_prompts_are_left_to_vllm(classes: Any) -> None:
    """The requests of a step that are not decoded come after the others."""
    metadata = Engine(classes, [40, 1, 100, 17], torch.float32).check([1, 1, 30, 17])
    assert (metadata.num_decode_tokens, metadata.num_prefills) == (2, 2)


def test_padding_of_a_captured_step(classes: Any) -> None:
    metadata = Engine(classes, [40, 1, 100, 17], torch.float32).check([1, 1, 1, 1], padding=3)
    assert metadata.num_decode_tokens == 7


@pytest.mark.usefixtures("always_cascade")
def test_equal_first_pages_are_read_once(classes: Any) -> None:
    engine = Engine(classes, [70, 70], torch.float32)
    engine.table[1] = engine.table[0]
    engine.rows[1] = engine.rows[0]
    metadata = engine.check([1, 1])
    assert [group.seqlen_k for group in metadata.decode.batch.shared_prefix.groups] == [64]


def test_what_vllm_asks_before(classes: Any) -> None:
    offered = classes.TilewiseMLABackend
    assert offered.is_mla()
    assert offered.supports_head_size(576)
    assert not offered.supports_head_size(640)
    rest = (16, True, False, False, False, None)
    assert offered.supports_combination(576, torch.bfloat16, "auto", *rest) is None
    assert "bfloat16" in offered.supports_combination(576, torch.float16, "bfloat16", *rest)
    assert not offered.supports_kv_cache_dtype("fp8_ds_mla")
    assert not classes.TilewiseMLAImpl.supports_dcp
    assert not impl_of(classes, "fp8").supports_quant_query_input


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"indexer": "an indexer"}, "attends to all keys"),
        ({"sliding_window": 128}, "latent attention with sliding_window"),
        ({"logits_soft_cap": 30.0}, "latent attention with logits_soft_cap"),
        ({"attn_type": "encoder"}, "latent attention with an encoder"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype fp8_ds_mla"),
        ({"kv_lora_rank": 528}, "latents of 544 columns, 528 of them V"),
    ],
    ids=str,
)
def test_layers_that_are_refused(classes: Any, changes: dict[str, Any], reason: str) -> None:
    """By the constructor, because vLLM's platform for CPUs does not ask before."""
    with pytest.raises(tw.Unsupported, match=reason):
        impl_of(classes, **changes)


def test_steps_and_caches_that_are_refused(classes: Any) -> None:
    table = torch.zeros(1, 2, dtype=torch.int32)
    common = metadata_of([5], [1], table, [], dcp_local_seq_lens=torch.tensor([4]))
    with pytest.raises(tw.Unsupported, match="context parallelism"):
        builder_of(classes).build(0, common)
    with pytest.raises(tw.Unsupported, match="KV connectors"):
        builder_of(classes, transfer=object())
    impl, scale = impl_of(classes), torch.ones(())
    with pytest.raises(tw.InvalidProblem, match=r"\(num_pages, page_size, 80\)"):
        impl.do_kv_cache_update(
            torch.zeros(1, 64), torch.zeros(1, 1, 16), torch.zeros(2, 16, 96), torch.zeros(1).long(), "auto", scale
        )
