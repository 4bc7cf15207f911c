from __future__ import annotations

import time

import pytest
import torch
import workers
from torch import multiprocessing

PATIENCE = 120  # seconds, for two processes that import torch and train three steps


def test_two_processes_train_as_one_on_the_mean_of_their_losses(tmp_path):
    context = multiprocessing.spawn(workers.train_together, args=(tmp_path,), nprocs=workers.PROCESSES, join=False)
    end = time.monotonic() + PATIENCE
    while not context.join(timeout=1):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            pytest.fail(f"two processes did not finish within {PATIENCE} s")
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(workers.PROCESSES))

    network, loss = workers.make_network(), workers.make_loss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for step, (images, labels) in enumerate(workers.make_batches()):
        optimizer.zero_grad()
        shares = [loss(network(images[share]), labels[share]) for share in (slice(0, 2), slice(2, 4))]
        torch.stack(shares).mean().backward()
        for got, expected in zip((first, second), shares, strict=True):
            torch.testing.assert_close(got["losses"][step], expected.detach())
        for a, b, parameter in zip(
            first["gradients"][step], second["gradients"][step], network.parameters(), strict=True
        ):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, parameter.grad)
        optimizer.step()
