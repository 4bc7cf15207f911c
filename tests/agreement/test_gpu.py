"""Plain torch on a GPU against plain torch on the CPU; skipped if there is no GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from backends import ACTIVATIONS, assert_close, batch, sums_and_gradient

from segcal import Binning, SegmentationLoss
from segcal.collect import Voxels, pick_backend, read_voxels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize(("activation", "labeled"), list(itertools.product(ACTIVATIONS, ("map", "soft"))))
def test_sums_and_gradients_agree_with_the_cpu(kernel, activation, labeled):
    voxels = read_voxels(*batch(labeled, torch.float32, activation), mask=torch.rand(2, 70_000) < 0.7)
    there = Voxels(*(part.cuda() for part in voxels))
    binning = (13, kernel, None, "left")
    got = [part.cpu() for part in sums_and_gradient(there, binning, activation, "torch")]
    assert_close(got, sums_and_gradient(voxels, binning, activation, "torch"))


def test_the_loss_of_tensors_on_the_gpu_is_that_of_the_cpu_in_half_precision_and_compiled():
    loss = SegmentationLoss(binning=Binning(20, kernel="triangular"))
    logits, labels = torch.randn(2, 3, 40, 40, 40).half(), torch.randint(0, 3, (2, 40, 40, 40))
    assert pick_backend(logits.cuda(), None) == "torch"
    here = loss(logits, labels)
    there, compiled = (f(logits.cuda(), labels.cuda()) for f in (loss, torch.compile(loss)))
    torch.testing.assert_close(there.cpu(), here)
    torch.testing.assert_close(compiled.cpu(), here)
