"""The ``fullgraph`` command: ``python -m fullgraph`` under torchrun, or on its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from fullgraph.checks import (
    GraphFacts,
    Kind,
    State,
    check_confusion,
    check_fits,
    check_kind,
    check_output,
    check_run_folder,
    check_split,
    check_split_named,
    check_state,
    check_target,
    check_training,
    match_classes,
    read_config,
    state_path,
)
from fullgraph.config import TrainConfig
from fullgraph.files import remove_left_behind
from fullgraph.host import under_torchrun
from fullgraph.shards import Manifest, read_manifest
from fullgraph.wording import counted

_LINGER_SECONDS = 10.0

Ranks = Annotated[int | None, tyro.conf.arg(metavar="W")]

if TYPE_CHECKING:
    from fullgraph.world import World


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train on a folder of shards, on as many ranks as it has parts or fewer, exactly as one process would.

    Under torchrun every rank runs this command; otherwise it starts the local ranks itself.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of shards, made by partition-tools build."""
    config: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    run: Annotated[Path | None, tyro.conf.arg(aliases=["--run-dir"])] = None
    """Folder for the results; by default a new one under runs/."""
    resume: Annotated[str | None, tyro.conf.arg(metavar="latest|PATH")] = None
    """Go on from the newest checkpoint of --run (of any run of these shards under runs/), or begin where there is none;
    or from a checkpoint or run folder. Options that are not given are the checkpoint's."""
    ranks: Ranks = None
    """Local ranks to start; by default one a part. Fewer run several parts each."""
    max_restarts: int = 0
    """How often to start the local ranks again, from the last checkpoint, when one is killed."""

    def main(self) -> int:
        if self.max_restarts < 0:
            raise ValueError(f"--max-restarts is {self.max_restarts}; expected 0 or more")
        named = not {"--split", "--resume"}.isdisjoint(_given(sys.argv[2:]))
        if not under_torchrun():  # ranks that are there already tell each other what is wrong
            facts = GraphFacts.of_manifest(read_manifest(self.folder))
            check_training(facts, self.config)
            if self.run is not None and self.resume is None:
                check_run_folder(self.run)
            check_split_named(facts, named)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to save
        ended: list[str | None] = []

        def work(world: World) -> None:
            from fullgraph.loop import train

            with world.stage("options"):
                check_split_named(GraphFacts.of_manifest(read_manifest(self.folder)), named)
            result = train(self.folder, self.config, run=self.run, resume=self.resume, world=world)
            ended.append(result.summary["stopped_by"])

        launch = uuid.uuid4().hex

        def remedy() -> str:
            from fullgraph.checkpoint import way_on

            return way_on(self._run_folder(launch))

        code = _on_ranks(
            self.folder,
            work,
            self.ranks,
            restarts=self.max_restarts,
            launch=launch,
            remedy=remedy,
            timeout=self.config.timeout,
            threads=self.config.threads,
        )
        if code == 0 and not under_torchrun() and ended[:1] in (["SIGINT"], ["SIGTERM"]):
            return 128 + signal.Signals[str(ended[0])]  # as the launcher returns for several ranks
        if code and "RANK" not in os.environ:  # all ranks have ended, perhaps while one was saving
            self._clean(launch)
        return code

    def _run_folder(self, launch: str) -> Path | None:
        from fullgraph.resume import run_of

        return run_of(self.run, self.resume, launch, read_manifest(self.folder))

    def _clean(self, launch: str) -> None:
        from fullgraph.checkpoint import FOLDER, remove_unfinished

        if (run := self._run_folder(launch)) is not None:
            for folder in (run, *filter(Path.is_dir, run.rglob("*"))):
                remove_left_behind(folder)
            if (run / FOLDER).is_dir():
                remove_unfinished(run / FOLDER)


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Predict every node of a graph with a trained model, in the order and under the ids of the user's graph."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of shards of the graph that the model was trained on."""
    run: Annotated[Path, tyro.conf.arg(aliases=["--run-dir"])]
    """Run folder of the model."""
    out: Path
    """File to write: .npy (the array alone), .h5 (predictions and ids) or .csv (a line a node, its id first)."""
    probabilities: bool = False
    """Write class probabilities, not labels."""
    embeddings: bool = False
    """Write the last layer's input, not labels."""
    graph: Path | None = None
    """Folder of shards of another graph with the same features, to predict there."""
    state: State = "best"
    """Weights of the best epoch by validation, or of the last."""
    ranks: Ranks = None
    """Local ranks to start; by default one a part. Fewer run several parts each."""

    def main(self) -> int:
        if self.probabilities and self.embeddings:
            raise ValueError("--probabilities and --embeddings exclude each other")
        kind: Kind = "probabilities" if self.probabilities else "embeddings" if self.embeddings else "labels"
        folder = self.graph or self.folder
        if not under_torchrun():
            check_output(self.out)
            check_kind(kind, _check_run(self.run, self.state, folder, read_manifest(folder))[1]["task"])

        def work(world: World) -> None:
            from fullgraph.inference import ids_path, predict

            path = predict(folder, self.run, self.out, kind=kind, state=self.state, world=world)
            if world.rank == 0:
                nodes = counted(read_manifest(folder).graph["num_nodes"], "node")
                ids = path.suffix == ".npy" and ids_path(path).exists()
                print(f"wrote {kind} of {nodes} to {path}" + (f", and their ids to {ids_path(path)}" if ids else ""))

        return _on_ranks(folder, work, self.ranks)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Print the exact scores of a trained model."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of shards of the graph that the model was trained on."""
    run: Annotated[Path, tyro.conf.arg(aliases=["--run-dir"])]
    """Run folder of the model."""
    split: int | None = None
    """Split to score; by default the run's."""
    confusion: bool = False
    """Print a table of true against predicted classes for each mask."""
    json: bool = False
    """Print one JSON object."""
    graph: Path | None = None
    """Folder of shards of another graph with the same features, to score there."""
    state: State = "best"
    """Weights of the best epoch by validation, or of the last."""
    ranks: Ranks = None
    """Local ranks to start; by default one a part. Fewer run several parts each."""

    def main(self) -> int:
        folder = self.graph or self.folder
        if not under_torchrun():
            manifest = read_manifest(folder)
            config, record = _check_run(self.run, self.state, folder, manifest)
            facts = GraphFacts.of_manifest(manifest)
            check_target(facts, config.task, config.metric)
            check_split(facts, config.split if self.split is None else self.split)
            match_classes(self.run, folder, record, manifest.graph)
            check_confusion(self.confusion, record["task"])

        def work(world: World) -> None:
            from rich.console import Console

            from fullgraph.inference import evaluate, show_evaluation

            found = evaluate(
                folder, self.run, split=self.split, confusion=self.confusion, state=self.state, world=world
            )
            if world.rank == 0:
                show_evaluation(found, Console(), as_json=self.json)

        return _on_ranks(folder, work, self.ranks)


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


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Look at the installation, this host, a folder of shards and an exchange between two local ranks, and say what is
    wrong; exit code 1 if anything is. Under torchrun: the exchange between its ranks.
    """

    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DIR]")] = None
    """Folder of shards to look at, too, and whose file system to try; by default the current folder's."""
    timeout: float = 60.0
    """Seconds that a rank waits for another."""

    def main(self) -> int:
        from rich.console import Console

        from fullgraph.doctor import examine, examine_exchange, show
        from fullgraph.launch import launch_local
        from fullgraph.world import RankError

        console = Console()
        if under_torchrun():

            def work(world: World) -> None:
                if not show(examine_exchange(world), Console(quiet=world.rank != 0)):
                    raise RankError("the exchange between the ranks brings wrong numbers")

            return _on_ranks(self.folder or Path(), work, timeout=self.timeout)
        good = show(examine(self.folder), console)
        code = launch_local(["doctor", "--timeout", str(self.timeout)], 2)
        good = good and code == 0
        console.print("nothing is wrong" if good else "something is wrong: see the lines that begin with !")
        return 0 if good else 1


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train one model under several ways to exchange message rows, and set each beside the exact run."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder of shards, made by partition-tools build."""
    config: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    recipes: Path | None = None
    """TOML file with one table a recipe, of options of fullgraph train; by default a built-in choice."""
    link: str | None = None
    """Rate and latency, such as 1gbit,0.2ms, of a link to predict seconds for."""
    seeds: int = 3
    """Runs a recipe, from --seed on; the same for all, so that differences are paired."""
    target: float | None = None
    """Validation score to reach; by default 0.99 times the exact run's best."""
    json: bool = False
    """Print one JSON object."""
    out: Path | None = None
    """Folder for compare.json, compare.png and compare.html; needs matplotlib and jinja2."""
    ranks: Ranks = None
    """Local ranks to start; by default one a part. Fewer run several parts each."""

    def main(self) -> int:
        from fullgraph.recipes import Link, recipes

        if self.seeds < 1:
            raise ValueError(f"--seeds is {self.seeds}; expected at least 1")
        link = None if self.link is None else Link.parse(self.link)
        chosen = recipes(self.config, self.recipes)
        out = self.out
        if out is not None:
            from fullgraph.compare_page import check_extra

            check_extra()

        def work(world: World) -> None:
            from rich.console import Console

            from fullgraph.compare import compare, show_comparison
            from fullgraph.compare_page import make_folder, write_comparison
            from fullgraph.runlog import plain

            progress, mine = Console(stderr=True, quiet=world.rank != 0), world.rank == 0
            with world.stage("compare"):
                if mine and out is not None:
                    make_folder(out)
            found = compare(
                self.folder, chosen, world, seeds=self.seeds, link=link, target=self.target, console=progress
            )
            if mine and self.json:
                print(json.dumps(plain(found)))
            elif mine:
                show_comparison(found, Console(width=max(Console().width, 150)))
            with world.stage("compare"):
                if mine and out is not None:
                    write_comparison(found, out)

        return _on_ranks(self.folder, work, self.ranks, timeout=self.config.timeout, threads=self.config.threads)


