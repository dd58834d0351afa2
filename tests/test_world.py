"""Collectives, errors that all ranks share, and bytes: what crosses is what the plans said would."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullgraph.config import TrainConfig
from fullgraph.cost import Ledger
from fullgraph.trainer import LOSS, make_trainer
from fullgraph.view import LayerView, Pass, make_part
from fullgraph.world import REST, SETUP, Meter, RankError, World, is_lost_rank
from tests.graphs import CASES, Case, shard_of
from tests.ranks import RankPool

SIZES = (1, 2, 3, 4)
KINDS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16)


# -------------------------------------------------------------------------------------------------------- exchange


def number(sender: int, receiver: int, row: int, column: int) -> int:
    return 1000 * sender + 100 * receiver + 10 * row + column


def rows_for(counts: list[int], sender: int, width: int) -> Tensor:
    """A row for each that ``sender`` sends; every element says where it comes from and goes to."""
    rows = [[number(sender, r, i, c) for c in range(width)] for r, count in enumerate(counts) for i in range(count)]
    return torch.tensor(rows, dtype=torch.float64).reshape(sum(counts), width)


def exchanged(world: World, counts: list[list[int]], width: int) -> list[tuple[Tensor, Tensor]]:
    """(received, expected) rows for tensors of each layout and type."""
    sent, received = counts[world.rank], [row[world.rank] for row in counts]
    rows = rows_for(sent, world.rank, width)
    expected = torch.cat(
        [rows_for(row, p, width)[sum(row[: world.rank]) :][: row[world.rank]] for p, row in enumerate(counts)]
    )
    layouts = {
        "plain": rows,
        "transposed": rows.t().contiguous().t(),
        "columns": torch.cat([rows, -rows], dim=1)[:, :width],
        "every other row": torch.stack([rows, -rows], dim=1).flatten(0, 1)[::2],
    }
    out = []
    for layout in layouts.values():
        assert torch.equal(layout, rows)
        out.append((world.exchange(layout, sent, received).wait(), expected))
    for kind in KINDS:
        out.append((world.exchange(rows.to(kind), sent, received).wait(), expected.to(kind)))
    one = torch.ones(1, 1, dtype=torch.float64).expand(len(rows), width)  # one number seen at every place
    out.append((world.exchange(one, sent, received).wait(), torch.ones_like(expected)))
    return out


COUNTS = {
    "even": lambda p: np.ones((p, p), int) * 3,
    "uneven": lambda p: np.arange(p * p).reshape(p, p) % 5,
    "one way": lambda p: np.triu(np.ones((p, p), int), 1) * 2,
    "one rank silent": lambda p: np.where(np.arange(p) == p - 1, 0, 2) * np.ones((p, 1), int),
    "nothing": lambda p: np.zeros((p, p), int),
}


@pytest.mark.parametrize("parts", SIZES)
def test_exchange_brings_every_row_to_its_place(ranks: RankPool, parts: int) -> None:
    for name, width in itertools.product(COUNTS, (1, 3)):
        for rank, pairs in enumerate(ranks.run(parts, exchanged, COUNTS[name](parts).tolist(), width)):
            for received, expected in pairs:
                assert received.dtype == expected.dtype
                assert torch.equal(received, expected), f"{name}, width {width}, rank {rank}, {expected.dtype}"


def compared(world: World, what: str) -> str:
    """An exchange that does not fit, where every collective is compared before."""
    world, there = dataclasses.replace(world, debug=True), world.rank == 1
    try:
        if what == "order":
            for layer in (1, 0) if there else (0, 1):
                world.exchange(torch.ones(2, 3), [1, 1], [1, 1], (layer, "forward")).wait()
        elif what == "kind" and there:
            world.sum_(torch.ones(2, 3))
        elif what == "counts" and there:
            world.exchange(torch.ones(1, 3), [1, 0], [2, 0]).wait()
        elif what == "columns" and there:
            world.exchange(torch.ones(2, 4), [1, 1], [1, 1]).wait()
        else:
            world.exchange(torch.ones(2, 3), [1, 1], [1, 1]).wait()
    except RankError as error:
        return str(error)
    return "it went well"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("order", "rank 0 is at .*forward of layer 0.* but rank 1 at .*forward of layer 1"),
        ("kind", "rank 0 is at .*exchange .* but rank 1 at .*sum of"),
        ("counts", "rank 0 sends 1 rows to rank 1, which expects 2"),
        ("columns", "of 3, torch.float32, but rank 1 at .*of 4, torch.float32"),
        ("nothing", "it went well"),
    ],
)
def test_what_ranks_do_not_do_alike_is_told_before_it_is_done(ranks: RankPool, what: str, text: str) -> None:
    (said,) = set(ranks.run(2, compared, what))
    assert re.search(text, said), said


def exchanged_without_columns(world: World) -> tuple[tuple[int, ...], int]:
    rows = world.exchange(torch.zeros(2 * world.size, 0), [2] * world.size, [2] * world.size).wait()
    return tuple(rows.shape), len(world.meter.ledger)


def test_rows_of_no_columns_do_not_travel(ranks: RankPool) -> None:
    assert ranks.run(3, exchanged_without_columns) == [((6, 0), 0)] * 3


def metered(world: World) -> tuple[dict[Any, list[int]], int]:
    counts = [rank + 1 for rank in range(world.size)]
    mine = [world.rank + 1] * world.size
    for tag in ((0, "forward"), SETUP, (0, "forward")):
        world.exchange(torch.zeros(sum(counts), 5, dtype=torch.float32), counts, mine, tag).wait()
    return world.meter.ledger, world.meter.bytes_sent


def test_the_meter_counts_what_goes_to_other_ranks(ranks: RankPool) -> None:
    for rank, (ledger, total) in enumerate(ranks.run(3, metered)):
        once = [0 if r == rank else 20 * (r + 1) for r in range(3)]
        assert ledger == {(0, "forward"): [2 * count for count in once], SETUP: once}
        assert total == 2 * sum(once)  # setting up is not a step's


def open_view(world: World, case: Case) -> LayerView:
    shard = shard_of(case.graph, case.part(world.size), world.rank, world.size)
    return make_part(shard, world, dtype=torch.float64).views(Pass(training=False))[0]


@contextlib.contextmanager
def watched_all_to_all(rank: int) -> Iterator[list[list[int]]]:
    """The bytes that this rank sends to each rank in every all-to-all of the block, by what torch is asked to do."""
    calls: list[list[int]] = []
    original = dist.all_to_all_single

    def watched(output: Tensor, rows: Tensor, take: list[int], give: list[int], **others: Any) -> Any:
        row_bytes = rows[:1].nbytes
        calls.append([0 if r == rank else count * row_bytes for r, count in enumerate(give)])
        return original(output, rows, take, give, **others)

    dist.all_to_all_single = watched
    try:
        yield calls
    finally:
        dist.all_to_all_single = original


def in_blocks(world: World, name: str, limits: list[int]) -> list[tuple[list[Tensor], int]]:
    """For each limit of bytes: results and gradients of every exchange, and the number of exchanges they took."""
    out = []
    for limit in limits:
        view = open_view(dataclasses.replace(world, exchange_bytes=limit), CASES[name])
        x = (torch.outer(view.ids, torch.arange(7)) % 11).to(torch.float64).requires_grad_()
        results = []
        assert view.plan.linear
        assert view.plan.halo  # agreed now, so that only rows are watched
        with watched_all_to_all(world.rank) as calls:
            for y in (view.propagate(x), view.propagate(x, "gcn"), view.with_halo(x)):
                (grad,) = torch.autograd.grad((y * y).sum(), x)
                results += [y.detach(), grad]
        out.append((results, len(calls)))
    return out


@pytest.mark.parametrize("name", ["directed", "one way", "no halo", "weighted"])
def test_blocks_of_columns_equal_one_block(ranks: RankPool, name: str) -> None:
    row = 8 * max(open_most_rows(name), 1)
    limits = [1 << 30, 7 * row, 3 * row, 1]  # all seven columns; the same; three at a time; one
    for outcome in ranks.run(2, in_blocks, name, limits):
        (whole, calls), *others = outcome
        assert calls == 6
        assert [n for _, n in others] == [6, 18, 42]
        for results, _ in others:
            assert all(torch.equal(a, b) for a, b in zip(results, whole, strict=True))


def open_most_rows(name: str) -> int:
    """Most halo rows that either of two ranks sends or receives."""
    case = CASES[name]
    shards = [shard_of(case.graph, case.part(2), q, 2) for q in range(2)]
    return max(shard.num_halo for shard in shards)


# ----------------------------------------------------------------------------------------------- other collectives


def summed(world: World) -> list[tuple[Tensor, Tensor]]:
    """(sum in place, expected) of views that are no plain block of memory, and of none."""
    total, factor = world.size * (world.size + 1) // 2, world.rank + 1
    base = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    views = [
        lambda t: t,
        lambda t: t[:, 2],
        lambda t: t[:, 1:5:2],
        lambda t: t.t(),
        lambda t: t[1:3],
        lambda t: t[::2, ::3],
        lambda t: t[:0],
        lambda t: t[2, 3],
    ]
    out = []
    for kind, view in itertools.product((torch.float64, torch.float32, torch.int64), views):
        tensor, expected = (base * factor).to(kind), (base * factor).to(kind)
        view(expected)[...] = view(base * total).to(kind)
        returned = world.sum_(view(tensor))
        assert torch.equal(returned, view(tensor))
        out.append((tensor, expected))
    return out


@pytest.mark.parametrize("parts", SIZES)
def test_sums_of_views_leave_the_rest_alone(ranks: RankPool, parts: int) -> None:
    for pairs in ranks.run(parts, summed):
        assert all(torch.equal(found, expected) for found, expected in pairs)


VALUES: list[Any] = [None, 1.5, {"a": [1, "é€🙂", None]}, "x" * 5000]


def told_apart(world: World) -> tuple[str, float]:
    """What is said without groups, and a sum over those that the pool made."""
    with pytest.raises(RankError) as refused:
        dataclasses.replace(world, apart_groups=[]).apart()
    apart = world.apart()
    assert apart.control is not world.control
    return str(refused.value), float(apart.sum_(torch.tensor([world.rank + 1.0])))


def test_groups_apart_of_some_processes_are_not_waited_for(ranks: RankPool) -> None:
    for text, total in ranks.run(3, told_apart):
        assert "a world of 3 of 4 processes" in text
        assert total == 6


def gathered(world: World) -> tuple[list[Any], list[list[float]], list[Tensor], int]:
    values = world.gather_json(VALUES[world.rank])
    vector = world.gather_vector([world.rank, float("inf"), -0.5]).tolist()
    rows = torch.arange(60.0).reshape(10, 6)[:, ::2][: 2 * world.rank]  # rank 0 has none
    found = [world.gather_rows(rows), world.gather_rows(rows[:0]), world.gather_rows(rows.to(torch.int64))]
    return values, vector, found, world.meter.bytes_sent


@pytest.mark.parametrize("parts", SIZES)
def test_every_rank_gathers_what_every_rank_has(ranks: RankPool, parts: int) -> None:
    rows = torch.arange(60.0).reshape(10, 6)[:, ::2]
    expected = torch.cat([rows[: 2 * rank] for rank in range(parts)])
    for values, vector, found, sent in ranks.run(parts, gathered):
        assert values == VALUES[:parts]
        assert vector == [[rank, float("inf"), -0.5] for rank in range(parts)]
        assert torch.equal(found[0], expected)
        assert found[1].shape == (0, 3)
        assert torch.equal(found[2], expected.to(torch.int64))
        assert sent == 0  # message rows alone are counted


# --------------------------------------------------------------------------------------------------------- stages


def staged(world: World, errors: dict[int, Exception]) -> tuple[str, int, str | None] | None:
    try:
        with world.stage("load"):
            if world.rank in errors:
                raise errors[world.rank]
    except RankError as error:
        return str(error), error.shown_by, None if error.__cause__ is None else type(error.__cause__).__name__
    return None


STAGES: list[tuple[dict[int, Exception], str, int]] = [
    ({1: ValueError("bad node 3")}, "load (rank 1): bad node 3", 1),
    ({0: ValueError("no"), 2: ValueError("no")}, "load (ranks 0 and 2): no", 0),
    ({r: ValueError("no") for r in range(3)}, "load (all ranks): no", 0),
    (
        {1: ValueError("a"), 2: OSError(2, "No such file", "/x")},
        "load:\n  rank 1: a\n  rank 2: [Errno 2] No such file: '/x'",
        1,
    ),
    ({2: ZeroDivisionError("by zero")}, "load (rank 2): ZeroDivisionError: by zero", 2),
    (
        {1: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes.")},
        "load (rank 1): RuntimeError: out of memory for 16 bytes; use more ranks on more hosts, a smaller --hidden or "
        "fewer --layers",
        1,
    ),
    (
        {1: MemoryError()},
        "load (rank 1): MemoryError: out of memory; use more ranks on more hosts, a smaller --hidden or fewer --layers",
        1,
    ),
    ({1: RankError("of a stage inside")}, "load (rank 1): RankError: of a stage inside", 1),
]


@pytest.mark.parametrize(("errors", "text", "shown_by"), STAGES, ids=[text for _, text, _ in STAGES])
def test_an_error_of_a_stage_is_the_same_on_all_ranks(
    ranks: RankPool, errors: dict[int, Exception], text: str, shown_by: int
) -> None:
    found = ranks.run(3, staged, errors)
    assert [outcome[:2] for outcome in found] == [(text, shown_by)] * 3
    # The cause is kept where it arose, and only of an error that no user is expected to make.
    for rank, outcome in enumerate(found):
        unexpected = rank in errors and not isinstance(errors[rank], (ValueError, OSError, MemoryError))
        unexpected = unexpected and "allocate" not in str(errors[rank])
        assert outcome[2] == (type(errors[rank]).__name__ if unexpected else None)


def test_a_stage_without_an_error_and_a_stage_of_one_rank(ranks: RankPool) -> None:
    assert ranks.run(3, staged, {}) == [None] * 3
    assert staged(World(), {0: ValueError("bad node 3")}) == ("load: bad node 3", 0, None)
    assert staged(World(), {0: KeyError("x")}) == ("load: KeyError: 'x'", 0, "KeyError")


# ------------------------------------------------------------------------------------------------------- the meter


@pytest.mark.parametrize(
    ("step", "tag", "text"),
    [
        (None, SETUP, "start"),
        (None, (0, "evaluate"), "layer 0 evaluate"),
        (4, SETUP, "epoch 5"),
        (0, REST, "epoch 1"),
        (0, LOSS, "epoch 1, loss"),
        (11, (1, "backward"), "epoch 12, layer 1 backward"),
    ],
)
def test_the_meter_says_where_a_run_is(step: int | None, tag: tuple[int, str], text: str) -> None:
    meter = Meter(step=step)
    meter.enter(tag)
    assert meter.where == text


def test_time_belongs_to_what_was_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 3.0, 10.0])
    monkeypatch.setattr("fullgraph.world.time.perf_counter", lambda: next(now))
    meter = Meter(_since=0.0)
    meter.enter((0, "forward"))  # after 1 s of setting up
    meter.enter(REST)  # after 2 s of the layer
    meter.seconds += 4.0
    meter.enter((0, "forward"))  # after 7 s of the rest, 4 of them in collectives
    assert meter.compute == {SETUP: 1.0, (0, "forward"): 2.0, REST: 3.0}


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"), True),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
        (MemoryError(), False),
    ],
)
def test_errors_of_a_broken_collective_are_known(error: Exception, lost: bool) -> None:
    assert is_lost_rank(error) == lost


# ------------------------------------------------------------------------------------------------------ the ledger

OPTIONS: dict[str, Sequence[Any]] = {
    "model": ("gcn", "sage", "gin", "gat"),
    "plan": ("cover", "halo"),
    "prune": (True, False),
    "layer0": ("once", "keep", "exchange"),
    "parts": (2, 3, 4),
    "layers": (1, 2, 3),
    "hidden": (4, 16),  # narrower and wider than the features
    "input_dropout": (0.0, 0.3),
    "case": ("directed", "one way", "no training node", "sparse", "isolated"),
    "dtype": ("float64", "float32"),
}
Choice = dict[str, Any]


def pairwise(options: dict[str, Sequence[Any]]) -> list[Choice]:
    """Choices of which some one holds every pair of values of two options: greedily, those of most new pairs first."""
    names = list(options)
    missing = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(options[a], options[b])
    }
    rng = np.random.default_rng(0)
    out: list[Choice] = []
    while missing:
        seed = sorted(missing, key=str)[0]
        best, most = {}, -1
        for _ in range(30):
            choice = dict(seed)
            for name in rng.permutation([name for name in names if name not in choice]):
                gain = [sum(frozenset([(name, v), item]) in missing for item in choice.items()) for v in options[name]]
                choice[str(name)] = options[name][int(np.argmax(gain))]
            new = len(missing & _pairs(choice))
            if new > most:
                best, most = choice, new
        out.append(best)
        missing -= _pairs(best)
    return out


def _pairs(choice: Choice) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in itertools.combinations(choice.items(), 2)}


def test_every_pair_of_options_occurs() -> None:
    chosen = pairwise(OPTIONS)
    assert len(chosen) < 40
    seen = set().union(*map(_pairs, chosen))
    for a, b in itertools.combinations(OPTIONS, 2):
        assert all(frozenset([(a, x), (b, y)]) in seen for x, y in itertools.product(OPTIONS[a], OPTIONS[b]))


def calls_of_a_step(world: World, choices: list[Choice]) -> list[tuple[list[list[int]], Ledger, int, int]]:
    """For each choice: the bytes that every all-to-all of one step sends to each rank, in order, by a wrapper that
    knows nothing of plans; what the trainer predicted; what the step's record says; and its own meter's sum."""
    out = []
    for choice in choices:
        fields = {name: value for name, value in choice.items() if name not in ("case", "parts")}
        case = CASES[choice["case"]]
        shard = shard_of(case.graph, case.part(world.size), world.rank, world.size)
        config = TrainConfig(heads=2, dropout=0.3, **fields)
        trainer = make_trainer(shard, config, dataclasses.replace(world, meter=Meter()))
        predicted = trainer.predicted_ledger()
        trainer.step(0)  # what is fetched once
        before = trainer.world.meter.bytes_sent
        with watched_all_to_all(world.rank) as calls:
            record, _ = trainer.step(1)
        out.append((calls, predicted, record["bytes_sent"], trainer.world.meter.bytes_sent - before))
    return out


def check_ledger(ranks: RankPool, choices: list[Choice]) -> None:
    for parts in OPTIONS["parts"]:
        chosen = [choice for choice in choices if choice["parts"] == parts]
        found = ranks.run(parts, calls_of_a_step, chosen, timeout=60 + 2.0 * len(chosen))
        for i, choice in enumerate(chosen):
            total = 0
            for rank in range(parts):
                calls, predicted, recorded, metered = found[rank][i]
                # Layers come in order, and back from the last to the first.
                layers = range(choice["layers"])
                tags = [(layer, "forward") for layer in layers] + [(layer, "backward") for layer in reversed(layers)]
                assert set(predicted) <= set(tags), choice
                assert calls == [predicted[tag] for tag in tags if tag in predicted], f"rank {rank} of {choice}"
                assert metered == sum(map(sum, calls)), choice
                total += metered
            assert recorded == total, choice


def test_the_ledger_says_what_crosses(ranks: RankPool) -> None:
    check_ledger(ranks, pairwise(OPTIONS))


@pytest.mark.slow
def test_the_ledger_of_every_combination(ranks: RankPool) -> None:
    few = OPTIONS | {"layers": (3,), "input_dropout": (0.0,), "dtype": ("float64",), "case": ("directed", "sparse")}
    check_ledger(ranks, [dict(zip(few, values, strict=True)) for values in itertools.product(*few.values())])
