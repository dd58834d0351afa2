"""How message rows are written on their way: as they are, as bfloat16, or as int8 with a scale a row.

int8 rounds at random: ``q = floor(x / scale + u)`` with u uniform in (0, 1) has the mean ``x / scale``, so that the
decoded row is an unbiased estimate of x (Alistarh et al. 2017, QSGD, section 3.1) within ``scale = max |x| / 127`` of
it, element by element. bfloat16 rounds to nearest: within 2^-8 of an element's magnitude. Rows that hold a number that
is not finite arrive with one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fullgraph.config import Codec
from fullgraph.dropout import MaskKey

_LEVELS = 127
_SCALE_BYTES = 4
_BLOCK = 1 << 17  # elements a block: what is computed on the way stays within a core's cache


def generator(key: MaskKey, *, rank: int, direction: int, device: torch.device) -> torch.Generator:
    """Source of one exchange's rounding; ranks draw apart from each other."""
    out = torch.Generator(device)
    out.manual_seed(MaskKey(key.as_int64(), rank, direction).as_int64() & ((1 << 63) - 1))
    return out


def encode(rows: Tensor, codec: Codec, draw: torch.Generator) -> Tensor:
    """What travels for ``rows`` [m, D]: [m, D] for float32 and bfloat16, uint8 [m, 4 + D] for int8: the bytes of the
    row's scale, a float32, then its numbers."""
    if codec == "float32":
        return rows
    if codec == "bfloat16":
        return rows.to(torch.bfloat16)
    m, width = rows.shape
    payload = torch.empty(m, _SCALE_BYTES + width, dtype=torch.uint8, device=rows.device)
    for block in _blocks(m, width):
        part = rows[block]
        scale = (
            (part.abs().amax(1, keepdim=True) / _LEVELS).to(torch.float32) if width else rows.new_zeros(m, 1).float()
        )
        steps = part / torch.where(scale == 0, 1.0, scale)
        steps.add_(_uniform(part.shape[0], width, draw)).floor_().clamp_(-_LEVELS, _LEVELS)
        payload[block, :_SCALE_BYTES] = scale.view(torch.uint8)
        payload[block, _SCALE_BYTES:] = steps.to(torch.int8).view(torch.uint8)
    return payload


def decode(payload: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
    """[m, D] rows of ``dtype`` from what ``encode`` gave."""
    if codec != "int8":
        return payload.to(dtype)
    m, width = payload.shape[0], payload.shape[1] - _SCALE_BYTES
    out = torch.empty(m, width, dtype=dtype, device=payload.device)
    for block in _blocks(m, width):
        scale = payload[block, :_SCALE_BYTES].reshape(-1).view(torch.float32)[:, None]
        torch.mul(payload[block, _SCALE_BYTES:].view(torch.int8), scale, out=out[block])
    return out


def _blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _BLOCK // max(width, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _uniform(rows: int, width: int, draw: torch.Generator) -> Tensor:
    """float32 [rows, width] midpoints of 2^16 equal steps of (0, 1): one 64-bit number serves four columns."""
    words = torch.empty(rows, -(-width // 4), dtype=torch.int64, device=draw.device)
    words.random_(-(1 << 63), None, generator=draw)
    lanes = words.view(torch.int16)[:, :width]
    return lanes.to(torch.float32).add_(32768.5).mul_(2.0**-16)
