"""results/h200/gdn.json -> results/h200/gdn.md: the tables, and nothing that is not in the file.

python scripts/device/gdn_table.py results/h200/gdn.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lumotree.bench.table import markdown  # noqa: E402


def variants(found: list[dict]) -> list[str]:
    lines = ["| tile | warps | schedule | fused products | early start | other | verify | publish "]
    lines[0] += "| total | outputs and states equal |"
    lines.append("|" + "---|" * 10)
    for entry in found:
        launch, gate = entry["launch"], entry.get("gate")
        if "graph_ms" not in entry:
            times = [entry.get("error") or "; ".join(gate["reasons"]), "", ""]
        else:
            graph = entry["graph_ms"]
            times = [f"{graph[s]['median']:.3f}" for s in ("verify", "publish", "total")]
        yes = {True: "yes", False: "no"}
        other = "operands touched ahead" if launch.get("touch") else ""
        head = [launch["block"], launch["warps"], launch["schedule"], yes[launch["fusion"]]]
        equal = "yes" if gate and gate["green"] else "no"
        cells = [*head, yes[launch["early"]], other, *times, equal]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def page(result: dict) -> str:
    g, versions = result["geometry"], result["versions"]
    rows, layers = result["active_rows"], result["audited_layers"]
    out = [
        "# GDN component on one device",
        "",
        f"{result['device']}; {', '.join(f'{k} {v}' for k, v in versions.items())}; commit "
        f"{result['commit']}; `{result['command']}`. Device copy {result['copy_tb_s']} TB/s, read "
        "plus written.",
        "",
        f"{g['layers']} layers, {g['heads']} value heads, {g['key_heads']} key heads, "
        f"{g['dk']} x {g['dv']} states; {rows} active rows of {result['tree']}. Graph "
        "medians in milliseconds, one captured graph a stage with a launch a layer, 256 MiB "
        "written before each iteration, paths cycling over every row. Errors are the largest "
        f"against float64; a cell is one of {layers} layers x {rows} "
        "rows, equal when every bit is that of the native chain.",
        "",
        markdown(result["rows"]),
        "",
        "Numerical policies:",
        "",
    ]
    policies = {r["title"]: r["policy"] for r in result["rows"] if "policy" in r}
    out += [f"- {title}: {policy}" for title, policy in policies.items()]
    out += ["", "## Launch variants of the scan (40 timed iterations)", ""]
    out += variants(result["variants"])
    for earlier in result.get("earlier_runs", []):
        out += ["", f"Earlier run, commit {earlier['commit']}:", "", *variants(earlier["variants"])]
    out += ["", "## Smaller trees (the launch of the table, 40 timed iterations)", ""]
    out += ["| tree | verify | publish |", "|---|---|---|"]
    for name, times in result.get("smaller_trees", {}).items():
        out.append(
            f"| {name} | {times['verify']['median']:.3f} | {times['publish']['median']:.3f} |"
        )
    notes = result.get("notes", [])
    if notes:
        out += ["", "## Reading", "", *[f"- {note}" for note in notes]]
    return "\n".join(out) + "\n"


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "results/h200/gdn.json")
    path.with_suffix(".md").write_text(page(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
