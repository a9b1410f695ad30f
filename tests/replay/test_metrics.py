"""The registry names every figure that is written, and the docs page is made from it."""

from pathlib import Path

from replay import metrics
from replay.compare import Loaded
from replay.guards.judge import CHECKS
from replay.rows import Row
from tests.replay.test_breakeven import ROW as MAP_ROW
from tests.replay.test_planted_defects import DEFECTS, looping, served, summary_of

ROOT = Path(__file__).parents[2]
FIXTURE = Path(__file__).parent / "fixtures" / "run-schema-1"


def test_the_page_is_current():
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics.page(), (
        "run: python scripts/metrics_page.py"
    )


def test_every_figure_of_a_summary_is_registered():
    summary = summary_of(served("ar", 1, 50, 0) + looping(served("server", 2)))
    arm = summary["arms"]["server"]
    assert arm.keys() == metrics.tags(metrics.ARM)
    (entry,) = summary["comparisons"]
    assert entry.keys() == metrics.tags(metrics.COMPARISON)
    cost = Loaded.read(FIXTURE).summary["cost_model"]
    assert cost.keys() == metrics.tags(metrics.COST)


def test_every_measured_field_of_a_row_and_of_the_map_is_registered():
    numeric = {
        name
        for name, field in Row.model_fields.items()
        if any(kind in str(field.annotation) for kind in ("int", "float"))
    } - {"run", "token_ids"}
    assert metrics.tags(metrics.ROW) == numeric
    assert metrics.tags(metrics.MAP) == MAP_ROW


def test_every_guard_is_registered():
    summary = summary_of(served("ar", 1, 50, 0) + served("server", 2))
    names = {check["name"] for arm in summary["arms"].values() for check in arm["guards"]["checks"]}
    assert names == metrics.tags(metrics.GUARDS) and len(names) == len(CHECKS) + 1
    assert {guard for _, guard, _ in DEFECTS.values()} <= names


def test_tags_are_unique_and_formulas_are_there():
    for _, _, section in metrics.SECTIONS:
        assert len(metrics.tags(section)) == len(section)
        assert all(metric.formula for metric in section)
