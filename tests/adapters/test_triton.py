"""The GPU's kernels in Triton's interpreter, against the plain torch reference; and compiled for GPUs, without one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings

import pytest
import torch
from backends import ACTIVATIONS, assert_agreement, batch, edge_batch, sums_and_gradient

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

from segcal import ACELoss, Binning, LabelError, RangeError, SegmentationLoss, bin_statistics
from segcal.collect import read_voxels
from segcal.doctor import check_backend
from segcal.kernels import triton_gpu
from segcal.kernels.operator import _plan

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # numpy's, which computes
]
VOXELS = 300  # a block of the forward pass that is full and one that is not; the interpreter is slow
LABELED = [  # labels, inputs, masked
    ("map", torch.float32, True),
    ("map", torch.float64, False),
    ("one-hot", torch.float32, False),
    ("soft", torch.float32, False),
    ("soft", torch.float64, True),
]


def small(*kind, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(*kind, voxels=VOXELS, **options)


@pytest.mark.parametrize(("labeled", "dtype", "masked"), LABELED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kernel", ["hard", "triangular", "bspline"])  # polynomials of degree 0, 1 and 3
def test_sums_and_gradients_agree(kernel, activation, labeled, dtype, masked):
    mask = torch.rand(2, VOXELS) < 0.7 if masked else None
    voxels = read_voxels(*small(labeled, dtype, activation), mask=mask)
    assert_agreement(voxels, (13, kernel, None, "left"), activation, "triton")


@pytest.mark.parametrize(
    "binning", [(0, "hard", None, "left"), (1200, "hard", None, "right"), (5, "gaussian", 3.0, "left")]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_any_number_of_bins_and_any_side_agree_in_any_order_of_adding(binning, deterministic):
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert_agreement(read_voxels(*small("map", torch.float64, "softmax")), binning, "softmax", "triton")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("label_dtype", [torch.uint8, torch.int16, torch.float32])
def test_label_types_agree(label_dtype):
    voxels = read_voxels(*small("map", torch.float32, "softmax", label_dtype), ignore_index=2)
    assert_agreement(voxels, (13, "triangular", None, "left"), "softmax", "triton")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_probabilities_of_zero_and_one_and_on_edges_and_centers_agree(kernel, activation):
    voxels = read_voxels(*edge_batch(activation))
    assert_agreement(voxels, (10, kernel, None, "left"), activation, "triton")


@pytest.mark.parametrize("voxels", [0, 1, 255, 256, 257])
def test_images_of_any_length_agree(voxels):
    inputs, labels = torch.randn(1, 2, voxels), torch.randint(0, 2, (1, voxels))
    for mask in (None, torch.rand(1, voxels) < 0.5, torch.zeros(1, voxels)):
        read = read_voxels(inputs, labels, mask=mask)
        assert_agreement(read, (7, "triangular", None, "left"), "softmax", "triton")


def test_many_classes_and_strides_agree():
    inputs, labels = torch.randn(2, 300, 20).transpose(1, 2), torch.randint(0, 20, (300, 2)).T
    assert_agreement(read_voxels(inputs, labels), (20, "triangular", None, "left"), "softmax", "triton")


def test_few_programs_take_many_blocks_in_turn(monkeypatch):
    monkeypatch.setattr(triton_gpu, "PROGRAMS", 2)
    voxels = read_voxels(*small("map", torch.float64, "softmax"))
    assert_agreement(voxels, (13, "triangular", None, "left"), "softmax", "triton")


def test_beyond_2_to_the_24_voxels_in_a_bin_every_voxel_counts(monkeypatch):
    monkeypatch.setattr(triton_gpu, "BLOCK", 1 << 20)
    monkeypatch.setattr(triton_gpu, "PROGRAMS", 1)
    voxels = (1 << 24) + 3
    stats = bin_statistics(torch.full((1, 1, voxels), 0.75), torch.ones(1, 1, voxels), bins=2, backend="triton")
    assert stats.count.tolist() == stats.label_sum.tolist() == [[[0, voxels]]]
    assert stats.confidence_sum.tolist() == [[[0, 0.75 * voxels]]]


def test_not_a_number_is_passed_on_and_a_masked_one_is_not():
    logits, labels = torch.randn(1, 2, 5, requires_grad=True), torch.tensor([[0, 1, 1, 0, 1]])
    with torch.no_grad():
        logits[0, 1, 2] = torch.nan
    loss = SegmentationLoss(binning=Binning(4, kernel="triangular"), backend="triton")
    assert loss(logits, labels).isnan()
    loss(logits, labels, mask=torch.tensor([[1, 1, 0, 1, 1]])).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[..., 2].tolist() == [[0, 0]]


def test_strange_labels_and_probabilities_are_refused_as_elsewhere():
    p = torch.full((2, 3, 4), 1 / 3)
    labels = torch.tensor([[0, 1, 2, 0], [0, 3, 0, 4]])
    with pytest.raises(LabelError, match=r"classes 0 to 2; case 1, voxel 1 .* holds 3"):
        bin_statistics(p, labels, backend="triton")
    with pytest.raises(LabelError, match=r"case 0, voxel 2 .* holds 0.5"):
        bin_statistics(p, torch.tensor([[0, 1, 0.5, 0], [0, 0, 0, 0]]), backend="triton")
    soft = torch.zeros(2, 3, 4)
    soft[1, 2, 3] = 1.5
    with pytest.raises(LabelError, match=r"lie in \[0, 1\]; case 1, class 2, voxel 3 .* holds 1.5"):
        bin_statistics(p, soft, backend="triton")
    with pytest.raises(RangeError, match=r"case 0, class 0 reaches 7"):
        bin_statistics(7 * p * 3, labels % 3, backend="triton")


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kernel", ["hard", "triangular"])
def test_the_loss_has_the_gradient_of_finite_differences(kernel, activation):
    loss = SegmentationLoss(binning=Binning(4, kernel=kernel), activation=activation, backend="triton")
    logits, labels = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True), torch.tensor([[0, 1, 2, 0, 1, 1]])
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), logits)


def test_the_whole_loss_compiles_to_one_graph():
    loss = SegmentationLoss(binning=Binning(6, kernel="triangular"), backend="triton")
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    logits, labels = torch.randn(2, 3, 8, 9, requires_grad=True), torch.randint(0, 3, (2, 8, 9))
    values = loss(logits, labels), compiled(logits, labels)
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits) for value in values))


def test_half_precision_counts_as_its_exact_value():
    logits, labels = torch.randn(1, 3, 50).half(), torch.randint(0, 3, (1, 50))
    losses = (ACELoss(Binning(5, kernel="triangular"), backend=name)(logits, labels) for name in ("triton", "torch"))
    torch.testing.assert_close(*losses)


def test_the_doctor_finds_the_kernels_in_order_and_names_wrong_ones(monkeypatch):
    monkeypatch.setattr("segcal.doctor.checks.VOXELS", VOXELS)
    assert check_backend("triton", "cpu").agrees
    monkeypatch.setattr(triton_gpu, "_forward", wrong_sums)
    assert "bin_statistics, hard bins, softmax: values must be within" in check_backend("triton", "cpu").complaints[0]


CPU, SPEC = torch.device("cpu"), _plan(13, "triangular", None, "left", "softmax", True)[1]


def test_the_check_on_first_use_finds_the_kernels_in_order():
    triton_gpu._agrees.cache_clear()
    for activation, exclusive in itertools.product(ACTIVATIONS, (True, False)):
        spec = _plan(20, "hard", None, "left", activation, True)[1]
        assert triton_gpu._agrees(CPU, torch.float32, torch.uint8, exclusive, True, spec)


def wrong_sums(*arguments):
    sums = right_sums(*arguments)
    return sums._replace(moments=sums.moments * 1.01)


def no_compiler(*arguments):
    raise RuntimeError("no C compiler\nlong story")


right_sums = triton_gpu._forward


@pytest.mark.parametrize(
    ("fault", "said"),
    [(wrong_sums, "on cpu, its sums differ. Plain torch is used"), (no_compiler, "RuntimeError: no C compiler. Plain")],
)
def test_kernels_that_fail_or_disagree_are_replaced_by_plain_torch_with_a_warning(monkeypatch, fault, said):
    triton_gpu._agrees.cache_clear()
    monkeypatch.setattr(triton_gpu, "_forward", fault)
    monkeypatch.setattr(
        triton_gpu, "_trusted", lambda *given: triton_gpu._agrees(CPU, torch.float32, torch.int64, True, False, SPEC)
    )
    voxels = read_voxels(*small("map", torch.float32, "softmax"))
    binning = (13, "triangular", None, "left")
    with pytest.warns(RuntimeWarning, match=said):
        got = sums_and_gradient(voxels, binning, "softmax", "triton")
    assert all(map(torch.equal, got, sums_and_gradient(voxels, binning, "softmax", "torch")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        sums_and_gradient(voxels, binning, "softmax", "triton")
    triton_gpu._agrees.cache_clear()


COMPILE = """
import itertools, os, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from segcal.kernels import triton_gpu as gpu

