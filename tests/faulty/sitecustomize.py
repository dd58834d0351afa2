"""Makes a rank fail at a named stage: for processes whose PYTHONPATH begins with this folder, and which FAULT names.

FAULT is a JSON object: ``rank`` and ``stage`` say who and where, ``kind`` is kill, stop or memory, ``mark`` is a file
that is made when it happens. The functions of the stage are wrapped before the program imports them; the program
itself knows of nothing.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

STEP = 2
"""The step, counted from 0, in which it happens."""


def happen(fault):
    if Path(fault["mark"]).exists():  # it has happened, and the ranks were started again
        return
    Path(fault["mark"]).touch()
    if fault["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault["kind"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault["kind"] == "memory":
        import torch

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        torch.ones(1 << 32)  # no model here is large enough


def before(owner, name, fault, when=lambda *args: True):
    original, happened = getattr(owner, name), []

    def wrapped(*args, **options):
        if not happened and when(*args):
            happened.append(True)
            happen(fault)
        return original(*args, **options)

    setattr(owner, name, wrapped)


def late(*args):
    return args[0].world.meter.step == STEP


def in_layer_1(_, __, view, *___):
    return view.training and view.layer == 1 and view.this_pass.step == STEP


def install(fault):
    stage = fault["stage"]
    if stage == "load":
        import fullgraph.shards

        before(fullgraph.shards, "read_shard", fault)
    elif stage == "plan":
        import fullgraph.plan

        before(fullgraph.plan, "agree_route", fault)
    elif stage == "forward":
        import fullgraph.models

        before(fullgraph.models.GCNConv, "forward", fault, in_layer_1)
    elif stage == "backward":
        import fullgraph.models

        forward = fullgraph.models.GCNConv.forward

        def hooked(self, x, view, *rest):
            y = forward(self, x, view, *rest)
            if in_layer_1(self, x, view):
                y.register_hook(lambda grad: happen(fault))
            return y

        fullgraph.models.GCNConv.forward = hooked
    elif stage == "gradient sum":
        import fullgraph.trainer

        before(fullgraph.trainer.Trainer, "_sum_gradients", fault, late)
    elif stage == "evaluation":
        import fullgraph.trainer

        before(fullgraph.trainer.Trainer, "evaluate", fault, late)
    elif stage in ("save", "checkpoint"):
        import torch

        save = torch.save

        def half(value, path, *args, **options):
            save(value, path, *args, **options)
            if stage == "save" or f".epoch-{STEP + 1:08d}." in str(path):
                os.truncate(path, os.path.getsize(path) // 2)
                happen(fault)
                save(value, path, *args, **options)

        torch.save = half
    elif stage == "space":
        import shutil

        usage = type(shutil.disk_usage("/"))
        shutil.disk_usage = lambda path: usage(1 << 50, 0, 1 << 50)
    else:
        raise ValueError(stage)


if "FAULT" in os.environ:
    _fault = json.loads(os.environ["FAULT"])
    _name = "partition_tools" if _fault["rank"] is None else "fullgraph"
    if _fault["rank"] in (None, int(os.environ.get("RANK", -1))) and _name in sys.orig_argv:
        install(_fault)
