"""Sparse kernels against each other and against the bandwidth of a copy.

SpMM is ``A X``, SDDMM the products ``<X[row], Y[column]>`` at A's entries, over a generated graph in the order in which
training keeps it (clusters of neighbours, where the build made them), and SpMM in other orders of its nodes too. Forms
take turns; the median counts. ``GB/s`` are the rows that a kernel must gather, one an entry, and what it writes, over
its seconds: above the copy's rate where rows are found in cache.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import tyro
from numpy.typing import NDArray
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from benchmarks import graphs
from benchmarks.report import deliver, machine, machine_line, say, table
from fullgraph import load
from fullgraph.kernels import SparseMatrix, from_coo, spmm
from fullgraph.plan import Plan

_weights_backward = torch.ops.aten._embedding_bag_per_sample_weights_backward

BLOCK_BYTES = 4 << 20
MOST_BYTES = 4 << 30
"""A form that makes a larger tensor is left out, and said."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Sparse kernels against each other and against the bandwidth of a copy."""

    graphs: tuple[str, ...] = ("arxiv-like", "reddit-like")
    """Names, NAME/10 for a tenth of the nodes, files or demo: specs."""
    widths: tuple[int, ...] = (64, 256)
    repeats: int = 5
    threads: int | None = None
    """By default all cores."""
    work: Path | None = None
    """Folder where shards are kept between runs."""
    note: str = ""
    """A sentence for the result: what bounds what is left."""
    name: str = "kernels"
    """Of the saved result."""
    quick: bool = False
    """A tiny graph, once: to see that it works."""
    json: bool = False
    """Print one JSON object."""
    save: bool = False
    """Keep the result under benchmarks/results."""


def csr(a: SparseMatrix, dtype: torch.dtype) -> Tensor:
    values = torch.ones(a.nnz, dtype=dtype)
    return torch.sparse_csr_tensor(a.indptr, a.indices, values, size=a.shape, check_invariants=False)


def _spmm_in_blocks(a: SparseMatrix, x: Tensor, step: int) -> Tensor:
    out = x.new_empty(a.shape[0], x.shape[1])
    for rows, block in a.blocks(step):
        out[rows] = spmm(block, x)
    return out


