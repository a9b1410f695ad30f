"""`lumotree bench batch`: what is timed, and the command over a small model."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lumotree.bench.batch import BOOKED, groups_of, serve_group
from lumotree.errors import LumoTreeError
from lumotree.serve import slots as serving
from replay import metrics
from replay.cli import app

CORPUS = "corpora/first.jsonl"


class FakeSlot:
    """Emits `script[i]` tokens in round i, up to a limit; its prompt takes two pieces."""

    def __init__(self, script, limit):
        self.script, self.limit, self.closed, self.pieces = script, limit, False, 0

    def open(self, ids, params, logprobs):
        self.ids, self.rounds = ids, 0
        self.run = SimpleNamespace(completion_tokens=0, phases_ms=dict.fromkeys(BOOKED, 0.0))

    def advance_prompt(self):
        self.pieces += 1
        self.run.completion_tokens = int(self.prompt_done)

    @property
    def prompt_done(self):
        return self.pieces == 2

    @property
    def finished(self):
        return self.run.completion_tokens >= self.limit

    def take(self):
        run = self.run
        run.completion_tokens = min(run.completion_tokens + self.script[self.rounds], self.limit)
        run.phases_ms["draft"] += 10.0 if self.rounds == 0 else 2.0
        self.rounds += 1

    def result(self):
        assert self.finished
        return SimpleNamespace(ttft_s=0.5, token_ids=list(range(self.run.completion_tokens)))

    def close(self):
        self.closed = True


class FakeSlots(list):
    """A round takes a quarter of a second; waiting for the device takes four."""

    now = 0.0

    def step(self, slots):
        self.now += 0.25
        for slot in slots:
            slot.take()
        return {}

    def settle(self):
        self.now += 4.0


def serve(scripts, limit):
    slots = FakeSlots(FakeSlot(script, limit) for script in scripts)
    found = serve_group(slots, [([1], None)] * len(slots), slots.settle, lambda: slots.now)
    assert all(slot.closed for slot in slots)
    return found


def test_a_window_ends_with_its_first_request():
    found = serve([[2, 2, 2, 2], [1, 1, 5, 1], [1] * 8], 8)
    window = found.window
    # The second request ends in round three; the wait at the end is the device's, and counts.
    assert (window.rounds, window.tokens, window.seconds) == (3, 6 + 7 + 3, 0.75 + 4.0)
    assert window.phases_ms["draft"] == 4.0  # of the second and the third round
    assert found.ttft_s == (0.5, 0.5, 0.5)
    assert [len(ids) for ids in found.token_ids] == [8, 8, 8]


@given(
    st.integers(2, 20).flatmap(
        lambda limit: st.tuples(
            st.just(limit),
            st.lists(st.lists(st.integers(1, 6), min_size=limit, max_size=limit), min_size=1,
                     max_size=4),
        )
    )
)  # fmt: skip
def test_every_request_is_active_in_every_timed_round(case):
    limit, scripts = case
    window = serve(scripts, limit).window

    def emitted(script, rounds):
        return min(1 + sum(script[:rounds]), limit)

    rounds = next(r for r in range(limit + 1) if max(emitted(s, r) for s in scripts) == limit)
    assert window.rounds == rounds
    assert window.tokens == sum(emitted(script, rounds) - 1 for script in scripts)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_groups_hold_every_request(case):
    count, size = case
    groups = list(groups_of(count, size))
    assert all(len(set(group)) == size for group in groups)
    assert {member for group in groups for member in group} == set(range(count))
    assert len(groups) == -(-count // size)


def call(engine, *words):
    common = ["bench", "batch", "--model", str(engine.source.folder), "--device", "cpu"]
    common += ["--corpus", CORPUS, "--prompt-tokens", "40", "--tokens", "6", "--runs", "2"]
    return CliRunner().invoke(app, [*common, *map(str, words)])


@pytest.fixture
def exact(speaking):
    if speaking.row_multiple is None:
        pytest.skip("no row multiple gives equal bits here")
    return speaking


def test_the_command_measures_and_writes(exact, tmp_path):
    out = tmp_path / "made" / "here"
    arms = "ar,mtp-3,lumotree:draft_vocab=900"
    done = call(exact, "--active", "3,1", "--arms", arms, "--out", out)
    assert done.exit_code == 0, done.output
    found = json.loads((out / "batch.json").read_text())
    rows = found["rows"]
    assert len(rows) == 2 * 2 * 3
    assert all(row.keys() == metrics.tags(metrics.BATCH_ROW) for row in rows)
    assert all(entry.keys() == metrics.tags(metrics.BATCH_RATIO) for entry in found["ratios"])
    firsts = [row["arm"] for row in rows[::3]]
    assert len(set(firsts)) > 1  # another arm begins
    # Three requests: three groups of one and a group of three; warm-ups take one group each.
    assert found["token_ids"] == {
        "answers": 3 * (2 * 3 + 1) + 3 * (2 * 3 + 3),
        "equal": 48,
        "first_difference": None,
    }
    plain = [row for row in rows if row["arm"] == "ar"]
    assert {(row["tokens_per_step"], row["rounds"]) for row in plain} == {(1, 15), (1, 5)}
    assert found["options"]["active"] == [1, 3] and len(found["requests"]) == 3
    assert {"machine", "versions", "git_commit", "command", "model", "sampling"} <= found.keys()
    assert "48 of 48 answers" in done.stdout
    assert sum("lumotree:draft_vocab=900 is" in line for line in done.stdout.splitlines()) == 2
    again = call(exact, "--active", 1, "--out", out)
    assert again.exit_code == 2 and "--out" in again.stderr and "already" in again.stderr


def test_an_answer_that_depends_on_the_arm_is_exit_code_1(exact, monkeypatch):
    honest = serving.Slot.result

    def stray(self):
        found = honest(self)
        if self.decoder.config.tree != "root":
            found.token_ids[2] += 1
        return found

    monkeypatch.setattr(serving.Slot, "result", stray)
    done = call(exact, "--active", 1, "--arms", "ar,lumotree", "--greedy", "--json", "--quiet")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["sampling"]["temperature"] == 0
    assert found["token_ids"]["equal"] == 3 < found["token_ids"]["answers"] == 6
    (request,) = found["requests"]
    assert f"request {request}: lumotree at 1 active" in done.stderr
    assert done.stderr.rstrip().endswith("at token 2")


def test_a_size_without_buffers_is_said_and_left_out(exact, monkeypatch):
    whole = serving.make_slots

    def full(engine, config, active, context, store):
        if active == 2 and config.tree != "root":
            raise LumoTreeError("no room")
        return whole(engine, config, active, context, store)

    monkeypatch.setattr(serving, "make_slots", full)
    done = call(exact, "--active", "1,2", "--arms", "ar,lumotree")
    assert done.exit_code == 0, done.output
    assert "lumotree at 2 active: no room" in done.stdout
    assert "lumotree is" in done.stdout and "at 1 active requests" in done.stdout
    done = call(exact, "--active", "2", "--arms", "lumotree")
    assert done.exit_code == 2 and "--active 2: no room" in done.stderr


def test_sizes_measured_before_a_break_are_kept(exact, monkeypatch, tmp_path):
    whole = serving.make_slots

    def breaking(engine, config, active, context, store):
        if active == 2:
            raise KeyboardInterrupt
        return whole(engine, config, active, context, store)

    monkeypatch.setattr(serving, "make_slots", breaking)
    done = call(exact, "--active", "1,2", "--arms", "ar,lumotree", "--out", tmp_path)
    assert done.exit_code == 130
    found = json.loads((tmp_path / "batch.json").read_text())
    assert {row["active"] for row in found["rows"]} == {1}
    assert found["options"]["active"] == [1, 2] and len(found["conclusion"]) == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--active", "99"], "--active 99"),
        (["--prompt-tokens", "9000"], "--prompt-tokens 9000"),
        (["--corpus", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--out", "README.md/x"], "--out"),
    ],
)
def test_what_cannot_be_measured_is_named(speaking, words, named):
    done = call(speaking, *words)
    assert done.exit_code == 2 and named in done.stderr and done.stderr.count("lumotree:") == 1
