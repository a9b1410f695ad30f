"""Tests of commands write reports without pictures: drawing takes seconds and is tested alone."""

import pytest

from replay.report import page


@pytest.fixture(autouse=True)
def quick_reports(request, monkeypatch):
    if "pictures" not in request.keywords:
        monkeypatch.setattr(page, "draw_view", lambda view, out: {})
