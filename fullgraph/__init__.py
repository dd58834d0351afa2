"""Online half: train a GNN on the whole graph, one rank a shard, boundary rows exchanged in every layer.

Names are imported when they are first asked for, so that reading shards and reports needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fullgraph.config import TrainConfig as TrainConfig
    from fullgraph.inference import evaluate as evaluate
    from fullgraph.inference import predict as predict
    from fullgraph.loading import load as load
    from fullgraph.loop import train as train
    from fullgraph.shards import Manifest as Manifest
    from fullgraph.shards import Shard as Shard
    from fullgraph.shards import read_manifest as read_manifest
    from fullgraph.shards import read_shard as read_shard
    from fullgraph.view import GraphPart as GraphPart
    from fullgraph.view import LayerView as LayerView
    from fullgraph.view import Pass as Pass
    from fullgraph.world import RankError as RankError
    from fullgraph.world import World as World
    from fullgraph.world import open_world as open_world

_HOME = {
    "GraphPart": "view",
    "LayerView": "view",
    "Pass": "view",
    "evaluate": "inference",
    "load": "loading",
    "predict": "inference",
    "Manifest": "shards",
    "Shard": "shards",
    "TrainConfig": "config",
    "RankError": "world",
    "World": "world",
    "open_world": "world",
    "read_manifest": "shards",
    "read_shard": "shards",
    "train": "loop",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"fullgraph.{_HOME[name]}"), name)
    raise AttributeError(f"module 'fullgraph' has no attribute {name!r}")
