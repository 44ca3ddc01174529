"""What kernels of GPUs are given that is no tensor on the device, without a GPU."""

import pytest
import torch

compilation = pytest.importorskip("tilewise.backends.gpu.compilation")
symbols = pytest.importorskip("tilewise.backends.gpu.symbols")
launch = pytest.importorskip("tilewise.backends.triton.launch")


def test_strides_past_31_bits_are_64_bit_numbers() -> None:
    numbers = (5, 2**31, symbols.Multiple(2**40, 16), 1.0)
    assert [compilation.type_name(number) for number in numbers] == ["i32", "i64", "i64", "fp32"]


@pytest.mark.parametrize("shape", [(), (5,)])
def test_a_seed_from_the_host_is_filled_in(shape: tuple[int, ...]) -> None:
    """All of its numbers, 64 bits each, without a copy that a graph could not capture."""
    seed = torch.arange(5)[: 5 if shape else 1].reshape(shape) + 2**40
    assert torch.equal(launch._filled(seed, torch.device("cpu")), seed)
