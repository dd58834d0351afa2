"""Which message rows cross in a training step, how they are written, and when: everything that is not exact.

Three choices compose. *When*: every step; one step late, under a whole step's work (Wan et al. 2022, PipeGCN); every
R-th step, from historical rows between (Fey et al. 2021, GNNAutoScale; Md et al. 2021, DistGNN); or a row once it has
moved. *How*: ``fullgraph.codec``. *Which*: all, or a share drawn anew each step (Wan et al. 2022, BNS-GCN).

A ``Policy`` lives as long as a run. For each step it gives a ``StepPolicy``, or None where the step is exact; from
it each propagate of the pass has its ``Carrier``. Propagates are known by their number in the pass, so a model must
make the same ones in every pass. Whether anything crosses hangs on (step, layer, options) alone, so that all ranks
meet; how many rows ``drift`` sends is told by the bitmaps that cross before them.

The first step of a cached form is exact and fills the cache. Where rows are cached, a row that is not drawn stays as it
was and nothing is scaled; where they are not, n rows of which k are drawn are scaled by n / k, which makes the sum an
unbiased estimate. A gradient goes back by the codec, and the draw, of its row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullgraph.codec import decode, encode, generator
from fullgraph.config import Codec, Refresh, TrainConfig
from fullgraph.cost import Crossing, Ledger, Tag, layer_ledger, row_bytes, rows_drawn
from fullgraph.dropout import MaskKey, uniform
from fullgraph.exchange import Arrivals, Arriving, Transfer, column_blocks, message_rows, send_rows
from fullgraph.history import History, history_bytes
from fullgraph.plan import Route
from fullgraph.reach import Counts
from fullgraph.world import Pending, World

_FORWARD, _BACKWARD = 0, 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The choices of a run, from its options."""

    refresh: Refresh
    stagger: bool
    keep_grad: bool
    average: float
    codec: Codec
    sample: float
    exact_after: int | None
    bfloat16: bool
    freeze_masks: bool
    measure_every: int | None

    @classmethod
    def of(cls, config: TrainConfig) -> Recipe:
        return cls(
            refresh=Refresh.parse(config.refresh),
            stagger=config.stagger,
            keep_grad=config.stale_grad == "keep",
            average=config.pipeline_average,
            codec=config.codec,
            sample=config.boundary_sample,
            exact_after=config.exact_after,
            bfloat16=config.cache_bfloat16,
            freeze_masks=config.freeze_masks,
            measure_every=config.measure_drift,
        )

    @property
    def exact(self) -> bool:
        """Whether every step is exact."""
        return not self.stale and self.codec == "float32" and self.sample == 1.0

    @property
    def stale(self) -> bool:
        """Whether rows are cached."""
        return self.refresh.stale

    def sentence(self) -> str:
        """What is not exact, for a person."""
        kind, words = self.refresh.kind, []
        if self.stale:
            when = {
                "pipelined": "one step late",
                "every": f"every {self.refresh.interval} steps" + (", layers in turn" if self.stagger else ""),
                "drift": f"when they changed by more than {self.refresh.threshold:g} of their norm",
            }
            words.append(f"sent {when[kind]}")
            if kind != "drift":
                words.append("gradients of the same age" if self.keep_grad else "no gradients of cached rows")
            if self.average:
                words.append(f"moving average with {self.average:g} of the past")
            words.append("masks of the sending step (frozen)" if self.freeze_masks else "masked where they are used")
        if self.codec != "float32":
            words.append(f"as {self.codec}")
        if self.sample < 1:
            words.append(f"{self.sample:.3g} of them drawn each step" + ("" if self.stale else ", scaled"))
        until = "" if self.exact_after is None else f", exact after epoch {self.exact_after}"
        return f"approximate in training: message rows {', '.join(words)}{until}; evaluation is exact"

    def exact_at(self, step: int) -> bool:
        return self.exact or (self.exact_after is not None and step >= self.exact_after)

    @property
    def masks_at_receiver(self) -> bool:
        """Whether rows are cached as they were before dropout."""
        return self.stale and not self.freeze_masks

    def due(self, step: int, layer: int) -> bool:
        """Whether ``every`` refreshes a layer in a step."""
        every = self.refresh.interval
        return step % every == (layer % every if self.stagger else 0)

    def crosses(self, step: int, layer: int) -> tuple[bool, bool]:
        """Whether rows (forward, backward) cross in a step after the one that filled the cache."""
        if self.refresh.kind == "every" and not self.due(step, layer):
            return False, False
        return True, self.refresh.kind != "pipelined" or self.keep_grad

    def layer_ledger(
        self,
        layer: int,
        crossing: Crossing,
        counts: Counts,
        *,
        step: int,
        fills: bool,
        itemsize: int,
        blocks: Sequence[slice],
    ) -> Ledger | None:
        """Bytes that a layer sends to each rank in a step; ``fills`` where it fills the cache. None where that depends
        on the rows."""
        if not crossing.width:
            return {}
        exact = self.exact_at(step) or (fills and self.stale)
        if self.refresh.kind == "drift" and self.stale and not exact:
            return None
        codec, sample = ("float32", 1.0) if exact else (self.codec, self.sample)
        forward, backward = (True, True) if exact or not self.stale else self.crosses(step, layer)
        row = sum(row_bytes(codec, block.stop - block.start, itemsize) for block in blocks)
        if not forward:
            return {}
        sent, received = ([rows_drawn(count, sample) for count in side] for side in (counts.sent, counts.received))
        back = backward and crossing.backward
        return layer_ledger(layer, Crossing(width=row, backward=back), sent, received, itemsize=1)

    def cache_bytes(self, crossing: Crossing, counts: Counts, itemsize: int) -> int:
        """Memory that a layer's caches hold on this rank; a transfer under way is not in it."""
        if not self.stale or not crossing.width:
            return 0
        of = functools.partial(history_bytes, width=crossing.width, itemsize=2 if self.bfloat16 else itemsize)
        sent, received = sum(counts.sent), sum(counts.received)
        if self.refresh.kind == "drift":
            return of(received) + of(sent)
        return of(received) + (of(sent) if self.keep_grad and crossing.backward else 0)


