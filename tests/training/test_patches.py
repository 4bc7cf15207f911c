"""Patches: drawn from seed, epoch and index alone; image and labels altered alike."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from monai import transforms

from segcal.training.config import make_config
from segcal.training.data import EpochOrder, Patches, augmentation, cut_patch, patch_loader, patch_start
from segcal.training.distributed import Processes
from segcal.training.preprocessing import OriginalGrid, PreparedCase

SHAPE, PATCH = (20, 18, 16), (12, 8, 8)
CLASSES = 4
CPU = torch.device("cpu")


def prepared(shape=SHAPE, *, labeled=True) -> PreparedCase:
    """Labels of thick slabs, which the image repeats: what alters one must alter the other alike."""
    labels = np.zeros(shape, np.uint8)
    if labeled:
        for value, axis in ((1, 0), (2, 1), (3, 2)):
            np.moveaxis(labels, axis, 0)[1 + 3 * value : 5 + 3 * value] = value
    geometry = OriginalGrid(shape, ((0, 1), (1, 1), (2, 1)), tuple((0, n) for n in shape))
    return PreparedCase(labels[None].astype(np.float32), labels, np.argwhere(labels).astype(np.int32), geometry)


def patches(*, cases=2, augmented="affine", seed=0, sampling="foreground", patch=PATCH) -> Patches:
    config = make_config(
        dataset="acdc",
        root="nowhere",
        changes=[
            f"seed={seed}",
            f"data.patch={list(patch)}",
            f"data.augmentation={augmented}",
            f"data.sampling={sampling}",
        ],
    )
    ready = prepared()
    return Patches([SimpleNamespace(name=str(i)) for i in range(cases)], SimpleNamespace(get=lambda _: ready), config)


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("augmented", ["affine", "brats", "none"])
def test_a_patch_follows_from_seed_epoch_and_index_whatever_was_drawn_before(augmented):
    first = patches(augmented=augmented)
    wanted = [first[epoch, index] for epoch in (1, 2) for index in range(4)]
    torch.manual_seed(99)
    np.random.seed(99)  # what MONAI falls back to
    again = patches(augmented=augmented)
    backwards = [again[epoch, index] for epoch in (2, 1) for index in (3, 2, 1, 0)][::-1]
    assert all(equal(a, b) for a, b in zip(wanted, backwards, strict=True))


@pytest.mark.parametrize("augmented", ["affine", "brats"])
def test_other_seeds_epochs_and_indices_give_other_patches(augmented):
    some = patches(augmented=augmented)
    drawn = [some[epoch, index] for epoch in range(3) for index in range(4)]
    drawn += [patches(augmented=augmented, seed=1)[0, index] for index in range(4)]
    same = sum(equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    assert same < 0.05 * len(drawn) * (len(drawn) - 1) / 2


@pytest.mark.parametrize("augmented", ["affine", "brats", "none"])
def test_images_are_float_and_labels_stay_class_indices(augmented):
    some = patches(augmented=augmented)
    for index in range(12):
        image, labels = some[0, index]
        assert (image.dtype, image.shape) == (torch.float32, (1, *PATCH))
        assert (labels.dtype, labels.shape) == (torch.uint8, PATCH)
        assert set(labels.unique().tolist()) <= set(range(CLASSES))
        assert image.isfinite().all()
        assert type(image) is type(labels) is torch.Tensor  # MONAI's own kind is slow, and not for a loss


def always(name: str) -> list[tuple[str, transforms.Randomizable]]:
    return [(type(each).__name__, each) for each in augmentation(name, SHAPE).transforms]


SPATIAL = [
    (kind, name)
    for name in ("affine", "brats")
    for kind, each in always(name)
    if kind in ("RandAffined", "RandZoomd", "RandRotated", "RandFlipd")
]


def middle(volume: torch.Tensor) -> torch.Tensor:
    """Center of mass."""
    axes = (volume.sum(others) for others in ((1, 2), (0, 2), (0, 1)))
    return torch.stack([(torch.arange(len(each)) * each).sum() / each.sum() for each in axes])


@pytest.mark.parametrize(("kind", "name"), SPATIAL)
def test_image_and_labels_stay_aligned_under_each_change_of_place(kind, name, monkeypatch):
    change = dict(always(name))[kind]
    inner = getattr(change, "rand_affine", change)
    for one in {id(each): each for each in (change, inner)}.values():
        monkeypatch.setattr(one, "prob", 1.0)
    place = torch.stack(torch.meshgrid(*[torch.arange(24.0)] * 3, indexing="ij"), -1)
    labels = (torch.linalg.norm(place - torch.tensor([9.3, 10.7, 12.4]), dim=-1) < 6.2).float()[None]
    moved, apart = 0, []
    for seed in range(32):
        change.set_random_state(seed=seed)
        found = change({"image": labels.clone(), "labels": labels.clone()})
        image, truth = (found[key].as_subclass(torch.Tensor)[0] for key in ("image", "labels"))
        moved += not torch.equal(truth, labels[0])
        assert set(truth.unique().tolist()) == {0, 1}
        apart.append(middle(image) - middle(truth))
    assert moved > 24
    assert torch.stack(apart).abs().max() < 0.6  # labels jump by whole voxels
    assert torch.stack(apart).mean(0).abs().max() < 0.1  # but not one way


def test_the_papers_augmentations_are_there():
    assert [kind for kind, _ in always("affine")] == ["RandAffined"]
    assert [kind for kind, _ in always("brats")] == [
        "RandZoomd", "RandRotated", "RandGaussianNoised", "RandGaussianSmoothd", "RandAdjustContrastd", "RandFlipd",
    ]  # fmt: skip
    assert [each.prob for _, each in always("brats")] == [0.3, 0.3, 0.2, 0.2, 0.3, 0.5]
    assert always("none") == []


@pytest.mark.parametrize("kind", ["RandGaussianNoised", "RandGaussianSmoothd", "RandAdjustContrastd"])
def test_changes_of_intensity_leave_labels_alone(kind, monkeypatch):
    change = dict(always("brats"))[kind]
    monkeypatch.setattr(change, "prob", 1.0)
    change.set_random_state(seed=0)
    truth = torch.from_numpy(prepared().labels)[None].float()
    found = change({"image": truth + torch.rand(truth.shape), "labels": truth.clone()})
    assert torch.equal(torch.as_tensor(found["labels"]), truth)


def centers(around_foreground: bool, number=600) -> float:
    """Share of patches whose middle is the one labeled voxel; others meet it one time in hundreds."""
    random = np.random.default_rng(0)
    case = prepared()
    spot = np.array([[10, 9, 8]])
    case = PreparedCase(case.image, case.labels, spot, case.geometry)
    starts = [patch_start(case, PATCH, random, around_foreground=around_foreground) for _ in range(number)]
    return float(np.mean([(np.array(start) + np.array(PATCH) // 2 == spot[0]).all() for start in starts]))


def test_half_of_the_patches_are_drawn_around_foreground():
    assert centers(True) == pytest.approx(0.5, abs=0.06)
    assert centers(False) < 0.02


def test_a_case_without_foreground_is_drawn_from_anywhere():
    random = np.random.default_rng(0)
    starts = {tuple(patch_start(prepared(labeled=False), PATCH, random, around_foreground=True)) for _ in range(200)}
    assert len(starts) > 50


def test_patches_lie_within_an_image_that_holds_them():
    random = np.random.default_rng(0)
    for _ in range(300):
        start = patch_start(prepared(), PATCH, random, around_foreground=True)
        assert all(0 <= first <= size - width for first, size, width in zip(start, SHAPE, PATCH, strict=True))


def test_a_patch_larger_than_the_image_has_it_in_the_middle_and_zeros_around():
    case = prepared((5, 18, 6))
    patch = (8, 8, 11)
    start = patch_start(case, patch, np.random.default_rng(0), around_foreground=False)
    assert (start[0], start[2]) == (-1, -2)
    values = np.arange(1, 1 + 5 * 18 * 6).reshape(1, 5, 18, 6)
    found = cut_patch(values, start, patch)
    assert found.shape == (1, *patch)
    np.testing.assert_array_equal(found[:, 1:6, :, 2:8], values[:, :, start[1] : start[1] + 8])
    found[:, 1:6, :, 2:8] = 0
    assert not found.any()


def test_a_patch_is_that_part_of_image_and_labels():
    some = patches(augmented="none", sampling="random")
    image, labels = some[3, 1]
    assert torch.equal(image[0], labels.float())  # the image repeats the labels
    windows = np.lib.stride_tricks.sliding_window_view(prepared().labels, PATCH).reshape(-1, *PATCH)
    assert (windows == labels.numpy()).all((1, 2, 3)).any()


@pytest.mark.parametrize(
    ("items", "batch", "world"), [(8, 2, 1), (7, 2, 1), (12, 2, 3), (7, 2, 2), (1, 2, 2), (5, 4, 3)]
)
def test_processes_together_cover_every_item_in_whole_batches(items, batch, world):
    orders = [EpochOrder(items, 0, batch, Processes(rank, world, CPU)) for rank in range(world)]
    shares = [[index for _, index in order] for order in orders]
    assert len({len(share) for share in shares}) == 1
    assert all(
        len(share) == len(order) and len(share) % batch == 0 for share, order in zip(shares, orders, strict=True)
    )
    drawn = [index for share in shares for index in share]
    assert set(drawn) == set(range(items))
    counts = np.bincount(drawn)
    assert counts.max() - counts.min() <= 1  # none twice before each came once
    if items % (batch * world) == 0:
        assert sorted(drawn) == list(range(items))


def test_the_order_is_the_same_for_the_same_epoch_and_another_for_the_next():
    order, again = (EpochOrder(20, 5, 2, Processes(0, 1, CPU)) for _ in range(2))
    order.epoch = again.epoch = 3
    assert list(order) == list(again)
    assert {epoch for epoch, _ in order} == {3}
    again.epoch = 4
    assert [index for _, index in again] != [index for _, index in order]


def test_several_patches_of_each_case_make_an_epoch():
    some = patches()
    config = some.config.model_copy(
        update={"training": some.config.training.model_copy(update={"patches_per_case": 3, "batch_size": 2})}
    )
    loader, order = patch_loader(some.cases, some.store, config, Processes(0, 1, CPU))
    order.epoch = 1
    batches = list(loader)
    assert [tuple(image.shape) for image, _ in batches] == [(2, 1, *PATCH)] * 3
    assert [tuple(labels.shape) for _, labels in batches] == [(2, *PATCH)] * 3
