import numpy as np
import pytest

from replay.costmodel import Observation, fit


def observed(designs, noise=0.0, seed=0):
    random = np.random.default_rng(seed)
    return [
        Observation(f"{p}/{r}", p, r, 5 + 2 * p + 0.5 * r + noise * random.normal())
        for p, r in designs
    ]


DESIGNS = [(0, 1), (1, 2), (3, 4), (5, 6), (5, 28), (0, 12), (3, 16)]


def test_exact_costs_are_found():
    model = fit(observed(DESIGNS))
    assert (model.fixed_ms, model.per_pass_ms, model.per_row_ms) == pytest.approx((5, 2, 0.5))
    assert model.rmse_ms == pytest.approx(0, abs=1e-9) and model.designs == 7
    assert model.predict(4, 10) == pytest.approx(18)


def test_leave_one_out_is_what_refitting_without_each_design_gives():
    data = observed(DESIGNS, noise=1.0)
    errors = [
        one.ms - fit([o for o in data if o is not one]).predict(one.passes, one.rows)
        for one in data
    ]
    model = fit(data)
    assert model.loo_rmse_ms == pytest.approx(np.sqrt(np.mean(np.square(errors))))
    relative = [error / one.ms for error, one in zip(errors, data, strict=True)]
    assert model.loo_relative == pytest.approx(np.sqrt(np.mean(np.square(relative))))
    assert model.loo_rmse_ms > model.rmse_ms


def test_too_few_designs_give_no_model_or_no_error():
    assert fit([]) is None and fit(observed(DESIGNS[:2])) is None
    # A chain's rows follow from its passes: the two costs cannot be told apart.
    assert fit(observed([(0, 1), (1, 2), (3, 4), (5, 6)])) is None
    assert fit(observed([(0, 1), (5, 6), (5, 28)])).loo_rmse_ms is None
