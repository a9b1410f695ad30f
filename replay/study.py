"""A break-even study as a library call: load, calibrate, measure, one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arms import inprocess
from lumotree.errors import CorpusError
from replay.breakeven import SCHEMA_VERSION, CostBench, measure_map
from replay.calibration import calibrate
from replay.corpus import load_corpus
from replay.items import make_items
from replay.job import ReplayOptions
from replay.machine import describe_machine, describe_versions


def break_even_study(
    corpus: Path,
    *,
    model: str = "embedded",
    dtype: str = "auto",
    device: str = "auto",
    rows: str = "natural",
    threads: int | None = None,
    requests: int = 4,
    tokens: int = 64,
    repeats: int = 15,
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The document that replay.breakeven describes. Raises LumoTreeError for wrong use."""
    read = load_corpus(corpus)
    options = ReplayOptions(
        corpus=str(corpus),
        arms=("ar",),
        model=model,
        dtype=dtype,
        device=device,
        rows=rows,
        threads=threads,
        cap=tokens,
        seed=seed,
    )
    note(f"loading model {model}")
    engine = inprocess.load_engine(model, dtype=dtype, device=device, rows=rows, threads=threads)
    items = make_items(read, options, engine)
    calibration = calibrate(engine, items, requests=requests, tokens=tokens, note=note)
    # The middle prompt stands for the corpus: cost grows with the prefix.
    by_length = sorted(items, key=lambda item: len(item.request.prompt_ids))
    bench = CostBench(engine, by_length[len(by_length) // 2], seed)
    found = measure_map(bench, calibration, repeats=repeats, note=note)
    recorded = calibration.as_dict()
    return {
        "schema_version": SCHEMA_VERSION,
        "corpus": {"name": corpus.name, "sha256": read.sha256},
        "requests": min(requests, len(items)),
        "prefix_tokens": bench.prefix_tokens,
        "repeats": repeats,
        "machine": describe_machine(),
        "model": engine.description(),
        "versions": describe_versions(),
        **found,
        "recorded_cost_model": recorded.pop("cost_model"),
        **recorded,
    }


def write_study(path: Path, found: dict[str, Any]) -> None:
    """Raises CorpusError when `path` cannot be written."""
    try:
        path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise CorpusError(f"{path} cannot be written: {error.strerror}") from None
