"""tree=auto: calibration on the embedded model, and how an arm gets and keeps its choice."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from arms import inprocess
from arms.choice import TreeChoice
from arms.spec import parse_arm
from lumotree.decoder import DecoderConfig
from lumotree.errors import ArmError
from replay.calibration import calibrate
from replay.cli import app
from replay.corpus import load_corpus
from replay.items import held_out, make_items
from replay.job import ReplayOptions
from replay.machine import describe_machine
from replay.runfolder import RunFolder
from tests.replay.fakes import FakeEngine, corpus_lines, install, write_corpus

CHOICE = TreeChoice("chain-2", 2, False, 90.0, 2.5, 27.7, "w1", "cpu")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_corpus(tmp_path / "c.jsonl", corpus_lines())


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def calibrated(monkeypatch):
    """A fake engine and a calibration that counts its calls."""
    install(FakeEngine(), monkeypatch)
    calls = []

    def stand_in(engine, items, **options):
        calls.append(len(items))
        return SimpleNamespace(choice=CHOICE)

    monkeypatch.setattr("replay.calibration.calibrate", stand_in)
    return calls


def test_a_replay_calibrates_once_and_records_the_choice(corpus, calibrated):
    done = call("replay", corpus, "--arms", "ar lumotree:tree=auto", "--cap", 9, "--out", "r")
    assert done.exit_code == 0, done.output
    assert calibrated == [6]
    arm = RunFolder.open(corpus.parent / "r").run["arms"]["lumotree:tree=auto"]
    assert TreeChoice.of(arm["description"]["choice"], "here") == CHOICE
    summary = RunFolder.open(corpus.parent / "r").summary()
    assert [entry["arm"] for entry in summary["comparisons"]] == ["lumotree:tree=auto"]


def test_a_resume_keeps_the_choice(corpus, calibrated):
    call("replay", corpus, "--arms", "ar lumotree:tree=auto", "--cap", 9, "--out", "r")
    done = call("replay", "--resume", "r")
    assert done.exit_code == 0, done.output
    assert len(calibrated) == 1


def test_without_auto_nothing_is_calibrated(corpus, calibrated):
    call("replay", corpus, "--arms", "ar lumotree", "--cap", 9, "--out", "r")
    assert calibrated == []


def test_a_plan_file_replaces_the_calibration(corpus, calibrated, tmp_path):
    (tmp_path / "map.json").write_text(json.dumps({"choice": CHOICE.as_dict()}))
    arm = "lumotree:tree=auto,plan=map.json"
    done = call("replay", corpus, "--arms", f"ar {arm}", "--cap", 9, "--out", "r")
    assert done.exit_code == 0 and calibrated == []
    description = RunFolder.open(tmp_path / "r").run["arms"][arm]["description"]
    assert description["choice"]["tree"] == "chain-2"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("{}", "holds no tree choice"),
        (json.dumps({"choice": CHOICE.as_dict() | {"tree": "oak"}}), "holds no tree choice"),
        (json.dumps({"choice": CHOICE.as_dict() | {"weights_sha256": "x"}}), "other weights"),
        (json.dumps({"choice": CHOICE.as_dict() | {"device": "cuda"}}), "another device"),
    ],
)
def test_a_bad_plan_is_a_row_that_says_why(corpus, calibrated, tmp_path, content, says):
    if content is not None:
        (tmp_path / "map.json").write_text(content)
    done = call(
        "replay", corpus, "--arms", "ar lumotree:tree=auto,plan=map.json", "--cap", 9, "--out", "r",
        "--json",
    )  # fmt: skip
    arm = json.loads(done.stdout)["arms"]["lumotree:tree=auto,plan=map.json"]
    assert arm["status"] == "unavailable" and says in arm["reason"]


def test_an_arm_without_a_calibration_says_how_to_get_one():
    arm = inprocess.InProcessArm(parse_arm("lumotree:tree=auto"), FakeEngine())
    assert arm.needs_choice
    with pytest.raises(ArmError, match="has no calibration") as caught:
        arm.start()
    assert "lumotree breakeven" in caught.value.hint


def test_the_choice_is_the_decoders_configuration():
    made = []
    engine = SimpleNamespace(
        description=lambda: {"weights_sha256": "w1", "device": "cpu"}, decoder=made.append
    )
    arm = inprocess.InProcessArm(parse_arm("lumotree:tree=auto"), engine)
    arm.choice = CHOICE
    description = arm.start()
    assert made == [DecoderConfig("chain-2", 2, False)]
    assert (description["tree"], description["passes"]) == ("chain-2", 2)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    path = write_corpus(tmp_path_factory.mktemp("c") / "c.jsonl", corpus_lines(2, 2))
    engine = inprocess.load_engine("embedded")
    options = ReplayOptions(corpus=str(path), arms=("ar",), cap=24)
    items = make_items(load_corpus(path), options, engine)
    return engine, items, calibrate(engine, items, requests=2, tokens=24)


def test_recorded_shares_agree_with_the_decoders_counts(calibration):
    engine, items, found = calibration
    by_design = {(r.tree, r.passes): r for r in found.measured}
    root = by_design["root", 0]
    assert root.reach == root.active == (1.0,)
    for reach in found.measured:
        assert reach.steps > 0 and len(reach.reach) == len(reach.active)
        assert reach.reach[0] == reach.active[0] == 1
        assert all(r <= a for r, a in zip(reach.reach, reach.active, strict=True))


def test_the_choice_is_the_first_candidate_and_decodes_the_same_tokens(calibration):
    engine, items, found = calibration
    best, choice = found.ranked[0], found.choice
    assert (choice.tree, choice.passes, choice.predicted_tok_s) == (
        best.tree,
        best.passes,
        best.tok_s,
    )
    choice.check(engine.description())
    arm = inprocess.InProcessArm(parse_arm("lumotree:tree=auto"), engine)
    arm.choice = choice
    arm.start()
    plain = inprocess.InProcessArm(parse_arm("ar"), engine)
    plain.start()
    for item in items[:2]:
        assert (
            arm.run(item.request, item.params).token_ids
            == plain.run(item.request, item.params).token_ids
        )
    json.dumps(found.as_dict())


HERE = {"cpu": "A", "cores": 8}
KNOWN = replace(CHOICE, cpu="A", cores=8, corpus_sha256="s", calibrated_on=("a", "b"))


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (replace(KNOWN, calibrated_on=("x",)), []),
        (KNOWN, ["chosen on 2 of these 3 requests"]),
        (replace(KNOWN, corpus_sha256="other"), []),
        (replace(KNOWN, corpus_sha256=None), ["chosen on 2 of these 3 requests"]),
        (replace(KNOWN, calibrated_on=()), ["not known on which requests"]),
        (replace(KNOWN, cpu="B"), ["another machine (B, 8 cores; this one is A", "2 of these 3"]),
        (replace(KNOWN, cores=2), ["another machine (A, 2 cores", "2 of these 3"]),
    ],
)
def test_a_choice_says_what_flatters_or_misleads_it(choice, says):
    found = choice.notices(HERE, "s", ["a", "b", "c"])
    assert len(found) == len(says)
    assert all(part in notice for part, notice in zip(says, found, strict=True))
    assert TreeChoice.of(json.loads(json.dumps(choice.as_dict())), "here") == choice


def test_a_plan_takes_machine_and_corpus_from_the_document_around_it(tmp_path):
    document = {"choice": CHOICE.as_dict(), "machine": HERE, "corpus": {"sha256": "s"}}
    (tmp_path / "map.json").write_text(json.dumps(document))
    choice = TreeChoice.load(tmp_path / "map.json")
    assert (choice.cpu, choice.cores, choice.corpus_sha256) == ("A", 8, "s")


@pytest.mark.parametrize(("limit", "seen"), [(4, 0), (6, 4)])
def test_calibration_prefers_requests_that_are_not_scored(
    corpus, tmp_path, monkeypatch, limit, seen
):
    install(FakeEngine(), monkeypatch)

    def stand_in(engine, items, *, corpus_sha256, **options):
        ids = tuple(item.request.request_id for item in items[:4])
        choice = replace(CHOICE, calibrated_on=ids, corpus_sha256=corpus_sha256)
        return SimpleNamespace(choice=choice)

    monkeypatch.setattr("replay.calibration.calibrate", stand_in)
    words = ("--arms", "ar lumotree:tree=auto", "--cap", 9, "--limit", limit, "--out", "r")
    done = call("replay", corpus, *words)
    assert done.exit_code == 0, done.output
    run = RunFolder.open(tmp_path / "r").run
    choice = run["arms"]["lumotree:tree=auto"]["description"]["choice"]
    assert choice["corpus_sha256"] == run["corpus"]["sha256"]
    assert len(set(choice["calibrated_on"]) & set(run["selected"])) == seen
    said = f"tree=auto was chosen on {seen} of these {limit} requests"
    page = (tmp_path / "r" / "report.html").read_text()
    assert (said in " ".join(done.stdout.split())) == (said in page) == (seen > 0)


def test_a_request_left_out_that_does_not_fit_is_no_calibration_request(tmp_path):
    lines = corpus_lines()
    lines[2]["body"]["messages"][0]["content"] = "word " * 80
    corpus = load_corpus(write_corpus(tmp_path / "c.jsonl", lines))
    options = ReplayOptions(corpus="c.jsonl", arms=("ar",), limit=4)
    ids = [item.request.request_id for item in held_out(corpus, options, FakeEngine())]
    assert ids == ["c1-t1"]


def test_a_resume_keeps_the_choice_of_a_plan_that_changed_or_went(corpus, calibrated, tmp_path):
    plan = tmp_path / "map.json"
    plan.write_text(json.dumps({"choice": CHOICE.as_dict()}))
    arm = "lumotree:tree=auto,plan=map.json"
    call("replay", corpus, "--arms", f"ar {arm}", "--cap", 9, "--out", "r")
    plan.write_text(json.dumps({"choice": CHOICE.as_dict() | {"tree": "chain-1", "passes": 1}}))
    for _ in range(2):
        done = call("replay", "--resume", "r")
        assert done.exit_code == 0, done.output
        description = RunFolder.open(tmp_path / "r").run["arms"][arm]["description"]
        assert description["choice"]["tree"] == "chain-2"
        plan.unlink(missing_ok=True)


def test_a_calibration_names_its_machine_and_requests(calibration):
    _, items, found = calibration
    here = describe_machine()
    assert (found.choice.cpu, found.choice.cores) == (here["cpu"], here["cores"])
    assert len(found.choice.calibrated_on) == 2
    assert set(found.choice.calibrated_on) <= {item.request.request_id for item in items}
