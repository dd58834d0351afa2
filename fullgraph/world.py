"""The ranks of a run: who I am, my device, and the few collectives that everything else is made of.

A ``World`` is opened once and handed to whoever needs it; nothing reaches for global rank state. Rows and gradients
travel over the data group (NCCL where every local rank has a GPU of its own, gloo otherwise); small control values
travel over gloo. Every call of torch.distributed in the project stands in this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from fullgraph.buffers import Buffers
from fullgraph.cost import Ledger, Tag
from fullgraph.host import is_stopped, loopback, process_here

WHOLE = -1
"""In the place of a layer's number: over all nodes, as in evaluation."""
SETUP: Tag = (WHOLE, "setup")
REST: Tag = (WHOLE, "rest")
RESTARTS = "FULLGRAPH_RESTARTS"
"""In the environment: how often this package's own launcher has started the ranks again."""
_ERROR_KEY = "fullgraph/error"
_LOST_KEY = "fullgraph/lost/{rank}"
_GATHER_SECONDS = 2.0  # for the ranks that live to say that they lost another
_STACK_SIGNAL = signal.SIGUSR2
_LINGER_SECONDS = 3.0  # for the others to read why


class RankError(RuntimeError):
    """An error that every rank knows: raised alike on all ranks, to be shown once.

    ``shown_by`` is the rank that shows it. A cause is kept only where it is not one that users are expected to make.
    """

    def __init__(self, message: str, shown_by: int = 0) -> None:
        super().__init__(message)
        self.shown_by = shown_by


@dataclass
class Meter:
    """What this rank's steps cost, by (layer, direction): bytes of message rows sent to each rank, seconds that they
    were on their way, seconds spent waiting for them, and seconds of everything else."""

    bytes_sent: int = 0
    """Since the start, without what is sent once to set up, or to measure what is approximate."""
    seconds: float = 0.0
    """In or waiting for any collective, gradient sums included."""
    ledger: Ledger = field(default_factory=dict)
    travel: dict[Tag, float] = field(default_factory=dict)
    waited: dict[Tag, float] = field(default_factory=dict)
    compute: dict[Tag, float] = field(default_factory=dict)
    step: int | None = None
    """The step that is being taken; None before the first."""
    _now: Tag = SETUP
    _since: float = field(default_factory=time.perf_counter)
    _seconds: float = 0.0

    def enter(self, tag: Tag) -> None:
        """What follows belongs to ``tag``; the time since the last call, outside collectives, to the tag before."""
        now = time.perf_counter()
        spent = now - self._since - (self.seconds - self._seconds)
        self.compute[self._now] = self.compute.get(self._now, 0.0) + spent
        self._now, self._since, self._seconds = tag, now, self.seconds

    @property
    def layer(self) -> int | None:
        """The layer that is at work; None outside layers."""
        return None if self._now[0] == WHOLE else self._now[0]

    @property
    def where(self) -> str:
        """The place in the run, for a person, to whom the first epoch is 1."""
        layer, what = self._now
        places = [] if self.step is None else [f"epoch {self.step + 1}"]
        if layer != WHOLE:
            places.append(f"layer {layer} {what}")
        elif self._now not in (SETUP, REST):
            places.append(what)
        return ", ".join(places) or "start"

    def sent(self, tag: Tag, bytes_to: Sequence[int]) -> None:
        if tag != SETUP and tag[1] != "measured":
            self.bytes_sent += sum(bytes_to)
        line = self.ledger.setdefault(tag, [0] * len(bytes_to))
        for rank, count in enumerate(bytes_to):
            line[rank] += count

    def arrived(self, tag: Tag, travel: float, waited: float) -> None:
        self.travel[tag] = self.travel.get(tag, 0.0) + travel
        self.waited[tag] = self.waited.get(tag, 0.0) + waited


@dataclass(frozen=True, eq=False)
class Pending:
    """Rows on their way; ``wait()`` returns them [sum of recv_counts, D]."""

    received: Tensor
    work: Any
    device: torch.device
    meter: Meter
    tag: Tag
    _sent: Tensor  # kept alive until the transfer is over
    _started: float = 0.0

    def wait(self) -> Tensor:
        if self.work is None:
            return self.received
        start = time.perf_counter()
        self.work.wait()
        received = self.received.to(self.device)
        now = time.perf_counter()
        self.meter.seconds += now - start
        self.meter.arrived(self.tag, now - self._started, now - start)
        return received


