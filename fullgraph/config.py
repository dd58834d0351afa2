"""What a training run is told: one frozen record, checked when made, saved with the results."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

Task = Literal["single-label", "multi-label", "regression"]
PlanKind = Literal["cover", "halo"]
Metric = Literal["accuracy", "micro_f1", "roc_auc", "mae"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of ``fullgraph train``."""

    model: Literal["gcn", "sage", "gin", "gat"] = "sage"
    """Layer type: GCN, GraphSAGE with mean aggregation, GIN, or GAT."""
    layers: int = 2
    """Number of message-passing layers."""
    hidden: int = 128
    """Width of the hidden layers; for GAT the total over its heads."""
    heads: int = 4
    """Attention heads of GAT's hidden layers."""
    out_heads: int = 1
    """Attention heads of GAT's last layer, averaged."""
    dropout: float = 0.5
    """Probability of zeroing an element of a hidden layer's output (and, for GAT, an attention weight)."""
    input_dropout: float = 0.0
    """The same for the features."""
    norm: Literal["none", "layer", "batch"] = "none"
    """Normalisation after each hidden layer; batch statistics are over all nodes of all ranks."""
    residual: bool = False
    """Add a hidden layer's input to its output."""
    feature_norm: Literal["none", "row"] = "none"
    """Divide each node's features by their sum, as is usual for bag-of-words features."""
    lr: float = 0.01
    """Learning rate."""
    weight_decay: float = 5e-4
    """L2 penalty of adam and sgd, decoupled decay of adamw."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """Optimiser; sgd has momentum 0.9."""
    scheduler: Literal["none", "cosine", "plateau"] = "none"
    """Learning rate over time: constant, a cosine to zero over the epochs, or halved when validation stalls."""
    epochs: int = 200
    """Most steps to take; a step is one pass over the whole graph."""
    time_limit: float | None = None
    """Stop after this many seconds of training."""
    patience: int | None = None
    """Stop after this many epochs without a better validation score."""
    eval_every: int = 1
    """Evaluate every so many epochs, and after the last."""
    metric: Metric | None = None
    """Score that picks the best epoch; by default accuracy, micro-F1 or mean absolute error by task."""
    task: Task | None = None
    """Kind of target; by default as the labels say."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weight of a class in the loss: 1, or N_train / (classes * its training nodes)."""
    clip: float | None = None
    """Scale gradients down to this global norm."""
    split: int = 0
    """Which of the graph's splits to train on."""
    inductive: bool = False
    """Train on the subgraph of the training nodes, with its degrees; evaluate on the whole graph."""
    edge_features: bool = True
    """Let GAT's attention see the edge features, where the shards hold some; other models here do not use them."""
    seed: int = 1
    """Seed of the initial weights and of dropout; the result does not depend on the number of ranks."""
    dtype: Literal["float32", "float64"] = "float32"
    """Floating-point type of features, weights and messages."""
    plan: PlanKind = "cover"
    """Message rows of linear layers: the fewest (a minimum cover of the cut edges), or one a halo node."""
    prune: bool = True
    """In training, compute and send in each layer only what the training nodes need."""
    layer0: Literal["auto", "once", "keep", "exchange"] = "auto"
    """The features' rows: aggregated once, halo features kept, exchanged each step, or what should cost least."""
    exchange_bytes: int = 1 << 30
    """Most bytes of message rows a rank sends or receives at a time."""
    profile: bool = False
    """Print, and leave in profile.json, bytes and seconds by layer and direction."""
    memory_check: bool = True
    """Refuse to start where the predicted peak memory exceeds what a host has."""
    threads: int | None = None
    """Compute threads a rank; by default the host's cores divided by its ranks."""
    timeout: float = 300.0
    """Seconds that a rank waits for another before the run ends with an error."""

    def __post_init__(self) -> None:
        def must(ok: bool, flag: str, expected: str) -> None:
            if not ok:
                value = getattr(self, flag)
                raise ValueError(f"--{flag.replace('_', '-')} is {value}; expected {expected}")

        for flag, hint in get_type_hints(type(self)).items():
            names = [name for arg in (hint, *get_args(hint)) if get_origin(arg) is Literal for name in get_args(arg)]
            optional = getattr(self, flag) is None and type(None) in get_args(hint)
            must(not names or optional or getattr(self, flag) in names, flag, f"one of {', '.join(names)}")
        for flag in ("layers", "hidden", "heads", "out_heads", "eval_every"):
            must(getattr(self, flag) >= 1, flag, "at least 1")
        must(self.exchange_bytes >= 1, "exchange_bytes", "at least 1")
        must(self.epochs >= 0, "epochs", "at least 0")
        for flag in ("dropout", "input_dropout"):
            must(0.0 <= getattr(self, flag) < 1.0, flag, "a probability in [0, 1)")
        must(self.lr > 0 and math.isfinite(self.lr), "lr", "a positive number")
        must(self.weight_decay >= 0 and math.isfinite(self.weight_decay), "weight_decay", "zero or a positive number")
        must(self.time_limit is None or self.time_limit > 0, "time_limit", "a positive number of seconds")
        must(self.patience is None or self.patience >= 1, "patience", "at least 1 epoch")
        must(self.clip is None or self.clip > 0, "clip", "a positive norm")
        must(self.split >= 0, "split", "at least 0")
        must(0 <= self.seed < 2**63, "seed", "an integer in [0, 2^63)")
        must(self.threads is None or self.threads >= 1, "threads", "at least 1")
        must(0 < self.timeout < math.inf, "timeout", "a positive number of seconds")
        if self.model == "gat" and self.hidden % self.heads:
            raise ValueError(f"--hidden {self.hidden} does not divide into --heads {self.heads}; take a multiple")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for config.json and checkpoints."""
        return dataclasses.asdict(self)
