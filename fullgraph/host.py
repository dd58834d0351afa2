"""What this host has to give: memory, file systems and the loopback interface."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mounts")
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "lustre", "gpfs", "cifs", "smb3", "beegfs", "ceph", "9p", "afs"})


def under_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has already given this process its rank."""
    return "RANK" in env and "WORLD_SIZE" in env


def available_memory() -> int:
    """Bytes that new allocations can take before the host swaps or a limit of a container or of this process (ulimit)
    is met: what is free, and what the system would give back of its caches."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
                lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
                available = min(available, max(0, soft - int(lines[name].split()[0]) * 1024))
    for most, used in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # a limit of "max" is none
            available = min(available, max(0, int(most.read_text()) - int(used.read_text())))
    return available


def file_system(path: Path) -> str:
    """The kind of file system that holds ``path``; "unknown" where the system does not say."""
    path = path.resolve()
    found, best = "unknown", -1
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            _, mount, kind, *_ = line.split(" ")
            at = Path(mount.encode().decode("unicode_escape"))
            if path.is_relative_to(at) and len(at.parts) > best:
                found, best = kind, len(at.parts)
    return found


def process_here() -> tuple[str, int]:
    """This process as others of this host find it: what its process ids are counted in, and its own."""
    with contextlib.suppress(OSError):
        return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}", os.getpid()
    return "", os.getpid()


def is_stopped(process: int) -> bool:
    """Whether a process of this host waits for SIGCONT."""
    with contextlib.suppress(OSError):
        return "\nState:\tT" in Path(f"/proc/{process}/status").read_text()
    return False


def loopback() -> str | None:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
