"""Codecs: what arrives lies within the stated bound, and int8's mean is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullgraph.codec import decode, encode, generator
from fullgraph.config import Codec
from fullgraph.cost import row_bytes
from fullgraph.dropout import MaskKey

CODECS: tuple[Codec, ...] = ("float32", "bfloat16", "int8")
CPU = torch.device("cpu")


def draw(step: int = 0) -> torch.Generator:
    return generator(MaskKey(1, step, 0), rank=0, direction=0, device=CPU)


def rows(m: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different sizes, one of zeros."""
    made = torch.randn(m, width, dtype=dtype, generator=torch.Generator().manual_seed(m * width))
    made *= 10.0 ** torch.linspace(-6, 6, max(m, 1), dtype=dtype)[:m, None]
    if m:
        made[m // 2] = 0
    return made


def through(x: torch.Tensor, codec: Codec, step: int = 0) -> torch.Tensor:
    return decode(encode(x, codec, draw(step)), codec, x.dtype)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(0, 40), width=st.integers(1, 70), double=st.booleans())
def test_rows_arrive_within_the_bound(m: int, width: int, double: bool) -> None:
    x = rows(m, width, torch.float64 if double else torch.float32)
    assert torch.equal(through(x, "float32"), x)
    assert bool(((through(x, "bfloat16") - x).abs() <= 2.0**-8 * x.abs()).all())
    step = x.abs().amax(1, keepdim=True) / 127
    assert bool(((through(x, "int8") - x).abs() <= step * (1 + 1e-5)).all())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 4), (2, 9)])
def test_a_row_takes_the_bytes_that_were_stated(codec: Codec, shape: tuple[int, int]) -> None:
    payload = encode(rows(*shape), codec, draw())
    assert payload.numel() * payload.element_size() == shape[0] * row_bytes(codec, shape[1], 4)


def test_blocks_do_not_show() -> None:
    x = rows(3000, 100)  # more than a block
    bound = x.abs().amax(1, keepdim=True) / 127 * (1 + 1e-5)
    assert bool(((through(x, "int8") - x).abs() <= bound).all())


def test_the_mean_of_rounding_is_right() -> None:
    x = rows(6, 40)
    draws = torch.stack([through(x, "int8", step) for step in range(2000)]).double()
    error = draws.mean(0) - x
    scale = (x.abs().amax(1, keepdim=True) / 127).double()
    standard = draws.std(0) / 2000**0.5
    assert bool((error.abs() <= 4 * standard + 1e-4 * scale).all())
    assert bool((error.sum(1).abs() <= 4 * standard.square().sum(1).sqrt() + 1e-3 * scale[:, 0]).all())


def test_draws_differ_by_step_rank_and_direction_and_repeat() -> None:
    x = rows(5, 64)
    given = [
        encode(x, "int8", generator(MaskKey(1, step, 0), rank=rank, direction=direction, device=CPU))
        for step, rank, direction in [(0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    assert torch.equal(given[0], given[1])
    assert not any(torch.equal(given[0], other) for other in given[2:])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_not_hidden(codec: Codec, bad: float) -> None:
    x = rows(3, 4)
    x[1, 2] = bad
    arrived = through(x, codec)
    assert not bool(torch.isfinite(arrived[1]).all())
    assert bool(torch.isfinite(arrived[[0, 2]]).all())
