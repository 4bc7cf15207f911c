"""The Lightning callback under real trainers: the errors of the whole set, on one process or two.

Run as a program this file is the training of the tests with two processes, which Lightning starts again for the second.
"""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from segcal import Binning, ConfigError, LabelError, SegmentationLoss, ShapeError, ace, bin_statistics, ece, mce
from segcal.adapters.lightning import CalibrationMonitor

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's use of torch
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
CLASSES, CASES, BATCH = 3, 7, 2
NAMES = ("background", "liver", "spleen")
PATIENCE = 170  # seconds, for two processes that import torch and Lightning


class Cases(Dataset):
    """Small images; the last class is missing in the second one."""

    def __init__(self, cases: int = CASES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.images = [torch.randn(1, 8, 9, 7, generator=generator).double() for _ in range(cases)]
        self.labels = [(3 * torch.rand(8, 9, 7, generator=generator) ** 2).long() for _ in range(cases)]
        self.labels[1].clamp_(max=1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, Tensor | str]:
        return {"image": self.images[i], "labels": self.labels[i], "name": f"patient{i}"}


class Net(LightningModule):
    """Learns a little; its steps return what the callback wants.

    In double precision, so that a voxel cannot change its bin with the batch that it is computed in.
    """

    def __init__(self, *, named: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Conv3d(1, CLASSES, 3, padding=1, dtype=torch.float64)
        self.loss = SegmentationLoss(binning=Binning(20, kernel="triangular"))
        self.named = named

    def training_step(self, batch, index):
        return self.loss(self.network(batch["image"]), batch["labels"])

    def validation_step(self, batch, index):
        names = {"cases": batch["name"]} if self.named else {}
        return {"logits": self.network(batch["image"]), "labels": batch["labels"], **names}

    def test_step(self, batch, index):
        return self.validation_step(batch, index)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def loader(cases: int = CASES) -> DataLoader:
    return DataLoader(Cases(cases), batch_size=BATCH)


def trainer(folder: Path, *callbacks, **options) -> Trainer:
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), **(settings | quiet | options))


def by_hand(network: nn.Module, *, bins: int = 20, cases: int = CASES) -> dict[str, float]:
    """What must be logged, from all cases at once."""
    data = Cases(cases)
    with torch.no_grad():
        probabilities = network(torch.stack(data.images)).softmax(1)
    stats = bin_statistics(probabilities, torch.stack(data.labels), bins=bins)
    values = {}
    for name, error in (("ace", ace), ("ece", ece), ("mce", mce)):
        micro, macro = error(stats.pool("case"))[0, 1:], error(stats)[:, 1:]
        values[name] = (micro[0] + micro[1]).item() / 2
        values[f"{name}_macro"] = sum(row.nanmean().item() for row in macro) / cases
        for i, label in enumerate(NAMES[1:]):
            values[f"{name}_{label}"] = micro[i].item()
            values[f"{name}_macro_{label}"] = macro[:, i].nanmean().item()
    return values


def logged(found, stage: str = "val") -> dict[str, float]:
    return {name.removeprefix(f"{stage}_"): float(value) for name, value in found.items() if name.startswith(stage)}


def only_means(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.endswith(NAMES)}


def test_values_are_those_of_all_cases_at_once_over_voxels_and_over_cases(tmp_path):
    monitor, net = CalibrationMonitor(activation="softmax"), Net()
    run = trainer(tmp_path, monitor)
    run.fit(net, loader(), loader())
    expected = only_means(by_hand(net.network))
    assert set(expected) == {f"{metric}{average}" for metric in ("ace", "ece", "mce") for average in ("", "_macro")}
    assert logged(run.callback_metrics) == pytest.approx(expected, rel=1e-5)
    voxels = 8 * 9 * 7
    assert monitor.statistics.count.sum(-1).tolist() == [[voxels] * CLASSES] * CASES
    assert not monitor.statistics.count.is_inference()  # or it could not be used with gradients
    assert monitor.cases is None


