"""Which bins a probability belongs to.

A kernel says how much a probability x belongs to each of M bins over [0, 1]. All kernels here share
one form: cut [0, 1] into cells of equal width; inside a cell, with u in [0, 1) the position in it, the
weight of every bin nearby is a polynomial of u. A hard bin is one cell with weight 1. The triangular
kernel (the paper's soft one) has cells between neighboring centers and weights 1 - u and u. The
cubic B-spline has the same cells and four cubic weights. The Gaussian uses finer cells and cubics that
follow it closely. So a backend never meets a kernel: it sums powers of u per cell, and a small matrix,
built here, turns those sums into bins. Cost does not depend on the number of bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal, get_args

import torch
from torch import Tensor

from segcal.errors import ConfigError, check_integer, is_number, one_of

Kernel = Literal["hard", "triangular", "gaussian", "bspline"]
MOST_BINS = 100_000  # a float32 times this is still exact in float64
SMALLEST_BANDWIDTH, LARGEST_BANDWIDTH = 0.2, 10.0  # in bin widths; the cubics hold to 1e-6 from here on


@dataclass(frozen=True)
class Cells:
    """A kernel as polynomials on cells: x lies at t = x * scale + shift, in cell floor(t), at u = t - floor(t)."""

    scale: float
    shift: float
    number: int
    per_bin: int
    first: int
    """Bin of the first weight, relative to the cell's own."""
    weights: tuple[tuple[tuple[float, ...], ...], ...]
    """Coefficients of u, by cell within a bin, bin nearby and power; at each u the weights sum to 1."""

    @property
    def degree(self) -> int:
        return len(self.weights[0][0]) - 1


@dataclass(frozen=True)
class Binning:
    """M equally wide bins over [0, 1] and the kernel that assigns probabilities to them.

    A value that is out of range, or that does not belong to the kernel, is a ConfigError.

    bins: how many, from 1 to 100,000.
    kernel: "hard" puts a probability into one bin; "triangular" (the paper's soft binning), "gaussian" and "bspline"
        spread it over neighboring bins.
    bandwidth: standard deviation of the Gaussian in bin widths, from 0.2 to 10; 0.5 if not given. For kernel="gaussian"
        only.
    empty_below: a bin whose summed weight is below this is empty: it has no gap.
    closed: "left" closes hard bins on the left, the last one on both sides; "right" turns that round. For
        kernel="hard" only.
    equal_mass_above: set by `segcal.equal_mass` only, to its threshold. It marks bins that hold about equally many
        voxels of each case and class, and that have no common edges.

    >>> Binning(bins=5).edges.tolist()
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> Binning(bins=2, kernel="triangular").memberships(torch.tensor([0.0, 0.5, 0.625])).tolist()
    [[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]]
    """

    bins: int = 20
    kernel: Kernel = "hard"
    bandwidth: float | None = None
    empty_below: float = 0.01
    closed: Literal["left", "right"] = "left"
    equal_mass_above: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bins", check_integer("bins", self.bins, most=MOST_BINS))
        hint = "The paper's soft binning is kernel='triangular'." if str(self.kernel) == "soft" else ""
        one_of("kernel", self.kernel, get_args(Kernel), hint=hint)
        one_of("closed", self.closed, ("left", "right"))
        if self.bandwidth is not None:
            if self.kernel != "gaussian":
                raise ConfigError(f"bandwidth belongs to kernel='gaussian'; got kernel={self.kernel!r}. Leave it out.")
            if not (is_number(self.bandwidth) and SMALLEST_BANDWIDTH <= self.bandwidth <= LARGEST_BANDWIDTH):
                raise ConfigError(
                    f"bandwidth must lie in [{SMALLEST_BANDWIDTH}, {LARGEST_BANDWIDTH}] bin widths; "
                    f"got {self.bandwidth!r}. Near 0 use kernel='hard'."
                )
        if self.closed == "right" and self.kernel != "hard":
            raise ConfigError(f"closed='right' belongs to kernel='hard'; got kernel={self.kernel!r}. Leave it out.")
        if not (is_number(self.empty_below) and self.empty_below >= 0):
            raise ConfigError(f"empty_below must be a number of at least 0; got {self.empty_below!r}.")
        if self.equal_mass_above is not None:
            if self.kernel != "hard":
                raise ConfigError(f"equal-mass bins are hard; got kernel={self.kernel!r}. Leave equal_mass_above out.")
            if not (is_number(self.equal_mass_above) and 0 <= self.equal_mass_above < 1):
                raise ConfigError(
                    f"equal_mass_above must be a probability from 0 to below 1; got {self.equal_mass_above!r}."
                )

    @property
    def edges(self) -> Tensor:
        """Where bins begin and end, (bins + 1), float64; ConfigError for equal-mass bins."""
        need_common_edges(self, "placed on [0, 1]")
        return torch.arange(self.bins + 1, dtype=torch.float64) / self.bins

    @property
    def centers(self) -> Tensor:
        """The middle of each bin, (bins), float64; ConfigError for equal-mass bins."""
        need_common_edges(self, "placed on [0, 1]")
        return (torch.arange(self.bins, dtype=torch.float64) + 0.5) / self.bins

    @property
    def cells(self) -> Cells:
        need_common_edges(self, "filled with probabilities")
        return _cells(self)

    def memberships(self, probabilities: Tensor) -> Tensor:
        """Weight of each probability in each bin, along a new last axis, float64; the weights sum to 1.

        For plots and checks: `bin_statistics` never builds this array. Differentiable. Equal-mass bins are refused
        (ConfigError).

        probabilities: numbers in [0, 1], of any shape.
        """
        cell, u = locate(probabilities, self.cells, closed=self.closed)
        weights, into = _spread(self, probabilities.device)
        powers = torch.stack([u**power for power in range(self.cells.degree + 1)], dim=-1)
        nearby = torch.einsum("...p,...np->...n", powers, weights[cell % self.cells.per_bin])
        empty = torch.zeros(*probabilities.shape, self.bins, dtype=torch.float64, device=probabilities.device)
        return empty.scatter_add(-1, into[cell], nearby)