TYPES = {
    "x_ptr": "*fp32", "y_ptr": "*u8", "mask_ptr": "*u8", "wrong_ptr": "*i64", "outside_ptr": "*i32",
    "gradient_ptr": "*fp32",
}

def build(kernel, target, warps, **constants):
    names = kernel.arg_names
    signature = {
        name: TYPES.get(name, "*fp64" if name.endswith("_ptr") else "i32") if name not in constants else "constexpr"
        for name in names
    }
    source = ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": False})

def stack(built):
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"]); file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return int(said.stdout.split("STACK:")[1].split()[0])

targets = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx90a", 64)]
for target, (activation, exclusive, degree) in itertools.product(
    targets, [("softmax", True, 1), ("sigmoid", False, 0), ("none", True, 3)]
):
    shared = dict(ACTIVATION=activation, SCALE=20.0, SHIFT=0.5, CELLS=True, DEGREE=degree, RIGHT=degree == 0,
                  EXCLUSIVE=exclusive, MASKED=not exclusive)
    both = [
        build(gpu._forward_pass, target, gpu.WARPS, **shared, CLASSES=True, SCATTER=degree == 3, BLOCK=gpu.BLOCK,
              TILE=gpu.TILE),
        build(gpu._backward_pass, target, gpu.BACKWARD_WARPS, **shared, BLOCK=gpu.BACKWARD_BLOCK),
    ]
    print(target.arch, activation, max(map(stack, both)) if target.backend == "cuda" else 0)
"""


def test_the_kernels_compile_for_gpus_and_fit_in_registers_but_for_a_few_bytes():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 9
    assert max(int(line.split()[-1]) for line in lines) <= 64, done.stdout  # bytes of stack; hundreds with larger tiles
