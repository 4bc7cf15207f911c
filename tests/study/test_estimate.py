"""Steps and operations are checked against the loader, MONAI, and arithmetic by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import layouts
import pytest
import torch
from monai.inferers import sliding_window_inference
from monai.networks import nets

from segcal.datasets import known_dataset, make_split, open_dataset
from segcal.errors import ConfigError
from segcal.study.estimate import (
    WINDOWS,
    Cost,
    count_windows,
    cpu_hours,
    describe_plan,
    estimate,
    forward_flop,
    steps_per_epoch,
    total,
)
from segcal.study.plan import Fitting, PlannedRun, make_plan, read_study
from segcal.training.config import make_config
from segcal.training.data import patch_loader
from segcal.training.distributed import Processes
from segcal.training.preprocessing import PreparedStore

UNET = 'network={name="UNet", options={channels=[4, 8], strides=[2], num_res_units=0}}'


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    monkeypatch.delenv("SEGCAL_DATA", raising=False)


def unet_flop(channels, classes, voxels):
    """Down to 4 channels at an eighth of the voxels, 8 at the bottom, and up again from both: 27 weights each."""
    inner = voxels // 8
    return 2 * 27 * inner * (channels * 4 + 4 * 8 + (4 + 8) * classes)


def planned(root, *changes, network=UNET, fittings=()):
    dataset = open_dataset("acdc", layouts.write_acdc(root, patients=7, test_patients=2))
    config = make_config(dataset="acdc", root=root, changes=[network, "data.patch=[16, 8, 4]", *changes])
    return PlannedRun("heart", config.resolved(dataset), dataset, fittings)


def plan_of(name, out):
    return make_plan(read_study(name), out)


@pytest.mark.parametrize(("channels", "patch"), [(1, (8, 8, 8)), (4, (16, 8, 12))])
def test_operations_are_those_of_the_layers(channels, patch):
    dataset = replace(known_dataset("acdc"), channels=("MRI",) * channels)
    config = make_config(dataset="acdc", root="nowhere", changes=[UNET]).resolved(dataset)
    assert forward_flop(config, dataset, patch) == unet_flop(channels, 4, math.prod(patch))


def test_operations_of_the_paper_network_grow_with_the_patch():
    dataset = known_dataset("kits")
    config = make_config(dataset="kits", root="nowhere").resolved(dataset)
    once, eight_times = (forward_flop(config, dataset, (n, n, n)) for n in (128, 256))
    assert eight_times == 8 * once > 1e12


def test_a_network_that_does_not_fit_is_refused(tmp_path):
    run = planned(tmp_path, network='network={name="UNet", options={channels=[3]}}')
    with pytest.raises(ConfigError, match=r"network\.options must fit UNet"):
        estimate(run)


def test_a_network_that_needs_values_to_be_made_is_counted(tmp_path, monkeypatch):
    class Needs(torch.nn.Module):
        def __init__(self, in_channels, out_channels):
            super().__init__()
            width = int(torch.ones(1).item())
            self.layer = torch.nn.Conv3d(in_channels, out_channels, width)

        def forward(self, image):
            return self.layer(image)

    monkeypatch.setattr(nets, "Needs", Needs, raising=False)
    run = planned(tmp_path, network="network.name=Needs")
    assert forward_flop(run.config, run.opened, (2, 3, 5)) == 2 * 1 * 4 * 30


def test_a_network_that_looks_at_values_has_no_known_cost(tmp_path, monkeypatch):
    class Looks(torch.nn.Module):
        def forward(self, image):
            return image if image.sum() > 0 else -image

    monkeypatch.setattr(nets, "Looks", Looks, raising=False)
    cost = estimate(planned(tmp_path, "training.epochs=2", network="network.name=Looks"))
    assert cost.steps == 2 * 6
    assert math.isnan(cost.hours(1.0))


@pytest.mark.parametrize(("batch_size", "patches_per_case"), [(1, 1), (2, 1), (5, 1), (3, 2), (64, 3)])
def test_steps_are_those_of_the_loader(tmp_path, batch_size, patches_per_case):
    changes = f"training.batch_size={batch_size}", f"training.patches_per_case={patches_per_case}", "training.epochs=3"
    run = planned(tmp_path, *changes)
    names = make_split(run.opened).train
    cases = [case for case in run.opened.cases if case.name in names]
    store = PreparedStore(tmp_path / "prepared", run.opened, run.config.data)
    loader, _ = patch_loader(cases, store, run.config, Processes(0, 1, torch.device("cpu")))
    assert steps_per_epoch(len(cases), run.config) == len(loader)
    assert estimate(run).steps == 3 * len(loader)


def test_cost_of_a_run_by_hand(tmp_path):
    """Seven patients: six to train, one to validate, two of the test; two frames each, one window an image."""
    changes = "training.epochs=7", "training.validate_every=3", "data.inference_patch=[32, 16, 8]"
    run = planned(tmp_path, *changes, fittings=(Fitting("temperature"), Fitting("vector")))
    cost = estimate(run)
    assert (cost.epochs, cost.steps) == (7, 7 * 6)
    assert cost.training_pflop == pytest.approx(7 * 6 * 2 * 3 * unet_flop(1, 4, 16 * 8 * 4) / 1e15)
    while_training, in_the_end, for_fitting = 3 * 2, 3 * (2 + 4), 2 * 2
    images = while_training + in_the_end + for_fitting
    assert cost.inference_pflop == pytest.approx(images * unet_flop(1, 4, 32 * 16 * 8) / 1e15)


def test_windows_are_counted_after_resampling(tmp_path):
    """Images of 12 x 10 x 6 voxels of 1.5 x 1.5 x 5 mm: 18 x 15 x 30 of 1 mm, 2 x 1 x 3 windows."""
    run = planned(tmp_path, "data.spacing_mm=[1, 1, 1]", "data.inference_patch=[16, 16, 16]", "training.epochs=1")
    kept = planned(tmp_path / "kept", "data.spacing_mm=keep", "data.inference_patch=[16, 16, 16]", "training.epochs=1")
    assert estimate(run).inference_pflop == pytest.approx(6 * estimate(kept).inference_pflop)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.99])
@pytest.mark.parametrize("size", [(8, 8, 8), (9, 12, 5), (17, 14, 15), (24, 25, 8)])
def test_windows_are_those_of_monai(size, overlap):
    seen = []

    def predictor(windows):
        seen.append(len(windows))
        return windows

    sliding_window_inference(torch.zeros(1, 1, *size), (8, 6, 7), 1, predictor, overlap=overlap)
    assert count_windows(size, (8, 6, 7), overlap) == sum(seen)


def test_hours_are_operations_over_speed():
    assert Cost(1, 1, 80.0, 10.0).hours(25.0) == 1.0
    assert Cost(1, 1, 80.0, 10.0).hours(50.0) == 0.5
    with pytest.raises(ConfigError, match="tflops must be above 0"):
        Cost(1, 1, 1.0, 1.0).hours(0.0)


def test_the_paper_has_sixteen_runs_without_any_data(tmp_path):
    rows = describe_plan(plan_of("paper", tmp_path))
    steps = {row.dataset: row.steps for row in rows}
    assert len(rows) == 4 * 4
    # patients (ACDC: two frames each) / batches of two x epochs
    assert steps == {
        "ACDC 17": 90 * 2 / 2 * 600,
        "AMOS 22": 216 / 2 * 600,
        "BraTS 21": 1000 / 2 * 1250,
        "KiTS 23": 352 / 2 * 1250,
    }
    assert rows[0].run == "ACDC_17-dice-ce-seed0"
    assert rows[0].methods == ("dice-ce", "dice-ce + temperature")
    assert (rows[0].seed, rows[0].epochs) == (0, 600)
    assert [row.methods for row in rows[1:4]] == [("ce",), ("hard-ace",), ("soft-ace",)]
    assert rows[0].hours > rows[1].hours  # the temperature
    together = total(rows)
    assert together[:3] == (16, 0, 4 * sum(steps.values()))
    assert together.hours == pytest.approx(sum(row.hours for row in rows))
    halved = total(describe_plan(plan_of("paper", tmp_path), 50.0))
    assert halved.hours == pytest.approx(together.hours / 2)


def test_cost_without_data_by_hand(tmp_path):
    acdc, amos = (next(run for run in plan_of("paper", tmp_path).runs.values() if run.dataset == name and run.fittings)
                  for name in ("ACDC 17", "AMOS 22"))  # fmt: skip
    dataset = known_dataset("acdc")
    flop = forward_flop(acdc.config.resolved(dataset), dataset, (256, 256, 16))
    images = 20 * 60 + 2 * (20 + 100) + 20
    assert estimate(acdc).training_pflop == pytest.approx(54_000 * 2 * 3 * flop / 1e15)
    assert estimate(acdc).inference_pflop == pytest.approx(images * WINDOWS * flop / 1e15)
    dataset = known_dataset("amos")
    flop = forward_flop(amos.config.resolved(dataset), dataset, (192, 192, 64))
    images = 24 * 60 + 2 * 24 + 24  # test images are not counted by the paper
    assert estimate(amos).inference_pflop == pytest.approx(images * WINDOWS * flop / 1e15)


def test_the_sensitivity_study_shares_what_coincides(tmp_path):
    rows = describe_plan(plan_of("sensitivity", tmp_path))
    assert len(rows) == 1 + 2 * (5 + 7 - 1)
    assert sum(len(row.methods) for row in rows) == 23
    assert {row.steps for row in rows} == {54_000}


def test_only_epochs_are_known_of_a_dataset_that_describes_itself(tmp_path):
    rows = describe_plan(plan_of("hippocampus", tmp_path))
    assert len(rows) == 4 * 3
    assert {row.epochs for row in rows} == {25}
    assert all(math.isnan(row.steps) and math.isnan(row.hours) for row in rows)
    assert total(rows) == (12, 12, 0, 0.0)
    run = next(iter(plan_of("hippocampus", tmp_path).runs.values()))
    open_epochs = make_config(dataset="decathlon", root="nowhere")
    assert estimate(replace(run, config=open_epochs)).epochs == 600


def test_with_data_the_name_is_that_of_the_folder(tmp_path):
    layouts.write_acdc(tmp_path / "heart", patients=7, test_patients=2)
    plan = make_plan(read_study("paper"), tmp_path, data=[f"ACDC 17={tmp_path / 'heart'}"])
    rows = describe_plan(plan)
    assert [row.run for row in rows[:4]] == list(plan.runs)[:4]
    assert [row.run for row in rows[4:8]] == [
        f"AMOS_22-{name}-seed0" for name in ("dice-ce", "ce", "hard-ace", "soft-ace")
    ]
    assert [row.steps for row in rows[:4]] == [6 * 600] * 4  # twelve frames of six patients


def test_a_training_on_a_cpu_takes_its_steps_times_what_one_takes(tmp_path, monkeypatch):
    run = planned(tmp_path, "training.batch_size=2")
    clock = iter(range(0, 1000, 6))  # every look at it is 6 s later, so that a step on one patch takes 6 s
    monkeypatch.setattr("segcal.study.estimate.time.perf_counter", lambda: next(clock))
    cost = estimate(run)
    windows = cost.inference_pflop / (forward_flop(run.config, run.opened, run.config.data.inference_patch) / 1e15)
    inference = windows * math.prod(run.config.data.inference_patch) / (16 * 8 * 4) / 3  # a third of a step, by voxels
    assert cpu_hours(run.config, run.opened) == pytest.approx(6 * (2 * cost.steps + inference) / 3600, rel=1e-6)