def test_validate_and_test_log_each_class_that_has_a_name(tmp_path):
    monitor, net = CalibrationMonitor(activation="softmax", bins=10, class_names=NAMES), Net(named=True)
    run = trainer(tmp_path, monitor)
    run.validate(net, loader(), verbose=False)
    assert logged(run.callback_metrics) == pytest.approx(by_hand(net.network, bins=10), rel=1e-5)
    assert monitor.cases == tuple(f"patient{i}" for i in range(CASES))
    run.test(net, loader(), verbose=False)
    assert logged(run.callback_metrics, "test") == pytest.approx(by_hand(net.network, bins=10), rel=1e-5)


def test_the_papers_micro_average_is_chosen_by_name_and_leaves_means_over_cases_alone(tmp_path):
    """Confidences of 0.2 (three voxels) and 0.6 (one voxel) in one bin; no label is true."""
    batches = [torch.tensor([[[0.2, 0.2, 0.2]]]), torch.tensor([[[0.6]]])]

    class Constant(LightningModule):
        def validation_step(self, batch, index):
            return {"probabilities": batches[index], "labels": torch.zeros_like(batches[index])}

    for given, expected in (({}, (3 * 0.2 + 0.6) / 4), ({"micro": "paper"}, (0.2 + 0.6) / 2)):
        run = trainer(tmp_path, CalibrationMonitor(activation="none", background=True, bins=1, **given))
        run.validate(Constant(), DataLoader([0, 1]), verbose=False)
        found = logged(run.callback_metrics)
        assert found["ace"] == pytest.approx(expected, abs=1e-6)
        assert found["ace_macro"] == pytest.approx((0.2 + 0.6) / 2, abs=1e-6)


def test_an_error_can_be_worked_out_on_paper(tmp_path):
    """Two voxels with the probability 0.9, one of them right: a gap of 0.4 in one bin."""

    class Constant(LightningModule):
        def validation_step(self, batch, index):
            return {"probabilities": torch.full((1, 1, 2), 0.9), "labels": torch.tensor([[[1, 0]]])}

    run = trainer(tmp_path, CalibrationMonitor(activation="none", background=True, bins=10))
    run.validate(Constant(), DataLoader([0]), verbose=False)
    assert logged(run.callback_metrics) == pytest.approx(
        dict.fromkeys(["ace", "ece", "mce", "ace_macro", "ece_macro", "mce_macro"], 0.4), abs=1e-6
    )


@pytest.mark.parametrize(
    ("background", "first"), [(None, 0), (True, 0), (False, 1)], ids=["not given", "counted", "left out"]
)
def test_the_channels_of_a_sigmoid_are_regions_without_a_background_unless_told(tmp_path, background, first):
    logits, labels = torch.randn(2, 3, 50), torch.randint(0, 2, (2, 3, 50))
    mask = torch.rand(2, 50) < 0.5

    class Regions(LightningModule):
        def validation_step(self, batch, index):
            return logits, labels

    monitor = CalibrationMonitor(
        activation="sigmoid",
        background=background,
        read=lambda outputs, batch: {"logits": outputs[0], "labels": outputs[1], "mask": mask},
    )
    run = trainer(tmp_path, monitor)
    run.validate(Regions(), DataLoader([0]), verbose=False)
    stats = bin_statistics(logits.sigmoid(), labels, mask=mask).pool("case")
    assert logged(run.callback_metrics)["ece"] == pytest.approx(ece(stats)[0, first:].mean().item(), rel=1e-5)


