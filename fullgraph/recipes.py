"""Recipes to compare: names for changes to a run's options, built in or from a TOML file; and links between ranks."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullgraph.config import TrainConfig

EXACT = "exact"
EXCHANGE = (
    *("refresh", "stagger", "stale_grad", "pipeline_average", "codec", "boundary_sample", "exact_after"),
    *("cache_bfloat16", "freeze_masks"),
)
_OF_A_RUN = (
    *("time_limit", "patience", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "profile"),
    "memory_check",
)
"""What does nothing in a comparison: each run takes all its epochs, and leaves nothing but its figures."""
_COMMON = ("seed", "epochs", "eval_every", "metric", "split", "task", "threads", "timeout", *_OF_A_RUN)
_BUILT_IN: dict[str, dict[str, Any]] = {
    "pipelined": {"refresh": "pipelined"},
    "every:2": {"refresh": "every:2"},
    "every:4 staggered": {"refresh": "every:4", "stagger": True},
    "drift:0.1": {"refresh": "drift:0.1"},
    "bfloat16": {"codec": "bfloat16"},
    "int8": {"codec": "int8"},
    "int8 pipelined": {"codec": "int8", "refresh": "pipelined"},
    "sample 0.5": {"boundary_sample": 0.5},
}


def recipes(base: TrainConfig, path: Path | None = None) -> dict[str, TrainConfig]:
    """Options by name, the exact run first. A file holds one table a recipe, of options as ``fullgraph train`` names
    them (``[slow]`` and ``refresh = "every:4"``).

    Raises ``ValueError`` for a file that is not such, or options that do not fit, naming the recipe; and for options in
    ``base`` that belong to a recipe, or that a comparison takes no notice of.
    """
    for name in (*EXCHANGE, *_OF_A_RUN):
        if getattr(base, name) != getattr(TrainConfig, name):
            what = "a recipe of a file (--recipes)" if name in EXCHANGE else "fullgraph train"
            raise ValueError(
                f"--{name.replace('_', '-')} is not an option of a comparison, but of {what}; leave it out"
            )
    if base.epochs < 1:
        raise ValueError(f"--epochs is {base.epochs}; expected at least 1")
    found = {EXACT: dataclasses.replace(base, measure_drift=None)}
    if path is not None:
        return found | {name: _changed(base, how, f"{path}: recipe {name}") for name, how in _read(path).items()}
    built_in = {name: how for name, how in _BUILT_IN.items() if base.model != "gat" or "boundary_sample" not in how}
    return found | {name: dataclasses.replace(base, **how) for name, how in built_in.items()}


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--recipes: {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    loose = [name for name, table in tables.items() if not isinstance(table, dict)]
    if loose or not tables or EXACT in tables:
        what = f"{loose[0]} outside a table" if loose else f"a recipe named {EXACT}" if tables else "no recipe"
        raise ValueError(
            f'{path} holds {what}; expected one table a recipe, such as [slow] and under it refresh = "every:4" (the '
            f"exact run comes first by itself)"
        )
    return tables


def _changed(base: TrainConfig, options: Mapping[str, Any], where: str) -> TrainConfig:
    known = [f.name for f in dataclasses.fields(base) if f.name not in _COMMON]
    plain = {name.replace("-", "_"): value for name, value in options.items()}
    if unknown := sorted(set(plain).difference(known)):
        raise ValueError(
            f"{where}: {unknown[0]} is not an option of a recipe; expected some of {', '.join(sorted(known))}"
        )
    for name, value in plain.items():
        default = getattr(TrainConfig, name)
        kind = type(default) if default is not None else int
        fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if not fits and not (kind is float and type(value) is int):
            raise ValueError(f"{where}: {name} is {value!r}; expected a value such as {default!r}")
    try:
        return dataclasses.replace(base, **plain)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins two ranks."""

    name: str
    bandwidth: float
    """Bytes a second, each way."""
    latency: float
    """Seconds."""

    @classmethod
    def parse(cls, text: str) -> Link:
        """``1gbit,0.2ms``: bits a second with kbit, mbit or gbit, and, if you like, a latency in us, ms or s."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit(?:,(\d+(?:\.\d+)?)(us|ms|s))?", text.strip().lower())
        if match is None or float(match[1]) == 0:
            raise ValueError(f"--link is {text}; expected a rate and a latency, such as 1gbit,0.2ms or 100mbit,1ms")
        rate = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
        latency = float(match[3]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[4]] if match[3] else 0.2e-3
        return cls(name=text.strip().lower(), bandwidth=rate / 8, latency=latency)
