"""Where a run's steps went, by layer and direction: bytes predicted and sent; seconds computing and waiting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from fullgraph.cost import Ledger, Tag
from fullgraph.world import REST, World


def profile(world: World, predicted: Ledger | None, steps: int) -> dict[str, Any]:
    """Means over ``steps`` training steps: bytes summed over ranks, seconds of the slowest rank (a collective).

    ``predicted`` are the bytes that this rank's plans say it sends in all of them; None where they are not known.
    """
    meter = world.meter
    meter.enter(REST)
    mine = {
        "sent": _named(meter.ledger),
        "predicted": None if predicted is None else _named(predicted),
        "compute": _named(meter.compute),
        "travel": _named(meter.travel),
        "waited": _named(meter.waited),
    }
    ranks = world.gather_json(mine)
    names = dict.fromkeys(_in_order(name for rank in ranks for kind in ("compute", "sent") for name in rank[kind]))
    rows = []
    for name in names:
        row: dict[str, Any] = {"name": name}
        if ranks[0]["predicted"] is not None and name.split()[-1] in ("forward", "backward", "recompute"):
            row["predicted_bytes"] = sum(sum(rank["predicted"].get(name, [])) for rank in ranks) / max(steps, 1)
        row["sent_bytes"] = sum(sum(rank["sent"].get(name, [])) for rank in ranks) / max(steps, 1)
        for kind in ("compute", "travel", "waited"):
            row[f"{kind}_seconds"] = max(rank[kind].get(name, 0.0) for rank in ranks) / max(steps, 1)
        rows.append(row)
    per_rank = [{"sent_bytes": rank["sent"], "predicted_bytes": rank["predicted"]} for rank in ranks]
    return {"steps": steps, "layers": rows, "ranks": per_rank}


def _named(by_tag: dict[Tag, Any]) -> dict[str, Any]:
    return {("" if layer < 0 else f"layer {layer} ") + what: value for (layer, what), value in by_tag.items()}


def _in_order(names: Iterable[str]) -> list[str]:
    """Forward by layer, then the loss, backward from the last layer, and the rest."""

    def key(name: str) -> tuple[int, int]:
        layer = int(name.split()[1]) if name.startswith("layer") else 0
        stages = ("forward", "loss", "recompute", "backward", "rest", "measured", "evaluate", "setup")
        stage = stages.index(name.split()[-1])
        return (2, -2 * layer - (stage == 2)) if stage in (2, 3) else (stage, layer)

    return sorted(set(names), key=key)


def show_profile(found: dict[str, Any], console: Console) -> None:
    """Print it as a table."""
    table = Table("an epoch", title="Profile", title_justify="left")
    heads = ("MB predicted", "MB sent", "compute s", "travel s", "waited s")
    for head in heads:
        table.add_column(head, justify="right")
    for row in found["layers"]:
        predicted = row.get("predicted_bytes")
        table.add_row(
            row["name"],
            "" if predicted is None else f"{predicted / 1e6:,.3f}",
            f"{row['sent_bytes'] / 1e6:,.3f}",
            *(f"{row[f'{kind}_seconds']:.4f}" for kind in ("compute", "travel", "waited")),
        )
    console.print(table)
    console.print(
        "bytes: message rows, all ranks together. compute: outside collectives. travel: from an exchange's start to "
        "its arrival. waited: the part of travel that no computation hid. Seconds are the slowest rank's; evaluation "
        "and setup are spread over the epochs.",
        style="dim",
        highlight=False,
    )