@dataclass
class Remedy:
    """What a person can do when a rank is gone."""

    find: Callable[[], str] = lambda: "start again"


@dataclass(frozen=True, eq=False)
class World:
    """P ranks; with one rank every collective is the identity."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    store: Any = None
    meter: Meter = field(default_factory=Meter)
    buffers: Buffers = field(default_factory=Buffers)
    """Where this rank's large rows lie."""
    exchange_bytes: int = 1 << 30
    """Most bytes of message rows that a rank sends or receives at a time; larger exchanges go in blocks of columns."""
    timeout: float = 300.0
    """Seconds that a rank waits for another."""
    restarts: int = 0
    """How often the launcher has started these ranks again."""
    launch: str = ""
    """The launcher's name for all starts of these ranks."""
    processes: tuple[tuple[str, int] | None, ...] = ()
    """Where each rank runs, as ``host.process_here`` says it; None for one that prints no stack when it is asked."""
    debug: bool = False
    """Compare before every collective what the ranks are about to do, and fill what is received with NaN before."""
    remedy: Remedy = field(default_factory=Remedy)
    """For the message when a rank is lost; the run sets it that has something to go on from."""
    apart_groups: list[dist.ProcessGroup] = field(default_factory=list)
    """Data and control group of ``apart``, once made; copies of the world share them."""

    def exchange(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], tag: Tag = SETUP
    ) -> Pending:
        """Start an all-to-all of ``rows`` [sum of send_counts, D], ordered by destination rank; its rows come back
        ordered by source rank. Counts are numbers of rows a rank; they must agree between every pair of ranks. The
        bytes are entered in the ledger under ``tag``."""
        assert rows.shape[0] == sum(send_counts)
        if self.size == 1:
            return Pending(rows, None, rows.device, self.meter, tag, rows)
        if rows.shape[1] == 0:
            return Pending(rows.new_empty(sum(recv_counts), 0), None, rows.device, self.meter, tag, rows)
        if self.debug:
            about = [f"exchange ({tag[1]} of layer {tag[0]})", rows.shape[1], str(rows.dtype)]
            self._compare(about, list(send_counts), list(recv_counts))
        start = time.perf_counter()
        device, (rows, group) = rows.device, self._carrier(rows)
        received = self.buffers.empty(sum(recv_counts), rows.shape[1], rows)
        if self.debug and received.is_floating_point():
            received.fill_(torch.nan)
        work = dist.all_to_all_single(received, rows, list(recv_counts), list(send_counts), group=group, async_op=True)
        row_bytes = rows.shape[1] * rows.element_size()
        self.meter.sent(tag, [0 if r == self.rank else c * row_bytes for r, c in enumerate(send_counts)])
        self.meter.seconds += time.perf_counter() - start
        return Pending(received, work, device, self.meter, tag, rows, start)

    def _carrier(self, tensor: Tensor) -> tuple[Tensor, dist.ProcessGroup | None]:
        """The contiguous tensor and the group it can travel over: gloo carries CPU memory only."""
        if tensor.is_cuda and self.data is not self.control:
            return tensor.contiguous(), self.data
        return tensor.cpu().contiguous(), self.control

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place; returns it."""
        if self.size > 1 and tensor.numel():
            if self.debug:
                self._compare(["sum", list(tensor.shape), str(tensor.dtype)])
            start = time.perf_counter()
            carried, group = self._carrier(tensor)
            dist.all_reduce(carried, group=group)
            if carried is not tensor:
                tensor.copy_(carried)
            self.meter.seconds += time.perf_counter() - start
        return tensor

    def gather_vector(self, values: Sequence[float], *, compared: bool = True) -> Tensor:
        """float64 [P, len(values)] on the CPU: every rank's values, on every rank."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return mine[None]
        if self.debug and compared:
            self._compare(["gather", len(values)])
        out = [torch.empty_like(mine) for _ in range(self.size)]
        start = time.perf_counter()
        dist.all_gather(out, mine, group=self.control)
        self.meter.seconds += time.perf_counter() - start
        return torch.stack(out)

    def _compare(
        self, about: Sequence[Any], sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> None:
        """Raise the same ``RankError`` on all ranks where they are not about to do the same collective, with the same
        shapes and with numbers of rows that fit (a collective)."""
        told = self.gather_json([self.meter.where, *about, sent, received], compared=False)
        for rank, other in enumerate(told):
            if other[:-2] != told[0][:-2]:
                raise RankError(
                    f"debug: rank 0 is at {_said(told[0][:-2])}, but rank {rank} at {_said(other[:-2])}; all ranks "
                    f"must run the same layers in the same order"
                )
        for source, (*_, to, _) in enumerate(told):
            for target, (*_, of) in enumerate(told):
                if to is not None and to[target] != of[source]:
                    raise RankError(
                        f"debug: at {_said(told[0][:-2])}, rank {source} sends {to[target]} rows to rank {target}, "
                        f"which expects {of[source]}"
                    )

    def gather_json(self, value: Any, *, compared: bool = True) -> list[Any]:
        """Every rank's JSON-able value, in order of rank, on every rank."""
        text = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(text)]
        sizes = self.gather_vector([len(text)], compared=compared)[:, 0].to(torch.int64).tolist()
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(out, mine, group=self.control)
        return [json.loads(bytes(t[:size].tolist())) for t, size in zip(out, sizes, strict=True)]

    def gather_rows(self, rows: Tensor) -> Tensor:
        """[sum of n, D] on the CPU of every rank: every rank's rows [n, D], in order of rank."""
        rows = rows.detach().cpu().contiguous()
        if self.size == 1:
            return rows
        counts = self.gather_vector([rows.shape[0]])[:, 0].to(torch.int64).tolist()
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: rows.shape[0]] = rows
        out = [torch.empty_like(padded) for _ in range(self.size)]
        if padded.numel():
            dist.all_gather(out, padded, group=self.control)
        return torch.cat([t[:count] for t, count in zip(out, counts, strict=True)])

    def apart(self) -> World:
        """The same ranks over process groups of their own, made the first time (a collective): what is long under way
        there keeps nothing here waiting."""
        if not self.apart_groups:
            if self.size != dist.get_world_size():
                raise RankError(
                    f"options: a world of {self.size} of {dist.get_world_size()} processes cannot make the groups that "
                    f"--refresh pipelined needs, for torch makes them on all processes together; make them there and "
                    f"give World(apart_groups=[data, control]), or take another --refresh"
                )
            span = datetime.timedelta(seconds=self.timeout)
            control = dist.new_group(backend="gloo", timeout=span)
            own = self.data is not self.control
            self.apart_groups.extend([dist.new_group(backend="nccl", timeout=span) if own else control, control])
        data, control = self.apart_groups
        return dataclasses.replace(self, data=data, control=control)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Local work of a stage (no collectives inside): an error of any rank becomes one ``RankError`` on all."""
        text, cause = None, None
        try:
            yield
        except (ValueError, OSError) as error:
            text = str(error)
        except Exception as error:
            text, cause = _unexpected(error)
        self.agree(name, text, cause)

    def agree(self, name: str, message: str | None, cause: Exception | None = None) -> None:
        """Raise the same ``RankError`` on every rank if any rank brings a message."""
        messages = self.gather_json(message)
        bad = {rank: text for rank, text in enumerate(messages) if text is not None}
        if not bad:
            return
        first, *_ = bad
        if self.size == 1:
            text = f"{name}: {message}"
        elif len(set(bad.values())) == 1:
            who = "all ranks" if len(bad) == self.size else _ranks(bad)
            text = f"{name} ({who}): {bad[first]}"
        else:
            text = f"{name}:\n" + "\n".join(f"  rank {rank}: {text}" for rank, text in bad.items())
        raise RankError(text, shown_by=first) from cause

    # --- errors in the middle of a step, where no collective may be tried again ---

    @property
    def failed(self) -> bool:
        """Whether a rank has reported an error in the middle of a step."""
        with contextlib.suppress(Exception):  # the store may be gone with the rank that held it
            return self.store is not None and bool(self.store.check([_ERROR_KEY]))
        return False

    def report_failure(self, cause: Exception) -> RankError:
        """Turn an error of this rank's own into the one error of the run. Nothing collective is tried.

        The first rank to fail writes its error to the store; a rank whose collective then breaks finds it there.
        Where nobody wrote any, the ranks that live tell each other so, and thereby know which do not.
        """
        if isinstance(cause, RankError):
            return cause
        if is_lost_rank(cause):
            text, cause_shown = self._name_the_lost(cause), None
        else:
            found, cause_shown = _unexpected(cause)
            text = f"rank {self.rank} ({self.meter.where}): {found}"
        shown_by = self.rank
        with contextlib.suppress(Exception):  # as above
            # compare_set writes only if nobody wrote before, and returns what stands there.
            shown_by, text = json.loads(self.store.compare_set(_ERROR_KEY, "", json.dumps([self.rank, text])))
        error = RankError(text, shown_by=shown_by)
        error.__cause__ = cause_shown if shown_by == self.rank else None
        error.__suppress_context__ = True
        return error

    def _name_the_lost(self, cause: Exception) -> str:
        """What a rank says that lost another, unless another error explains it."""
        where, living = self.meter.where, {self.rank}
        late = "timed out" in str(cause).lower()
        deadline = time.monotonic() + _GATHER_SECONDS
        with contextlib.suppress(Exception):  # as above
            self.store.set(_LOST_KEY.format(rank=self.rank), where)
            while True:
                living = {rank for rank in range(self.size) if self.store.check([_LOST_KEY.format(rank=rank)])}
                # Where a process ended, a launcher knows more and ends this one meanwhile.
                if self.failed or time.monotonic() >= deadline or (late and len(living) == self.size - 1):
                    break
                time.sleep(0.05)
        lost = [rank for rank in range(self.size) if rank not in living]
        if lost:
            what = "ended or cannot be reached"
            if late:
                what = f"did not answer within {self.timeout:g} s (--timeout){self._stacks(lost, living)}"
            remedy = "raise --timeout if it is only slow, or " * late + self._remedy()
            return f"{_ranks(lost)} {what}; {_ranks(living)} waited at {where}; {remedy}"
        detail = next(iter(str(cause).strip().splitlines()), "no detail")
        return f"the connection between ranks broke at {where}: {type(cause).__name__}: {detail}; {self._remedy()}"

    def _stacks(self, lost: Sequence[int], living: set[int]) -> str:
        """Have lost ranks of this host print where they are; the lowest of the living there asks, and says so."""
        found = []
        with contextlib.suppress(OSError, IndexError):
            for rank in lost:
                place, mine = self.processes[rank], self.processes[self.rank]
                if place is None or mine is None or not place[0] or place[0] != mine[0]:
                    continue
                if is_stopped(place[1]):
                    found.append(f"process {place[1]} is stopped, SIGCONT lets it go on")
                    continue
                if self.rank == min(r for r in living if (p := self.processes[r]) is not None and p[0] == mine[0]):
                    os.kill(place[1], _STACK_SIGNAL)
                found.append(f"process {place[1]}, which prints its stack")
        return f" ({', '.join(found)})" if found else ""

    def _remedy(self) -> str:
        with contextlib.suppress(Exception):  # it may look at disks
            return self.remedy.find()
        return Remedy().find()


def _unexpected(error: Exception) -> tuple[str, Exception | None]:
    """What to say of an error, and the error itself where its traceback says more."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        asked = re.search(r"allocate (\d+) bytes|allocate ([\d.]+ \wi?B)", str(error))
        size = "" if asked is None else f" for {asked[1] + ' bytes' if asked[1] else asked[2]}"
        remedy = "use more ranks on more hosts, a smaller --hidden or fewer --layers"
        return f"{type(error).__name__}: out of memory{size}; {remedy}", None
    if isinstance(error, OSError):
        return str(error), None
    return f"{type(error).__name__}: {error}", error


