"""The orthogonal matrix nearest to a matrix, about, by the Newton-Schulz iteration of Muon (Jordan et al. 2024).

With the singular values X = U S V', the result is U S' V' with all of S' between 0.7 and 1.2. The coefficients grow
small singular values fast, so that five steps suffice; they do not converge to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of X, (X X') X and (X X')² X; Jordan et al. 2024."""
STEPS = 5
TINY = 1e-7


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the iteration: bfloat16, and float64 for float64, so that layouts can be compared."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return the matrix with singular values near 1, in its dtype.

    >>> orthogonalized(torch.tensor([[0.0, 4.0], [1.0, 0.0]], dtype=torch.float64)).abs().gt(0.6).tolist()
    [[False, True], [True, False]]
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]  # the product below is as small as it can be
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=TINY)  # so that no singular value is above 1
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
