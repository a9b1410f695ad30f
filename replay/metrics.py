"""Every figure that is written or printed: tag, unit, formula, direction. docs/metrics.md is made
from this, and a test holds the keys of every file against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["higher", "lower", "neither"]
MARK = {"higher": "higher is better", "lower": "lower is better", "neither": "-"}


@dataclass(frozen=True)
class Metric:
    """One figure. `unit` is empty for counts and names; formulas use the tags of other figures."""

    tag: str
    unit: str
    formula: str
    direction: Direction = "neither"


ROW = (
    Metric("prompt_tokens", "tokens", "prompt length as the arm counted it"),
    Metric("completion_tokens", "tokens", "emitted tokens, the end-of-text token included"),
    Metric("prefix_reused_tokens", "tokens", "prompt tokens taken from an earlier turn's state"),
    Metric("ttft_s", "s", "request sent to first token", "lower"),
    Metric("e2e_s", "s", "request sent to last token", "lower"),
    Metric("decode_s", "s", "e2e_s - ttft_s", "lower"),
    Metric("steps", "", "verification steps after the first token; null where not counted"),
    Metric("accepted_by_depth", "", "[d]: steps whose accepted path reached depth d + 1"),
    Metric("accepted_by_row", "", "[i]: steps whose accepted path held row i of the tree"),
    Metric("accepted_by_source", "", "accepted drafts by spine, runner-up, suffix, rescue"),
    Metric("phases_ms", "ms", "wall-clock time in draft, verify, select, publish, other", "lower"),
)
ARM = (
    Metric("requests", "", "completed rows, warm-ups and failures left out"),
    Metric("failed_requests", "", "rows with an error; in no rate", "lower"),
    Metric("completion_tokens", "tokens", "sum over completed rows"),
    Metric(
        "pooled_tok_s",
        "tok/s",
        "sum(completion_tokens - 1) / sum(decode_s) over completed rows; the headline. The first "
        "token belongs to the prefill, so neither it nor its time counts. null when withheld",
        "higher",
    ),
    Metric("run_range_tok_s", "tok/s", "lowest and highest pooled_tok_s of one run", "higher"),
    Metric(
        "mean_request_tok_s",
        "tok/s",
        "mean of (completion_tokens - 1) / decode_s over rows: every request equal",
        "higher",
    ),
    Metric("tokens_per_step", "tok/step", "sum(completion_tokens - 1) / sum(steps)", "higher"),
    Metric("ms_per_step", "ms", "1000 * sum(decode_s) / sum(steps)", "lower"),
    Metric(
        "survival_by_depth",
        "share",
        "[d]: sum(accepted_by_depth[d]) / sum(steps): steps that got to depth d + 1",
        "higher",
    ),
    Metric("phases_ms", "ms", "sum over completed rows, by phase", "lower"),
    Metric("phases_ms_per_step", "ms", "phases_ms / sum(steps)", "lower"),
    Metric("phase_shares", "share", "phases_ms / sum of phases_ms"),
    Metric("accepted_by_source", "", "accepted drafts by drafter, sum over completed rows"),
    Metric("accepted_per_step", "tok/step", "accepted_by_source / sum(steps)", "higher"),
    Metric("reach_by_row", "share", "sum(accepted_by_row[i]) / sum(steps)", "higher"),
    Metric(
        "break_even_tokens_per_step",
        "tok/step",
        "baseline pooled_tok_s * ms_per_step / 1000: tokens per step at which the arm's rate "
        "equals the baseline's on this machine. tokens_per_step below it is a loss",
        "lower",
    ),
    Metric(
        "break_even_accepted",
        "tok/step",
        "break_even_tokens_per_step - 1, at least 0: accepted drafts per step at break-even",
        "lower",
    ),
    Metric(
        "aa_floor",
        "relative",
        "exp(max |log(rate of run i / rate of run j)|) - 1 over pairs of runs of the same arm, on "
        "the requests both completed; null with one run",
        "lower",
    ),
    Metric(
        "status",
        "",
        "ok; partial: fewer completed rows than runs × selected requests, a failed row, or not "
        "reached at the last start; failed; unavailable; withheld. Only ok is ranked",
    ),
    Metric("reason", "", "why the status is not ok"),
    Metric("guards", "", "token_ids_equal and mismatches; checks; failed: see Guards"),
    Metric("withheld", "", "what a failing guard took from the headline, as measured"),
)
COMPARISON = (
    Metric("arm", "", "the arm"),
    Metric("baseline", "", "what it is held against: ar where it was measured"),
    Metric(
        "ratio",
        "ratio",
        "pooled_tok_s / baseline_pooled_tok_s, both of this comparison; within a run folder run i "
        "is paired with run i",
        "higher",
    ),
    Metric(
        "ci_low",
        "ratio",
        "lower end of the 95 % interval of ratio, all runs of a request together; null below 4 "
        "requests. See method",
    ),
    Metric("ci_high", "ratio", "upper end of the same"),
    Metric(
        "request_ratio",
        "ratio",
        "exp(mean of the requests' own log ratios): every request equal",
        "higher",
    ),
    Metric("pooled_tok_s", "tok/s", "of the arm over the rows both completed", "higher"),
    Metric("mean_request_tok_s", "tok/s", "of the arm over the rows both completed", "higher"),
    Metric("baseline_pooled_tok_s", "tok/s", "of the baseline over the same rows"),
    Metric("baseline_mean_request_tok_s", "tok/s", "of the baseline over the same rows"),
    Metric("wins", "", "requests whose own ratio exceeds (1 + aa_floor) * (1 + drift)", "higher"),
    Metric("losses", "", "requests whose own ratio is below the reciprocal of that", "lower"),
    Metric("ties", "", "the other requests"),
    Metric("aa_floor", "relative", "the larger aa_floor of the two arms", "lower"),
    Metric(
        "drift",
        "relative",
        "between two folders: exp(|log ratio|) - 1 of the first folder's baseline, or where that "
        "is compared the widest of another arm with the same spec in both; null within a folder "
        "and without such an arm",
        "lower",
    ),
    Metric(
        "verdict",
        "",
        "faster or slower: 6 conversations, the interval excludes 1 and |log ratio| > "
        "log(1 + aa_floor) + log(1 + drift); otherwise, and between folders without drift, not "
        "separated; withheld when a guard fails on either side",
    ),
    Metric("reason", "", "why that verdict"),
    Metric("requests", "", "shared requests"),
    Metric(
        "method",
        "",
        "t: log ratio ± t(n - 1, 0.975) * standard error (linearised, from sums per conversation), "
        "below n = 12; bootstrap-t: studentised bootstrap of the log ratio (2,000 draws, seed 0), "
        "conversations resampled, then requests within each, from 12 on. Simulated coverage: 93 to "
        "97 %; 92.5 % where six conversations differ much in size",
    ),
    Metric(
        "resampled",
        "",
        "what n counts: conversations; requests below 6 conversations, which takes them for "
        "independent: such an interval only describes the sample",
    ),
    Metric("clusters", "", "conversations of the shared requests; one outside any counts itself"),
    Metric("withheld", "", "the figures as measured, when the verdict is withheld"),
)
COST = (
    Metric("fixed_ms", "ms", "cost of a step without passes and rows, by least squares", "lower"),
    Metric("per_pass_ms", "ms", "cost of one drafting pass", "lower"),
    Metric("per_row_ms", "ms", "cost of one verified row, root included", "lower"),
    Metric("rmse_ms", "ms", "root mean square residual of the fit", "lower"),
    Metric(
        "loo_rmse_ms",
        "ms",
        "root mean square error of each design predicted from all others; null with three",
        "lower",
    ),
    Metric("loo_relative", "share", "the same, each error over the design's own ms", "lower"),
    Metric("designs", "", "trees the model is fitted to"),
    Metric("rows", "", "in a summary `nominal`: every row the drafters may fill counts"),
    Metric(
        "predicted",
        "",
        "best parts of the measured trees: tokens_per_step = 1 + sum of reach over their rows, "
        "ms_per_step from the cost model; none while loo_relative is null",
    ),
)
MAP = (
    Metric("kind", "", "root, chain, pruned or wide"),
    Metric("name", "", "how tables call the tree"),
    Metric("tree", "", "preset or parent list"),
    Metric("passes", "", "drafting passes"),
    Metric("suffix", "", "whether any row wants suffix drafts"),
    Metric("rows", "", "verified rows, root included, all forced active"),
    Metric("mean_rows", "", "rows that real drafts fill per step"),
    Metric("depth", "", "deepest row"),
    Metric("draft_ms", "ms", "drafting after a publication of the longest path", "lower"),
    Metric("verify_ms", "ms", "one target forward over all rows", "lower"),
    Metric("select_ms", "ms", "sampling of all rows and the walk", "lower"),
    Metric("publish_root_ms", "ms", "publication (replay) of the root alone", "lower"),
    Metric("publish_deep_ms", "ms", "publication (replay) of the longest path", "lower"),
    Metric(
        "publish_ms",
        "ms",
        "between the two at (tokens_per_step - 1) / depth; the root's where that is unknown",
        "lower",
    ),
    Metric("ms_per_step", "ms", "draft_ms + verify_ms + select_ms + publish_ms", "lower"),
    Metric("tokens_per_step", "tok/step", "1 + sum of recorded reach over the rows", "higher"),
    Metric("tok_s", "tok/s", "1000 * tokens_per_step / ms_per_step", "higher"),
    Metric("tok_s_free_publish", "tok/s", "the same without publish_ms", "higher"),
    Metric(
        "advantage_ms",
        "ms",
        "tokens_per_step * root_ms_per_token - draft_ms - verify_ms - select_ms",
        "higher",
    ),
    Metric(
        "publish_share_of_advantage", "share", "publish_ms / advantage_ms; from 1 on eaten", "lower"
    ),
    Metric("publish_share_of_step", "share", "publish_ms / ms_per_step", "lower"),
    Metric("break_even_tokens_per_step", "tok/step", "ms_per_step / root_ms_per_token", "lower"),
    Metric("over_best_chain", "ratio", "tok_s / highest tok_s of a chain", "higher"),
    Metric("over_best_chain_free_publish", "ratio", "the same of tok_s_free_publish", "higher"),
    Metric("round_spread", "ratio", "slowest round over fastest, the machine's mood divided out"),
)
GUARDS = (
    Metric("token_ids", "", "in-process arms of one seed emit the same ids; margin at the first "
           "divergence. Where bits are not equal here, near-ties (0.25) and unmeasured margins "
           "only warn"),
    Metric("prompt_tokens", "", "prompt tokens as counted by the arm = as sent"),
    Metric("first_tokens", "", "greedy arms: at least half of the outputs begin alike"),
    Metric("counts", "", "completion_tokens agree with token ids, cap, finish reason and "
           "steps + accepted drafts; several tokens take time"),
    Metric("lifetime_counters", "", "no count rises strictly over six or more requests to twice "
           "its start"),
    Metric("counter_resets", "", "server counters read around requests only move by the request"),
    Metric("first_burst", "", "warns when over 2 % of tokens came with the first event, untimed"),
    Metric("empty_outputs", "", "not empty more often than the baseline (sign test 0.05 and a "
           "tenth of the requests; or all and none, from 4 requests on)"),
    Metric("length_stops", "", "not at the cap more or less often than the baseline (same rule, "
           "at 0.01)"),
    Metric("length_shift", "", "permutation test of log lengths, labels swapped within requests: "
           "p <= 0.01 and a shift over 0.1; or every output off by a quarter"),
    Metric("repetition", "", "not looping more often than the baseline (same rule): half of the "
           "output one period of up to 64 tokens, or under a fifth of its 4-grams distinct"),
)  # fmt: skip

LOAD = (
    Metric("requests", "", "completed requests"),
    Metric("failed_requests", "", "rows with an error", "lower"),
    Metric("wall_s", "s", "first request sent to last token, summed over runs", "lower"),
    Metric("requests_per_s", "1/s", "requests / wall_s", "higher"),
    Metric("output_tok_s", "tok/s", "sum(completion_tokens) / wall_s, all requests together",
           "higher"),
    Metric("goodput_per_s", "1/s", "completed requests within every limit of --goodput / wall_s; "
           "null without limits", "higher"),
    Metric("good_share", "share", "completed requests within every limit / all requests",
           "higher"),
    Metric("ttft_s", "s", "p50, p95, p99 (nearest rank) of ttft_s, waiting included", "lower"),
    Metric("e2e_s", "s", "p50, p95, p99 of e2e_s", "lower"),
    Metric("burst_s", "s", "p50, p95, p99 of the time between the moments at which tokens came; "
           "several may come at once", "lower"),
    Metric("late_s", "s", "p50, p95, p99 of sent - due with --arrivals recorded: this client's own "
           "delay; null in a closed loop", "lower"),
)  # fmt: skip

BATCH_ROW = (
    Metric("active", "", "requests decoded side by side"),
    Metric("arm", "", "the arm"),
    Metric("run", "", "from 1; the warm-up is in no row"),
    Metric("together", "", "requests of one forward: below active where products of more rows have "
           "other bits on this machine"),
    Metric("tok_s", "tok/s", "tokens / seconds: all active requests together", "higher"),
    Metric("tokens", "tokens", "emitted in full rounds, from the first round with all requests of "
           "a group active to the end of the first request; summed over groups"),
    Metric("seconds", "s", "wall-clock time of those rounds, the device idle at both ends"),
    Metric("rounds", "", "full rounds, summed over groups"),
    Metric("ms_per_round", "ms", "1000 * seconds / rounds", "lower"),
    Metric("tokens_per_step", "tok/step", "tokens / (rounds * active)", "higher"),
    Metric("ttft_s", "s", "median over requests of the time from opening a prompt to its first "
           "token; prompts are prefilled one after another", "lower"),
    Metric("phases_ms_per_round", "ms", "what a request's own clock booked, mean over requests, a "
           "group's first round left out; other is the rest of ms_per_round, so other requests' "
           "turns too. null without a second round", "lower"),
    Metric("windows", "", "rounds, tokens and seconds of each group"),
)  # fmt: skip
BATCH_RATIO = (
    Metric("active", "", "requests decoded side by side"),
    Metric("arm", "", "the tree"),
    Metric("baseline", "", "what it is held against"),
    Metric("ratio", "ratio", "median over runs of tok_s of run i / baseline's tok_s of run i",
           "higher"),
    Metric("run_range", "ratio", "lowest and highest of those"),
    Metric("aa_floor", "relative", "the larger of both arms' highest tok_s / lowest - 1 over runs; "
           "null with one run", "lower"),
    Metric("verdict", "", "ahead: every run's ratio exceeds 1 and ratio exceeds 1 + aa_floor; "
           "behind: the reverse; otherwise, and with one run, not separated"),
)  # fmt: skip

SECTIONS = (
    ("Row of requests.jsonl", "One request through one arm in one run.", ROW),
    ("Arm in summary.json", "`arms.<name>`; computed from rows alone.", ARM),
    (
        "Comparison in summary.json",
        "`comparisons[]`, `runner_up` (the fastest arm with status ok against "
        "the second) and of `lumotree compare`.",
        COMPARISON,
    ),
    ("Cost model", "`cost_model` of a summary and of `lumotree breakeven`.", COST),
    (
        "Load",
        "`load.arms.<name>` of a summary with --concurrency or --arrivals. Its rows say in "
        "`details.load` when they were sent (`sent_s`, from the start of the arm's run), how late, "
        "and `burst_s`.",
        LOAD,
    ),
    (
        "Batch scaling",
        "`rows[]` of `lumotree bench batch`. `cells[]` are medians of them over the runs of a size "
        "and an arm, with `run_range_tok_s`.",
        BATCH_ROW,
    ),
    (
        "Ratios of batch scaling",
        "`ratios[]` of the same. `conclusion` names the sizes between which the verdict turns.",
        BATCH_RATIO,
    ),
    ("Break-even map", "`map[]` of `lumotree breakeven`.", MAP),
)
HEAD = """# Metrics

Made by `python scripts/metrics_page.py` from `replay/metrics.py`; a test fails when it is not
current. Units stand in the tag where there is one. Failed and warm-up requests are in no figure.
"""


def tags(metrics: tuple[Metric, ...]) -> set[str]:
    """The names of a section."""
    return {metric.tag for metric in metrics}


def page() -> str:
    """docs/metrics.md."""
    parts = [HEAD]
    for title, about, metrics in SECTIONS:
        parts.append(f"## {title}\n\n{about}\n")
        parts.append("| tag | unit | formula | direction |\n|---|---|---|---|")
        parts += [
            f"| `{m.tag}` | {m.unit or '-'} | {_cell(m.formula)} | {MARK[m.direction]} |"
            for m in metrics
        ]
        parts.append("")
    parts.append(
        "## Guards\n\nEach is `pass`, `warn`, `fail` or `skip` with a reason. One that fails "
        "withholds the arm's headline: its rates and ratios are null, its status is `withheld`, "
        "the command ends with exit code 1.\n\n| guard | what must hold |\n|---|---|"
    )
    parts += [f"| `{m.tag}` | {_cell(m.formula)} |" for m in GUARDS]
    return "\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