def need_common_edges(binning: Binning, purpose: str) -> None:
    """ConfigError for equal-mass bins, whose edges differ by case and class; `purpose` ends "... edges to be"."""
    if binning.equal_mass_above is not None:
        raise ConfigError(
            f"bins must have the same edges in all cases and classes to be {purpose}; these are equal-mass bins, "
            f"whose edges differ. Use the hard bins that segcal.equal_mass was given."
        )


def locate(probabilities: Tensor, cells: Cells, *, closed: str = "left") -> tuple[Tensor, Tensor]:
    """Cell and position in it, in float64; the position carries the gradient.

    The cell is the floor of the exact product x * scale. That of a float32 is exact in float64; a float64 is
    split into two parts whose products are. Outside [0, 1], and for NaN, the nearest cell is taken (NaN: the first).
    """
    wide = probabilities.to(torch.float64)
    t = wide * cells.scale + cells.shift
    with torch.no_grad():
        cell = t.floor() if closed == "left" else t.ceil() - 1
        if probabilities.dtype == torch.float64:
            high = wide.to(torch.float32).to(torch.float64)
            # Less the nearest edge first: then nothing is rounded away, and the sign of the rest is exact.
            edge = cell if closed == "left" else cell + 1
            rest = (high * cells.scale + cells.shift - edge) + (wide - high) * cells.scale
            cell += (rest > 0).to(cell.dtype) if closed == "right" else -(rest < 0).to(cell.dtype)
        cell = cell.clamp_(0, cells.number - 1).nan_to_num_(0)
    return cell.long(), t - cell


