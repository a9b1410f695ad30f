"""Paired statistics of two arms that served the same requests.

The estimate is the ratio of pooled rates over shared requests. Requests of one conversation share
their fate, so a conversation is the sample. From BOOTSTRAP_CLUSTERS conversations on the interval
is a two-level bootstrap (conversations, then requests within each) of the studentised log ratio:
Efron and Tibshirani 1993, section 12.5. With fewer its quantiles explode (a draw of few different
conversations has hardly any spread to divide by), and Student's t with clusters - 1 degrees of
freedom takes their place. The standard error is the delta method on cluster sums.
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
# Below this many conversations there is no verdict.
MIN_CLUSTERS = 6
# Below this many the interval is Student's t, from it on the studentised bootstrap.
BOOTSTRAP_CLUSTERS = 12
# Below this many requests there is nothing to describe either.
MIN_REQUESTS = 4
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom.
T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
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
    """An interval of a ratio and how it came about.

    `clusters` counts conversations, a request outside any for itself. `resampled` is
    `conversations`, or `requests` where there are too few of those: then the interval takes
    requests for independent and describes the sample at most.
    """

    low: float
    high: float
    method: str
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
    """The 95 % interval of the pooled ratio; None below MIN_REQUESTS requests.

    Below MIN_CLUSTERS conversations it is over requests, and `resampled` says so.
    """
    if len(pairs.requests) < MIN_REQUESTS:
        return None
    groups, what, conversations = pairs.groups, "conversations", _count(pairs.groups)
    if conversations < MIN_CLUSTERS:
        groups, what = np.arange(len(pairs.requests)), "requests"
    log_ratio = _log_ratio(pairs.sums.sum(axis=1))
    error = _standard_error(np.stack([np.bincount(groups, weights=row) for row in pairs.sums]))
    if _count(groups) < BOOTSTRAP_CLUSTERS:
        low, high, method = -(t := T_975[_count(groups) - 2]), t, "t"
    else:
        low, high = _quantiles(pairs.sums, groups, resamples, seed)
        method = "bootstrap-t"
    # The estimate belongs to its interval, whatever the skew of the draws.
    return Interval(
        float(np.exp(log_ratio - max(high, 0.0) * error)),
        float(np.exp(log_ratio - min(low, 0.0) * error)),
        method,
        what,
        conversations,
    )


def _quantiles(
    sums: np.ndarray, groups: np.ndarray, resamples: int, seed: int
) -> tuple[float, float]:
    """The outer quantiles of the studentised log ratio over draws."""
    log_ratio = _log_ratio(sums.sum(axis=1))
    studentised = [
        (_log_ratio(drawn.sum(axis=-1)) - log_ratio, _standard_error(drawn))
        for drawn in _resample(sums, groups, resamples, seed)
    ]
    shift, errors = (np.concatenate(part) for part in zip(*studentised, strict=True))
    # A draw without spread (every cluster the same) has no studentised value.
    usable = np.isfinite(shift) & (errors > 1e-12)
    if not usable.any():
        return 0.0, 0.0
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(shift[usable] / errors[usable], [tail, 1 - tail])
    return float(low), float(high)


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


def verdict(
    ratio: float, ci: Interval | None, floor: float | None, drift: float | None = None
) -> tuple[str, str]:
    """`faster`, `slower` or `not separated`, and why.

    Separated means all of: MIN_CLUSTERS conversations, an interval that excludes 1 and an effect
    beyond the A/A floor. `drift`, relative like the floor, is what comes on top between runs
    that were not interleaved.
    """
    if ci is None:
        return "not separated", f"fewer than {MIN_REQUESTS} requests: no interval"
    if ci.clusters < MIN_CLUSTERS:
        return "not separated", (
            f"only {ci.clusters} conversation{'s' * (ci.clusters != 1)}, "
            f"a verdict needs {MIN_CLUSTERS}"
        )
    if floor is None:
        return "not separated", "one run of each arm: the noise floor is unknown"
    if ci.low <= 1 <= ci.high:
        return "not separated", "the interval includes 1"
    if abs(np.log(ratio)) <= np.log1p(floor) + np.log1p(drift or 0.0):
        text = f"the effect is within the A/A floor of {100 * floor:.1f} %"
        if drift is not None:
            text += f" and the drift of {100 * drift:.1f} % between the runs"
        return "not separated", text
    beyond = "A/A floor" if drift is None else "A/A floor and the drift between the runs"
    return "faster" if ratio > 1 else "slower", f"interval excludes 1, effect exceeds the {beyond}"


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