def test_half_precision_is_widened_before_the_softmax_and_ignored_labels_are_left_out(tmp_path):
    logits, labels = torch.randn(1, 2, 400, dtype=torch.bfloat16), torch.randint(0, 2, (1, 400))
    labels[0, 100:] = 255

    class Half(LightningModule):
        def validation_step(self, batch, index):
            return {"logits": logits, "labels": labels}

    monitor = CalibrationMonitor(activation="softmax", ignore_index=255)
    trainer(tmp_path, monitor).validate(Half(), DataLoader([0]), verbose=False)
    right = bin_statistics(logits.float().softmax(1)[..., :100], labels[..., :100])
    assert torch.equal(monitor.statistics.count, right.count)
    assert torch.allclose(monitor.statistics.confidence_sum, right.confidence_sum, rtol=1e-12)


def test_the_sanity_check_is_neither_counted_nor_logged(tmp_path):
    seen = []

    class Watched(CalibrationMonitor):
        def on_train_start(self, trainer, pl_module):
            seen.append((self.statistics, logged(trainer.callback_metrics)))

    monitor = Watched(activation="softmax")
    run = trainer(tmp_path, monitor, num_sanity_val_steps=2)
    run.fit(Net(), loader(), loader())
    assert seen == [(None, {})]
    assert monitor.statistics.cases == CASES


def test_a_checkpoint_and_an_early_stop_can_follow_the_error(tmp_path):
    keeper = ModelCheckpoint(tmp_path / "kept", monitor="val_ace", filename="{epoch}-{val_ace:.6f}", mode="min")
    stopper = EarlyStopping("val_ece_macro", patience=100)
    run = trainer(
        tmp_path,
        CalibrationMonitor(activation="softmax"),
        keeper,
        stopper,
        max_epochs=4,
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path, "csv"),
    )
    run.fit(Net(), loader(), loader())
    with (Path(run.logger.log_dir) / "metrics.csv").open() as file:
        errors = [float(row["val_ace"]) for row in csv.DictReader(file) if row.get("val_ace")]
    assert len(set(errors)) == 4  # an epoch's own each time
    assert keeper.best_model_score.item() == pytest.approx(min(errors), rel=1e-5)
    assert f"epoch={errors.index(min(errors))}-val_ace={min(errors):.6f}" in keeper.best_model_path
    assert stopper.best_score.isfinite()


def images(folder: Path) -> dict[str, list[tuple[int, bytes]]]:
    """Step and PNG of each image in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), size_guidance={"images": 0})
    board.Reload()
    return {
        tag: [(event.step, event.encoded_image_string) for event in board.Images(tag)] for tag in board.Tags()["images"]
    }


def test_a_diagram_reaches_tensorboard_every_so_many_validations(tmp_path):
    import io

    import matplotlib.image

    run = trainer(
        tmp_path,
        CalibrationMonitor(activation="softmax", class_names=NAMES, diagram_every=2),
        max_epochs=4,
        logger=[TensorBoardLogger(tmp_path, "board"), CSVLogger(tmp_path, "csv")],
    )
    run.fit(Net(), loader(), loader())
    found = images(Path(run.loggers[0].log_dir))
    steps = math.ceil(CASES / BATCH)
    assert [step for step, _ in found["val_reliability"]] == [steps, 3 * steps]
    drawn = matplotlib.image.imread(io.BytesIO(found["val_reliability"][0][1]), format="png")
    assert drawn.shape[1] > 400
    assert 0.02 < (drawn[..., :3] < 0.5).any(-1).mean() < 0.6  # neither blank nor all ink


def test_no_diagram_is_drawn_where_none_is_wanted_or_none_can_go(tmp_path, monkeypatch):
    from segcal.adapters import lightning

    monkeypatch.setattr(lightning, "_diagram", lambda *arguments: pytest.fail("drawn"))
    for options, logger in (({}, CSVLogger(tmp_path)), ({"diagram_every": 0}, TensorBoardLogger(tmp_path))):
        run = trainer(tmp_path, CalibrationMonitor(activation="softmax", **options), logger=logger)
        run.validate(Net(), loader(), verbose=False)


def test_a_logger_with_log_image_gets_the_diagram(tmp_path):
    """Weights & Biases' logger has this method; it takes arrays."""
    came = []

    class Images(CSVLogger):
        def log_image(self, key, images, step=None):
            came.append((key, [image.shape[2] for image in images], images[0].dtype.name, step))

    run = trainer(tmp_path, CalibrationMonitor(activation="softmax"), logger=Images(tmp_path))
    run.validate(Net(), loader(), verbose=False)
    assert came == [("val_reliability", [3], "uint8", 0)]


