"""Sums over voxels with two derivatives: the compiled pass against the plain one, both against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid
from truths import drawn

from segcal.calibrators.likelihood import each_by_itself, exclusive, log_odds, of_temperature, output
from segcal.calibrators.stream import Piece
from segcal.kernels.numba_likelihood import NO_WEIGHTS, temperature_sums


def piece_of(activation, dtype, *, voxels=3000, weighted=False, factor=1.0, strided=False):
    logits, labels = drawn(activation, voxels=voxels)
    logits = (factor * logits).to(dtype)
    labels = labels.long() if activation == "softmax" else labels.double()
    weights = torch.rand(voxels, dtype=torch.float64) if weighted else None
    if strided:
        logits, labels = logits.mT.contiguous().mT[:, ::2], labels[..., ::2]
        weights = None if weights is None else weights[::2]
    return Piece(logits, labels, weights)


def compiled(piece, inverse, threads=1):
    weights = NO_WEIGHTS if piece.weights is None else piece.weights.numpy()
    with np.errstate(all="raise", under="ignore"):
        return temperature_sums(piece.logits.numpy(), piece.labels.numpy(), weights, inverse, threads=threads)


def sums_by_torch(piece, inverse):
    """Value, slope, curvature and wrong voxels, relative to the true class so that nothing cancels."""
    logits = piece.logits.double()
    weights = torch.ones(1, dtype=torch.float64) if piece.weights is None else piece.weights
    if piece.labels.ndim == 2:
        side = torch.where(piece.labels > 0, -logits, logits)
        missing = (side * inverse).sigmoid()
        losses, slopes, bends = -logsigmoid(-side * inverse), missing * side, missing * (1 - missing) * side**2
        wrong = side >= 0
    else:
        labels = piece.labels[None]
        side = logits - logits.gather(0, labels)
        shares = (side * inverse).softmax(0)
        losses, slopes = (side * inverse).logsumexp(0), (shares * side).sum(0)
        bends = (shares * (side - slopes) ** 2).sum(0)
        wrong = side.scatter(0, labels, -torch.inf).amax(0) >= 0
    sums = [(part * weights).sum() for part in (losses, slopes, bends)]
    return torch.stack([*sums, wrong.sum().double()])


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_the_compiled_pass_is_the_plain_one(activation, dtype, weighted, strided):
    piece = piece_of(activation, dtype, weighted=weighted, strided=strided)
    for inverse in (0.01, 0.7, 1.0, 100.0):
        plain = sums_by_torch(piece, inverse).numpy()
        for threads in (1, 2):
            assert compiled(piece, inverse, threads) == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("factor", [0.0, 1e-4, 100.0, 1e4])
def test_the_compiled_pass_is_the_plain_one_on_extreme_logits(activation, factor):
    piece = piece_of(activation, torch.float64, factor=factor)
    for inverse in (0.01, 1.0, 100.0):
        found = compiled(piece, inverse)
        assert np.isfinite(found).all()
        assert found == pytest.approx(sums_by_torch(piece, inverse).numpy(), rel=1e-12, abs=1e-12)


def test_where_all_are_surely_right_nothing_is_rounded_away():
    piece = Piece(torch.tensor([[40.0], [0.0]]).double(), torch.zeros(1).long())
    value, slope, curvature, wrong = compiled(piece, 1.0)
    assert value == pytest.approx(np.exp(-40), rel=1e-12, abs=0)
    assert slope == pytest.approx(-40 * np.exp(-40), rel=1e-12, abs=0)
    assert curvature == pytest.approx(1600 * np.exp(-40), rel=1e-12, abs=0)
    assert wrong == 0


def test_ties_count_as_wrong_in_both():
    logits = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    for labels in (torch.zeros(3).long(), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])):
        piece = Piece(logits, labels)
        assert compiled(piece, 1.0)[3] == sums_by_torch(piece, 1.0)[3] == (2 if labels.ndim == 1 else 4)


def loss_of(out, piece):
    """By torch; of classes that overlap the mean over them."""
    weights = torch.ones(out.shape[1]).double() if piece.weights is None else piece.weights
    if piece.labels.ndim == 1:
        return (cross_entropy(out.T, piece.labels, reduction="none") * weights).sum()
    return (binary_cross_entropy_with_logits(out, piece.labels, reduction="none") * weights).sum() / len(out)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_a_temperature_are_those_of_autograd(activation, weighted):
    piece = piece_of(activation, torch.float64, voxels=200, weighted=weighted)
    at = torch.tensor(0.6, dtype=torch.float64)

    def loss(inverse):
        return loss_of(inverse * piece.logits, piece)

    sums = of_temperature(piece, at.item())
    assert sums.value == pytest.approx(loss(at).item(), rel=1e-12)
    assert sums.gradient.item() == pytest.approx(torch.func.grad(loss)(at).item(), rel=1e-10)
    assert sums.curvature.item() == pytest.approx(torch.func.hessian(loss)(at).item(), rel=1e-10)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_any_linear_logits_are_those_of_autograd(activation, weighted):
    piece = piece_of(activation, torch.float64, voxels=200, weighted=weighted)
    x, at = torch.randn(3, 2, 200, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    sums = (exclusive if activation == "softmax" else each_by_itself)(piece, x, at)

    def loss(parameters):
        return loss_of(torch.einsum("kf,kfn->kn", parameters, x), piece)

    assert sums.value == pytest.approx(loss(at).item(), rel=1e-12)
    assert torch.allclose(sums.gradient, torch.func.grad(loss)(at), rtol=1e-10)
    assert torch.allclose(sums.curvature, torch.func.hessian(loss)(at), rtol=1e-9, atol=1e-9)
    out = output(at, x)
    wrong = (out.argmax(0) != piece.labels).sum() if activation == "softmax" else ((out > 0) != piece.labels).sum(1)
    assert torch.equal(sums.wrong, wrong.reshape(sums.wrong.shape))


@pytest.mark.parametrize("factor", [0.1, 1, 10, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_are_exact_from_the_surest_to_the_least_probable_class(factor, dtype):
    logits = (factor * drawn(voxels=500, classes=4)[0]).to(dtype)
    z = logits.double().numpy()
    wanted = np.stack([z[k] - logsumexp(np.delete(z, k, axis=0), axis=0) for k in range(4)])
    reach = 80 if dtype == torch.float32 else 700  # further than its probabilities
    found = log_odds(logits, "softmax").double().numpy().clip(-reach, reach)
    assert found == pytest.approx(wanted.clip(-reach, reach), rel=1e-5 if dtype == torch.float32 else 1e-12, abs=2e-6)
    assert torch.equal(log_odds(logits, "sigmoid"), logits)
