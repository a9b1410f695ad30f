import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumotree.errors import CorpusError
from replay.rows import Row
from replay.runfolder import RunFolder

RUN = {"options": {"cap": 48, "runs": 1}, "corpus": {"sha256": "a"}, "model": {"name": "m"}}


def rows(n):
    return [Row(arm="ar", run=1, request_id=f"r{i}", token_ids=[i], error="é") for i in range(n)]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 4), st.data())
def test_a_torn_last_line_is_cut_off_and_the_rest_kept(tmp_path_factory, count, data):
    path = tmp_path_factory.mktemp("run") / "r"
    folder = RunFolder.create(path, RUN)
    for row in rows(count):
        folder.append(row)
    folder.close()
    file = path / "requests.jsonl"
    whole = file.read_bytes()
    size = data.draw(st.integers(0, len(whole)))
    file.write_bytes(whole[:size])
    kept = whole[:size].count(b"\n")
    again = RunFolder.open(path)
    assert again.rows() == rows(count)[:kept]
    again.resume(RUN)
    for row in rows(count)[kept:]:
        again.append(row)
    again.close()
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"corpus": {"sha256": "b"}}, "corpus sha256 was a, now it is b"),
        ({"model": {"name": "n"}}, "model name was m, now it is n"),
        ({"options": {"cap": 64, "runs": 1}}, "options cap was 48, now it is 64"),
        ({"options": {"cap": 48, "runs": 1, "seed": 2}}, "options seed was null, now it is 2"),
    ],
)
def test_what_differs_is_named(tmp_path, changes, says):
    RunFolder.create(tmp_path / "r", RUN).close()
    with pytest.raises(CorpusError) as caught:
        RunFolder.open(tmp_path / "r").resume(RUN | changes)
    assert f"{tmp_path / 'r'} cannot be resumed: {says}" in caught.value.message


def test_two_writers_are_refused(tmp_path):
    first = RunFolder.create(tmp_path / "r", RUN)
    with pytest.raises(CorpusError, match="being written by another process"):
        RunFolder.open(tmp_path / "r").resume(RUN)
    first.close()


def test_a_broken_row_in_the_middle_is_named(tmp_path):
    folder = RunFolder.create(tmp_path / "r", RUN)
    folder.close()
    (tmp_path / "r" / "requests.jsonl").write_text(rows(1)[0].model_dump_json() + "\n{\n{}\n")
    with pytest.raises(CorpusError, match="requests.jsonl line 2 is not a row"):
        folder.rows()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "has no run.json"),
        ("{", "cannot be read"),
        ('{"schema_version": 99}', "schema version 99"),
        ("[]", "is not a JSON object"),
        ("{}", "schema version None"),
    ],
)
def test_no_run_folder(tmp_path, content, says):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(CorpusError, match=says):
        RunFolder.open(tmp_path)


def test_a_used_place_is_not_overwritten(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(CorpusError, match="exists and is not empty"):
        RunFolder.create(tmp_path, RUN)


def test_files_are_replaced_whole(tmp_path):
    folder = RunFolder.create(tmp_path / "r", RUN)
    folder.write_json("summary.json", {"a": 1})
    folder.write_json("summary.json", {"a": 2})
    assert folder.summary() == {"a": 2}
    assert sorted(p.name for p in folder.path.iterdir()) == [
        "requests.jsonl",
        "run.json",
        "summary.json",
    ]
    assert json.loads((folder.path / "run.json").read_text())["schema_version"] == 1
    folder.close()


def test_an_unfinished_run_has_no_summary(tmp_path):
    folder = RunFolder.create(tmp_path / "r", RUN)
    folder.close()
    with pytest.raises(CorpusError, match="has no summary.json") as caught:
        folder.summary()
    assert "--resume" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "is not a JSON object"),
        ("3", "is not a JSON object"),
        ('{"schema_version": 99}', "schema version 99; this version reads up to"),
        ('{"schema_version": "1"}', "schema version '1'"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_summary_that_is_none_is_one_clear_error(tmp_path, content, says):
    folder = RunFolder.create(tmp_path / "r", RUN)
    folder.close()
    (tmp_path / "r" / "summary.json").write_text(content)
    with pytest.raises(CorpusError, match="summary.json.*" + says.replace("(", "[(]")):
        folder.summary()


def assert_resumes(path, arms, says):
    """A resume with these arms goes on, or is refused in these words."""
    folder, run = RunFolder.open(path), RUN | {"arms": arms}
    if says is None:
        folder.resume(run)
        folder.close()
    else:
        with pytest.raises(CorpusError, match=says):
            folder.resume(run)


OWN = {"kind": "in-process", "tree": "root"}
SGLANG = {"kind": "sglang", "tree": "root"}


@pytest.mark.parametrize(
    ("saved", "given", "says"),
    [
        (OWN, OWN | {"new": 32}, None),  # an option that the saving version had not
        (OWN | {"old": 1}, OWN, None),
        (OWN | {"old": 1}, OWN | {"old": 2, "new": 32}, "ar old was 1, now it is 2"),
        (OWN, OWN | {"choice": {"tree": "oak"}}, "ar choice was null"),
        (SGLANG, SGLANG | {"server": "0.5"}, "ar server was null"),
    ],
)
def test_options_that_one_version_has_not_do_not_count(tmp_path, saved, given, says):
    run = RUN | {"arms": {"ar": {"description": saved}}}
    RunFolder.create(tmp_path / "r", run).close()
    assert_resumes(tmp_path / "r", {"ar": {"description": given}}, says)


@pytest.mark.parametrize(
    ("arms", "says"),
    [
        ({"ar": {"description": {"tree": "root"}}}, None),
        ({"ar": {"status": "unavailable", "reason": "gone"}}, None),
        ({"new": {"description": {"tree": "oak"}}}, None),
        ({"ar": {"description": {"tree": "oak"}}}, "arm ar tree was root, now it is oak"),
    ],
)
def test_a_resume_refuses_an_arm_that_decodes_with_something_else(tmp_path, arms, says):
    saved = {"ar": {"description": {"tree": "root"}}, "new": {"status": "unavailable"}}
    RunFolder.create(tmp_path / "r", RUN | {"arms": saved}).close()
    assert_resumes(tmp_path / "r", arms, says)


@pytest.mark.parametrize("name", ["run.json", "summary.json"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch, name):
    folder = RunFolder.create(tmp_path / "r", RUN)
    folder.close()

    def full(draft, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("replay.runfolder.os.replace", full)
    with pytest.raises(CorpusError, match=f"{name} cannot be written: No space left"):
        folder.write_json(name, {})


def test_rows_that_cannot_be_opened_are_named(tmp_path):
    RunFolder.create(tmp_path / "r", RUN).close()
    (tmp_path / "r" / "requests.jsonl").unlink()
    (tmp_path / "r" / "requests.jsonl").mkdir()
    folder = RunFolder.open(tmp_path / "r")
    with pytest.raises(CorpusError, match="requests.jsonl cannot be written"):
        folder.resume(RUN)
    with pytest.raises(CorpusError, match="requests.jsonl cannot be read"):
        folder.rows()