def _check_run(run: Path, state: str, folder: Path, manifest: Manifest) -> tuple[TrainConfig, dict[str, Any]]:
    """What config.json says, once the run is known to be whole and to fit the graph in ``folder``."""
    config, record = read_config(run)
    check_state(state_path(run, state))
    check_fits(run, folder, record, GraphFacts.of_manifest(manifest), manifest.graph_id)
    return config, record


def _on_ranks(
    folder: Path,
    work: Callable[[World], None],
    ranks: int | None = None,
    *,
    restarts: int = 0,
    launch: str = "",
    remedy: Callable[[], str] = lambda: "start again",
    timeout: float = 300.0,
    threads: int | None = None,
) -> int:
    """Run ``work`` on the ranks: as the one that a launcher made this process, or by launching them, by default one a
    part."""
    from fullgraph.launch import end_with_parent, launch_local

    if not under_torchrun() and (ranks != 1 or restarts):
        parts = read_manifest(folder).parts
        if ranks is not None and not 1 <= ranks <= parts:
            raise ValueError(f"--ranks is {ranks}; {folder} holds {parts} parts, so expected 1 to {parts}")
        if (ranks or parts) > 1 or restarts:
            return launch_local(sys.argv[1:], ranks or parts, restarts, launch=launch, remedy=remedy)
    if under_torchrun():
        if ranks not in (None, int(os.environ["WORLD_SIZE"])):
            raise ValueError(f"--ranks is {ranks}, but {os.environ['WORLD_SIZE']} were started; leave the option out")
        end_with_parent()

    from fullgraph.world import RankError, open_world

    def show(error: RankError) -> None:
        if not isinstance(error.__cause__, (NoneType, OSError, ValueError)):  # these say what is wrong themselves
            traceback.print_exception(error.__cause__)
        _fail(str(error))

    try:
        with open_world(timeout=timeout, threads=threads, show=show) as world:
            work(world)
    except RankError as error:
        show(error)
        return 1
    return 0