@lru_cache(maxsize=64)
def _cells(binning: Binning) -> Cells:
    bins = binning.bins
    if binning.kernel == "hard":
        return Cells(bins, 0.0, bins, 1, 0, (((1.0,),),))
    if binning.kernel == "triangular":
        return Cells(bins, 0.5, bins + 1, 1, -1, (((1.0, -1.0), (0.0, 1.0)),))
    if binning.kernel == "bspline":
        sixths = ((1, -3, 3, -1), (4, 0, -6, 3), (1, 3, 3, -3), (0, 0, 0, 1))
        return Cells(bins, 0.5, bins + 1, 1, -2, (tuple(tuple(c / 6 for c in row) for row in sixths),))
    return _gaussian_cells(bins, 0.5 if binning.bandwidth is None else binning.bandwidth)


def _gaussian_cells(bins: int, bandwidth: float) -> Cells:
    """Cubics through four nodes of each small cell, of Gaussians normalized over an endless row of bins.

    Interpolating at shared end points keeps them continuous, and functions that sum to 1 at the nodes
    give polynomials that sum to 1 everywhere. The row beyond the outer bins is folded into them.
    """
    per_bin = 2 * math.ceil(8 / bandwidth)  # narrower Gaussians turn faster: error below 1e-6 in each weight
    reach = math.ceil(6 * bandwidth + 1)  # exp(-18): what lies beyond is below 2e-8
    nodes = (1 - torch.cos(torch.arange(4, dtype=torch.float64) * torch.pi / 3)) / 2
    to_coefficients = torch.linalg.inv(torch.stack([nodes**power for power in range(4)], dim=-1))
    positions = (torch.arange(per_bin, dtype=torch.float64)[:, None] + nodes) / per_bin
    neighbors = torch.arange(-reach, reach, dtype=torch.float64)
    weights = torch.softmax(-(((positions[..., None] - 1 - neighbors) / bandwidth) ** 2) / 2, dim=-1)
    coefficients = torch.einsum("pn,cnb->cbp", to_coefficients, weights)
    # cells start half a bin below 0, as the triangular ones do
    frozen = tuple(tuple(tuple(row) for row in cell) for cell in coefficients.tolist())
    return Cells(bins * per_bin, 0.5 * per_bin, (bins + 1) * per_bin, per_bin, -reach, frozen)


@lru_cache(maxsize=64)
def _spread(binning: Binning, device: torch.device) -> tuple[Tensor, Tensor]:
    """Polynomial weights (cell within a bin, bin nearby, power), and the bins that each cell feeds."""
    cells = binning.cells
    weights = torch.tensor(cells.weights, dtype=torch.float64, device=device)
    own = torch.arange(cells.number, device=device) // cells.per_bin
    nearby = cells.first + torch.arange(weights.shape[1], device=device)
    return weights, (own[:, None] + nearby).clamp_(0, binning.bins - 1)


def _groups(binning: Binning) -> tuple[int, int]:
    """Groups of cells, and cells in each: one for every place within a bin."""
    return binning.cells.number // binning.cells.per_bin, binning.cells.per_bin


def cells_to_bins(moments: Tensor, binning: Binning) -> Tensor:
    """Sums per bin from sums of powers of u per cell: (..., cells, powers) to (..., bins)."""
    weights, into = _spread(binning, moments.device)
    grouped = moments.reshape(*moments.shape[:-2], *_groups(binning), moments.shape[-1])
    # Power by power: einsum would start threads for a few numbers, which on a busy machine wait for one another.
    parts = (grouped[..., power, None] * weights[..., power] for power in range(weights.shape[-1]))
    nearby = reduce(torch.add, parts).flatten(-3)
    empty = torch.zeros(*moments.shape[:-2], binning.bins, dtype=moments.dtype, device=moments.device)
    return empty.index_add(-1, into.flatten(), nearby)


def bins_to_cells(gradient: Tensor, binning: Binning) -> Tensor:
    """The adjoint of `cells_to_bins`: a gradient per bin, (..., bins), as one per cell and power."""
    weights, into = _spread(binning, gradient.device)
    nearby = gradient[..., into].reshape(*gradient.shape[:-1], *_groups(binning), into.shape[1])
    powers = [(nearby * weights[..., power]).sum(-1) for power in range(weights.shape[-1])]
    return torch.stack(powers, dim=-1).flatten(-3, -2)
