"""Labels with a channel per class: one-hot ones are what a label map is, others agree with the reference."""

from __future__ import annotations

import pytest
import torch
from backends import ACTIVATIONS, assert_agreement, batch, sums_and_gradient

from segcal import LabelError, bin_statistics
from segcal.collect import read_voxels

BINNING = (13, "triangular", None, "left")
VOXELS = 5000  # several blocks, the last not full


def one_hot(labels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.functional.one_hot(labels, 3).movedim(-1, 1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_one_hot_labels_give_what_their_map_gives_to_the_bit(dtype, activation, masked):
    inputs, labels = batch("map", torch.float32, activation, voxels=VOXELS)
    mask = torch.rand(2, VOXELS) < 0.7 if masked else None
    of_map, of_channels = (
        sums_and_gradient(read_voxels(inputs, y, mask=mask), BINNING, activation, "numba")
        for y in (labels, one_hot(labels, dtype))
    )
    assert all(torch.equal(a, b) for a, b in zip(of_map, of_channels, strict=True))


@pytest.mark.parametrize("kernel", ["hard", "triangular"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("change", ["no class", "two classes", "soft"])
def test_one_voxel_unlike_the_others_counts_as_in_the_reference(kernel, activation, change):
    inputs, labels = batch("map", torch.float32, activation, voxels=VOXELS)
    channels = one_hot(labels, torch.float32)
    voxel = channels[1, :, 1500]
    # Of exclusive classes labels may sum to less than 1 on average, not to more.
    channels[1, :, :100] = 0
    voxel.copy_({"no class": voxel * 0, "two classes": (voxel > -1).float(), "soft": voxel * 0.5}[change])
    assert_agreement(read_voxels(inputs, channels), (13, kernel, None, "left"), activation)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_the_first_wrong_label_is_found_behind_blocks_of_one_hot_ones(dtype):
    inputs, labels = batch("map", torch.float32, "softmax", voxels=VOXELS)
    channels = one_hot(labels, dtype)
    channels[1, 2, 4321] = 2
    with pytest.raises(LabelError, match="case 1, class 2, voxel 4321"):
        bin_statistics(inputs.softmax(1), channels, backend="numba")
