"""Isotonic regression: a rising curve without a formula for each class, fitted in one pass.

Each class is fitted against the rest. Of exclusive classes the results are divided by their sum afterwards.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.calibrator import Activation, Calibrator, FitReport, Inputs, check_inputs, need_all_classes
from segcal.calibrators.likelihood import log_odds, truth_of
from segcal.calibrators.stream import CaseStream, check_stream, need_same_classes, no_voxels, pieces_of

FINE = 1 << 14  # steps of the log-odds in which voxels are counted
REACH = 20.0  # of the log-odds: beyond it float32 probabilities are 0 or 1


class Isotonic(Calibrator):
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
        table, report = self._count(cases)
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
        count, true = table[..., 0], table[..., 1]
        after = -(torch.xlogy(true, shares) + torch.xlogy(count - true, 1 - shares)).sum()
        self._end_fit(len(table), inputs, replace(report, after=float(after) / report.voxels / len(table)))
        return self

    def _count(self, cases: CaseStream) -> tuple[Tensor, FitReport]:
        """Return (class, step, 3): voxels, true ones and sum of log-odds; and the report without its result."""
        number = check_stream(cases)
        sums, voxels, loss = None, 0, 0.0
        for i, case in enumerate(cases):
            for piece in pieces_of(case, self.activation):
                odds = log_odds(piece.logits.double(), self.activation).clamp(-REACH, REACH)
                classes = len(odds)
                if sums is None:
                    sums = torch.zeros(3, classes * FINE, dtype=torch.float64)
                need_same_classes(sums.shape[1] // FINE, classes, i)
                truth = truth_of(piece, classes)
                steps = ((odds + REACH) * (FINE / (2 * REACH))).long().clamp_(max=FINE - 1)
                places = (steps + FINE * torch.arange(classes)[:, None]).flatten()
                for row, weights in zip(sums, (None, truth.flatten(), odds.flatten()), strict=True):
                    row += torch.bincount(places, weights, minlength=classes * FINE)
                voxels += odds.shape[1]
                loss += float(-torch.where(truth > 0, odds, -odds).sigmoid().log().sum()) / classes
        if sums is None or not voxels:
            raise no_voxels()
        table = sums.reshape(3, -1, FINE).movedim(0, 2)
        need_all_classes(self.method, table[..., 1].sum(1))
        return table, FitReport(number, voxels, 1, "binary nll", loss / voxels, math.nan)

    def _apply(self, logits: Tensor) -> Tensor:
        odds = log_odds(logits, self.activation)
        rows = [
            torch.from_numpy(np.interp(row.double().numpy(), x.numpy(), y.numpy()))
            for row, (x, y) in zip(odds.cpu(), self.knots, strict=True)
        ]
        shares = torch.stack(rows)
        return (shares.log() if self.activation == "softmax" else torch.logit(shares)).to(logits)

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
