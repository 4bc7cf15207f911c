"""The processes of a training: one, or as many as torchrun started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among all; alone, nothing is sent anywhere."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """The one process that writes files."""
        return self.rank == 0

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network with gradients averaged over all processes."""
        network = network.to(self.device)
        return DistributedDataParallel(network) if self.world > 1 else network

    def share(self, items: list[T]) -> list[T]:
        """Every world-th item, so that all processes together have each once."""
        return items[self.rank :: self.world]

    def gather(self, mine: T) -> list[T]:
        """What each process holds, by rank, everywhere."""
        if self.world == 1:
            return [mine]
        everyone: list[T] = [mine] * self.world
        distributed.all_gather_object(everyone, mine)
        return everyone

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process makes, everywhere; the others need not see its files."""
        if self.world == 1:
            return make()
        made: list[Any] = [make() if self.first else None]
        distributed.broadcast_object_list(made, 0)
        found: T = made[0]
        return found

    def mean(self, values: Tensor) -> Tensor:
        """The average over processes."""
        if self.world > 1:
            distributed.all_reduce(values)
        return values / self.world

    def agree(self, network: nn.Module) -> None:
        """Take over the first process's buffers: each one's batch norm has seen other patches."""
        if self.world > 1:
            for buffer in network.buffers():
                distributed.broadcast(buffer, 0)

    def wait(self) -> None:
        if self.world > 1:
            distributed.barrier()


@contextmanager
def processes() -> Iterator[Processes]:
    """Join the processes that torchrun started, as its variables tell, or be alone."""
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if world == 1:
        yield Processes(0, 1, device)
        return
    if cuda:
        torch.cuda.set_device(device)  # objects are gathered through the current one
    distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Processes(distributed.get_rank(), world, device)
    finally:
        distributed.destroy_process_group()
