"""Start the ranks of a run on this host with torchrun's own machinery, when the user has not."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Mapping, Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def under_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has already given this process its rank."""
    return "RANK" in env and "WORLD_SIZE" in env


def launch_local(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m fullgraph ARGUMENTS`` as ``ranks`` local ranks that meet on the loopback interface.

    Returns the exit code: 0, that of the first rank to fail, or 128 + the number of the signal that ended it.
    The ranks have said what went wrong; nothing is added here but for a rank that died without a word.
    """
    # The launcher logs a multi-line report for each failed rank; the rank's own message says more.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank sets its own share of the cores
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "fullgraph", *arguments)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode < 0:
            print(f"fullgraph: error: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
            return 128 - failure.exitcode
        return int(failure.exitcode)
    except SignalException as e:
        return 128 + int(e.sigval)
    return 0
