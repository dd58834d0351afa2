"""The ``fullgraph`` command: ``python -m fullgraph`` under torchrun, or on its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from fullgraph.config import TrainConfig
from fullgraph.shards import read_manifest


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train on a folder of shards, one rank a part, exactly as one process would.

    Under torchrun every rank runs this command; otherwise it starts the local ranks itself.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of shards, made by partition-tools build."""
    config: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    run: Path | None = None
    """Folder for the results; by default a new one under runs/."""

    def main(self) -> int:
        from fullgraph.launch import launch_local, under_torchrun

        parts = read_manifest(self.folder).parts
        if not under_torchrun() and parts > 1:
            return launch_local(sys.argv[1:], parts)
        return _as_rank(self)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Generate a graph, partition it, train on every core, and prove that P ranks and one give the same losses."""

    out: Path = Path("fullgraph-demo")
    """Folder for everything the demo writes."""
    nodes: int = 20_000
    """Nodes of the generated graph."""
    ranks: int | None = None
    """Parts and ranks; by default one a core, and at least 2."""
    epochs: int = 30
    """Steps to train."""

    def main(self) -> int:
        from fullgraph.demo import run_demo

        return run_demo(self.out, nodes=self.nodes, ranks=self.ranks, epochs=self.epochs)


def _as_rank(options: Train) -> int:
    from fullgraph.train import train
    from fullgraph.world import RankError, World, open_world

    world: World | None = None
    try:
        with open_world(timeout=options.config.timeout, threads=options.config.threads) as world:
            try:
                train(options.folder, options.config, run=options.run, world=world)
            except Exception as cause:
                error = world.report_failure("train", cause)
                if error.printer == world.rank:
                    _fail(str(error))
                    if not isinstance(cause, RankError):
                        raise
                world.abandon()
                return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(message: str) -> None:
    print(f"fullgraph: error: {message}", file=sys.stderr, flush=True)


def main() -> None:
    """Console entry point."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"train": Train, "demo": Demo}, prog="fullgraph", description="Full-graph GNN training on a partitioned graph."
    )
    try:
        code = command.main()
    except (ValueError, OSError) as e:
        _fail(str(e))
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
