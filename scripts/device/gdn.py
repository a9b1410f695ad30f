"""The GDN component on a device: checks and times launch variants, then the mechanism table.

  python scripts/device/gdn.py --out DIR            everything, at the 27B geometry
  python scripts/device/gdn.py --warm 3/8           compiles every eighth variant and exits

Writes DIR/gdn.json after every step, so that a run cut short keeps what it had. Needs torch and
triton only.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path as File

sys.path.insert(0, str(File(__file__).resolve().parents[2]))

import torch  # noqa: E402

from lumotree.bench import gdn as bench  # noqa: E402
from lumotree.bench.timing import Protocol, time_stages  # noqa: E402
from lumotree.captured.graph import capture  # noqa: E402
from lumotree.ops.gdn import GEOMETRIES, Path  # noqa: E402
from lumotree.verifiers import NAMES  # noqa: E402
from lumotree.verifiers.path_scan import PathScan  # noqa: E402
from lumotree.verifiers.weaver import Weaver  # noqa: E402

# Columns and warps of the fused solving kernel.
SOLVE_TILES = [(64, 4), (64, 8), (32, 4)]
SHORT = Protocol(warmup=10, timed=40)
# Rows of thousands of small kernels: their eager time is host time, a few iterations tell it.
SLOW = {"torch-node": Protocol(warmup=1, timed=8), "specla": Protocol(warmup=2, timed=20)}


def variants():
    """Launch variants, those that start early last: the rest is measured without them."""
    from lumotree.ops.gdn_triton import Launch

    plain = [Launch(block, name) for name in ("split", "fine") for block in (16, 32, 8)]
    plain += [Launch(block, name) for name in ("twigs", "paths", "cut") for block in (16, 32)]
    plain += [Launch(16, "split", fusion=False), Launch(16, "fine", warps=2)]
    early = [Launch(block, name, early=True) for name in ("split", "fine") for block in (16, 32)]
    return plain, early


def warm(part: int, parts: int, case: bench.Case) -> None:
    plain, early = variants()
    for launch in [*plain, *early][part::parts]:
        verifier, states = case.make("path-scan", launch), case.states.clone()
        verifier.verify(0, states, case.operands[0])
        verifier.publish(states, case.paths[0])
        bench.native_rows(case.tree, case.geometry, states[0], case.operands[0], launch)
    for block, warps in SOLVE_TILES[part::parts]:
        Weaver.block, Weaver.warps = block, warps
        for name in ("weaver", "tree-wy", "native-path"):
            verifier = case.make(name)
            states = case.states.clone()
            verifier.verify(0, states, case.operands[0])
            verifier.publish(states, case.paths[0])
            verifier.flush(states)
    torch.cuda.synchronize()


def tune(case: bench.Case, launches, found: list[dict], keep) -> list[dict]:
    """Every variant: gate against the native chain of the same tile, then graph timings."""
    native = None
    for launch in launches:
        entry = {"launch": asdict(launch)}
        try:
            bits = (launch.block, launch.warps, launch.fusion)
            if bits != native:
                case.renew_native(launch)
                native = bits
            verifier = case.make("path-scan", launch)
            gate = bench.check(case, verifier)
            entry["gate"] = {**asdict(gate), "green": gate.green}
            entry["buffers_mib"] = round(verifier.buffers_mib, 3)
            if gate.green:
                graph, _ = bench.time_row(case, verifier, SHORT, None)
                entry["graph_ms"] = {k: v.as_dict() for k, v in graph.items()}
        except Exception as error:  # a variant that fails is a result
            entry["error"] = f"{type(error).__name__}: {error}"[:300]
        found.append(entry)
        keep(found)
        times = {k: round(v["median"], 4) for k, v in entry.get("graph_ms", {}).items()}
        print(entry["launch"], times, entry.get("gate", {}).get("reasons"), entry.get("error"))
    return found


def smaller_trees(case: bench.Case, launch) -> dict[str, dict]:
    """Verification of smaller trees: what a launch and the state's load cost, and a row more."""
    found = {}
    for name in ("root", "chain-3", "chain-5", "chain-11"):
        tree = bench.active_tree(name)
        verifier = PathScan(tree, case.geometry, case.device, launch=launch)
        part = [o.map(lambda x, n=len(tree): x[:n].contiguous()) for o in case.operands]
        operands = [verifier.place(i, o) for i, o in enumerate(part)]
        states = case.states.clone()
        path = Path.of(tree, tree.root_paths[-1], case.device)
        graphs = {
            "verify": capture(
                lambda v=verifier, s=states, all_=operands: [
                    v.verify(i, s, o) for i, o in enumerate(all_)
                ]
            ),
            "publish": capture(lambda v=verifier, s=states, p=path: v.publish(s, p)),
        }
        stages = {k: g.replay for k, g in graphs.items()}
        times = time_stages(stages, lambda i: None, case.device, SHORT)
        found[name] = {k: v.as_dict() for k, v in times.items()}
        print(name, {k: round(v.median, 4) for k, v in times.items()})
    return found


