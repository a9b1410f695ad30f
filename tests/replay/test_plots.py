"""Pictures: every one is drawn, says what it must, and keeps its labels inside and apart."""

import json
from pathlib import Path

import pytest

from lumotree.errors import CorpusError
from lumotree.tree import tree_from_name
from replay.plots import PICTURES, draw_run, picture
from replay.plots.tree import layout
from replay.report.view import RunView
from tests.replay.synthetic import synthetic_rows, write_run

FIRST_VERSION = Path(__file__).parents[1] / "fixtures" / "run-v1"
pytestmark = pytest.mark.pictures


def map_row(kind, name, rows, **more):
    figures = {
        "kind": kind,
        "name": name,
        "rows": rows,
        "depth": rows - 1,
        "draft_ms": 1.0,
        "verify_ms": 9.0,
        "publish_ms": 0.5,
        "ms_per_step": 10.5,
        "tokens_per_step": 2.0,
        "break_even_tokens_per_step": 1.2,
        "tok_s": 190.0,
        "tok_s_free_publish": 200.0,
        "advantage_ms": 8.0,
        "publish_share_of_advantage": 0.06,
    }
    return figures | more


MAP = {
    "corpus": {"name": "made-up.jsonl"},
    "machine": {"cpu": "Made-up CPU"},
    "model": {"name": "embedded"},
    "prefix_tokens": 1234,
    "map": [
        map_row("root", "root", 1, tok_s=85.0),
        map_row("chain", "chain-1", 2),
        map_row("chain", "chain-3", 4, tok_s=150.0),
        map_row("pruned", "hydra27/5 best 8", 8),
        map_row("wide", "wide-4x1", 5, tok_s=None, tok_s_free_publish=None, advantage_ms=None),
    ],
    "conclusion": ["Publishing eats no tree's advantage whole."],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = write_run(tmp_path_factory.mktemp("plots") / "run", synthetic_rows())
    (path / "breakeven.json").write_text(json.dumps(MAP))
    return path


@pytest.mark.parametrize("name", PICTURES)
def test_each_picture_is_drawn_and_says_what_it_shows(run, name):
    module = picture(name)
    figure = module.draw(RunView.load(run))
    assert figure is not None and module.TITLE and len(module.TEXT) > 60
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    page = figure.bbox
    for axes in figure.axes:
        frame = axes.get_window_extent(renderer).expanded(1.01, 1.01)

        def shown(texts, inside=None):
            boxes = [t.get_window_extent(renderer) for t in texts if t.get_visible()]
            boxes = [box for box in boxes if box.width > 1]
            # Ticks beyond the limits of an axis have a label that is never drawn.
            return boxes if inside is None else [b for b in boxes if inside(b)]

        def across(box, frame=frame):
            return frame.x0 <= (box.x0 + box.x1) / 2 <= frame.x1

        def along(box, frame=frame):
            return frame.y0 <= (box.y0 + box.y1) / 2 <= frame.y1

        below = shown(axes.get_xticklabels(), across)
        beside = shown(axes.get_yticklabels(), along)
        for box in [*shown(axes.texts), *below, *beside]:
            assert box.x0 >= page.x0 - 1 and box.x1 <= page.x1 + 1, f"{name}: a label is cut"
        for boxes in (sorted(below, key=lambda b: b.x0), sorted(beside, key=lambda b: b.y0)):
            for one, two in zip(boxes, boxes[1:], strict=False):
                assert not one.overlaps(two), f"{name}: labels on an axis overlap"


def test_a_run_of_the_first_version_is_drawn_without_what_it_lacks(tmp_path):
    names = {path.stem for path in draw_run(FIRST_VERSION, tmp_path)}
    assert names == set(PICTURES) - {"tree", "breakeven"}, "its rows count no tree nodes"


def test_the_same_rows_give_the_same_bytes(run, tmp_path):
    one, two = draw_run(run, tmp_path / "a"), draw_run(run, tmp_path / "b")
    for left, right in zip(one, two, strict=True):
        assert left.read_bytes() == right.read_bytes(), left.name


def test_long_names_and_many_arms_fit(tmp_path):
    rows = []
    for index in range(9):
        for row in synthetic_rows(requests=3, runs=2, arms=("lumotree",), seed=index):
            name = f"lumotree:tree=-1,0,0,1,1,2,2,3,3,4,4,5,passes={index}"
            rows.append(row.model_copy(update={"arm": name if index else "ar"}))
    from tests.replay import synthetic

    arms = {row.arm: synthetic.ARMS["lumotree"] for row in rows}
    path = write_run(
        tmp_path / "run",
        rows,
        arms={a: {"status": "ok", "description": d} for a, d in arms.items()},
    )
    assert len(draw_run(path, tmp_path / "out")) >= 7


@pytest.mark.parametrize("name", ["hydra27", "chain-7", "root", "-1,0,0,0,1,1,2,2,2,6,6"])
def test_no_two_nodes_of_a_tree_share_a_place(name):
    tree = tree_from_name(name)
    places = layout(tree)
    assert len(set(places)) == len(tree)
    assert [x for x, _ in places] == list(tree.depth)


def test_a_break_even_file_is_drawn_alone(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps(MAP))
    assert draw_run(path) == [tmp_path / "map.png"] and (tmp_path / "map.png").stat().st_size
    path.write_text('{"map": []}')
    with pytest.raises(CorpusError, match="is no break-even map"):
        draw_run(path)