def test_one_monitor_sees_one_of_several_loaders(tmp_path):
    class Two(Net):
        def validation_step(self, batch, index, dataloader_idx=0):
            return super().validation_step(batch, index)

    inner = CalibrationMonitor(activation="softmax")
    outer = CalibrationMonitor(activation="softmax", loader=1, prefix="outer_")
    net, run = Two(), trainer(tmp_path, inner, outer)
    run.validate(net, [loader(), loader(3)], verbose=False)
    assert logged(run.callback_metrics) == pytest.approx(only_means(by_hand(net.network)), rel=1e-5)
    found = logged(run.callback_metrics, "outer_val")
    assert found == pytest.approx(only_means(by_hand(net.network, cases=3)), rel=1e-5)
    assert (inner.statistics.cases, outer.statistics.cases) == (CASES, 3)


def test_two_monitors_of_one_name_are_refused(tmp_path):
    monitors = [CalibrationMonitor(activation="softmax", loader=i) for i in range(2)]
    with pytest.raises(ConfigError, match="must have a prefix of its own; several have ''"):
        trainer(tmp_path, *monitors).validate(Net(), loader(), verbose=False)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "validation_step must return a dict with the tensors 'logits' and 'labels' .*; got nothing"),
        (torch.zeros(1, 2, 3), "got a Tensor"),
        ({}, "got a dict of nothing"),
        ({"probabilities": torch.zeros(1, 2, 3), "labels": torch.zeros(1, 3)}, r"probabilities \(Tensor\), labels"),
        ({"logits": [torch.zeros(1, 2, 3)], "labels": torch.zeros(1, 3)}, r"got a dict of logits \(list\), labels"),
    ],
)
def test_a_step_that_returns_something_else_is_refused_before_the_training(tmp_path, returned, message):
    class Wrong(Net):
        def validation_step(self, batch, index):
            return returned

        def training_step(self, batch, index):
            pytest.fail("trained")

    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, CalibrationMonitor(activation="softmax")).fit(Wrong(), loader(), loader())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation": "argmax"}, ConfigError, "activation must be one of 'softmax', 'sigmoid', 'none'"),
        (
            {"activation": "softmax", "micro": "macro"},
            ConfigError,
            "micro must be one of 'pooled', 'paper'; got 'macro'",
        ),
        ({"activation": "none"}, ConfigError, "background must be given with activation='none'"),
        (
            {"activation": "softmax", "bins": 5, "binning": Binning(5)},
            ConfigError,
            "bins and binning must not be given together",
        ),
        ({"activation": "softmax", "class_names": ("bg", "x", "x")}, ConfigError, "'x' came more than once"),
    ],
)
def test_options_that_say_too_little_or_too_much_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        CalibrationMonitor(**options)
    with pytest.raises(TypeError, match="activation"):
        CalibrationMonitor()


@pytest.mark.parametrize(
    ("options", "more", "error", "message"),
    [
        ({"class_names": NAMES}, {}, ShapeError, "one name per class, the background's included; got 3 for 2 classes"),
        ({}, {"cases": ["a"]}, ShapeError, r"one name for each case of the batch \(2\); got 1"),
        ({}, {"cases": ["a", "a"]}, LabelError, "'a' came with different labels"),
        ({}, {"logits": torch.zeros(2, 1, 4)}, ShapeError, 'got one channel. Use activation="sigmoid"'),
        ({"background": True}, {"logits": torch.zeros(2, 1, 4)}, ShapeError, 'got one channel. Use activation="sigm'),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, options, more, error, message):
    returned = {"logits": torch.randn(2, 2, 4), "labels": torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]])} | more

    class Wrong(LightningModule):
        def validation_step(self, batch, index):
            return returned

    with pytest.raises(error, match=message):
        trainer(tmp_path, CalibrationMonitor(activation="softmax", **options)).validate(
            Wrong(), DataLoader([0]), verbose=False
        )


