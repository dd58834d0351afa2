"""What a training run is told: one frozen record, checked when made, saved with the results."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fullgraph.records import check_types

Task = Literal["single-label", "multi-label", "regression"]
PlanKind = Literal["cover", "halo"]
Metric = Literal["accuracy", "micro_f1", "roc_auc", "mae"]
Codec = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """When message rows cross, as ``--refresh`` says it."""

    kind: Literal["always", "pipelined", "every", "drift"] = "always"
    interval: int = 1
    """Steps from one refresh of ``every`` to the next."""
    threshold: float = 0.0
    """Change relative to a row's norm beyond which ``drift`` sends it again."""

    @classmethod
    def parse(cls, text: str) -> Refresh:
        """``always``, ``pipelined``, ``every:R`` or ``drift:T``; ``ValueError`` for anything else."""
        kind, _, value = text.partition(":")
        try:
            if kind == "every" and (interval := int(value)) >= 1:
                return cls(kind="every", interval=interval)
            if kind == "drift" and 0.0 <= (threshold := float(value)) < math.inf:
                return cls(kind="drift", threshold=threshold)
        except ValueError:
            pass
        if text == "always" or text == "pipelined":
            return cls(kind="pipelined" if text == "pipelined" else "always")
        raise ValueError(
            f"--refresh is {text}; expected always, pipelined, every:R with R at least 1 (every:2), or drift:T with T "
            f"at least 0 (drift:0.1)"
        )

    @property
    def stale(self) -> bool:
        """Whether rows of earlier steps are used. Once every step, and rows that changed at all, are exact."""
        return self.kind == "pipelined" or self.interval > 1 or self.threshold > 0


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
    """Which of the graph's splits to train on; the command line must name it where there are several."""
    inductive: bool = False
    """Train on the subgraph of the training nodes, with its degrees; evaluate on the whole graph."""
    edge_features: bool = True
    """Let GAT's attention see the edge features, where the shards hold some; other models here do not use them."""
    seed: int = 1
    """Seed of the initial weights and of dropout; the result does not depend on the number of ranks."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Floating-point type of features, weights and messages. With bfloat16 rows are rounded to 8 bits, which halves
    their memory and what crosses; sums are formed in float32, and weights, optimiser and loss stay in it."""
    plan: PlanKind = "cover"
    """Message rows of linear layers: the fewest (a minimum cover of the cut edges), or one a halo node."""
    prune: bool = True
    """In training, compute and send in each layer only what the training nodes need."""
    layer0: Literal["auto", "once", "keep", "exchange"] = "auto"
    """The features' rows: aggregated once, halo features kept, exchanged each step, or what should cost least."""
    recompute: bool = False
    """Keep nothing of a hidden layer for backward but its input, and compute the rest again, exchange included. Saves
    memory with GAT, GIN, a norm or a residual; layers that keep no more anyway are left as they are, and named."""
    exchange_bytes: int = 1 << 30
    """Most bytes of message rows a rank sends or receives at a time."""
    refresh: str = "always"
    """When message rows cross in training: always (exact); pipelined (one step late, hidden under a whole step);
    every:R (each R-th step, from a cache between); drift:T (rows that changed by more than T of their norm)."""
    stagger: bool = False
    """With every:R, refresh the layers in turn instead of all in the same step."""
    stale_grad: Literal["keep", "drop"] = "keep"
    """With pipelined and every:R, gradients of stale rows: those of the last refresh, or none."""
    pipeline_average: float = 0.0
    """With pipelined, weight of the past in a moving average of rows and gradients; 0 takes the newest alone."""
    codec: Codec = "float32"
    """How message rows and their gradients are written: as they are, bfloat16, or int8 with a scale a row, rounded at
    random so that the mean is right."""
    boundary_sample: float = 1.0
    """Share of the message rows that cross in a step, drawn anew each step; what is left out is made up for by scaling
    (or, where rows are cached, by the rows from before)."""
    exact_after: int | None = None
    """Train exactly once this many epochs are done."""
    cache_bfloat16: bool = False
    """Keep cached rows in bfloat16: half the memory."""
    freeze_masks: bool = False
    """With stale rows and dropout, cache rows with the dropout mask of the step that sent them, so that the fewest rows
    can be sent; by default rows are cached before dropout and masked where they are used."""
    measure_drift: int | None = None
    """Every so many epochs, fetch the exact rows too and log how far those in use are from them, layer by layer."""
    checkpoint_every: int | None = None
    """Save a checkpoint every so many epochs, to go on from with --resume; SIGUSR1 and whatever stops a run early save
    one, too."""
    checkpoint_minutes: float | None = None
    """Save a checkpoint after the first epoch that ends so many minutes after the last one."""
    keep_checkpoints: int = 2
    """How many of the last checkpoints to keep, beside the one with the best validation score."""
    profile: bool = False
    """Print, and leave in profile.json, bytes and seconds by layer and direction."""
    memory_check: bool = True
    """Refuse to start where the predicted peak memory exceeds what a host has."""
    debug: bool = False
    """Compare on all ranks, before every collective, which it is and its shapes, and after every epoch the weights;
    fill what is received with NaN before. Slow; for models of your own."""
    threads: int | None = None
    """Compute threads a rank; by default the host's cores divided by its ranks."""
    timeout: float = 300.0
    """Seconds that a rank waits for another before the run ends with an error."""

    def __post_init__(self) -> None:
        def must(ok: bool, flag: str, expected: str) -> None:
            if not ok:
                value = getattr(self, flag)
                raise ValueError(f"--{flag.replace('_', '-')} is {value}; expected {expected}")

        check_types(self)
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
        must(self.checkpoint_every is None or self.checkpoint_every >= 1, "checkpoint_every", "at least 1 epoch")
        minutes = self.checkpoint_minutes
        must(minutes is None or 0 < minutes < math.inf, "checkpoint_minutes", "a positive number of minutes")
        must(self.keep_checkpoints >= 1, "keep_checkpoints", "at least 1")
        must(self.patience is None or self.patience >= 1, "patience", "at least 1 epoch")
        must(self.clip is None or self.clip > 0, "clip", "a positive norm")
        must(self.split >= 0, "split", "at least 0")
        must(0 <= self.seed < 2**63, "seed", "an integer in [0, 2^63)")
        refresh = Refresh.parse(self.refresh)
        must(not self.stagger or refresh.kind == "every", "stagger", "every:R for --refresh with it")
        cached = refresh.kind in ("pipelined", "every")
        must(self.stale_grad == "keep" or cached, "stale_grad", "keep unless --refresh is pipelined or every:R")
        must(0.0 <= self.pipeline_average < 1.0, "pipeline_average", "a weight in [0, 1)")
        averaged = self.pipeline_average > 0
        must(not averaged or refresh.kind == "pipelined", "pipeline_average", "0 unless --refresh is pipelined")
        must(0.0 < self.boundary_sample <= 1.0, "boundary_sample", "a share in (0, 1]")
        drawn = self.boundary_sample < 1.0
        must(not drawn or refresh.kind != "drift", "boundary_sample", "1 with drift:T, which picks the rows itself")
        exact = not refresh.stale and not drawn and self.codec == "float32"
        must(not self.recompute or exact, "recompute", "off where message rows are approximate")
        if drawn and not refresh.stale and self.model == "gat":
            raise ValueError(
                f"--boundary-sample {self.boundary_sample:g} with --model gat: attention divides by a sum over all "
                f"neighbours, which scaling drawn rows does not give back; take gcn, sage or gin, or add --refresh "
                f"every:R or pipelined, where rows that are not drawn stay as they were"
            )
        must(self.exact_after is None or self.exact_after >= 0, "exact_after", "at least 0")
        must(self.measure_drift is None or self.measure_drift >= 1, "measure_drift", "at least 1 epoch")
        must(self.threads is None or self.threads >= 1, "threads", "at least 1")
        must(0 < self.timeout < math.inf, "timeout", "a positive number of seconds")
        if self.model == "gat" and self.hidden % self.heads:
            raise ValueError(f"--hidden {self.hidden} does not divide into --heads {self.heads}; take a multiple")

    @property
    def weight_dtype(self) -> str:
        """Floating-point type of weights, their gradients and the optimiser's state."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for config.json and checkpoints."""
        return dataclasses.asdict(self)
