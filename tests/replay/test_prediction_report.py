"""The cost model in the report: no prediction without a known error, and what rows mean."""

from types import SimpleNamespace

import pytest

from replay.costmodel import Observation, fit
from replay.prediction import Reach, candidates
from replay.report.predictions import cost_table

MEASURED = [Reach("chain-2", 2, False, 9, (1.0, 0.5, 0.2), (1.0, 1.0, 1.0))]


def observed(*designs):
    return [Observation(f"{p}/{r}", p, r, 5 + 2 * p + 0.5 * r) for p, r in designs]


def table(*designs, **changes):
    cost = fit(observed(*designs))
    predicted = [candidate.as_dict() for candidate in candidates(MEASURED, cost)]
    saved = cost.as_dict() | {"rows": "nominal", "predicted": predicted} | changes
    return cost_table(SimpleNamespace(summary={"cost_model": saved}))


def test_an_exactly_determined_fit_predicts_nothing():
    assert candidates(MEASURED, fit(observed((0, 1), (5, 6), (5, 28)))) == []
    # Folders of earlier versions saved predictions all the same.
    found = table((0, 1), (5, 6), (5, 28), predicted=[{"tree": "oak"}])
    assert "Error unknown: as many trees as coefficients." in found.note
    assert "Rows are nominal" in found.note
    assert [cell.text for cell in found.rows[0]] == ["5.000", "2.000", "0.500", "3"]


def test_a_coefficient_of_one_tree_alone_has_no_error_either():
    found = table((0, 1), (0, 2), (0, 3), (5, 6))
    assert "Error unknown: a coefficient rests on one tree alone." in found.note


@pytest.mark.parametrize(("rows", "said"), [("nominal", True), ("measured", False)])
def test_predictions_say_their_error_and_what_rows_are(rows, said):
    found = table((0, 1), (5, 6), (5, 28), (3, 9), rows=rows)
    assert found.rows and "a tree left out of the fit is predicted to 0 %" in found.note
    assert ("Rows are nominal" in found.note) == said


def test_a_calibration_of_too_few_designs_is_a_sentence(monkeypatch):
    pytest.importorskip("torch")
    from lumotree.decoder import DecoderConfig
    from lumotree.errors import LumoTreeError
    from replay import calibration

    designs = [DecoderConfig("root", 0, False), DecoderConfig("chain-2", 2, False)]
    designs.append(DecoderConfig("hydra27", 5, False))
    steps = {
        config: [calibration.StepRecord(tuple(range(rows)), (0,), {"verify": 5.0 + rows})] * 3
        for config, rows in zip(designs, (1, 3, 28), strict=True)
    }
    monkeypatch.setattr(calibration, "record", lambda *given: list(steps.items()))
    with pytest.raises(LumoTreeError, match="too few designs to predict another tree"):
        calibration.calibrate(None, [])
