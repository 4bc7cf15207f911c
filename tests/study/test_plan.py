"""A study's file becomes runs: one for each network that must be trained, known by its configuration."""

from __future__ import annotations

from pathlib import Path

import layouts
import pytest
import torch

from segcal.datasets import make_phantom, make_split, open_dataset
from segcal.errors import ConfigError, FileError
from segcal.study.plan import describe_plan, make_plan, read_study, shipped_studies, steps_per_epoch
from segcal.training.config import make_config
from segcal.training.data import patch_loader
from segcal.training.distributed import Processes
from segcal.training.preprocessing import PreparedStore

SMALL = """
title = "Two datasets"
preset = "small"
seeds = [0, 3]
methods = ["dice-ce", "dice-ce + temperature", "heavy"]

[variants.heavy]
method = "soft-ace"
set.loss.ace.weight = 4

[datasets.one]
dataset = "phantom"
root = "a/Task00_Phantom"
set.training.epochs = 7

[datasets."two more"]
dataset = "phantom"
root = "b/Task00_Phantom"

[set.training]
epochs = 5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    for name in "ab":
        make_phantom(folder / name, cases=6, size=(40, 40, 26))
    return folder


def plan_of(folder: Path, text: str = SMALL, **how):
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    return make_plan(read_study(folder / "mine.toml", **how), folder / "out")


def test_datasets_times_methods_times_seeds(folder):
    plan = plan_of(folder)
    assert [arm[:3] for arm in plan.arms[:4]] == [
        ("one", "dice-ce", 0), ("one", "dice-ce", 3), ("one", "dice-ce + temperature", 0),
        ("one", "dice-ce + temperature", 3),
    ]  # fmt: skip
    assert len(plan.arms) == 2 * 3 * 2
    assert len(plan.runs) == 2 * 2 * 2  # the temperature needs no training of its own
    with_temperature = [name for name, run in plan.runs.items() if run.fittings]
    assert with_temperature == [arm.run for arm in plan.arms if arm.method == "dice-ce"]


def test_settings_come_from_the_study_the_dataset_and_the_variant(folder):
    plan = plan_of(folder)
    run = {(arm.dataset, arm.method, arm.seed): plan.runs[arm.run].config for arm in plan.arms}
    heavy = run["one", "heavy", 3]
    assert (heavy.loss.ace.weight, heavy.loss.ace.kernel, heavy.seed) == (4.0, "triangular", 3)
    assert heavy.training.epochs == 7
    assert run["two more", "heavy", 3].training.epochs == 5
    assert run["two more", "dice-ce", 0].network.name == "UNet"  # of the preset


def test_a_run_is_known_by_what_it_learns_from(folder):
    before, moved = plan_of(folder), plan_of(folder, SMALL.replace("two more", "other"))
    assert list(moved.runs)[:4] == list(before.runs)[:4]
    longer = plan_of(folder, SMALL.replace("set.training.epochs = 7", "set.training.epochs = 8"))
    assert not set(longer.runs) & set(list(before.runs)[:4])  # those of the first dataset
    assert list(longer.runs)[4:] == list(before.runs)[4:]
    changed = plan_of(folder, changes=["loss.ace.bins=10"])
    assert not set(changed.runs) & set(before.runs)


def test_two_datasets_of_one_kind_never_share_a_run(folder):
    same = SMALL.replace("set.training.epochs = 7", "").replace("b/Task00", "a/Task00")
    assert len(plan_of(folder, same).runs) == 8


def test_the_file_that_workers_read_says_the_same_from_anywhere(folder, tmp_path, monkeypatch):
    (folder / "mine.txt").write_text(
        "".join(f"{s} phantom_00{i}\n" for i, s in enumerate(["train", "validation", "test"]))
    )
    plan = plan_of(folder, SMALL + "[set.data]\nsplit = 'mine.txt'\n", changes=["training.batch_size=3"])
    plan.file.save(tmp_path / "study.toml")
    monkeypatch.chdir(tmp_path)
    again = make_plan(read_study("study.toml"), tmp_path / "elsewhere")
    assert again.runs.keys() == plan.runs.keys()
    config = next(iter(again.runs.values())).config
    assert (config.training.batch_size, config.data.split) == (3, str(folder / "mine.txt"))


def test_a_sweep_trains_each_setting_once(folder):
    text = """
    title = "Sweep"
    preset = "small"
    methods = ["dice-ce", "soft-ace"]
    sweep = { methods = ["soft-ace"], bins = [5, 20], weights = [0.5, 1, 2.0] }
    datasets.one = { dataset = "phantom", root = "a" }
    """
    plan = plan_of(folder, text)
    assert [(p.against, p.setting, p.label) for p in plan.points] == [
        ("bins", 5, "soft-ace, 5 bins"), ("bins", 20, "soft-ace"),
        ("lambda", 0.5, "soft-ace, λ 0.5"), ("lambda", 1, "soft-ace"), ("lambda", 2, "soft-ace, λ 2"),
    ]  # fmt: skip
    assert len(plan.runs) == 2 + 1 + 2
    run = {arm.method: plan.runs[arm.run].config.loss.ace for arm in plan.arms}
    assert (run["soft-ace, 5 bins"].bins, run["soft-ace, 5 bins"].weight) == (5, 1.0)
    assert (run["soft-ace, λ 2"].bins, run["soft-ace, λ 2"].weight) == (20, 2.0)


def test_the_shipped_studies_are_those_of_the_paper():
    shipped = shipped_studies()
    assert list(shipped) == [
        "acdc-small", "hippocampus", "hippocampus-balanced", "paper", "phantom", "phantom-sensitivity", "sensitivity",
    ]  # fmt: skip
    five = ("dice-ce", "ce", "dice-ce + temperature", "hard-ace", "soft-ace")
    for name in ("acdc-small", "paper", "phantom"):
        assert shipped[name].config.methods == five
    assert shipped["hippocampus"].config.methods == (*five[:3], "dice-ce + local-temperature", *five[3:])
    assert shipped["hippocampus"].config.seeds == (0, 1, 2)
    assert [part.dataset for part in shipped["paper"].config.datasets.values()] == ["acdc", "amos", "brats", "kits"]
    assert (shipped["paper"].config.preset, shipped["paper"].config.set) == ("paper", {})
    sweep = shipped["sensitivity"].config.sweep
    assert sweep is not None
    assert sweep.bins == (5, 10, 20, 50, 100)
    assert sweep.weights == (0.1, 0.25, 0.5, 1, 2, 4, 10)


def test_missing_data_are_told_and_stop_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("SEGCAL_DATA", raising=False)
    plan = make_plan(read_study("paper"), tmp_path)
    assert list(plan.missing) == ["ACDC 17", "AMOS 22", "BraTS 21", "KiTS 23"]
    assert "--data" in plan.missing["KiTS 23"]
    assert len(plan.arms) == 20
    assert all(run.opened is None for run in plan.runs.values())


def test_data_are_found_by_name_in_a_folder_or_by_the_environment(folder, monkeypatch):
    monkeypatch.delenv("SEGCAL_DATA", raising=False)
    text = SMALL.replace('"a/', '"nowhere/a/').replace('"b/', '"nowhere/b/')
    (folder / "elsewhere.toml").write_text(text, encoding="utf-8")
    study = read_study(folder / "elsewhere.toml")
    assert set(make_plan(study, folder / "out").missing) == {"one", "two more"}
    assert set(make_plan(study, folder / "out", data=[f"one={folder / 'a'}"]).missing) == {"two more"}
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "nowhere").symlink_to(folder)
    assert not make_plan(study, folder / "out", data=[str(folder / "data")]).missing
    monkeypatch.setenv("SEGCAL_DATA", str(folder / "data"))
    assert not make_plan(study, folder / "out").missing
    with pytest.raises(ConfigError, match=r"must name a dataset of the study .one, two more.; got 'three'"):
        make_plan(study, folder / "out", data=["three=there"])


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ('"heavy"]', '"heavier"]', "got 'heavier'"),
        ("+ temperature", "+ magic", "got 'dice-ce . magic'"),
        ('method = "soft-ace"', 'method = "softest"', "got 'heavy'"),
        ("seeds = [0, 3]", "seeds = []", "seeds"),
        ("seeds = [0, 3]", "seeeds = [0, 3]", "unknown key 'seeeds'. Did you mean 'seeds'"),
        ('dataset = "phantom"', 'dataset = "fantom"', "datasets.one.dataset must be"),
        ('root = "a/Task00_Phantom"', "", "datasets.one"),
        ("epochs = 5", "epoches = 5", "training.epoches"),
        ("set.loss.ace.weight = 4", "set.seed = 4", "leave seed to the study"),
        ('datasets."two more"', 'datasets."two/more"', "letters, digits"),
        ('title = "Two datasets"', "title = ", "must be TOML"),
        ('title = "Two datasets"', 'title = "Two"\nchoose = "dsc >= 0"', "unknown key 'choose'"),
        ("[set.training]", "[sweep]\nmethods = ['hard-ace']\n[set.training]", "'hard-ace' is not"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(folder, before, after, what):
    text = SMALL.replace(before, after)
    assert text != SMALL
    if 'root = "a' in before:
        text = text.replace('dataset = "phantom"\n\nset', 'dataset = "decathlon"\n\nset')
    with pytest.raises(ConfigError, match=what):
        plan_of(folder, text)


def test_what_is_no_study_names_those_there_are(tmp_path):
    with pytest.raises(FileError, match=r"one of acdc-small, .*nothing.toml is neither"):
        read_study(tmp_path / "nothing.toml")


def test_the_study_in_the_documentation_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("SEGCAL_DATA", raising=False)
    text = (Path(__file__).parents[2] / "docs/howto/run-the-study.md").read_text(encoding="utf-8")
    (block,) = (part.split("```")[0] for part in text.split("```toml\n")[1:] if part.startswith("title"))
    (tmp_path / "mine.toml").write_text(block, encoding="utf-8")
    plan = make_plan(read_study(tmp_path / "mine.toml"), tmp_path / "out")
    assert (len(plan.arms), len(plan.runs)) == (12, 9)
    assert "Dataset005_Prostate" in plan.missing["prostate"]


@pytest.mark.parametrize(("batch_size", "patches_per_case"), [(1, 1), (2, 1), (5, 1), (3, 2), (64, 3)])
def test_steps_per_epoch_are_the_batches_of_the_loader(tmp_path, batch_size, patches_per_case):
    changes = [f"training.batch_size={batch_size}", f"training.patches_per_case={patches_per_case}"]
    dataset = open_dataset("acdc", layouts.write_acdc(tmp_path, patients=7, test_patients=2))
    config = make_config(dataset="acdc", root=tmp_path, changes=["data.patch=[16, 8, 4]", *changes]).resolved(dataset)
    names = make_split(dataset).train
    cases = [case for case in dataset.cases if case.name in names]
    store = PreparedStore(tmp_path / "prepared", dataset, config.data)
    loader, _ = patch_loader(cases, store, config, Processes(0, 1, torch.device("cpu")))
    assert steps_per_epoch(len(cases), config) == len(loader)


@pytest.fixture
def shipped_plan(monkeypatch, tmp_path):
    """The plan of an included study, with the data that are given."""
    monkeypatch.delenv("SEGCAL_DATA", raising=False)
    return lambda name, **options: make_plan(read_study(name), tmp_path / "out", **options)


def test_without_data_the_steps_follow_from_the_cases_of_the_paper(shipped_plan):
    rows = describe_plan(shipped_plan("paper"))
    assert len(rows) == 4 * 4
    assert {row.dataset: row.steps for row in rows} == {  # patients (ACDC: two frames each) / batches of two x epochs
        "ACDC 17": 90 * 2 / 2 * 600,
        "AMOS 22": 216 / 2 * 600,
        "BraTS 21": 1000 / 2 * 1250,
        "KiTS 23": 352 / 2 * 1250,
    }
    assert rows[0] == ("ACDC_17-dice-ce-seed0", "ACDC 17", ("dice-ce", "dice-ce + temperature"), 0, 600, 54_000)
    assert [row.methods for row in rows[1:4]] == [("ce",), ("hard-ace",), ("soft-ace",)]


def test_runs_of_the_sensitivity_study_are_shared(shipped_plan):
    rows = describe_plan(shipped_plan("sensitivity"))
    assert len(rows) == 1 + 2 * (5 + 7 - 1)
    assert sum(len(row.methods) for row in rows) == 23
    assert {row.steps for row in rows} == {54_000}


def test_only_epochs_are_known_of_a_dataset_that_describes_itself(shipped_plan):
    rows = describe_plan(shipped_plan("hippocampus"))
    assert len(rows) == 4 * 3
    assert {(row.epochs, row.steps) for row in rows} == {(25, None)}


def test_with_data_the_row_has_the_name_of_the_folder(shipped_plan, tmp_path):
    layouts.write_acdc(tmp_path / "heart", patients=7, test_patients=2)
    plan = shipped_plan("paper", data=[f"ACDC 17={tmp_path / 'heart'}"])
    rows = describe_plan(plan)
    assert [row.run for row in rows[:4]] == list(plan.runs)[:4]
    assert [row.run for row in rows[4:8]] == [
        f"AMOS_22-{name}-seed0" for name in ("dice-ce", "ce", "hard-ace", "soft-ace")
    ]
    assert [row.steps for row in rows[:4]] == [6 * 600] * 4  # twelve frames of six patients
