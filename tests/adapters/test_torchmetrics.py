"""The torchmetrics metric: sums as state, the same over two processes, and inside a collection."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryCalibrationError

from segcal import ConfigError, ace, bin_statistics, ece, micro
from segcal.adapters.torchmetrics import CalibrationError


def batches(number=4):
    generator = torch.Generator().manual_seed(3)
    for _ in range(number):
        probabilities = torch.randn(2, 3, 50, generator=generator).softmax(1)
        yield probabilities, torch.randint(0, 3, (2, 50), generator=generator)


def everything(reading="pooled"):
    probabilities, labels = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    return micro(bin_statistics(probabilities, labels, bins=10), reading=reading)


def test_batches_add_up_to_the_error_of_all_voxels():
    metric = CalibrationError(3, error="ace", bins=10, average="none", background=True)
    for batch in batches():
        metric.update(*batch)
    torch.testing.assert_close(metric.compute(), ace(everything())[0])
    metric.reset()
    assert metric.count.sum() == 0


def test_a_binary_ece_equals_that_of_torchmetrics():
    generator = torch.Generator().manual_seed(0)
    # away from the edges: torchmetrics puts an edge in the bin below
    probabilities = (torch.randint(0, 10, (1, 1, 1000), generator=generator) + 0.3) / 10
    labels = torch.randint(0, 2, (1, 1, 1000), generator=generator)
    theirs = BinaryCalibrationError(n_bins=10, norm="l1")(probabilities.flatten(), labels.flatten())
    metric = CalibrationError(1, bins=10)
    metric.update(probabilities, labels)
    assert metric.compute().item() == pytest.approx(theirs.item(), abs=1e-6)


def test_it_works_in_a_collection_and_leaves_the_background_out_unless_asked_for():
    collection = MetricCollection(
        {"ece": CalibrationError(3, bins=10), "everything": CalibrationError(3, bins=10, background=True)}
    )
    for batch in batches():
        collection.update(*batch)
    values = collection.compute()
    errors = ece(everything())[0]
    assert values["ece"].item() == pytest.approx(errors[1:].mean().item())
    assert values["everything"].item() == pytest.approx(errors.mean().item())


def test_classes_one_by_one_are_those_that_count():
    metric = CalibrationError(3, error="ace", bins=10, average="none")
    for batch in batches():
        metric.update(*batch)
    torch.testing.assert_close(metric.compute(), ace(everything())[0, 1:])


def test_the_papers_micro_average_is_chosen_by_name():
    pooled, paper = (CalibrationError(3, error="ace", bins=10, **given) for given in ({}, {"micro": "paper"}))
    for batch in batches():
        pooled.update(*batch)
        paper.update(*batch)
    assert pooled.compute().item() == pytest.approx(ace(everything())[0, 1:].mean().item())
    assert paper.compute().item() == pytest.approx(ace(everything("paper"))[0, 1:].mean().item())
    assert abs(paper.compute() - pooled.compute()) > 1e-6


def test_unknown_errors_are_refused():
    with pytest.raises(ConfigError, match="error must be one of"):
        CalibrationError(3, error="mse")
    with pytest.raises(ConfigError, match="micro must be one of 'pooled', 'paper'; got 'macro'"):
        CalibrationError(3, micro="macro")


def one_process(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    metric = CalibrationError(3, error="ace", bins=10, average="none", background=True)
    for i, batch in enumerate(batches()):
        if i % 2 == rank:
            metric.update(*batch)
    torch.save(metric.compute(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_find_what_one_finds(tmp_path):
    mp.spawn(one_process, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(found, ace(everything())[0])