def copy_rate(device: torch.device) -> float:
    """TB/s of a large device copy, read plus written."""
    a = torch.empty(2**30, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    times = time_stages({"copy": lambda: b.copy_(a)}, lambda i: None, device, Protocol(3, 10))
    return 2 * a.numel() / times["copy"].median / 1e9


def commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
        return done.stdout.strip() or None
    except OSError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="results/h200")
    parser.add_argument("--geometry", default="27b")
    parser.add_argument("--tree", default="hydra27")
    parser.add_argument("--warm")
    parser.add_argument("--commit", help="commit to record where git is not at hand")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds for the whole run")
    options = parser.parse_args()
    began = time.time()
    device = torch.device("cuda")
    geometry, tree = GEOMETRIES[options.geometry], bench.active_tree(options.tree)
    if options.warm:
        part, parts = map(int, options.warm.split("/"))
        small = bench.Case(geometry, tree, device, audited=0)
        warm(part, parts, small)
        print(f"warm {options.warm}: {time.time() - began:.0f} s")
        return
    import triton

    case = bench.Case(geometry, tree, device)
    result = {
        **bench.describe(case),
        "command": "python scripts/device/gdn.py",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "commit": options.commit or commit(),
    }
    print(f"inputs and answers: {time.time() - began:.0f} s")
    out = File(options.out)
    out.mkdir(parents=True, exist_ok=True)

    def keep(**more) -> None:
        result.update(more)
        (out / "gdn.json").write_text(json.dumps(result, indent=1))

    keep(copy_tb_s=round(copy_rate(device), 2))
    from lumotree.ops.gdn_triton import Launch

    plain, early = variants()
    tuned: list[dict] = []

    def fastest() -> tuple[float, Launch]:
        green = [v for v in tuned if "graph_ms" in v]
        if not green:
            raise SystemExit("no variant is green")
        best = min(green, key=lambda v: v["graph_ms"]["total"]["median"])
        return best["graph_ms"]["total"]["median"], Launch(**best["launch"])

    tune(case, plain, tuned, lambda found: keep(variants=found))
    _, best = fastest()
    case.renew_native(best)
    keep(launch=asdict(best))
    print(f"best {best}: {time.time() - began:.0f} s")
    rows: list[dict] = []

    def table(names: list[str], note: str | None = None) -> None:
        for name in names:
            if time.time() - began > options.deadline:
                print(f"{name}: no time left")
                continue
            try:
                row = bench.run_row(case, name, Protocol(), SLOW.get(name, Protocol())).as_dict()
            except Exception as error:
                traceback.print_exc()
                row = {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}
            torch.cuda.empty_cache()
            rows.append({**row, "launch": asdict(case.launch), "note": note})
            keep(rows=rows)
            graph = {k: round(v["median"], 4) for k, v in (row.get("graph_ms") or {}).items()}
            eager = {k: round(v["median"], 3) for k, v in (row.get("eager_ms") or {}).items()}
            gate = row.get("gate", {})
            print(name, graph, eager, row.get("buffers_mib"), gate, f"{time.time() - began:.0f} s")

    solving = {}
    for tile in SOLVE_TILES:
        Weaver.block, Weaver.warps = tile
        try:
            graph, _ = bench.time_row(case, case.make("weaver"), SHORT, None)
            solving[tile] = graph["total"].median
        except Exception as error:
            print(f"weaver {tile}: {error}"[:200])
    Weaver.block, Weaver.warps = min(solving, key=solving.get)
    keep(solve_tiles={f"{b}x{w}": ms for (b, w), ms in solving.items()})
    print("weaver total by tile", {k: round(v, 4) for k, v in solving.items()})
    table([name for name in NAMES if name not in SLOW])
    try:
        keep(smaller_trees=smaller_trees(case, best))
    except Exception:
        traceback.print_exc()
    tune(case, early, tuned, lambda found: keep(variants=found))
    _, best = fastest()
    case.renew_native(best)
    if best.early:
        table(["path-scan"], "early start")
        table(["weaver"], "again, after the early-start row")
    table([name for name in NAMES if name in SLOW])


if __name__ == "__main__":
    main()
