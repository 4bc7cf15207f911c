"""Fits of calibrators at 10^7 and 10^9 voxels: time and memory, beside a fit that holds all logits at once.

    python benchmarks/calibrate.py [--largest 1000000000] [--only temperature ...]

The stream gives the same case of 10^6 voxels and 4 classes again and again, so that what grows is only the number of
voxels seen. The usual way is what libraries do: concatenate, then torch's L-BFGS over all logits.
"""

from __future__ import annotations

import argparse

from measure import peak_and_output, write_rows

STREAM = """
import time
import torch
from segcal.calibrators import make_calibrator

class Stream:
    def __init__(self, voxels):
        random = torch.Generator().manual_seed(0)
        z = 2 * torch.randn(4, 1_000_000, generator=random)
        noise = -torch.rand(4, 1_000_000, generator=random).log()
        self.case, self.number = (2.5 * z, (z - noise.log()).argmax(0)), voxels // 1_000_000
    def __len__(self):
        return self.number
    def __iter__(self):
        return (self.case for _ in range(self.number))
"""

USUAL = """
stream = Stream({voxels})
# measured from here
logits = torch.cat([case[0].T for case in stream])
labels = torch.cat([case[1] for case in stream])
temperature = torch.ones(1, requires_grad=True)
optimizer = torch.optim.LBFGS([temperature], lr=0.1, max_iter=50)
def closure():
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(logits / temperature, labels)
    loss.backward()
    return loss
begin = time.perf_counter()
optimizer.step(closure)
print(time.perf_counter() - begin, temperature.item())
"""

OURS = """
stream = Stream({voxels})
make_calibrator({method!r}, **{settings}).fit(Stream(1_000_000))  # compiled code is loaded
# measured from here
begin = time.perf_counter()
found = make_calibrator({method!r}, **{settings}).fit(stream)
print(time.perf_counter() - begin, getattr(found, "temperature", ""), found.report.passes)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=10**9)
    parser.add_argument("--only", nargs="*", help="these methods; an hour for all of them on two cores")
    arguments = parser.parse_args()
    rows = [row("concatenated, L-BFGS", 10**7, USUAL.format(voxels=10**7))]
    jobs = [
        ("temperature", {}, (10**7, arguments.largest)),
        ("isotonic", {}, (10**7, arguments.largest)),
        ("vector", {}, (10**7, arguments.largest // 10)),
        ("vector", {"voxels": 10**6}, (10**7, arguments.largest)),
        ("local-temperature", {}, (10**7, arguments.largest // 10)),
    ]
    for method, settings, sizes in jobs:
        if arguments.only and method not in arguments.only:
            continue
        for voxels in sizes:
            rows.append(row(f"{method} {settings or ''}".strip(), voxels, OURS.format(**locals())))
    write_rows("calibrate", rows)


def row(name: str, voxels: int, code: str) -> dict[str, object]:
    peak, said = peak_and_output(STREAM + code)
    seconds, *rest = said.split()
    print(name, voxels, seconds, rest, flush=True)
    return {
        "fit": name, "voxels": voxels, "seconds": round(float(seconds), 1), "peak_MiB": round(peak / 2**20),
        "temperature": rest[0][:7] if rest and "." in rest[0] else "", "passes": rest[-1] if len(rest) > 1 else "",
    }  # fmt: skip


if __name__ == "__main__":
    main()