# --------------------------------------------------------------------------------------------------------- drawn rows


@dataclass(frozen=True, eq=False)
class _Way:
    """What takes part in one direction of an exchange: numbers of rows to and from each rank, and, where not all rows
    do, the int64 indices of those that leave and arrive (ascending) and what makes up for the others [k, 1]."""

    tag: Tag
    sent: tuple[int, ...]
    received: tuple[int, ...]
    leaving: Tensor | None = None
    arriving: Tensor | None = None
    scale: Tensor | None = None


def _drawn_ways(ways: tuple[_Way, _Way], share: float, key: MaskKey, rank: int, device: torch.device) -> list[_Way]:
    """The same for rows that are drawn. Both sides draw the same, for they hash (step, propagate, sender, receiver,
    row of the pair); a gradient goes the way of its row."""
    counts = ways[_FORWARD]
    others = torch.arange(len(counts.sent), device=device)
    sent = _choose(counts.sent, rank * len(others) + others, share, key)
    received = _choose(counts.received, others * len(others) + rank, share, key)
    return [
        _Way(way.tag, out[1], into[1], out[0], into[0], into[2])
        for way, out, into in ((ways[_FORWARD], sent, received), (ways[_BACKWARD], received, sent))
    ]


def _choose(
    counts: Sequence[int], pair_ids: Tensor, share: float, key: MaskKey
) -> tuple[Tensor, tuple[int, ...], Tensor]:
    """(rows chosen, how many of each rank, scale of each): of a pair's n rows the ceil(share n) of least hash."""
    device = pair_ids.device
    kept = tuple(rows_drawn(count, share) for count in counts)
    n, k = torch.tensor(counts, device=device), torch.tensor(kept, device=device)
    pair = torch.repeat_interleave(torch.arange(len(counts), device=device), n)
    index = torch.arange(pair.shape[0], device=device) - (torch.cumsum(n, 0) - n)[pair]
    number = uniform((pair_ids[pair] << 32) + index, 1, key)[:, 0]
    order = torch.argsort(pair + number, stable=True)  # by pair, as the rows are, and by number within
    chosen = torch.sort(order[index < k[pair]])[0]
    scale = torch.where(k > 0, n / k.clamp(min=1), 1.0)[pair[chosen]]
    return chosen, kept, scale[:, None]


