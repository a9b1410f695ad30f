"""What a step costs: fixed + per drafting pass + per verified row, by least squares.

ms = fixed_ms + per_pass_ms * passes + per_row_ms * rows, rows including the root. The error is
leave-one-out: each design (a tree with its passes) is predicted from all the others, which is
what a prediction for a tree that was never measured has to expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Observation:
    """Mean milliseconds of a step of one design; `passes` and `rows` are means per step too."""

    design: str
    passes: float
    rows: float
    ms: float


@dataclass(frozen=True)
class CostModel:
    """Fitted costs in milliseconds.

    rmse_ms is of the fit; loo_rmse_ms and loo_relative (of each design's own ms, root mean
    square) are leave-one-out, None when leaving one out leaves too few designs; then rmse_ms
    says nothing either and nothing may be predicted.
    """

    fixed_ms: float
    per_pass_ms: float
    per_row_ms: float
    rmse_ms: float
    loo_rmse_ms: float | None
    loo_relative: float | None
    designs: int

    def predict(self, passes: float, rows: float) -> float:
        """Milliseconds of a step."""
        return self.fixed_ms + self.per_pass_ms * passes + self.per_row_ms * rows

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fit(observations: Sequence[Observation]) -> CostModel | None:
    """The model of at least three designs that tell passes and rows apart; None otherwise."""
    x = np.array([[1.0, o.passes, o.rows] for o in observations]).reshape(-1, 3)
    y = np.array([o.ms for o in observations])
    if len(y) < 3 or np.linalg.matrix_rank(x) < 3:
        return None
    coefficients = np.linalg.lstsq(x, y, rcond=None)[0]
    residuals = y - x @ coefficients
    # Leave-one-out residuals without refitting: e / (1 - h), h the diagonal of the hat matrix.
    leverage = np.einsum("ij,ji->i", x, np.linalg.pinv(x))
    loo = None
    if len(y) > 3 and (leverage < 1 - 1e-9).all():
        loo = residuals / (1 - leverage)
    return CostModel(
        *map(float, coefficients),
        rmse_ms=_rms(residuals),
        loo_rmse_ms=None if loo is None else _rms(loo),
        loo_relative=None if loo is None else _rms(loo / y),
        designs=len(y),
    )


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))
