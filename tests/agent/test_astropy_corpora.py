"""The Astropy corpora by their manifests: they are not committed, what they must be is."""

from __future__ import annotations

import json

import pytest

from replay.agent.scripted import task_scripts
from replay.agent.tasks import load_tasks
from replay.corpus import load_corpus, manifest_path
from replay.selection import largest_remainder
from scripts.record.astropy import FOLDER, PLANS, REQUESTS


def test_manifests_are_those_of_the_scripts() -> None:
    for plan in PLANS:
        manifest = json.loads(manifest_path(plan.path).read_text(encoding="utf-8"))
        scripts = task_scripts(load_tasks([FOLDER], plan.tasks))
        captured = [script.requests for script in scripts]
        assert manifest["count"] == REQUESTS and manifest["captured"] == sum(captured)
        kept = largest_remainder(captured, REQUESTS)
        assert manifest["conversations"] == {
            name: {"captured": all_of, "kept": some}
            for name, all_of, some in zip(plan.tasks, captured, kept, strict=True)
        }
    first, disjoint = (set(plan.tasks) for plan in PLANS)
    assert not first & disjoint


def test_where_they_have_been_recorded_they_are_as_frozen_and_disjoint() -> None:
    if not all(plan.path.exists() for plan in PLANS):
        pytest.skip("not recorded here: python -m scripts.record.astropy")
    first, disjoint = (
        {
            message["content"]
            for request in load_corpus(plan.path).requests
            for message in request.messages
            if message["role"] in ("user", "assistant")
        }
        for plan in PLANS
    )
    assert first and disjoint and not first & disjoint
