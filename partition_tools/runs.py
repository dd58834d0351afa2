"""What a run folder says: the options it trained with and what it measured.

A run folder is written by ``fullgraph train``; of it config.json and summary.json are read, and nothing is executed.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullgraph.config import TrainConfig

_MAX_BYTES = 1 << 24
_DECIDE = (
    *("model", "layers", "hidden", "heads", "out_heads", "norm", "residual", "optimizer", "split"),
    *("input_dropout", "dtype", "plan", "prune", "layer0"),
)
"""Options that what is sent and computed hang on."""
_APPROXIMATE = ("refresh", "codec", "boundary_sample")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run measured."""

    run: str
    """Its folder."""
    epochs: int
    bytes_per_epoch: int
    """Message rows, all ranks together; median."""
    seconds_per_epoch: float
    """Median."""
    memory_bytes: int
    """Peak of the rank that needs most; of a process, or of a GPU."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as far as a report needs it."""

    folder: str
    build_id: str
    """Build that it trained on."""
    shards: str
    """Where that build was."""
    config: TrainConfig
    outputs: int
    """Columns of its outputs."""
    measured: Measured
    notes: tuple[str, ...]
    """Why what it measured may differ from what is predicted."""


def read_run(folder: str | Path) -> Run:
    """Read a run folder; ``ValueError`` says what is wrong with it."""
    config, summary = _read(Path(folder) / "config.json"), _read(Path(folder) / "summary.json")
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    try:
        options = TrainConfig(**{name: value for name, value in config.items() if name in fields})
        found = Run(
            folder=str(folder),
            build_id=str(config["build_id"]),
            shards=str(config.get("shards", "")),
            config=options,
            outputs=_number(config, "outputs", int),
            measured=Measured(
                run=str(folder),
                epochs=_number(summary, "epochs", int),
                bytes_per_epoch=_number(summary, "bytes_sent_per_epoch", int),
                seconds_per_epoch=_number(summary, "seconds_per_epoch", float),
                memory_bytes=_number(summary, "peak_memory_bytes", int),
            ),
            notes=(),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"--run {folder}: {what}; expected a folder that fullgraph train wrote") from None
    return dataclasses.replace(found, notes=tuple(_notes(config, summary, found)))


def _notes(config: dict[str, Any], summary: dict[str, Any], run: Run) -> list[str]:
    notes = []
    name = config.get("model_name", run.config.model)
    if name != run.config.model:
        notes.append(f"the run trained {name}, a model of its own: what is predicted is for {run.config.model}")
    if run.config.inductive:
        notes.append("the run trained on its training nodes alone (--inductive); predicted is the whole graph")
    asked = [f"--{name.replace('_', '-')} {getattr(run.config, name)}" for name in _APPROXIMATE if _is_set(run, name)]
    if asked:
        notes.append(f"the run exchanged rows approximately ({', '.join(asked)}); predicted is the exact exchange")
    parts, ranks = summary.get("parts"), summary.get("ranks")
    if isinstance(parts, int) and isinstance(ranks, int) and ranks < parts:
        notes.append(f"the run had {ranks} ranks for {parts} parts; predicted is one rank a part")
    return notes


def _is_set(run: Run, name: str) -> bool:
    return bool(getattr(run.config, name) != getattr(TrainConfig, name))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"--run {path.parent}: no {path.name}; expected the folder of a run that has ended, as fullgraph train "
            f"prints it"
        )
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes; no run writes that much")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}; expected an object")
    return content


def _number(content: dict[str, Any], name: str, kind: type) -> Any:
    value = content[name]
    good = isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}; expected a number of at least 0")
    return kind(value)


def stated_model(given: dict[str, Any], runs: Sequence[Run]) -> TrainConfig:
    """Options of the model that costs are predicted for: those of the runs, which must agree where it matters, with
    those ``given`` in their place; the defaults where there are no runs."""
    if not runs:
        return TrainConfig(**given | ({"heads": 1} if given.get("hidden", 0) % TrainConfig.heads else {}))
    first = runs[0]
    for run in runs[1:]:
        for name in _DECIDE:
            one, other = getattr(first.config, name), getattr(run.config, name)
            if one != other:
                raise ValueError(
                    f"--run: {first.folder} trained with --{name.replace('_', '-')} {one}, {run.folder} with {other}; "
                    f"predictions are for one model: report on them one at a time"
                )
    for name, value in given.items():
        if value != getattr(first.config, name):
            raise ValueError(
                f"--{name} {value}: the run {first.folder} trained with {getattr(first.config, name)}, so that what it "
                f"measured says nothing about {value}; leave --{name} or --run out"
            )
    return first.config