def _said(about: Sequence[Any]) -> str:
    where, kind, *shapes = about
    return f"{where}: {kind} of {', '.join(map(str, shapes))}"


def _ranks(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def backends() -> list[str]:
    """Names of what this build of torch can carry collectives with."""
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, available in known.items() if available()]


def is_lost_rank(cause: BaseException) -> bool:
    """Whether an error is that of a collective which another rank left, or did not reach in time."""
    if isinstance(cause, dist.DistError):
        return True
    text = str(cause).lower()
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting", "broken pipe")
    return isinstance(cause, RuntimeError) and any(word in text for word in words)


def _prints_stack() -> bool:
    """Have the stacks of this process printed on a signal, even where it hangs outside Python; False where none can."""
    if signal.getsignal(_STACK_SIGNAL) != signal.SIG_DFL:
        return False
    with contextlib.suppress(RuntimeError, ValueError, AttributeError, OSError):  # no standard error, say
        faulthandler.register(_STACK_SIGNAL)
        return True
    return False


def _tell_torchrun(message: str) -> None:
    """Its own report of a failed rank shows what stands in the file that this handler writes, with the traceback of
    the exception that is being handled: here one that says no more than the message."""
    try:
        raise RankError(message) from None
    except RankError as error:
        get_error_handler().record_exception(error)