# ------------------------------------------------------------------------------------------------------------ bitmaps


@dataclass(frozen=True, eq=False)
class _Bits:
    """Where the bit of each row stands when each rank's rows fill whole bytes."""

    place: Tensor
    """int64 [m]"""
    rank: Tensor
    """int64 [m]"""
    bytes: tuple[int, ...]
    """A rank."""

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> _Bits:
        n = torch.tensor(counts, device=device)
        size = (n + 7) // 8
        rank = torch.repeat_interleave(torch.arange(len(counts), device=device), n)
        shift = 8 * (torch.cumsum(size, 0) - size) - (torch.cumsum(n, 0) - n)
        place = torch.arange(rank.shape[0], device=device) + shift[rank]
        return cls(place, rank, tuple(size.tolist()))

    def pack(self, marks: Tensor) -> Tensor:
        """uint8 [bytes, 1] from bool [m]."""
        bits = torch.zeros(8 * sum(self.bytes), dtype=torch.int64, device=marks.device)
        bits[self.place] = marks.to(torch.int64)
        weights = 2 ** torch.arange(8, device=marks.device)
        return (bits.view(-1, 8) * weights).sum(1, keepdim=True).to(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """bool [m] again."""
        bits = (packed.to(torch.int64) >> torch.arange(8, device=packed.device)) & 1
        return bits.reshape(-1)[self.place].to(torch.bool)

    def count(self, marks: Tensor) -> tuple[int, ...]:
        """Marked rows of each rank."""
        return tuple(torch.bincount(self.rank[marks], minlength=len(self.bytes)).tolist())


# ------------------------------------------------------------------------------------------------------------ carriers


@dataclass(frozen=True, eq=False)
class _Decoding:
    """Coded rows on their way."""

    pending: Pending
    codec: Codec
    dtype: torch.dtype

    def wait(self) -> Tensor:
        return decode(self.pending.wait(), self.codec, self.dtype)


@dataclass(eq=False)
class _Flow:
    """What is remembered of one direction of one propagate, where it arrives."""

    history: History
    under_way: list[Arriving] = field(default_factory=list)
    sent_in: int = 0
    which: Tensor | None = None
    """Step that sent what is under way, and rows that it brings; None for all."""

    def arrive(self, average: float) -> None:
        """Take what is under way into the history."""
        if self.under_way:
            rows = _side_by_side([arriving.wait() for arriving in self.under_way])
            self.under_way = []
            if average:
                before = self.history.pull(rows.dtype)
                rows = rows.lerp(before if self.which is None else before[self.which], average)
            self.history.push(rows, self.sent_in, self.which)


@dataclass(eq=False)
class _Site:
    """One propagate of the pass: the rows that came, the gradients that came back, and (for drift) what was sent."""

    layer: int
    flows: tuple[_Flow, _Flow]
    sent: History

    @property
    def stores(self) -> dict[str, History]:
        return {"forward": self.flows[_FORWARD].history, "backward": self.flows[_BACKWARD].history, "sent": self.sent}


class _Crossing:
    """The carrier of one propagate in one step."""

    def __init__(self, policy: Policy, number: int, site: _Site, step: int) -> None:
        self.recipe, self.world, self.apart, self.measured = policy.recipe, policy.world, policy.apart, policy.measured
        self.site, self.step, self.key = site, step, MaskKey(policy.seed, step, number)

    def send(self, x: Tensor, route: Route) -> Arrivals:
        layer = self.site.layer
        self.world.meter.enter((layer, "forward"))
        self.width, self.dtype, self.route = x.shape[1], x.dtype, route
        self.columns = column_blocks(self.width, x.element_size(), route.most_rows, self.world.exchange_bytes)
        counts = route.counts
        self.all = (
            _Way((layer, "forward"), counts.sent, counts.received),
            _Way((layer, "backward"), counts.received, counts.sent),
        )
        self.fills = self.recipe.stale and not self.site.flows[_FORWARD].history.filled
        self.ways: Sequence[_Way] = self.all
        if self.recipe.sample < 1.0 and not self.fills:
            self.ways = _drawn_ways(self.all, self.recipe.sample, self.key, self.world.rank, x.device)

        def rows(columns: slice) -> Tensor:
            return message_rows(x, route, columns)

        used = self._forward(rows)
        every = self.recipe.measure_every
        if every is not None and (self.step + 1) % every == 0:
            taken = _gathered(used)
            self._measure(taken, _gathered(send_rows(x, route, self.world, (layer, "measured"))))
            used = [(slice(0, self.width), taken)]
        return used

    def send_back(self, grad: Callable[[], Tensor], route: Route) -> Arrivals:
        assert route is self.route
        self.world.meter.enter((self.site.layer, "backward"))
        recipe = self.recipe
        crosses = self.fills or recipe.crosses(self.step, self.site.layer)[1]

        def rows() -> Callable[[slice], Tensor]:
            every = grad()
            return lambda columns: every[:, columns]

        if not recipe.stale or recipe.refresh.kind == "drift" or not recipe.keep_grad:
            return self._fresh(rows(), _BACKWARD) if crosses else []
        return self._cached(rows, _BACKWARD, crosses)

    def _forward(self, rows: Callable[[slice], Tensor]) -> Arrivals:
        if not self.recipe.stale:
            return self._fresh(rows, _FORWARD)
        if self.recipe.refresh.kind == "drift":
            if self.fills:
                self.site.sent.push(rows(slice(0, self.width)), self.step)
            else:
                return self._moved(rows)
        return self._cached(lambda: rows, _FORWARD, self.recipe.crosses(self.step, self.site.layer)[0])

    def _fresh(self, rows: Callable[[slice], Tensor], direction: int) -> Arrivals:
        """This step's rows; zeros for those that are not drawn."""
        way = self.ways[direction]
        transfer = self._transfer(rows, direction)
        return transfer if way.arriving is None else _scattered(transfer, way, sum(self.all[direction].received))

    def _cached(self, rows: Callable[[], Callable[[slice], Tensor]], direction: int, crosses: bool) -> Arrivals:
        """The rows in the history, brought up to date first where this step is one for it."""
        flow, way = self.site.flows[direction], self.ways[direction]
        if not flow.history.filled:
            self.fills, self.ways = True, self.all
            flow.history.push(_gathered(self._transfer(rows(), direction)), self.step)
        elif crosses and self.recipe.refresh.kind == "pipelined":
            flow.arrive(self.recipe.average)
            flow.under_way, flow.sent_in, flow.which = self._start(rows(), direction), self.step, way.arriving
        elif crosses:
            flow.history.push(_gathered(self._transfer(rows(), direction)), self.step, way.arriving)
        return [(slice(0, self.width), flow.history.pull(self.dtype))]

    def _transfer(self, rows: Callable[[slice], Tensor], direction: int) -> Transfer:
        """The exchange of those rows that take part, on its way."""
        return Transfer(self._leaving(rows, direction), self._sender(direction, self.world), self.columns)

    def _start(self, rows: Callable[[slice], Tensor], direction: int) -> list[Arriving]:
        """The same over the groups apart, all columns at once."""
        leaving, send = self._leaving(rows, direction), self._sender(direction, self.apart)
        return [send(leaving(columns)) for columns in self.columns]

    def _leaving(self, rows: Callable[[slice], Tensor], direction: int) -> Callable[[slice], Tensor]:
        leaving = self.ways[direction].leaving
        return rows if leaving is None else lambda columns: rows(columns).index_select(0, leaving)

    def _sender(self, direction: int, world: World) -> Callable[[Tensor], Arriving]:
        codec: Codec = "float32" if self.fills else self.recipe.codec
        way = self.ways[direction]
        draw = generator(self.key, rank=world.rank, direction=direction, device=world.device)

        def send(rows: Tensor) -> Arriving:
            return _Decoding(
                world.exchange(encode(rows, codec, draw), way.sent, way.received, way.tag), codec, self.dtype
            )

        return send

    def _moved(self, rows: Callable[[slice], Tensor]) -> Arrivals:
        """The history, with those rows new that are further than the threshold from what their receiver has."""
        way, history, last = self.all[_FORWARD], self.site.flows[_FORWARD].history, self.site.sent
        now, before = rows(slice(0, self.width)), last.pull(self.dtype)
        change = torch.linalg.vector_norm(now - before, dim=1)
        moved = ~(change <= self.recipe.refresh.threshold * torch.linalg.vector_norm(before, dim=1))  # NaN has moved
        bits, bits_in = _Bits.of(way.sent, now.device), _Bits.of(way.received, now.device)
        marks = bits_in.unpack(self.world.exchange(bits.pack(moved), bits.bytes, bits_in.bytes, way.tag).wait())
        leaving, arriving = torch.nonzero(moved)[:, 0], torch.nonzero(marks)[:, 0]
        sent, received = bits.count(moved), bits_in.count(marks)
        draw = generator(self.key, rank=self.world.rank, direction=_FORWARD, device=now.device)
        codec, told, came = self.recipe.codec, [], []
        for columns in self.columns:
            payload = encode(now[leaving, columns], codec, draw)
            told.append(decode(payload, codec, self.dtype))
            came.append(decode(self.world.exchange(payload, sent, received, way.tag).wait(), codec, self.dtype))
        last.push(_side_by_side(told), self.step, leaving)
        history.push(_side_by_side(came), self.step, arriving)
        return [(slice(0, self.width), history.pull(self.dtype))]

    def _measure(self, taken: Tensor, exact: Tensor) -> None:
        sums = [(taken - exact).square(), exact.square(), taken.square(), taken * exact]
        mine = torch.stack([each.sum(dtype=torch.float64) for each in sums]).cpu()
        layer = self.site.layer
        self.measured[layer] = self.measured.get(layer, 0) + mine


def _side_by_side(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), 1)


