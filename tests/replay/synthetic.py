"""Run folders made of invented rows: as many as a test wants, without a model."""

from __future__ import annotations

import json
import random

from lumotree.request import PHASES, SOURCES
from lumotree.tree import tree_from_name
from replay.rows import Row
from replay.summary import summarise

ARMS = {
    "ar": {"tree": "root", "passes": 0, "suffix": False},
    "mtp-5": {"tree": "chain-5", "passes": 5, "suffix": False},
    "lumotree": {"tree": "hydra27", "passes": 5, "suffix": True},
}
SECONDS_PER_STEP = {"ar": 0.020, "mtp-5": 0.040, "lumotree": 0.048}


def synthetic_rows(requests=8, runs=2, tokens=60, arms=tuple(ARMS), seed=0):
    """Rows of `requests` x `runs` x arms, with every field that a picture reads."""
    chance = random.Random(seed)
    rows = []
    outputs = [[chance.randrange(4000) for _ in range(tokens)] for _ in range(requests)]
    for run in range(1, runs + 1):
        for number, output in enumerate(outputs):
            for arm in arms:
                rows.append(_row(arm, run, number, list(output), chance))
    return rows


def _row(arm, run, number, output, chance):
    tree = tree_from_name(ARMS[arm]["tree"])
    steps, by_depth = 1, []
    while 1 + steps + sum(by_depth) < len(output):
        steps += 1
        by_depth = [round(steps * 0.8 ** (d + 1)) for d in range(max(tree.depth))]
    by_row = [0] * len(tree)
    for row, count in zip(tree.spine, [steps, *by_depth], strict=True):
        siblings = [s for s in tree.children[tree.parents[row]] if s != row] if row else []
        aside = count // 10 if siblings else 0
        by_row[row] = count - aside
        if aside:
            by_row[siblings[0]] = aside
    decode = steps * SECONDS_PER_STEP[arm] * chance.uniform(0.95, 1.05)
    shares = dict(zip(SOURCES, (0.7, 0.1, 0.15, 0.05), strict=True))
    accepted = sum(by_depth)
    sources = {"lumotree": SOURCES, "mtp-5": ("spine",)}.get(arm, ())
    return Row(
        arm=arm,
        run=run,
        request_id=f"conversation-{number // 8:03}-{number % 8:02}",
        prompt_tokens=1000 + number,
        completion_tokens=len(output),
        ttft_s=0.5,
        e2e_s=0.5 + decode,
        decode_s=decode,
        steps=steps,
        accepted_by_depth=by_depth,
        accepted_by_row=by_row,
        accepted_by_source=_split(accepted, {s: shares[s] for s in sources}),
        phases_ms={phase: 1000 * decode / len(PHASES) for phase in PHASES},
        finish_reason="length",
        output_sha256="0" * 64,
        token_ids=output,
    )


def _split(total, shares):
    """Whole parts of `total`; the first takes what rounding leaves."""
    parts = {name: int(total * share) for name, share in shares.items()}
    for name in list(parts)[:1]:
        parts[name] += total - sum(parts.values())
    return parts


def write_run(path, rows, summary=None, **run):
    """A run folder as a replay leaves it; `run` overrides parts of run.json."""
    path.mkdir(parents=True)
    arms = {
        arm: {"status": "ok", "description": {"kind": "in-process", **ARMS.get(arm, {})}}
        for arm in dict.fromkeys(row.arm for row in rows)
    }
    about = {
        "schema_version": 1,
        "options": {"runs": 2, "warmup": 0},
        "arms": arms,
        "corpus_path": "corpora/made-up.jsonl",
        "corpus": {"sha256": "a" * 64, "requests": 8},
        "model": {"name": "embedded", "weights_sha256": "b" * 64, "device": "cpu"},
        "machine": {"cpu": "Made-up CPU", "cores": 2},
        "versions": {"python": "3.11"},
        "started_at": "2026-01-01T00:00:00+00:00",
        "ended_at": "2026-01-01T00:10:00+00:00",
        **run,
    }
    (path / "run.json").write_text(json.dumps(about))
    with (path / "requests.jsonl").open("w") as file:
        file.writelines(row.model_dump_json() + "\n" for row in rows)
    if summary is None:
        summary = summarise(about["arms"], rows, None, about)
    (path / "summary.json").write_text(json.dumps(summary))
    return path
