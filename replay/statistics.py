"""Paired statistics of two arms that served the same requests.

The estimate is the ratio of pooled rates over shared requests. Its interval is a two-level
bootstrap (conversations, then requests within each) of the studentised log ratio: requests of
one conversation share their fate, so a request is not an independent sample, and the plain
percentile interval of a dozen conversations is too narrow. Formulas: Efron and Tibshirani 1993,
section 12.5 (bootstrap-t); the standard error is the delta method on cluster sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from replay.rows import Row

RESAMPLES = 2000
SEED = 0
LEVEL = 0.95
# Below this a studentised bootstrap has no stable quantiles.
MIN_CLUSTERS = 4
# Elements of one resampling block: bounds memory on runs of many thousand rows.
BLOCK = 1 << 20
# log(rate) = log tokens - log seconds; the ratio subtracts the baseline's.
SIGNS = np.array([1.0, -1.0, -1.0, 1.0])


@dataclass(frozen=True)
class Pairs:
    """Sums per shared request, all its runs together: tokens, seconds, then the baseline's.

    tokens are `completion_tokens` - 1, seconds `decode_s`; `groups` numbers the conversations.
    """

    requests: tuple[str, ...]
    groups: np.ndarray
    sums: np.ndarray

    @property
    def ratio(self) -> float:
        """Pooled rate over pooled rate."""
        tokens, seconds, base_tokens, base_seconds = self.sums.sum(axis=1)
        return float((tokens / seconds) / (base_tokens / base_seconds))

    @property
    def log_ratios(self) -> np.ndarray:
        """Log ratio of each request's own rates; requests without decode time are left out."""
        usable = (self.sums > 0).all(axis=0)
        return _log_ratio(self.sums[:, usable])


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a ratio, and what was resampled to get it."""

    low: float
    high: float
    resampled: str
    clusters: int


def pair(
    ours: Sequence[Row],
    base: Sequence[Row],
    conversations: Mapping[str, str | None],
    *,
    same_run: bool = True,
) -> Pairs | None:
    """The requests that both completed; None when they share no decode time.

    `same_run` pairs (run, request), as interleaved arms of one run folder allow; without it a
    request of one folder meets the same request of another, whatever the run.
    """
    index: dict[str, int] = {}
    mine, theirs = _by_key(ours, same_run), _by_key(base, same_run)
    shared = [key for key in mine if key in theirs]
    sums = np.zeros((4, len({key[1] for key in shared})))
    for key in shared:
        column = index.setdefault(key[1], len(index))
        sums[:, column] += (*mine[key], *theirs[key])
    if not index or not (sums.sum(axis=1) > 0).all():
        return None
    names: dict[str, int] = {}
    groups = [
        # A request outside any conversation stands for itself.
        names.setdefault(
            f"c:{c}" if (c := conversations.get(r)) is not None else f"r:{r}", len(names)
        )
        for r in index
    ]
    return Pairs(tuple(index), np.array(groups), sums)


def interval(pairs: Pairs, *, resamples: int = RESAMPLES, seed: int = SEED) -> Interval | None:
    """The 95 % interval of the pooled ratio; None below MIN_CLUSTERS requests.

    Conversations are resampled, then requests within each. With fewer than MIN_CLUSTERS
    conversations requests are resampled as if they were independent, and `resampled` says so.
    """
    groups, what = pairs.groups, "conversations, then requests"
    if _count(groups) < MIN_CLUSTERS:
        groups, what = np.arange(len(pairs.requests)), "requests"
    clusters = _count(groups)
    if clusters < MIN_CLUSTERS:
        return None
    log_ratio = _log_ratio(pairs.sums.sum(axis=1))
    totals = np.stack([np.bincount(groups, weights=row) for row in pairs.sums])
    error = _standard_error(totals)
    studentised = [
        (_log_ratio(drawn.sum(axis=-1)) - log_ratio, _standard_error(drawn))
        for drawn in _resample(pairs.sums, groups, resamples, seed)
    ]
    shift, errors = (np.concatenate(part) for part in zip(*studentised, strict=True))
    # A draw without spread (every cluster the same) has no studentised value.
    usable = np.isfinite(shift) & (errors > 1e-12)
    low = high = 0.0
    if usable.any():
        tail = (1 - LEVEL) / 2
        low, high = np.quantile(shift[usable] / errors[usable], [tail, 1 - tail])
    # The estimate belongs to its interval, whatever the skew of the draws.
    return Interval(
        float(np.exp(log_ratio - max(high, 0.0) * error)),
        float(np.exp(log_ratio - min(low, 0.0) * error)),
        what,
        clusters,
    )


def aa_floor(rows: Sequence[Row]) -> float | None:
    """The largest relative difference of pooled rates between two runs of the same arm.

    exp(max |log(rate of run i / rate of run j)|) - 1 over the requests both completed; None
    with fewer than two runs. An effect below it is what this arm does against itself.
    """
    by_run: dict[int, list[Row]] = {}
    for row in rows:
        if row.completed:
            by_run.setdefault(row.run, []).append(row)
    found = [
        abs(np.log(pairs.ratio))
        for one, two in combinations(by_run.values(), 2)
        if (pairs := pair(one, two, {}, same_run=False)) is not None
    ]
    return float(np.expm1(max(found))) if found else None


def verdict(ratio: float, ci: Interval | None, floor: float | None) -> tuple[str, str]:
    """`faster`, `slower` or `not separated`, and why.

    Separated means both: the interval excludes 1 and the effect exceeds the A/A floor.
    """
    if ci is None:
        return "not separated", f"fewer than {MIN_CLUSTERS} requests: no interval"
    if floor is None:
        return "not separated", "one run of each arm: the noise floor is unknown"
    if ci.low <= 1 <= ci.high:
        return "not separated", "the interval includes 1"
    if abs(np.log(ratio)) <= np.log1p(floor):
        return "not separated", f"the effect is within the A/A floor of {100 * floor:.1f} %"
    return (
        "faster" if ratio > 1 else "slower"
    ), "interval excludes 1, effect exceeds the A/A floor"


def tally(pairs: Pairs, floor: float | None) -> tuple[int, int, int]:
    """Requests won, lost and tied. A tie differs by no more than the A/A floor (0 if unknown)."""
    threshold = np.log1p(floor or 0.0)
    logs = pairs.log_ratios
    won, lost = int((logs > threshold).sum()), int((logs < -threshold).sum())
    return won, lost, len(logs) - won - lost


def _by_key(rows: Sequence[Row], same_run: bool) -> dict[tuple[int, str], tuple[float, float]]:
    found: dict[tuple[int, str], tuple[float, float]] = {}
    for row in rows:
        if row.completed:
            key = (row.run if same_run else 0, row.request_id)
            tokens, seconds = found.get(key, (0.0, 0.0))
            found[key] = (tokens + row.completion_tokens - 1, seconds + row.decode_s)
    return found


def _count(groups: np.ndarray) -> int:
    return int(groups.max()) + 1


def _log_ratio(sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.tensordot(SIGNS, np.log(sums), axes=1)


def _standard_error(totals: np.ndarray) -> np.ndarray:
    """Of the log ratio, from cluster sums [4, ..., clusters], by linearisation."""
    clusters = totals.shape[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        influence = np.tensordot(SIGNS, totals / totals.sum(axis=-1, keepdims=True), axes=1)
    return np.sqrt(clusters / (clusters - 1) * (influence**2).sum(axis=-1))


def _resample(sums: np.ndarray, groups: np.ndarray, resamples: int, seed: int):
    """Blocks of cluster sums [4, block, clusters]: clusters drawn, then requests within each."""
    random = np.random.default_rng(seed)
    sizes = np.bincount(groups)
    starts = np.cumsum(sizes) - sizes
    ordered = np.concatenate([sums[:, np.argsort(groups, kind="stable")], np.zeros((4, 1))], axis=1)
    clusters, widest = len(sizes), int(sizes.max())
    block = max(1, BLOCK // (clusters * widest))
    for begin in range(0, resamples, block):
        count = min(block, resamples - begin)
        drawn = random.integers(clusters, size=(count, clusters))
        inner = random.random((count, clusters, widest)) * sizes[drawn][..., None]
        index = starts[drawn][..., None] + inner.astype(np.int64)
        # Clusters smaller than the widest are filled up with the column of zeros at the end.
        index[np.arange(widest) >= sizes[drawn][..., None]] = sums.shape[1]
        yield ordered[:, index].sum(axis=-1)
