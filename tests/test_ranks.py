"""The harness that runs functions on several ranks: results, errors, hangs and deaths."""

import os
import time

import pytest
import torch

from fullgraph.world import World
from tests.ranks import MAX_RANKS, RankFailure, RankPool


def describe(world: World, factor: int) -> tuple[int, int, float, int]:
    total = world.sum_(torch.tensor([float(world.rank + 1)]))
    return world.rank * factor, world.size, float(total), torch.get_num_threads()


def fail_on(world: World, bad: int) -> None:
    if world.rank == bad:
        raise LookupError(f"no luck on rank {bad}")
    world.barrier()


def fail_everywhere(world: World) -> None:
    raise LookupError(f"no luck on rank {world.rank}")


def hang_on(world: World, bad: int) -> None:
    if world.rank == bad:
        time.sleep(300)
    world.barrier()


def die_on(world: World, bad: int) -> None:
    if world.rank == bad:
        os._exit(7)


def process_id(world: World) -> int:
    return os.getpid()


def unpicklable(world: World) -> object:
    return lambda: None


@pytest.mark.parametrize("size", range(1, MAX_RANKS + 1))
def test_results_come_in_order_of_rank(ranks: RankPool, size: int) -> None:
    total = size * (size + 1) / 2
    assert ranks.run(size, describe, 10) == [(10 * rank, size, total, 1) for rank in range(size)]


def test_ranks_stay_alive_between_jobs(ranks: RankPool) -> None:
    first = ranks.run(MAX_RANKS, process_id)
    assert len(set(first)) == MAX_RANKS
    assert ranks.run(MAX_RANKS, process_id) == first
    assert ranks.run(2, process_id) == first[:2]


def test_an_error_on_one_rank_comes_back_with_its_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(3, fail_on, 1)
    assert set(failure.value.failures) == {0, 1, 2}
    assert "in fail_on" in failure.value.failures[1]
    assert "LookupError: no luck on rank 1" in failure.value.failures[1]
    assert "no luck on rank 1" in str(failure.value)
    assert ranks.run(3, describe, 1)[2] == (2, 3, 6.0, 1)


def test_errors_on_all_ranks_come_back(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(2, fail_everywhere)
    assert [f"no luck on rank {rank}" in text for rank, text in failure.value.failures.items()] == [True, True]
    with pytest.raises(RankFailure, match="no luck on rank 0"):
        ranks.run(1, fail_everywhere)


def test_a_hang_ends_with_the_place_where_each_rank_stands(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"hang_on on 2 ranks failed") as failure:
        ranks.run(2, hang_on, 0, timeout=6.0)
    assert set(failure.value.failures) == {0, 1}
    assert "still running after 6 s" in failure.value.failures[0]
    assert "in hang_on" in failure.value.failures[0]
    assert "in barrier" in failure.value.failures[1]
    assert ranks.run(2, describe, 1)[1] == (1, 2, 3.0, 1)


def test_a_rank_that_dies_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks.run(4, die_on, 2)
    assert failure.value.failures == {2: "died with exit code 7"}
    assert ranks.run(4, describe, 1)[3] == (3, 4, 10.0, 1)


def test_a_result_that_cannot_be_sent_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match="pickle"):
        ranks.run(1, unpicklable)


@pytest.mark.parametrize("size", [0, MAX_RANKS + 1])
def test_a_size_out_of_range_is_refused(ranks: RankPool, size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} ranks; expected 1 to {MAX_RANKS}"):
        ranks.run(size, describe, 1)
