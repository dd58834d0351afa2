"""The sparse kernels against dense products whose every sum is exact, so that they must be equal to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from fullgraph.kernels import SparseMatrix, sddmm, segment_sum, spmm, spmm_transposed


def check_kernels(device: torch.device, dtype: torch.dtype, edges: int = 2000) -> None:
    """Raise ``RuntimeError`` that names the kernel which is not right on this device: a library's fast kernel once
    returned zeros for large sums without a word."""
    generator = torch.Generator().manual_seed(0)
    rows, columns, width = 17, 13, 5

    def whole(*shape: int, most: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).to(device, dtype)

    dense = whole(rows, columns, most=2)
    x, y = whole(columns, width, most=3), whole(rows, width, most=3)
    matrix = _sparse(dense)
    at = (matrix.rows.long(), matrix.indices.long())
    pairs = {
        "spmm": (spmm(matrix, x), dense @ x),
        "spmm_transposed": (spmm_transposed(matrix, y), dense.t() @ y),
        "sddmm": (sddmm(matrix, y, x), (y @ x.t())[at]),
        "segment_sum": (segment_sum(matrix, x[matrix.indices.long()]), (dense != 0).to(dtype) @ x),
        "a sum of many ones": _ones(device, dtype, edges),
    }
    for name, (found, expected) in pairs.items():
        if not torch.equal(found, expected):
            worst = float((found - expected).abs().max())
            raise RuntimeError(
                f"the sparse kernel {name} is wrong on {device.type} in {dtype}: off by {worst:g} from the dense "
                f"product; take another version of torch (this is {torch.__version__})"
            )


def _sparse(dense: Tensor) -> SparseMatrix:
    rows, columns = torch.nonzero(dense, as_tuple=True)
    indptr = torch.zeros(dense.shape[0] + 1, dtype=torch.int32, device=dense.device)
    indptr[1:] = torch.cumsum(torch.bincount(rows, minlength=dense.shape[0]), 0)
    return SparseMatrix((dense.shape[0], dense.shape[1]), indptr, columns.to(torch.int32), dense[rows, columns])


def _ones(device: torch.device, dtype: torch.dtype, edges: int) -> tuple[Tensor, Tensor]:
    """The sum over in-edges of ones, beside the in-degrees; one node has most of them."""
    degrees = torch.tensor([edges - 3, 0, 2, 1], device=device)
    indptr = torch.cat([degrees.new_zeros(1), torch.cumsum(degrees, 0)]).to(torch.int32)
    indices = torch.arange(edges, dtype=torch.int32, device=device) % 7
    matrix = SparseMatrix((4, 7), indptr, indices)
    return spmm(matrix, torch.ones(7, 2, dtype=dtype, device=device)), degrees[:, None].expand(4, 2).to(dtype)
