"""The ``fullgraph`` command: ``python -m fullgraph`` under torchrun, or on its own."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
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
    run: Annotated[Path | None, tyro.conf.arg(aliases=["--run-dir"])] = None
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
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from fullgraph.trainer import train
    from fullgraph.world import RankError, open_world

    # torchrun's own report of a failed rank shows what stands in the file that this handler writes.
    handler = get_error_handler()
    handler.initialize()
    with open_world(timeout=options.config.timeout, threads=options.config.threads) as world:
        try:
            train(options.folder, options.config, run=options.run, world=world)
        except Exception as cause:
            error = world.report_failure("train", cause)
            handler.record_exception(RankError(str(error)))  # a fresh one: its message without a traceback
            if error.printer == world.rank:
                if not isinstance(cause, RankError):
                    traceback.print_exception(cause)
                _fail(str(error))
            world.abandon()
            return 1
    return 0


def _fail(message: str) -> None:
    print(f"fullgraph: error: {message}", file=sys.stderr, flush=True)


_COMMANDS: dict[str, Callable[..., Train | Demo]] = {"train": Train, "demo": Demo}


def main() -> None:
    """Console entry point."""
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in _COMMANDS:
            command = tyro.cli(_COMMANDS[arguments[0]], prog=f"fullgraph {arguments[0]}", args=arguments[1:])
        else:
            about = "Full-graph GNN training on a partitioned graph."
            command = tyro.extras.subcommand_cli_from_dict(_COMMANDS, prog="fullgraph", description=about)
        code = command.main()
    except (ValueError, OSError) as e:
        _fail(str(e))
        code = 2
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