def spmm_forms(a: SparseMatrix, x: Tensor) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """By name, the call and the bytes of the largest tensor that it makes besides its result."""
    width, size = x.shape[1], x.element_size()
    step = max(1, BLOCK_BYTES // (width * size))
    sparse = csr(a, x.dtype)

    def gathered() -> Tensor:
        return x.new_zeros(a.shape[0], width).index_add_(0, a.rows, x.index_select(0, a.indices))

    return {
        "embedding_bag": (lambda: spmm(a, x), 0),
        "embedding_bag in row blocks": (lambda: _spmm_in_blocks(a, x, step), 0),
        "torch.sparse CSR": (lambda: sparse @ x, 0),
        "gather, index_add": (gathered, a.nnz * width * size),
    }


def sddmm_forms(a: SparseMatrix, x: Tensor) -> dict[str, tuple[Callable[[], Tensor], int]]:
    width, size = x.shape[1], x.element_size()
    step = max(1, BLOCK_BYTES // (width * size))
    pattern = csr(a, x.dtype)
    rows, cols = a.rows, a.indices

    def in_blocks() -> Tensor:
        out = x.new_empty(a.nnz)
        for start in range(0, a.nnz, step):
            end = start + step
            torch.sum(
                x.index_select(0, rows[start:end]).mul_(x.index_select(0, cols[start:end])), 1, out=out[start:end]
            )
        return out

    return {
        "embedding_bag's weights": (lambda: _weights_backward(x, x, cols, a.indptr[:-1], rows, 0, -1), 0),
        "torch.sparse.sampled_addmm": (lambda: torch.sparse.sampled_addmm(pattern, x, x.t(), beta=0.0).values(), 0),
        "gather both, multiply": (
            lambda: (x.index_select(0, rows) * x.index_select(0, cols)).sum(1),
            3 * a.nnz * width * size,
        ),
        "gather both in blocks": (in_blocks, 0),
    }


def in_orders(whole: Plan, x: Tensor) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """SpMM in row blocks with the nodes in several orders."""
    a = whole.linear.local
    n, rows, cols = a.shape[0], a.rows.numpy(), a.indices.numpy()
    step = max(1, BLOCK_BYTES // (x.shape[1] * x.element_size()))
    pattern = sp.csr_array((np.ones(a.nnz, np.int8), cols, a.indptr.numpy()), shape=a.shape)
    orders = {
        "as trained": np.arange(n),
        "by id": np.argsort(whole.owned_global.numpy()),
        "breadth first": reverse_cuthill_mckee(pattern),
        "random": np.random.default_rng(0).permutation(n),
    }

    def form(order: NDArray[np.integer[Any]]) -> tuple[Callable[[], Tensor], int]:
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)
        return functools.partial(_spmm_in_blocks, from_coo(a.shape, place[rows], place[cols]), x, step), 0

    return {f"nodes {name}": form(order) for name, order in orders.items()}


def copy_rate() -> float:
    """Bytes read and written a second by a copy far larger than the caches."""
    x = torch.randn(1 << 26)
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / min(_timed(lambda: y.copy_(x)) for _ in range(7))


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    forms: dict[str, tuple[Callable[[], Tensor], int]], reference: str, repeats: int, dtype: torch.dtype
) -> dict[str, tuple[float | None, str]]:
    """By name, the median seconds, or None and why."""
    told: dict[str, tuple[float | None, str]] = {}
    expected = forms[reference][0]().double() if reference in forms else None
    for name, (call, needs) in forms.items():
        if needs > MOST_BYTES:
            told[name] = None, f"needs {needs / 2**30:.1f} GiB"
            continue
        try:
            found = call().double()
        except RuntimeError as error:
            told[name] = None, "not in this library"
            say(f"{name}: {str(error).splitlines()[0]}")
            continue
        if expected is not None:
            far = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
            if not far < (0.25 if dtype == torch.bfloat16 else 1e-3):  # index_add rounds every sum to bfloat16
                raise RuntimeError(f"{name} differs from {reference} by {far:.2g} of its largest value")
    seconds: dict[str, list[float]] = {name: [] for name in forms if name not in told}
    for _ in range(repeats):
        for name, line in seconds.items():
            line.append(_timed(forms[name][0]))
    return told | {name: (median(line), "") for name, line in seconds.items()}


def main(options: Options) -> int:
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    warnings.filterwarnings("ignore", message="Sparse ")
    facts, found, copied = machine(), [], copy_rate()
    with graphs.work_folder(options.work) as work:
        for graph in (graphs.TINY,) if options.quick else options.graphs:
            whole = load(graphs.shards(graph, 1, work)).whole
            a = whole.linear.local
            a = SparseMatrix(a.shape, a.indptr, a.indices)
            for width in options.widths:
                for dtype in (torch.float32, torch.bfloat16):
                    torch.manual_seed(0)
                    x = torch.randn(a.shape[1], width, dtype=dtype)
                    row_bytes = width * x.element_size()
                    for kernel, forms, reference, useful in (
                        ("SpMM", spmm_forms(a, x), "embedding_bag", (a.nnz + a.shape[0]) * row_bytes),
                        ("SpMM", in_orders(whole, x), "", (a.nnz + a.shape[0]) * row_bytes),
                        ("SDDMM", sddmm_forms(a, x), "gather both in blocks", (a.nnz + a.shape[0]) * row_bytes),
                    ):
                        timed = measure(forms, reference, 1 if options.quick else options.repeats, dtype)
                        for name, (seconds, why) in timed.items():
                            rate = None if seconds is None else useful / seconds
                            found.append(
                                {
                                    "graph": graph,
                                    "kernel": kernel,
                                    "form": name,
                                    "width": width,
                                    "dtype": str(dtype).removeprefix("torch."),
                                    "seconds": seconds,
                                    "bytes_a_second": rate,
                                    "of_copy": None if rate is None else rate / copied,
                                    "left_out": why,
                                }
                            )
                say(f"{graph}, width {width}: done")
    rows = [
        (
            f"{f['graph']}, {f['kernel']}, {f['form']}",
            f["width"],
            f["dtype"],
            f["left_out"] if f["seconds"] is None else f"{f['seconds']:.4f}",
            "" if f["seconds"] is None else f"{f['bytes_a_second'] / 1e9:.2f}",
            "" if f["seconds"] is None else f"{f['of_copy']:.2f}",
        )
        for f in sorted(found, key=lambda f: (f["graph"], f["kernel"], f["width"], f["dtype"] != "float32"))
    ]
    header = ("graph, kernel, form", "width", "numbers", "seconds", "GB/s", "of copy")
    text = (
        f"# Sparse kernels\n\n{machine_line(facts)} {torch.get_num_threads()} threads; a copy reads and writes "
        f"{copied / 1e9:.1f} GB/s.\n\n{table(header, rows)}"
    )
    text += f"\n\n{options.note}" if options.note else ""
    record = {"machine": facts, "copy_bytes_a_second": copied, "note": options.note, "results": found}
    deliver(options.name, text, record, as_json=options.json, save=options.save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Options)))
