"""Where in a training step numbers stop being finite, once a loss or a gradient has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fullgraph.kernels import SparseRows
from fullgraph.view import GraphPart, Pass
from fullgraph.world import World

FEATURES = "the node features"
Place = tuple[str, bool]
"""(a name for a person, whether its numbers are finite here)"""


def first_not_finite(model: nn.Module, part: GraphPart, this_pass: Pass) -> str:
    """Names the first of weights, features and modules' outputs that is not finite on some rank, with the rank, by
    running the forward pass ``this_pass`` again (a collective, to be called by all ranks alike)."""
    places = [(f"the weight {_in_layer(name)}", _finite(value)) for name, value in model.named_parameters()]
    places.append((FEATURES, _finite(part.x)))
    with _watched(model, part.world, places), torch.no_grad():
        part.run(model, this_pass)
    return _first(places, part.world)


def first_gradient_not_finite(model: nn.Module) -> str:
    """The same for gradients that were summed over ranks: backward comes to the last layer first."""
    bad = [name for name, value in model.named_parameters() if value.grad is not None and not _finite(value.grad)]
    return f"backward, the first not to be finite is that of {_in_layer(bad[-1]) if bad else 'the learned features'}"


def _in_layer(name: str) -> str:
    """A parameter's name, with the number that the model's list of layers gives it."""
    number = next((piece for piece in name.split(".") if piece.isdigit()), None)
    return name if number is None else f"{name} (layer {number})"


@contextlib.contextmanager
def _watched(model: nn.Module, world: World, places: list[Place]) -> Iterator[None]:
    """Adds a place for the output of every module that is called inside the block, in the order in which they end."""

    def watch(name: str, module: nn.Module) -> Any:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            layer = world.meter.layer
            at = "" if layer is None else f"layer {layer}, "
            places.append((f"the output of {at}{name} ({type(module).__name__})", _finite(output)))

        return module.register_forward_hook(note)

    hooks = [watch(name, module) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _finite(value: Any) -> bool:
    if isinstance(value, SparseRows):
        value = value.values
    if isinstance(value, (tuple, list)):
        return all(map(_finite, value))
    return not isinstance(value, Tensor) or bool(value.isfinite().all())


def _first(places: list[Place], world: World) -> str:
    """The first place that is not finite anywhere, by all ranks' places, which a user's model may number unlike."""
    bad = next((at for at, (_, finite) in enumerate(places) if not finite), len(places))
    every = world.gather_json([bad, places[bad][0] if bad < len(places) else ""])
    first, name = min((tuple(found) for found in every), key=lambda found: found[0])
    ranks = [rank for rank, found in enumerate(every) if found[0] == first]
    if not name:
        return "all layers' outputs are finite, the loss of them is not: look at the labels, and at targets' scale"
    where = "" if len(ranks) == world.size else f" on rank {', '.join(map(str, ranks))}"
    return f"the first not to be finite is {name}{where}"
