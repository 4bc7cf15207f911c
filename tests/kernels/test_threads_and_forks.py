from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from segcal import Binning, SegmentationLoss, bin_statistics

VOXELS = 300_000  # several segments, so that threads share the work


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def results(kernel: str) -> tuple[torch.Tensor, ...]:
    logits = torch.randn(2, 3, VOXELS, generator=torch.Generator().manual_seed(3)).requires_grad_()
    labels = (torch.arange(VOXELS) // 1000 % 3).expand(2, -1)
    loss = SegmentationLoss(binning=Binning(20, kernel=kernel))(logits, labels)
    loss.backward()
    stats = bin_statistics(logits.detach().softmax(1), labels, binning=Binning(20, kernel=kernel))
    return loss.detach(), logits.grad, stats.count, stats.confidence_sum, stats.label_sum


def test_results_are_the_same_to_the_bit_each_time_and_for_any_number_of_threads(kernel):
    torch.set_num_threads(1)
    alone = results(kernel)
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        for got, expected in zip(results(kernel), alone, strict=True):
            assert torch.equal(got, expected)


FORK = """
import os, signal, sys, torch
from segcal import Binning, SegmentationLoss
from segcal.kernels import numba_cpu
from segcal.kernels.spec import Spec

torch.set_num_threads(2)
logits = torch.randn(2, 3, 200_000, requires_grad=True)
labels = torch.randint(0, 3, (2, 1, 200_000))

def loss():
    value = SegmentationLoss(binning=Binning(20, kernel="triangular"), backend="numba")(logits, labels)
    return value, torch.autograd.grad(value, logits)[0]

def sums():
    return numba_cpu.forward(logits, labels, None, Spec("softmax", 20.0, 0.0, 20, 0, "left", True))[:3]

before = loss(), sums()
child = os.fork()
if child == 0:
    signal.alarm(60)  # rather end than hang
    after = [sums()]  # on two threads of its own
    torch.set_num_threads(1)  # torch's own threads do not survive a fork; its data loaders do this, too
    after.insert(0, loss())
    same = all(torch.equal(a, b) for old, new in zip(before, after) for a, b in zip(old, new))
    os._exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS starts workers anew, and Windows has no fork")
def test_a_forked_child_of_a_process_that_used_the_loss_can_use_it_too():
    done = subprocess.run([sys.executable, "-c", FORK], timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
