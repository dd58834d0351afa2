import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from partition_tools import metis
from partition_tools.adjacency import Adjacency, symmetric_adjacency
from partition_tools.graph import Graph
from partition_tools.metis import MetisError, laid_out, refill_empty

PROJECT = Path(__file__).parents[1]


def ring(n: int) -> Adjacency:
    nodes = np.arange(n)
    return symmetric_adjacency(Graph(name="ring", num_nodes=n, src=nodes, dst=(nodes + 1) % n))


def partition(adjacency: Adjacency, **changed: object) -> np.ndarray:
    request = {"parts": 2, "seed": 1, "scheme": "recursive", "objective": "cut", "imbalance": 0.03, **changed}
    with laid_out("toy.graph", adjacency, None) as layout:
        return layout.partition(**request)  # type: ignore[arg-type]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in place of the METIS child."""

    def replace(script: str) -> None:
        path = tmp_path / "child.py"
        path.write_text("import os, signal, sys, time, json\nimport numpy as np\n" + textwrap.dedent(script))
        monkeypatch.setattr(metis, "_CHILD", path)

    return replace


def test_splits_a_ring_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    part = partition(ring(40), parts=4)
    assert part.dtype == np.int32
    assert np.bincount(part).tolist() == [10] * 4
    partition(ring(9), parts=8, scheme="kway")
    assert capfd.readouterr() == ("", "")


def test_the_child_loads_only_numpy_and_pymetis() -> None:
    with laid_out("ring", ring(6), None) as layout:
        request = {"parent": os.getpid(), "parts": 2, "recursive": True, "volume": False, "options": {"seed": 1}}
        (layout.folder / "request.json").write_text(json.dumps(request))
        script = (
            "import runpy, sys; runpy.run_path(sys.argv.pop(0 + 1), run_name='__main__'); "
            "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
        )
        command = [sys.executable, "-P", "-c", script, str(metis._CHILD), str(layout.folder)]
        loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert {"numpy", "pymetis"} <= set(loaded)
    assert not {"scipy", "torch", "h5py", "partition_tools", "fullgraph"} & set(loaded)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ["SIGKILL", "memory"]),
        ("print('did not free memory', flush=True); os.abort()", ["SIGABRT", "'did not free memory'", "--method bfs"]),
        ("os.kill(os.getpid(), signal.SIGSEGV)", ["SIGSEGV", "printed nothing", "--seed"]),
        ("os.kill(os.getpid(), signal.SIGILL)", ["SIGILL", "CPU", "--no-binary pymetis"]),
        ("os.kill(os.getpid(), 40)", ["signal 40"]),
        ("sys.exit('Input Error: Incorrect objective type.')", ["exit status 1", "Input Error"]),
        ("", ["without a readable answer", "part.npy"]),
    ],
)
def test_a_dying_child_becomes_one_error(
    child: Callable[[str], None], capfd: pytest.CaptureFixture[str], script: str, expected: list[str]
) -> None:
    child(script)
    with pytest.raises(MetisError) as caught:
        partition(ring(8), parts=3)
    message = str(caught.value)
    for words in ["toy.graph", "8 nodes", "8 undirected pairs", "3 parts", "seed 1", "pymetis 20", *expected]:
        assert words in message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("part", "objective", "message"),
    [
        ("np.array([0, 0, 0, 0, 1, 1, 1, 1])", 3, "reported a cut of 3, but its partition has 2"),
        ("np.array([0, 0, 0, 0, 1, 1, 1, 1])", -2, "reported a cut of -2, but its partition has 2"),
        ("np.array([0, 0, 0, 0, 1, 1, 2, 1])", 4, "put node 6 into part 2"),
        ("np.array([0, 0, 0, -1, 1, 1, 1, 1])", 4, "put node 3 into part -1"),
        ("np.zeros(7, np.int64)", 0, r"returned int64 \[7\]"),
        ("np.zeros(8)", 0, r"returned float64 \[8\]"),
        ("np.array([None])", 0, "without a readable answer"),
    ],
)
def test_an_answer_is_recounted(child: Callable[[str], None], part: str, objective: int, message: str) -> None:
    child(f"""
        os.chdir(sys.argv[1])
        np.save("part.npy", {part})
        open("answer.json", "w").write(json.dumps({{"objective": {objective}}}))
    """)
    with pytest.raises(MetisError, match=message):
        partition(ring(8))


def test_an_old_answer_is_not_taken_for_a_new_one(child: Callable[[str], None]) -> None:
    with laid_out("ring", ring(8), None) as layout:
        layout.partition(parts=2, seed=1, scheme="recursive", objective="cut", imbalance=0.03)
        child("")
        with pytest.raises(MetisError, match="without a readable answer"):
            layout.partition(parts=2, seed=1, scheme="recursive", objective="cut", imbalance=0.03)


