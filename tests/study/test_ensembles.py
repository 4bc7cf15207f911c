"""Ensembles in a study: means of runs that are trained anyway, or for them; calibrated, compared, resumed alike."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from layouts import write_acdc
from typer.testing import CliRunner

from segcal import Evaluation
from segcal.cli import app
from segcal.errors import ConfigError
from segcal.study import do_runs, load_study, make_plan, open_study, read_study, running, work
from segcal.study.overview import overview
from segcal.study.plan import describe_plan
from segcal.study.summary import collect
from segcal.training.ensemble import load_ensemble
from segcal.training.runs import evaluate_run

pytestmark = pytest.mark.usefixtures("one_thread")
BOTH, OVER = "ensemble(dice-ce, soft-ace)", "ensemble(dice-ce over seeds)"
STUDY = """
title = "Ensembles"
methods = ["dice-ce", "{both}", "{both} + temperature", "{over}"]
seeds = [0, 1]
preset = "paper"
maps = 0
[datasets.ACDC]
dataset = "acdc"
root = "data/database"
[set]
network.options = {{init_filters = 4, blocks_down = [1, 1], norm = "BATCH", dsdepth = 2}}
data.patch = [16, 16, 4]
training.epochs = 1
training.validate_every = 1
"""


def write_study(folder, text=STUDY):
    (folder / "mine.toml").write_text(text.format(both=BOTH, over=OVER), encoding="utf-8")
    return folder / "mine.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    write_acdc(folder / "data", patients=5, test_patients=2)
    write_study(folder)
    return folder


@pytest.fixture(scope="module")
def shop(folder, one_thread):
    shop = open_study(read_study(folder / "mine.toml"), folder / "out")
    said: list[str] = []
    do_runs(shop, say=said.append)
    assert said == [f"{name} is done" for name in in_order(shop.plan)]
    return shop


def in_order(plan):
    """Members before ensembles."""
    return sorted(plan.runs, key=lambda name: bool(plan.runs[name].members))


def ensembles(plan):
    return [run for run in plan.runs.values() if run.members]


def copy_of(shop, folder):
    """The study as it is, to be changed."""
    shutil.copytree(shop.out, folder / "out")
    return load_study(folder / "out")


def test_members_are_planned_and_ensembles_train_nothing(shop):
    plan = shop.plan
    kinds = [(run.config.method, run.config.seed) for run in plan.runs.values() if not run.members]
    assert kinds == [("dice-ce", 0), ("dice-ce", 1), ("soft-ace", 0), ("soft-ace", 1)]  # soft-ace is no method here
    assert [[(m.config.method, m.config.seed) for m in run.members] for run in ensembles(plan)] == [
        [("dice-ce", 0), ("soft-ace", 0)], [("dice-ce", 1), ("soft-ace", 1)], [("dice-ce", 0), ("dice-ce", 1)],
    ]  # fmt: skip
    assert [arm[:3] for arm in plan.arms[2:]] == [
        ("ACDC", BOTH, 0), ("ACDC", BOTH, 1), ("ACDC", f"{BOTH} + temperature", 0),
        ("ACDC", f"{BOTH} + temperature", 1), ("ACDC", OVER, 0),
    ]  # fmt: skip
    assert [run.name.rsplit("-", 1)[0] for run in ensembles(plan)] == [
        "ACDC-ensemble-seed0", "ACDC-ensemble-seed1", "ACDC-ensemble-seed0-1",
    ]  # fmt: skip
    for run in ensembles(plan):
        assert not list((shop.runs / run.name).glob("*.pt"))


def test_numbers_are_those_of_the_mean(shop, tmp_path):
    for run in ensembles(shop.plan):
        members = load_ensemble([shop.runs / member.name for member in run.members])
        expected = evaluate_run(members, tmp_path / run.name).evaluation
        found = Evaluation.load(shop.runs / run.name / "test" / "evaluation.npz")
        np.testing.assert_array_equal(found.case_metrics()["ace"], expected.case_metrics()["ace"])
    run = ensembles(shop.plan)[0]
    members = load_ensemble([shop.runs / member.name for member in run.members])
    fitted = run.fittings[0].make().fit(list(members.logits_and_labels("validation")))
    expected = evaluate_run(members, tmp_path / "calibrated", calibrator=fitted).evaluation
    found = Evaluation.load(shop.runs / run.name / run.fittings[0].folder / "test" / "evaluation.npz")
    np.testing.assert_allclose(found.case_metrics()["ace"], expected.case_metrics()["ace"], atol=1e-5)


def test_tables_and_states_have_ensembles(shop):
    results = collect(shop)
    (found,) = results.datasets
    assert found.methods == ("dice-ce", BOTH, f"{BOTH} + temperature", OVER)
    assert found.seeds[OVER] == (0,)
    assert results.remarks == ()
    assert {row["status"] for row in results.rows} == {"done"}
    assert overview(shop).line == "7 runs: 7 done, 0 running, 0 failed, 0 waiting"


def test_an_ensemble_is_planned_without_epochs_and_its_members_for_its_methods(shop):
    rows = {row.run: row for row in describe_plan(shop.plan)}
    for run in ensembles(shop.plan):
        assert (rows[run.name].epochs, rows[run.name].steps) == (0, 0)
    member = ensembles(shop.plan)[0].members[1]
    assert rows[member.name].methods == (BOTH, f"{BOTH} + temperature")
    assert rows[member.name].epochs == 1


def test_only_an_ensemble_brings_its_members(folder, tmp_path, monkeypatch):
    """In turn, and by whatever executor: never before they are done."""
    shop = open_study(read_study(folder / "mine.toml"), tmp_path / "out")
    begun: list[str] = []

    def done(run, out):
        begun.append(run.name)
        place = out / work.RUNS / run.name
        place.mkdir(parents=True)
        facts = {"fittings": [fitting.folder for fitting in run.fittings], "validation": work.CROSS_FITTED}
        facts |= (
            {"weights": run.name, "members": work._weights(run, out / work.RUNS)} if run.members else {"weights": 1}
        )
        (place / work.DONE).write_text(json.dumps(facts))
        return work.RunResult("done", f"{run.name} is done")

    monkeypatch.setattr(running, "do_run", done)
    monkeypatch.setattr(running, "do_run_apart", done)
    first, _, last = ensembles(shop.plan)
    do_runs(shop, only=[last.name], wait=False)
    assert begun == [*(member.name for member in last.members), last.name]
    begun.clear()

    def backwards(function, jobs):
        for i in reversed(range(len(jobs))):
            yield i, function(*jobs[i])

    do_runs(shop, executor=backwards)
    assert last.name not in begun
    places = {name: place for place, name in enumerate(begun)}
    assert all(places.get(member.name, -1) < places[first.name] for member in first.members)
    assert all(map(shop.is_done, shop.plan.runs.values()))


def test_a_failed_member_fails_its_ensembles_with_a_sentence(shop, tmp_path, monkeypatch):
    shop = copy_of(shop, tmp_path)
    broken = ensembles(shop.plan)[0].members[1]
    shutil.rmtree(shop.runs / broken.name)

    def fail(config, folder, **options):
        raise MemoryError("there is none")

    monkeypatch.setattr(work, "train", fail)
    said: list[str] = []
    do_runs(shop, say=said.append)
    states = {state.name: state for state in shop.states()}
    failed = [name for name, state in states.items() if state.status == "failed"]
    assert failed == [broken.name, ensembles(shop.plan)[0].name]
    told = f"every member of an ensemble must be done; {broken.name}: it failed: MemoryError: there is none"
    assert told in states[failed[1]].message
    assert any(told in text for text in said)
    assert BOTH in collect(shop).remarks[0]


def test_a_member_that_is_trained_again_makes_its_ensembles_anew(shop, tmp_path):
    shop = copy_of(shop, tmp_path)
    member = ensembles(shop.plan)[0].members[1]
    place = shop.runs / member.name / work.DONE
    place.write_text(json.dumps(json.loads(place.read_text()) | {"weights": "others"}))
    assert [shop.is_done(run) for run in ensembles(shop.plan)] == [False, True, True]


def test_a_study_that_is_done_is_not_done_again(shop, monkeypatch):
    monkeypatch.setattr(running, "do_run", lambda run, out: pytest.fail(f"{run.name} is done"))
    do_runs(shop)


def test_plan_and_status_show_ensembles(shop, folder):
    done = CliRunner().invoke(app, ["study", "plan", str(folder / "mine.toml")])
    assert done.exit_code == 0, done.output
    assert "7 runs" in done.output
    done = CliRunner().invoke(app, ["study", "status", str(shop.out)])
    assert done.exit_code == 0, done.output
    assert "7 done" in done.output


def test_names_for_job_scripts_are_those_of_the_runs_that_train(shop, folder):
    done = CliRunner().invoke(app, ["study", "plan", str(folder / "mine.toml"), "--names"])
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [name for name, run in shop.plan.runs.items() if not run.members]


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["ensemble(dice-ce)"], "must be of several methods, or of one over several seeds"),
        (["ensemble(dice-ce, dice-ce)"], "must be of several methods"),
        (["ensemble(dice-ce, nets)"], "members of an ensemble must be trained: .* got 'nets' in"),
        (["ensemble(dice-ce, ce + temperature)"], "without a calibrator, .* got 'ce \\+ temperature'"),
        (["ensemble(dice-ce, scaled)"], "got 'scaled' in"),
        (["ensemble(dice-ce, ensemble(ce, soft-ace))"], "members of an ensemble must be trained"),
        (["ensemble(dice-ce, ce over seeds)"], "of one over several seeds"),
        (["ensemble(dice-ce, ce) + nothing"], "or an ensemble, as 'ensemble\\(dice-ce, soft-ace\\)'"),
        (["changed"], "variants.changed.set must be left to the members"),
    ],
)
def test_what_is_no_ensemble_is_refused(folder, tmp_path, methods, message):
    variants = {"scaled": 'method = "ce"\ncalibrator = "temperature"\n'}
    variants["changed"] = 'method = "ensemble(dice-ce, ce)"\nset.training.epochs = 3\n'
    text = STUDY.replace('methods = ["dice-ce", "{both}", "{both} + temperature", "{over}"]', f"methods = {methods}")
    text += "".join(f"[variants.{name}]\n{content}" for name, content in variants.items())
    with pytest.raises(ConfigError, match=message):
        read_study(write_study(tmp_path, text))


def test_a_variant_of_an_ensemble_has_calibrator_options(folder, tmp_path):
    text = STUDY.replace('"{over}"]', '"mine"]')
    text += '[variants.mine]\nmethod = "ensemble(dice-ce, soft)"\ncalibrator = "temperature"\n'
    text += 'calibrator_options.objective = "ace"\n[variants.soft]\nmethod = "soft-ace"\nset.loss.ace.bins = 10\n'
    shutil.copytree(folder / "data", tmp_path / "data")
    plan = make_plan(read_study(write_study(tmp_path, text)), tmp_path / "out")
    run = plan.runs[plan.arms[-1].run]
    assert [member.config.loss.ace.bins for member in run.members] == [20, 10]
    assert run.fittings[0].options == (("objective", '"ace"'),)
    with pytest.raises(ConfigError, match="methods of the sweep must be trained; 'mine' is an ensemble"):
        read_study(write_study(tmp_path, text + '[sweep]\nmethods = ["mine"]\nweights = [0.5]\n'))
