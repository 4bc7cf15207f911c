"""Losses, metric and handler in MONAI's own engines: real steps of a real network, on data that carry metadata."""

from __future__ import annotations

import oracle
import pytest
import torch
from ignite.engine import Events
from monai.data import DataLoader, Dataset, MetaTensor, decollate_batch
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import from_engine
from monai.losses import DeepSupervisionLoss
from monai.networks.nets import SegResNetDS, UNet
from monai.transforms import Activations, Activationsd, AsDiscreted, Compose

from segcal import Binning, SegmentationLoss
from segcal.adapters.monai import CalibrationError, CalibrationErrorMetric, HardL1ACELoss, SoftL1ACELoss

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
MONAI_STYLE = {"softmax": True, "to_onehot_y": True}
SOFT = SegmentationLoss(binning=Binning(20, kernel="triangular"))
ACE_LOSSES = {"hard": HardL1ACELoss(**MONAI_STYLE), "soft": SoftL1ACELoss(**MONAI_STYLE)}


@pytest.fixture
def loader() -> DataLoader:
    """Four noisy cubes within cubes in batches of two: every class is in every case."""
    cases = []
    for shift in range(4):
        label = torch.zeros(1, 12, 12, 12)
        label[:, 2:8, 3:9, 3:9] = 1
        label[:, 4:7, 5:8, 5:8] = 2
        label = label.roll(shift, 1)
        cases.append({"image": MetaTensor(label + 0.7 * torch.randn(label.shape)), "label": MetaTensor(label)})
    return DataLoader(Dataset(cases), batch_size=2)


def small_unet() -> UNet:
    return UNet(spatial_dims=3, in_channels=1, out_channels=3, channels=(4, 8), strides=(2,), norm="BATCH")


def deep_network() -> SegResNetDS:
    """A list of two outputs while it trains, the second half as fine; one otherwise."""
    return SegResNetDS(in_channels=1, out_channels=3, init_filters=4, blocks_down=(1, 1, 1), norm="BATCH", dsdepth=2)


def train(network, loss, loader, *, epochs: int) -> list[float]:
    """The loss of each step."""
    losses: list[float] = []
    trainer = SupervisedTrainer(
        device=CPU,
        max_epochs=epochs,
        train_data_loader=loader,
        network=network,
        optimizer=torch.optim.Adam(network.parameters(), 1e-2),
        loss_function=loss,
        amp=False,
    )
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output[0]["loss"])
    )  # decollated: a dictionary for each case
    trainer.run()
    return losses


