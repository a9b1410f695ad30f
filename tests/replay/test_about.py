"""The command line of a report says what was run, not in whose folders."""

import pytest

from replay.report.about import command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lumotree", "replay", "/home/alice/c.jsonl"], "lumotree replay c.jsonl"),
        (["--out", "~/runs/x"], "--out x"),
        (["--out=/home/alice/x"], "--out=x"),
        (["--out=/home/alice/my runs/x"], "--out=x"),
        (["--out=~alice/x", "--cap=64"], "--out=x --cap=64"),
        (["--arm", "lumotree:tree=auto,plan=/home/alice/p.json"],
         "--arm lumotree:tree=auto,plan=p.json"),
        (["--arms=ar lumotree:tree=auto,plan=/home/alice/p.json"],
         "'--arms=ar lumotree:tree=auto,plan=p.json'"),
        (["--arm", "sglang-eagle:url=http://127.0.0.1:30000"],
         "--arm sglang-eagle:url=http://127.0.0.1:30000"),
        (["--out=/"], "--out=/"),
    ],
)  # fmt: skip
def test_folders_are_left_out(words, said):
    assert command(words) == said
    assert "alice" not in command(words)


def test_no_command_was_saved():
    assert command(None) is None and command([]) is None