def test_timeout_ends_a_child_that_will_not_stop(child: Callable[[str], None], tmp_path: Path) -> None:
    child(f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        print("working", flush=True)
        time.sleep(100)
    """)
    with pytest.raises(MetisError, match=r"took more than 2 s .*'working'.*--timeout"):
        partition(ring(8), timeout=2.0)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_the_folder_goes_whatever_happens(child: Callable[[str], None]) -> None:
    child("os.abort()")
    with pytest.raises(MetisError), laid_out("ring", ring(8), None) as layout:  # noqa: PT012
        folder = layout.folder
        layout.partition(parts=2, seed=1, scheme="recursive", objective="cut", imbalance=0.03)
    assert not folder.exists()


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ValueError, match=r"No space left on device.*TMPDIR"):
        partition(ring(8))


LONG_CALL = """
import numpy as np
from partition_tools.adjacency import symmetric_adjacency
from partition_tools.graph import Graph
from partition_tools.metis import laid_out

nodes = np.random.default_rng(0).integers(0, 60_000, (2, 900_000))
adjacency = symmetric_adjacency(Graph(name="long.graph", num_nodes=60_000, src=nodes[0], dst=nodes[1]))
with laid_out("long.graph", adjacency, None) as layout:
    layout.partition(parts=64, seed=1, scheme="kway", objective="volume", imbalance=0.03)
"""


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_metis_ends_with_the_process_that_asked(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", LONG_CALL], cwd=PROJECT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        children: list[psutil.Process] = []

        def metis_at_work() -> bool:
            children[:] = psutil.Process(process.pid).children()
            return bool(children) and children[0].cpu_times().user > 0.6

        assert wait_for(metis_at_work, 60)
        process.send_signal(number)
        assert process.stderr is not None
        said = process.stderr.read()
        process.wait()
    assert wait_for(lambda: not psutil.pid_exists(children[0].pid), 5)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in said
        assert not list(tmp_path.iterdir())


def test_sigterm_to_metis_never_gives_half_a_partition() -> None:
    """METIS traps the signal and may return; here the wait is for the end of its call."""
    script = LONG_CALL.replace("60_000", "20_000").replace("900_000", "200_000").replace('"volume"', '"cut"')
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=PROJECT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        children: list[psutil.Process] = []

        def metis_at_work() -> bool:
            children[:] = psutil.Process(process.pid).children()
            return bool(children) and children[0].cpu_times().user > 0.3

        assert wait_for(metis_at_work, 60)
        children[0].terminate()
        assert process.stderr is not None
        assert "MetisError: long.graph: METIS was ended by SIGTERM" in process.stderr.read()


def test_volume_equals_our_count_of_rows() -> None:
    nodes = np.random.default_rng(0).integers(0, 400, (2, 2000))
    adjacency = symmetric_adjacency(Graph(name="g", num_nodes=400, src=nodes[0], dst=nodes[1]))
    part = partition(adjacency, parts=4, scheme="kway", objective="volume")
    assert np.bincount(part, minlength=4).min() > 0


def test_recursive_bisection_keeps_the_tolerance_over_all_levels() -> None:
    rng = np.random.default_rng(0)
    nodes = rng.integers(0, 3000, (2, 12_000))
    load = rng.integers(1, 30, 3000)
    adjacency = symmetric_adjacency(Graph(name="g", num_nodes=3000, src=nodes[0], dst=nodes[1]))
    with laid_out("g", adjacency, load) as layout:
        part = layout.partition(parts=32, seed=1, scheme="recursive", objective="cut", imbalance=0.1)
    assert np.bincount(part, weights=load).max() <= 1.1 * load.sum() / 32


def test_versions_name_what_a_partition_depends_on() -> None:
    found = metis.versions()
    assert found["pymetis"].startswith("20")
    assert found["METIS"].endswith("64-bit indices")


def sizes(part: np.ndarray, parts: int) -> list[int]:
    return np.bincount(part, minlength=parts).tolist()


def test_refill_moves_single_nodes_where_parts_are_small() -> None:
    part = np.array([0, 0, 0, 1, 1, 1], dtype=np.int32)
    empty, moved = refill_empty(part, 4, ring(6), None)
    assert (empty.tolist(), moved, sizes(part, 4)) == ([2, 3], 2, [2, 2, 1, 1])


def test_refill_moves_what_hangs_together() -> None:
    part = np.zeros(40, dtype=np.int32)
    refill_empty(part, 4, ring(40), None)
    assert sizes(part, 4) == [10] * 4
    assert ring(40).cut(part) == 4


def test_refill_prefers_nodes_without_neighbours_in_the_donor() -> None:
    edges = np.array([(0, 1), (1, 2), (2, 0), (0, 3)])
    adjacency = symmetric_adjacency(Graph(name="g", num_nodes=5, src=edges[:, 0].copy(), dst=edges[:, 1].copy()))
    part = np.zeros(5, dtype=np.int32)
    refill_empty(part, 5, adjacency, None)
    assert sorted(part.tolist()) == [0, 1, 2, 3, 4]
    assert part[4] == 1  # Isolated, so it went first.
    assert part[3] == 2  # Then the one at the end of a path.


def test_refill_around_one_heavy_node() -> None:
    load = np.array([1000] + [1] * 39)
    part = np.zeros(40, dtype=np.int32)
    refill_empty(part, 4, ring(40), load)
    heavy = part[0]
    assert sorted(sizes(part, 4)) == [1, 10, 10, 19]
    assert sizes(part, 4)[heavy] == 1


def test_refill_leaves_full_parts_alone() -> None:
    part = np.array([0, 1, 1, 0], dtype=np.int32)
    empty, moved = refill_empty(part, 2, ring(4), None)
    assert (empty.size, moved, part.tolist()) == (0, 0, [0, 1, 1, 0])
