"""Interleaving, and resume schedules: stop anywhere, any number of times, and lose nothing."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from arms.protocol import ArmRequest, ArmResult
from lumotree.errors import ArmError
from lumotree.request import SamplingParams
from replay.runner import WARMUP_TOKENS, Item, replay, schedule, start_arms


class Stopped(BaseException):
    pass


class Silent:
    def begin(self, total, done): ...
    def note(self, text): ...
    def advance(self, row): ...


@dataclass
class StubArm:
    """Reuses the common prefix with the conversation's last prompt, as the decoder does."""

    name: str
    in_process: bool = True
    reason: str | None = None
    known: dict = field(default_factory=dict)
    served: list = field(default_factory=list)

    def start(self):
        if self.reason:
            raise ArmError(self.reason)
        return {}

    def new_run(self):
        self.known.clear()

    def run(self, request, params):
        before = self.known.get(request.conversation, ())
        reused = sum(1 for a, b in zip(before, request.prompt_ids, strict=False) if a == b)
        if request.conversation is not None:
            self.known[request.conversation] = request.prompt_ids
        self.served.append((request.request_id, params.max_tokens))
        return ArmResult(completion_tokens=params.max_tokens, prefix_reused_tokens=reused, e2e_s=1)

    def close(self): ...


def items(conversations):
    turn = {}
    made = []
    for index, name in enumerate(conversations):
        turn[name] = turn.get(name, 0) + 1
        request = ArmRequest(f"r{index}", tuple(range(4 * turn[name])), name)
        made.append(Item(request, SamplingParams(max_tokens=100)))
    return made


def run_with_stops(names, work, runs, warmup, stops):
    """Replay in processes that die after stops[0], stops[1], ... rows; the last one ends."""
    rows = []
    for stop in [*stops, None]:
        left = [stop]

        def append(row, left=left):
            if left[0] == 0:
                raise Stopped
            left[0] = None if left[0] is None else left[0] - 1
            rows.append(row)

        try:
            replay(
                [StubArm(name) for name in names],
                work,
                runs=runs,
                warmup=warmup,
                done={row.key for row in rows},
                append=append,
                progress=Silent(),
            )
        except Stopped:
            continue
    return rows


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 3),
    st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 2),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_stops_change_no_row_and_no_order(arms, conversations, runs, warmup, stops):
    names = [f"arm{i}" for i in range(arms)]
    work = items(conversations)
    whole = run_with_stops(names, work, runs, warmup, [])
    broken = run_with_stops(names, work, runs, warmup, stops)
    assert [row.key for row in broken] == list(dict.fromkeys(row.key for row in broken))
    assert broken == whole
    assert len(whole) == arms * (len(work) * runs + min(warmup, len(work)))


def test_arms_alternate_and_the_first_one_rotates():
    arms = [StubArm("x"), StubArm("y"), StubArm("z")]
    order = [slot.key for slot in schedule(arms, items(["a", "a"]), 2)]
    assert [key[0] for key in order] == [*"xyz", *"yzx", *"yzx", *"zxy"]
    assert [key[1] for key in order] == [1] * 6 + [2] * 6


def test_warm_up_is_short_and_marked():
    arm, rows = StubArm("x"), []
    replay([arm], items(["a"]), runs=1, warmup=1, done=(), append=rows.append, progress=Silent())
    assert arm.served == [("r0", WARMUP_TOKENS), ("r0", 100)]
    assert [(row.run, row.warmup) for row in rows] == [(0, True), (1, False)]
    assert rows[1].prefix_reused_tokens == 0  # the warm-up left no prefix behind


def test_a_finished_replay_serves_nothing():
    arm, rows = StubArm("x"), []
    work = items(["a"])
    replay([arm], work, runs=1, warmup=1, done=(), append=rows.append, progress=Silent())
    again = StubArm("x")
    done = {row.key for row in rows}
    replay([again], work, runs=1, warmup=1, done=done, append=rows.append, progress=Silent())
    assert again.served == []


def test_an_unavailable_arm_is_a_status():
    ready, status = start_arms([StubArm("x"), StubArm("y", reason="no server reached at u")])
    assert [arm.name for arm in ready] == ["x"]
    assert status["y"] == {"status": "unavailable", "reason": "no server reached at u"}


def test_an_exception_of_an_arm_is_a_failed_row():
    class Broken(StubArm):
        def run(self, request, params):
            raise RuntimeError("kernel fault")

    rows = []
    replay(
        [Broken("x")], items(["a"]), runs=1, warmup=0, done=(), append=rows.append,
        progress=Silent(),
    )  # fmt: skip
    assert rows[0].error == "RuntimeError: kernel fault" and not rows[0].completed
