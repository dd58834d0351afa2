"""The options of a run check themselves and are plain data."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from fullgraph.config import TrainConfig

WRONG: list[tuple[str, Any, str]] = [
    *(
        (flag, value, "at least 1")
        for flag in ("layers", "hidden", "heads", "out_heads", "eval_every")
        for value in (0, -3)
    ),
    ("epochs", -1, "at least 0"),
    *(
        (flag, value, "a probability in [0, 1)")
        for flag in ("dropout", "input_dropout")
        for value in (-0.1, 1.0, 1.5, math.nan)
    ),
    *(("lr", value, "a positive number") for value in (0.0, -1.0, math.inf, math.nan)),
    *(("weight_decay", value, "zero or a positive number") for value in (-1e-9, math.inf, math.nan)),
    *(("time_limit", value, "a positive number of seconds") for value in (0.0, -1.0, math.nan)),
    *(("timeout", value, "a positive number of seconds") for value in (0.0, -1.0, math.nan, math.inf)),
    ("patience", 0, "at least 1 epoch"),
    *(("clip", value, "a positive norm") for value in (0.0, -1.0, math.nan)),
    ("split", -1, "at least 0"),
    ("seed", -1, "an integer in [0, 2^63)"),
    ("seed", 2**63, "an integer in [0, 2^63)"),
    ("threads", 0, "at least 1"),
    ("model", "gatt", "one of gcn, sage, gin, gat"),
    ("model", None, "one of gcn, sage, gin, gat"),
    ("norm", "rows", "one of none, layer, batch"),
    ("feature_norm", "column", "one of none, row"),
    ("optimizer", "lion", "one of adam, adamw, sgd"),
    ("scheduler", "cos", "one of none, cosine, plateau"),
    ("class_weights", "equal", "one of none, balanced"),
    ("dtype", "float16", "one of float32, float64, bfloat16"),
    ("metric", "f1", "one of accuracy, micro_f1, roc_auc, mae"),
    ("task", "classes", "one of single-label, multi-label, regression"),
]


@pytest.mark.parametrize(("flag", "value", "expected"), WRONG)
def test_a_wrong_value_is_named_with_its_flag_and_what_was_expected(flag: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        TrainConfig(**{flag: value})
    assert str(error.value) == f"--{flag.replace('_', '-')} is {value}; expected {expected}"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("layers", 1),
        ("epochs", 0),
        ("dropout", 0.0),
        ("dropout", math.nextafter(1.0, 0.0)),
        ("weight_decay", 0.0),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("patience", 1),
        ("patience", None),
        ("metric", None),
        ("task", "regression"),
        ("time_limit", math.inf),
        ("clip", 1e-9),
    ],
)
def test_values_at_the_edge_are_taken(flag: str, value: Any) -> None:
    assert getattr(TrainConfig(**{flag: value}), flag) == value


def test_heads_must_divide_the_hidden_width_of_gat_alone() -> None:
    with pytest.raises(ValueError, match="--hidden 130 does not divide into --heads 4; take a multiple"):
        TrainConfig(model="gat", hidden=130)
    assert TrainConfig(model="gat", hidden=130, heads=5).heads == 5
    assert TrainConfig(model="gcn", hidden=130).hidden == 130


def test_a_changed_copy_is_checked_and_the_record_is_frozen() -> None:
    config = TrainConfig()
    with pytest.raises(ValueError, match="--lr is 0"):
        dataclasses.replace(config, lr=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        TrainConfig("gcn")  # type: ignore[misc]


def test_as_dict_goes_through_json_and_back() -> None:
    config = TrainConfig(model="gat", hidden=64, patience=7, time_limit=1.5, metric="roc_auc", seed=2**63 - 1)
    plain = config.as_dict()
    assert set(plain) == {field.name for field in dataclasses.fields(TrainConfig)}
    assert TrainConfig(**json.loads(json.dumps(plain, allow_nan=False))) == config


def test_the_defaults_are_json() -> None:
    assert TrainConfig(**json.loads(json.dumps(TrainConfig().as_dict(), allow_nan=False))) == TrainConfig()
