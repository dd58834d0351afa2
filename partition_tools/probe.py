"""The constants of this machine, measured by ranks of the trainer in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from fullgraph.cost import Machine

_RANKS = 2
_TIMEOUT = 300.0


def measured(ranks: int = _RANKS) -> Machine:
    """Those of as many ranks that work at the same time. Raises ``ValueError`` where they cannot be started, with what
    they said."""
    with tempfile.TemporaryDirectory(prefix="partition-tools-probe-") as folder:
        answer = Path(folder) / "machine.json"
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *launch, "-m", "fullgraph.probe", str(answer)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
            return Machine(**json.loads(answer.read_text()))
        except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
            said = run.stderr.strip()[-500:] if not isinstance(error, subprocess.TimeoutExpired) else str(error)
            raise ValueError(
                f"--probe: the machine could not be measured ({said}); leave it out, and state --bandwidth, --latency "
                f"and --flops"
            ) from None