def predicted(network, loader) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (case, class, voxel) and one-hot labels, without any engine."""
    network.eval()
    with torch.no_grad():
        parts = [(network(batch["image"]).as_tensor().softmax(1), batch["label"].as_tensor()) for batch in loader]
    probabilities, labels = (torch.cat(part).flatten(2).double() for part in zip(*parts, strict=True))
    return probabilities, oracle.one_hot(labels[:, 0], 3)


def ace_by_hand(network, loader) -> float:
    return oracle.ace_loss(*predicted(network, loader), bins=20).item()


@pytest.mark.parametrize("kind", ACE_LOSSES)
def test_a_trainer_brings_the_calibration_error_down(kind, loader):
    network = small_unet()
    before = ace_by_hand(network, loader)
    losses = train(network, ACE_LOSSES[kind], loader, epochs=15)
    assert losses[-1] < losses[0]
    assert ace_by_hand(network, loader) < 0.8 * before


def test_the_fused_loss_trains_as_the_only_loss_of_a_trainer(loader):
    network = small_unet()
    before = ace_by_hand(network, loader)
    losses = train(network, SOFT, loader, epochs=15)
    assert len(losses) == 30
    assert losses[-1] < 0.7 * losses[0]
    assert ace_by_hand(network, loader) < 0.8 * before


def test_one_step_of_a_trainer_is_the_step_that_torch_takes(loader):
    """The loss reads MetaTensors as it reads tensors: the same weights come out."""
    torch.manual_seed(1)
    by_engine, by_hand = small_unet(), small_unet()
    by_hand.load_state_dict(by_engine.state_dict())
    (batch, *_) = list(loader)
    train(by_engine, SOFT, [batch], epochs=1)
    optimizer = torch.optim.Adam(by_hand.parameters(), 1e-2)
    by_hand.train()
    SOFT(by_hand(batch["image"].as_tensor()), batch["label"].as_tensor()).backward()
    optimizer.step()
    for ours, theirs in zip(by_engine.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("loss", [*ACE_LOSSES.values(), SOFT], ids=["hard", "soft", "fused"])
def test_deep_supervision_is_the_weighted_sum_over_outputs(loss, loader):
    (batch, *_) = list(loader)
    outputs = deep_network().train()(batch["image"])
    assert [tuple(output.shape[2:]) for output in outputs] == [(12, 12, 12), (6, 6, 6)]
    labels = batch["label"].as_tensor()
    coarse = labels[:, :, 1::2, 1::2, 1::2]  # nearest-exact: the voxel at the middle of two is the second
    expected = loss(outputs[0].as_tensor(), labels) + 0.5 * loss(outputs[1].as_tensor(), coarse)
    torch.testing.assert_close(DeepSupervisionLoss(loss)(outputs, batch["label"]).as_subclass(torch.Tensor), expected)


def test_the_fused_loss_takes_the_list_of_outputs_itself(loader):
    (batch, *_) = list(loader)
    outputs = deep_network().train()(batch["image"])
    by_monai = DeepSupervisionLoss(SOFT)(outputs, batch["label"])
    assert SOFT(outputs, batch["label"]).item() == pytest.approx(by_monai.item(), rel=1e-6)


@pytest.mark.parametrize("loss", [DeepSupervisionLoss(SOFT), SOFT], ids=["wrapped", "list"])
def test_a_trainer_with_deep_supervision_learns(loss, loader):
    network = deep_network()
    before = ace_by_hand(network, loader)
    losses = train(network, loss, loader, epochs=20)
    assert losses[-1] < 0.7 * losses[0]
    assert ace_by_hand(network, loader) < 0.8 * before


def evaluate(network, loader, *, one_hot: bool) -> SupervisedEvaluator:
    steps = [Activationsd("pred", softmax=True), *([AsDiscreted("label", to_onehot=3)] if one_hot else [])]
    read = from_engine(["pred", "label"])
    evaluator = SupervisedEvaluator(
        device=CPU,
        val_data_loader=loader,
        network=network,
        postprocessing=Compose(steps),
        key_val_metric={"ace": CalibrationError(calibration_reduction="average", output_transform=read)},
        additional_metrics={
            "foreground": CalibrationError(
                include_background=False, calibration_reduction="average", output_transform=read
            ),
            "ece": CalibrationError(output_transform=read),
        },
        metric_cmp_fn=lambda current, best: current < best,
        amp=False,
    )
    evaluator.run()
    return evaluator


@pytest.mark.parametrize("one_hot", [True, False], ids=["one-hot", "indices"])
def test_an_evaluator_reports_what_the_formula_gives(one_hot, loader):
    network = small_unet()
    train(network, SOFT, loader, epochs=3)
    state = evaluate(network, loader, one_hot=one_hot).state
    probabilities, labels = predicted(network, loader)
    count, confidence, label = oracle.bin_sums(probabilities, labels, bins=20)
    ece = ((confidence - label).abs().sum(2) / count.sum(2)).mean()
    assert state.metrics["ace"] == pytest.approx(oracle.ace_loss(probabilities, labels, bins=20).item(), abs=1e-6)
    assert state.metrics["foreground"] == pytest.approx(
        oracle.ace_loss(probabilities, labels, bins=20, background=False).item(), abs=1e-6
    )
    assert state.metrics["ece"] == pytest.approx(ece.item(), abs=1e-6)
    assert state.metric_details["ace"].shape == (4, 3)
    assert state.best_metric == state.metrics["ace"]


def test_the_smaller_error_is_the_better_one_where_the_evaluator_is_told_so(loader):
    network = small_unet()
    evaluator = evaluate(network, loader, one_hot=True)
    first = evaluator.state.metrics["ace"]
    train(network, ACE_LOSSES["soft"], loader, epochs=15)
    evaluator.run()
    assert evaluator.state.best_metric == evaluator.state.metrics["ace"] < first


def test_a_decollated_batch_measures_as_the_batch_does(loader):
    network = small_unet().eval()
    whole, parts = CalibrationErrorMetric(), CalibrationErrorMetric()
    for batch in loader:
        with torch.no_grad():
            batch["pred"] = network(batch["image"])
        cases = decollate_batch(batch)
        assert all(isinstance(case["pred"], MetaTensor) for case in cases)
        whole(batch["pred"].softmax(1), batch["label"])
        parts([Activations(softmax=True)(case["pred"]) for case in cases], [case["label"] for case in cases])
    torch.testing.assert_close(whole.get_buffer(), parts.get_buffer(), rtol=0, atol=0)
    assert whole.get_buffer().shape == (4, 3)
