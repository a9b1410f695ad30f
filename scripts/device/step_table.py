"""results/h200/step/*.json -> results/h200/step.md: tables, and no figure that is not in a file.

python scripts/device/step_table.py
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "results/h200/step"
# SGLang 0.5.17 with FlashAttention 3, the same shape on another machine of this kind: ms a step
# with 2k and 16k prompts (random weights, so no acceptance).
SGLANG = {
    "autoregressive": (14.72, 14.97),
    "EAGLE chain of 5": (20.97, 21.29),
    "EAGLE chain of 7": (23.23, 23.57),
    "EAGLE tree of 28": (26.43, 26.83),
}
PHASES = ("draft", "verify", "select", "publish", "other")


def load(name: str):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def steps(name: str) -> list[str]:
    rows = load(name)
    lines = ["| prompt | arm | ms/step | x mtp-5 | tokens/step | " + " | ".join(PHASES)]
    lines[0] += " | idle share | first token (best), ms |"
    lines.append("|" + "---|" * (len(PHASES) + 7))
    for prompt in sorted({row["prompt"] for row in rows}):
        here = [row for row in rows if row["prompt"] == prompt]

        def mean(arm: str, key: str, here=here) -> float:
            return statistics.fmean(row[key] for row in here if row["arm"] == arm)

        for arm in dict.fromkeys(row["arm"] for row in here):
            ms, idle = mean(arm, "ms_per_step"), mean(arm, "other")
            booked = mean(arm, "verify") > 0
            # The first request of a decoder also compiles and captures.
            first = min(row["ttft_ms"] for row in here if row["arm"] == arm)
            cells = [prompt, arm, f"{ms:.2f}", f"{ms / mean('mtp-5', 'ms_per_step'):.3f}"]
            cells += [f"{mean(arm, 'tokens_per_step'):.2f}"]
            cells += [f"{mean(arm, phase):.3f}" if booked else "–" for phase in PHASES]
            cells += [f"{idle / ms:.1%}" if booked else "–", f"{first:.0f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def exactness() -> list[str]:
    lines = ["| prompt, sampling | steps | accepted rows equal | all active rows equal |"]
    lines[0] += " recurrent | conv | keys and values |"
    lines.append("|" + "---|" * 7)
    total = Counter()
    for name in ("exactness", "exactness-32k", "exactness-2", "exactness-3"):
        for case, counts in load(f"{name}.json")["cases"].items():
            total += Counter(counts)
            lines.append(_exact(case, counts))
    return [*lines, _exact("**all**", total)]


def _exact(name: str, c: dict) -> str:
    pairs = [("path rows equal", "path rows"), ("rows equal", "rows")]
    pairs += [(f"{s} equal", "steps") for s in ("recurrent", "conv", "keys and values")]
    cells = [name, c["steps"], *(f"{c[part]} / {c[whole]}" for part, whole in pairs)]
    return "| " + " | ".join(map(str, cells)) + " |"


def products() -> list[str]:
    linear = load("linear.json")
    lines = ["| rows | these kernels with norms, ms | torch.mm (cuBLAS), products only, ms |"]
    lines.append("|---|---|---|")
    for chain in linear["chains"]:
        if chain["variant"] == "tuned":
            rows = str(chain["rows"])
            theirs = linear["cublas"][rows]["with_head"][0]
            lines.append(f"| {rows} | {chain['with_head'][0]:.2f} | {theirs:.2f} |")
    best = max(linear["read"].values())
    return [*lines, "", f"Fastest read-only kernel of the same run: {best:.2f} TB/s."]


def products8() -> list[str]:
    lines = [
        "| product | N, K | bfloat16, ms | 8 bits, ms (best block) | TB/s |",
        "|---|---|---|---|---|",
    ]
    found = load("linear8.json")
    for name in dict.fromkeys(entry["shape"] for entry in found):
        wide, *narrow = [entry for entry in found if entry["shape"] == name]
        best = min((e for e in narrow if "ms" in e), key=lambda e: e["ms"])
        cells = [name, f"{wide['n']}, {wide['k']}", f"{wide['ms']:.3f}", f"{best['ms']:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{best['tb_s']:.2f}"]) + " |")
    return lines


def prefill() -> list[str]:
    found = [entry for entry in load("prefill.json") if "whole prefill" in entry["name"]]
    return [f"- {entry['name']}: {entry['ms']:.0f} ms" for entry in found if "ms" in entry]


def profile() -> list[str]:
    lines = ["| arm, stage | graph, us | kernels running, us | share idle |", "|---|---|---|---|"]
    for name in ("ar", "lumotree"):
        for stage, found in load(f"profile-{name}-16000.json").items():
            idle = 1 - found["busy_us"] / found["span_us"]
            row = [f"{name} {stage}", f"{found['span_us']:.0f}", f"{found['busy_us']:.0f}"]
            lines.append("| " + " | ".join([*row, f"{idle:.1%}"]) + " |")
    return lines


def rehearsals() -> list[str]:
    lines = [
        "| shape | weights, GB | lumotree, ms/step | tokens/step | tokens as the small model's |"
    ]
    lines.append("|---|---|---|---|---|")
    for shape, found in load("rehearsal-small.json").items():
        if not shape.startswith("rehearsal:"):
            continue
        decode, same = found["decode"], found["agreement"]
        cells = [shape, f"{found['make']['bytes'] / 1e9:.1f}", f"{min(decode['ms_per_step']):.2f}"]
        cells += [f"{decode['tokens_per_step']:.2f}"]
        cells += [f"{sum(same['common_prefix'])} / {sum(same['of'])}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def page() -> str:
    about = load("about.json")
    out = [
        "# Whole steps of rehearsal:27b on one H200",
        "",
        f"{about['device']}, {about['versions']}; {about['when']}; tree of commit "
        f"{about['commit']}. "
        "Acceptance of the embedded model, cost of the 27B shape. bfloat16, batch 1.",
        "",
        "## Milliseconds a step",
        "",
        f"`{about['commands']['steps']}`: one process, arms interleaved, two rounds, greedy and "
        "sampled, 64 tokens a request; means over all of them. `draft vocabulary` drafts among the "
        "first 4096 ids, which hold every token of the small model: what it saves is real, that it "
        "loses no acceptance is not.",
        "",
        *steps("steps.json"),
        "",
        f"The same on {about['other machine']}:",
        "",
        *steps("steps-2.json"),
        "",
        "SGLang 0.5.17 with FlashAttention 3, the same shape and kind of machine, another day "
        "(ms a step at 2k and 16k): "
        + "; ".join(f"{name} {a}, {b}" for name, (a, b) in SGLANG.items())
        + ".",
        "",
        about["tokens"],
        "",
        "## Equal bits",
        "",
        f"`{about['commands']['exactness']}`: each step of a lumotree decode done again row by row "
        "by autoregressive decoding over its own state, row mode `matched`. Accepted rows in every "
        "step, all active rows in every sixth to twelfth; states, histories and the whole prefix "
        "of keys and values after every step. Three runs, line by line as they were.",
        "",
        *exactness(),
        "",
        "## Where the time goes",
        "",
        *profile(),
        "",
        "## Matrix products and norms, 64 layers and lm_head in one graph",
        "",
        *products(),
        "",
        "## Products of the draft head with weights in 8 bits, one row",
        "",
        f"`{about['commands']['products8']}`: medians of graph replays, weights from memory.",
        "",
        *products8(),
        "",
        "## Prefill of 16,384 tokens",
        "",
        *prefill(),
        "",
        "These are of kernels over random weights; in the decoder the first token of a "
        "16,000-token prompt took the time in the first table, draft-head cache included.",
        "",
        "## Smaller shapes",
        "",
        f"`{about['commands']['rehearsals']}`, greedy, {about['rehearsals']}:",
        "",
        *rehearsals(),
        "",
        "## GPU tests",
        "",
        f"`{about['commands']['tests']}`: {about['tests']}",
        "",
        "## Reading",
        "",
        *[f"- {note}" for note in about["notes"]],
    ]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    (FOLDER.parent / "step.md").write_text(page(), encoding="utf-8")
