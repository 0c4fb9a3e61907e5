"""The few statistics that the evaluations report."""

from __future__ import annotations

import numpy as np


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; ties share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank: np.ndarray = (counts.cumsum() - (counts - 1) / 2)[inverse]
    return mean_rank


def spearman(x: np.ndarray, y: np.ndarray) -> float | None:
    """Spearman's rank correlation of two samples (n,); None where one of them is constant."""
    rank_x, rank_y = ranks(x), ranks(y)
    if rank_x.std() == 0 or rank_y.std() == 0:
        return None
    return float(np.corrcoef(rank_x, rank_y)[0, 1])