def _given(arguments: list[str]) -> dict[str, str]:
    """The flags on the command line, each with the word after it."""
    given: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        given[name] = value if equals else next(iter(arguments[place + 1 :]), "")
    return given


def _resumed(arguments: list[str]) -> Any:
    """What the flags start from where the command names a checkpoint to go on from: its options. None for others."""
    given = _given(arguments)
    if arguments[0] != "train" or "--resume" not in given:
        return None
    from fullgraph.resume import saved_options

    config = saved_options(given.get("--run") or given.get("--run-dir"), given["--resume"])
    return None if config is None else Train(folder=tyro.MISSING, config=config)


def _fail(message: str) -> None:
    print(f"fullgraph: error: {message}", file=sys.stderr, flush=True)


_COMMANDS: dict[str, Callable[..., Train | Predict | Evaluate | Compare | Demo | Doctor]] = {
    "train": Train,
    "predict": Predict,
    "evaluate": Evaluate,
    "compare": Compare,
    "demo": Demo,
    "doctor": Doctor,
}


@contextlib.contextmanager
def _rank_0_speaks() -> Iterator[None]:
    """Of P equal messages about a flag one is enough; rank 0 must have said it before a launcher hears of the end of
    another rank, and ends all."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except SystemExit as end:
        if end.code:
            time.sleep(_LINGER_SECONDS)
        raise


def main() -> None:
    """Console entry point."""
    if "RANK" in os.environ:  # at Ctrl-C the launcher's other ranks need not say the same
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = sys.argv[1:]
    quiet = int(os.environ.get("RANK", "0")) > 0
    try:
        with _rank_0_speaks() if quiet else contextlib.nullcontext():
            if arguments and arguments[0] in _COMMANDS:
                command = tyro.cli(
                    _COMMANDS[arguments[0]],
                    prog=f"fullgraph {arguments[0]}",
                    args=arguments[1:],
                    default=_resumed(arguments),
                )
            else:
                about = "Full-graph GNN training on a partitioned graph."
                command = tyro.extras.subcommand_cli_from_dict(_COMMANDS, prog="fullgraph", description=about)
        code = command.main()
    except (ValueError, OSError) as e:
        _fail(str(e))
        code = 2
    except KeyboardInterrupt:
        code = 130
    if code == 0 and "RANK" in os.environ:
        # Threads of the process group may outlive it, and would abort a rank that has done all it had to.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(code)


if __name__ == "__main__":
    main()
