"""Calibrators without a formula: a rising curve (isotonic) or steps (histogram) for each class, fitted in a pass.

Each class stands against the rest. Of exclusive classes the results are divided by their sum afterwards.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.calibrator import Activation, Calibrator, FitReport, Inputs, check_inputs, need_all_classes
from segcal.calibrators.likelihood import log_odds, truth_of
from segcal.calibrators.stream import CaseStream, check_stream, need_same_classes, no_voxels, pieces_of
from segcal.errors import check_integer, one_of

FINE = 1 << 14  # steps of the log-odds in which voxels are counted
REACH = 20.0  # of the log-odds: beyond it float32 probabilities are 0 or 1


class _ByClass(Calibrator):
    """Counts voxels and true ones in bins of each class."""

    def _count(self, cases: CaseStream, bins: int, index: Any) -> tuple[Tensor, FitReport]:
        """(class, bin, 3): voxels, true ones and sum of log-odds; `index` gives the bins of (class, voxel) log-odds."""
        number = check_stream(cases)
        sums, voxels, loss = None, 0, 0.0
        for i, case in enumerate(cases):
            for piece in pieces_of(case, self.activation):
                odds = log_odds(piece.logits.double(), self.activation).clamp(-REACH, REACH)
                classes = len(odds)
                if sums is None:
                    sums = torch.zeros(3, classes * bins, dtype=torch.float64)
                need_same_classes(sums.shape[1] // bins, classes, i)
                truth = truth_of(piece, classes)
                places = (index(odds) + bins * torch.arange(classes)[:, None]).flatten()
                for row, weights in zip(sums, (None, truth.flatten(), odds.flatten()), strict=True):
                    row += torch.bincount(places, weights, minlength=classes * bins)
                voxels += odds.shape[1]
                loss += float(-torch.where(truth > 0, odds, -odds).sigmoid().log().sum()) / classes
        if sums is None or not voxels:
            raise no_voxels()
        table = sums.reshape(3, -1, bins).movedim(0, 2)
        need_all_classes(self.method, table[..., 1].sum(1))
        return table, FitReport(number, voxels, 1, "binary nll", loss / voxels, math.nan)

    def _finish(self, inputs: Inputs, report: FitReport, table: Tensor, shares: Tensor) -> None:
        """End the fit, and report the likelihood of these shares of true voxels in the bins of the fit."""
        count, true = table[..., 0], table[..., 1]
        after = -(torch.xlogy(true, shares) + torch.xlogy(count - true, 1 - shares)).sum()
        self._end_fit(len(table), inputs, replace(report, after=float(after) / report.voxels / len(table)))

    def _as_logits(self, shares: Tensor) -> Tensor:
        return shares.log() if self.activation == "softmax" else torch.logit(shares)


class Isotonic(_ByClass):
    """The rising curve nearest to the labels, of each class (Zadrozny and Elkan, 2002), straight between its knots.

    Voxels are counted in 16,384 steps of the log-odds from -20 to 20, so that one pass and little memory do; the
    curve differs from one through every single voxel by less than a step, 0.0025 of log-odds. A block of the curve
    without a true voxel (or with nothing else) has the share (true + 1/2) / (voxels + 1) instead of 0 (or 1), or
    that of the block beside it where the curve would fall.

    activation: "softmax" for exclusive classes, "sigmoid" for classes that overlap.
    """

    method = "isotonic"
    summary = "The rising curve nearest to the labels, of each class (Zadrozny and Elkan, 2002)."

    def __init__(self, *, activation: Activation = "softmax") -> None:
        super().__init__(activation=activation)
        self.knots: list[tuple[Tensor, Tensor]] = []
        """Log-odds and shares of each class."""

    @property
    def fitted(self) -> bool:
        return bool(self.knots)

    def fit(self, cases: CaseStream, *, inputs: Inputs = "logits") -> Self:
        from scipy.optimize import isotonic_regression

        check_inputs(inputs)

        def index(odds: Tensor) -> Tensor:
            return ((odds + REACH) * (FINE / (2 * REACH))).long().clamp_(max=FINE - 1)

        table, report = self._count(cases, FINE, index)
        shares = torch.full(table.shape[:2], 0.5, dtype=torch.float64)
        knots = []
        for k, rows in enumerate(table):
            seen = rows[:, 0] > 0
            count, true, odds = rows[seen].unbind(1)
            found = isotonic_regression((true / count).numpy(), weights=count.numpy())
            curve = torch.from_numpy(found.x.copy())
            block = torch.from_numpy(np.repeat(np.arange(len(found.weights)), np.diff(found.blocks)))
            weight = torch.from_numpy(found.weights)[block]
            curve = _rising(_inside(curve, weight), curve)
            shares[k, seen] = curve
            ends = torch.ones(len(curve), dtype=torch.bool)
            ends[1:-1] = (block[1:-1] != block[:-2]) | (block[1:-1] != block[2:])
            knots.append(((odds / count)[ends], curve[ends]))
        self.knots = knots
        self._finish(inputs, report, table, shares)
        return self

    def _apply(self, logits: Tensor) -> Tensor:
        odds = log_odds(logits, self.activation)
        rows = [
            torch.from_numpy(np.interp(row.double().numpy(), x.numpy(), y.numpy()))
            for row, (x, y) in zip(odds.cpu(), self.knots, strict=True)
        ]
        return self._as_logits(torch.stack(rows)).to(logits)

    def state(self) -> dict[str, Any]:
        return {"knots": [[x.tolist(), y.tolist()] for x, y in self.knots]}

    def set_state(self, state: dict[str, Any]) -> None:
        knots = [tuple(torch.tensor(side, dtype=torch.float64) for side in pair) for pair in state["knots"]]
        for x, y in knots:
            rising = (
                x.shape == y.shape and x.ndim == 1 and len(x) and bool((x.diff() >= 0).all() and (y.diff() >= 0).all())
            )
            if not rising or not bool(((y > 0) & (y < 1) & x.isfinite()).all()):
                raise ValueError("its curves must rise, within 0 and 1")
        if len(knots) != self.classes:
            raise ValueError("it must have a curve for each class")
        self.knots = [(x, y) for x, y in knots]


class HistogramBinning(_ByClass):
    """The share of true voxels in each bin of probability, of each class (Zadrozny and Elkan, 2001).

    activation: "softmax" for exclusive classes, "sigmoid" for classes that overlap.
    bins: how many, of each class.
    edges: "width" makes the bins equally wide, "mass" gives them as equal numbers of voxels as steps of the log-odds
        allow. A bin without voxels leaves probabilities as they are; one without a true voxel (or with nothing else)
        has the share (true + 1/2) / (voxels + 1).
    """

    method = "histogram"
    summary = "The share of true voxels in each bin of probability, of each class (Zadrozny and Elkan, 2001)."

    def __init__(
        self, *, activation: Activation = "softmax", bins: int = 20, edges: Literal["width", "mass"] = "width"
    ) -> None:
        super().__init__(activation=activation)
        one_of("edges", edges, ("width", "mass"))
        self.bins, self.edges = check_integer("bins", bins, most=FINE), edges
        self.limits: Tensor | None = None
        """(class, bin - 1): log-odds between the bins."""
        self.shares: Tensor | None = None
        """(class, bin); NaN: no voxel."""

    @property
    def fitted(self) -> bool:
        return self.shares is not None

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"bins": self.bins, "edges": self.edges}

    def fit(self, cases: CaseStream, *, inputs: Inputs = "logits") -> Self:
        check_inputs(inputs)
        passes = 1
        inner = torch.arange(1, self.bins, dtype=torch.float64) / self.bins
        if self.edges == "mass":
            passes = 2
            steps = torch.linspace(-REACH, REACH, FINE + 1, dtype=torch.float64)[1:-1]
            fine, _ = self._count(cases, FINE, lambda odds: torch.bucketize(odds, steps, right=True))
            shares = fine[..., 0].cumsum(1) / fine[..., 0].sum(1, keepdim=True)
            limits = steps[torch.searchsorted(shares, inner.expand(len(shares), -1).contiguous()).clamp(max=FINE - 2)]
        else:
            limits = torch.logit(inner)

        def index(odds: Tensor) -> Tensor:
            rows = limits.expand(len(odds), -1).contiguous()
            return torch.searchsorted(rows, odds.contiguous(), right=True)

        table, report = self._count(cases, self.bins, index)
        self.limits = limits.expand(len(table), -1).clone()
        self.shares = _inside(table[..., 1] / table[..., 0], table[..., 0])
        self._finish(inputs, replace(report, passes=passes), table, self.shares.nan_to_num(0.5))
        return self

    def _apply(self, logits: Tensor) -> Tensor:
        assert self.limits is not None  # `check` has looked
        assert self.shares is not None
        odds = log_odds(logits, self.activation).double()
        shares = self.shares.gather(1, torch.searchsorted(self.limits, odds.contiguous(), right=True))
        tiny = math.exp(-REACH)
        shares = torch.where(shares.isnan(), odds.sigmoid().clamp(tiny, 1 - tiny), shares)
        return self._as_logits(shares).to(logits)

    def state(self) -> dict[str, Any]:
        assert self.limits is not None  # `save` has looked
        assert self.shares is not None
        return {"limits": self.limits.tolist(), "shares": self.shares.tolist()}

    def set_state(self, state: dict[str, Any]) -> None:
        limits = torch.tensor(state["limits"], dtype=torch.float64)
        numbers = [[math.nan if share is None else share for share in row] for row in state["shares"]]
        shares = torch.tensor(numbers, dtype=torch.float64)
        if shares.shape != (self.classes, self.bins) or limits.shape != (self.classes, self.bins - 1):
            raise ValueError(f"it must have {self.bins} shares for each class, and the limits between them")
        rising = bool(limits.isfinite().all() and (limits.diff(dim=1) >= 0).all())
        if not rising or not bool((shares.isnan() | ((shares > 0) & (shares < 1))).all()):
            raise ValueError("its shares must lie within 0 and 1, its limits must rise")
        self.limits, self.shares = limits, shares


def _rising(shares: Tensor, before: Tensor) -> Tensor:
    """Shares that were kept off 0 and 1, no further than to the nearest that were neither before."""
    others = before[(before > 0) & (before < 1)]
    if not len(others):
        return shares
    low, high = shares.clamp(max=others.min()), shares.clamp(min=others.max())
    return torch.where(before == 0, low, torch.where(before == 1, high, shares))


def _inside(shares: Tensor, count: Tensor) -> Tensor:
    """Shares of true voxels, kept off 0 and 1 by half a voxel."""
    return torch.where((shares == 0) | (shares == 1), (shares * count + 0.5) / (count + 1), shares)
