"""The store of historical rows."""

from __future__ import annotations

import pytest
import torch

from fullgraph.history import History, history_bytes


def test_what_was_pushed_is_pulled_by_index_and_has_its_age() -> None:
    store = History()
    assert not store.filled
    assert store.nbytes == 0
    store.push(torch.arange(12.0).view(4, 3), step=5)
    store.push(torch.tensor([[7.0, 8.0, 9.0], [-1.0, -2.0, -3.0]]), 8, torch.tensor([3, 0]))
    assert store.pull(torch.float32).tolist() == [[-1, -2, -3], [3, 4, 5], [6, 7, 8], [7, 8, 9]]
    assert store.age(9).tolist() == [1, 4, 4, 1]
    assert store.nbytes == history_bytes(4, 3, 4)


def test_a_store_is_never_read_before_it_is_filled() -> None:
    store = History()
    with pytest.raises(AssertionError):
        store.pull(torch.float32)
    with pytest.raises(AssertionError):
        store.push(torch.zeros(1, 3), 0, torch.tensor([0]))


def test_a_bfloat16_store_takes_half() -> None:
    store = History(torch.bfloat16)
    store.push(torch.full((4, 6), 1 / 3), 0)
    assert store.pull(torch.float32).dtype == torch.float32
    assert float((store.pull(torch.float32) - 1 / 3).abs().max()) <= 2.0**-8 / 3
    assert store.nbytes == history_bytes(4, 6, 2)


@pytest.mark.parametrize("rows", [0, 3])
def test_state_is_a_copy_and_comes_back(rows: int) -> None:
    store, other = History(), History()
    assert store.state() == {}
    store.push(torch.ones(rows, 2, dtype=torch.float64), 4)
    state = store.state()
    store.push(torch.zeros(rows, 2, dtype=torch.float64), 5)
    other.load_state(state, torch.device("cpu"))
    assert other.filled
    assert other.pull(torch.float64).tolist() == [[1.0, 1.0]] * rows
    assert other.age(6).tolist() == [2] * rows