def _gathered(arrivals: Arrivals) -> Tensor:
    """All columns of rows as they arrive."""
    return _side_by_side([rows for _, rows in arrivals])


def _scattered(transfer: Transfer, way: _Way, rows: int) -> Arrivals:
    """What arrives, scaled, in its place among zeros."""
    assert way.arriving is not None
    assert way.scale is not None
    for columns, part in transfer:
        every = part.new_zeros(rows, part.shape[1])
        yield columns, every.index_copy_(0, way.arriving, (part * way.scale).to(part.dtype))


# --------------------------------------------------------------------------------------------------------- the policy


class Policy:
    """A run's recipe at work: gives each step its carriers, and keeps what is cached from step to step."""

    def __init__(self, recipe: Recipe, world: World, seed: int) -> None:
        """A collective where rows travel under a whole step: they need process groups of their own."""
        self.recipe, self.world, self.seed = recipe, world, seed
        self.active = world.size > 1 and not recipe.exact
        self.apart = world.apart() if self.active and recipe.refresh.kind == "pipelined" else world
        self.measured: dict[int, Tensor] = {}
        """By layer, sums over this rank's rows since they were last taken: |used - exact|^2, |exact|^2, |used|^2 and
        used . exact."""
        self.first: int | None = None
        """The step that filled the caches."""
        self._sites: dict[int, _Site] = {}

    def at(self, step: int) -> StepPolicy | None:
        """What moves the rows of a step; None where it is exact."""
        if not self.active:
            return None
        if self.recipe.exact_at(step):
            self.drain()
            self._sites = {}
            return None
        if not self._sites:
            self.first = step
        return StepPolicy(self, step)

    def site(self, number: int, layer: int) -> _Site:
        """The memory of the pass's propagate of this number."""
        if number not in self._sites:
            dtype = torch.bfloat16 if self.recipe.bfloat16 else None
            flows = (_Flow(History(dtype)), _Flow(History(dtype)))
            self._sites[number] = _Site(layer, flows, History(dtype))
        return self._sites[number]

    def drain(self) -> None:
        """Wait for all that is under way, on every rank alike: before the end, and before the state is saved."""
        for number in sorted(self._sites):
            for flow in self._sites[number].flows:
                flow.arrive(self.recipe.average)

    @property
    def nbytes(self) -> int:
        """Memory of the caches."""
        return sum(store.nbytes for site in self._sites.values() for store in site.stores.values())

    def ages(self, step: int) -> dict[tuple[int, str], Tensor]:
        """int32 [m] by propagate and direction: steps from each cached row's sending to ``step``."""
        stores = ((number, name, store) for number, site in self._sites.items() for name, store in site.stores.items())
        return {(number, name): store.age(step) for number, name, store in stores if store.filled}

    def drift(self) -> list[dict[str, float]]:
        """By layer, how far the rows in use were from the exact ones since this was last asked, over all ranks (a
        collective where anything was measured)."""
        mine, self.measured = self.measured, {}
        if not mine:
            return []
        layers = sorted(mine)
        sums = self.world.gather_vector(torch.cat([mine[layer] for layer in layers]).tolist()).sum(0).view(-1, 4)
        out = []
        for layer, (apart, exact, used, both) in zip(layers, sums.tolist(), strict=True):
            relative = (apart / exact) ** 0.5 if exact else float(apart > 0)
            norm = (exact * used) ** 0.5
            out.append({"layer": layer, "relative_error": relative, "cosine": both / norm if norm else 1.0})
        return out

    def state(self) -> dict[str, Tensor]:
        """What this rank has cached, by name; all ranks together, for it waits for what is under way."""
        self.drain()
        out: dict[str, Tensor] = {}
        for number, site in self._sites.items():
            for name, store in site.stores.items():
                out |= {f"{number}.{site.layer}.{name}.{key}": value for key, value in store.state().items()}
        return out

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take what ``state`` gave on this rank, in a run of the same plans and options. Without it the next step is
        exact and fills the caches."""
        self._sites = {}
        for name in state:
            number, layer, store, key = name.split(".")
            if key == "rows":
                stores = self.site(int(number), int(layer)).stores
                stem = name.removesuffix(".rows")
                stores[store].load_state({k: state[f"{stem}.{k}"] for k in ("rows", "sent")}, self.world.device)


class StepPolicy:
    """One step's way of moving rows; each of its propagates asks for its carrier, in order."""

    def __init__(self, policy: Policy, step: int) -> None:
        self._policy, self._step, self._number = policy, step, 0

    @property
    def masks_at_receiver(self) -> bool:
        return self._policy.recipe.masks_at_receiver

    @property
    def scales(self) -> bool:
        """Whether rows that are not drawn are made up for by scaling, which serves sums only."""
        return self._policy.recipe.sample < 1.0 and not self._policy.recipe.stale

    def carrier(self, layer: int) -> _Crossing:
        """That of the pass's next propagate."""
        site = self._policy.site(self._number, layer)
        self._number += 1
        return _Crossing(self._policy, self._number - 1, site, self._step)