def test_a_case_that_came_again_counts_once(tmp_path):
    returned = {"logits": torch.randn(2, 2, 40), "labels": torch.randint(0, 2, (2, 40)), "cases": torch.tensor([8, 9])}

    class Again(LightningModule):
        def validation_step(self, batch, index):
            return returned

    monitor = CalibrationMonitor(activation="softmax")
    trainer(tmp_path, monitor).validate(Again(), DataLoader([0, 0]), verbose=False)
    assert monitor.cases == (8, 9)
    assert monitor.statistics.count.sum() == 2 * 2 * 40


def test_a_trainer_of_pytorch_lightning_takes_it_too(tmp_path):
    older = pytest.importorskip("pytorch_lightning")

    class Older(older.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Net().network

        def validation_step(self, batch, index):
            return {"logits": self.network(batch["image"]), "labels": batch["labels"]}

    net = Older()
    run = older.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=tmp_path, callbacks=[CalibrationMonitor(activation="softmax")],
    )  # fmt: skip
    run.validate(net, loader(), verbose=False)
    assert logged(run.callback_metrics) == pytest.approx(only_means(by_hand(net.network)), rel=1e-5)


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """What two processes wrote that ran this file as a program."""
    folder = tmp_path_factory.mktemp("together")
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "sync_dist" not in done.stderr  # what Lightning says where processes may log different values
    return folder


def test_two_processes_find_what_one_finds_and_count_a_case_dealt_twice_once(together, tmp_path):
    first, second = (torch.load(together / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["dealt"] + second["dealt"] == CASES + 1  # what Lightning's sampler does to make shares equal
    net = Net()
    net.load_state_dict(first["network"])
    for found in (first, second):
        assert found["metrics"] == pytest.approx(by_hand(net.network), rel=1e-5)
        assert sorted(found["cases"]) == [f"patient{i}" for i in range(CASES)]
    monitor = CalibrationMonitor(activation="softmax")
    trainer(tmp_path, monitor).validate(net, loader(), verbose=False)
    order = [int(name.removeprefix("patient")) for name in first["cases"]]
    assert torch.equal(first["count"], monitor.statistics.count[order])
    assert torch.allclose(first["confidence_sum"], monitor.statistics.confidence_sum[order], rtol=1e-12)


def test_two_processes_log_one_diagram(together):
    (folder,) = (together / "board").iterdir()
    assert len(images(folder)["val_reliability"]) == 1


def test_two_processes_without_names_of_cases_are_refused(together):
    assert "cases must have names on 2 processes" in (together / "refused.txt").read_text()


def main(folder: Path) -> None:
    net, monitor = Net(named=True), CalibrationMonitor(activation="softmax", class_names=NAMES)
    run = trainer(folder, monitor, strategy="ddp", devices=2, logger=TensorBoardLogger(folder, "board"))
    run.fit(net, loader(), loader())
    content = {
        "network": net.state_dict(),
        "metrics": logged(run.callback_metrics),
        "cases": monitor.cases,
        "count": monitor.statistics.count,
        "confidence_sum": monitor.statistics.confidence_sum,
        "dealt": len(run.val_dataloaders.sampler),
    }
    torch.save(content, folder / f"{run.global_rank}.pt")
    try:
        run.validate(Net(), loader())
    except ConfigError as error:
        if run.is_global_zero:
            (folder / "refused.txt").write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