def _store_of_start(restarts: int, timeout: datetime.timedelta) -> Store:
    """The store where the ranks meet. Torchrun keeps one over all its starts, with the addresses of ranks that are
    gone; so each start has keys of its own."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"start/{restarts}", store)


@contextlib.contextmanager
def open_world(
    timeout: float = 300.0,
    threads: int | None = None,
    show: Callable[[RankError], None] = traceback.print_exception,
) -> Iterator[World]:
    """Join the ranks that torchrun started (RANK, WORLD_SIZE, ... in the environment), or be the only one.

    ``timeout`` is in seconds. ``threads`` defaults to the host's cores over its ranks: torchrun sets
    OMP_NUM_THREADS=1 whatever the machine has.

    With several ranks, an error that leaves the block ends all of them with status 1 (``SystemExit``), and the rank
    where it arose calls ``show``. The only rank raises it.
    """
    env = os.environ
    rank, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads or max(1, len(os.sched_getaffinity(0)) // local_size))
    restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(env.get(RESTARTS, "0"))
    launch = env.get("TORCHELASTIC_RUN_ID", "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    if size == 1:
        yield World(device=device, restarts=restarts, launch=launch)
        return
    span = datetime.timedelta(seconds=timeout)
    if size == local_size and (name := loopback()):  # nobody outside this host is expected
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    try:
        joined = _store_of_start(restarts, span)
        dist.init_process_group("gloo", store=joined, rank=rank, world_size=size, timeout=span)
    except Exception as e:
        where = f"{env.get('MASTER_ADDR', '?')}:{env.get('MASTER_PORT', '?')}"
        taken = "EADDRINUSE" in str(e)
        remedy = (
            "another program has that port: end it, or start all ranks with another MASTER_PORT (--master-port)"
            if taken
            else "check that all ranks were started and that the address can be reached (GLOO_SOCKET_IFNAME names the "
            "network interface)"
        )
        reason = "the address is in use" if taken else str(e).strip().rstrip(".")
        raise ValueError(
            f"rank {rank} of {size} could not join the others at {where} within {timeout:g} s: {reason}; {remedy}"
        ) from e
    control, store = dist.group.WORLD, dist.distributed_c10d._get_default_store()
    world = World(
        rank,
        size,
        local_rank,
        local_size,
        device,
        control,
        control,
        store,
        timeout=timeout,
        restarts=restarts,
        launch=launch,
    )
    try:
        told = world.gather_json([gpus >= local_size, process_here() if _prints_stack() else None])
        world = dataclasses.replace(world, processes=tuple(place and tuple(place) for _, place in told))
        if all(own_gpu for own_gpu, _ in told):
            world = dataclasses.replace(world, data=dist.new_group(backend="nccl", timeout=span))
        yield world
    except Exception as cause:
        error = world.report_failure(cause)
        if rank == error.shown_by:
            _tell_torchrun(str(error))
            show(error)
        if rank != error.shown_by or error is not cause:
            time.sleep(_LINGER_SECONDS)
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
