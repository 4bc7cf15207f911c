"""How sure a number is: bootstrap and permutation over patients, paired tests, the error that chance alone would show.

Voxels of an image are not independent, and two frames of a patient are not either; patients are. So patients are
what is drawn, and what tests count. A draw is a row of weights, how often each case is taken, so that every mean and
every micro average of all draws is one product of matrices (`metrics.micro` takes them).
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy import special
from torch import Tensor

from segcal._io.files import reject_pipe
from segcal.errors import ConfigError, FileError, check_integer, check_seed
from segcal.statistics import BinStatistics

MOST_RESAMPLES = 10**6  # intervals gain no digit from more
FRAME = re.compile(r"(?P<patient>patient\d+)_frame\d+")  # ACDC: two frames of each patient
TOGETHER = 2**22  # weights of draws that are made at a time: 32 MB
FEWEST_PATIENTS = 5  # below that nothing is tested and no interval is given: with few, chance passes for an effect


def patients_of(cases: Sequence[str], rule: str | None = None) -> tuple[str, ...]:
    """The patient of each case: what `rule` says, or by default each case its own, but for ACDC's frames.

    The rule is "none" (each case its own patient), a .csv file with columns case and patient, or a regular
    expression whose first group is the patient.

    >>> patients_of(["patient001_frame01", "patient001_frame12"])
    ('patient001', 'patient001')
    >>> patients_of(["scan_07_left", "scan_07_right"], r"scan_(\\d+)")
    ('07', '07')
    """
    if rule is None:
        return tuple(match["patient"] if (match := FRAME.fullmatch(case)) else case for case in cases)
    if rule == "none":
        return tuple(cases)
    if rule.endswith(".csv"):
        known = _read_patients(Path(rule))
        missing = [case for case in cases if case not in known]
        if missing:
            raise ConfigError(f"{rule} must name the patient of every case; {missing[0]!r} is not in it. Add the case.")
        return tuple(known[case] for case in cases)
    try:
        pattern = re.compile(rule)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"patients must be 'none', a .csv file or a regular expression; {rule!r}: {error}.") from None
    if pattern.groups < 1:
        raise ConfigError(f"the expression for patients must have a group, as (patient\\d+)_; got {rule!r}.")
    matches = [pattern.search(case) for case in cases]
    for case, match in zip(cases, matches, strict=True):
        if match is None or match[1] is None:
            raise ConfigError(
                f"the expression for patients must match every case; {rule!r} does not match {case!r}."
                " Change the expression."
            )
    return tuple(match[1] for match in matches if match)


def _read_patients(path: Path) -> dict[str, str]:
    reject_pipe(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path} cannot be read: {error}. Check the path.") from error
    if not rows or not {"case", "patient"} <= set(rows[0]):
        raise ConfigError(
            f"{path} must have columns case and patient; it has {', '.join(rows[0]) if rows else 'none'}."
            " Add the columns."
        )
    known: dict[str, str] = {}
    for row in rows:
        case, patient = row["case"], row["patient"]
        if not case and not patient:
            continue  # spreadsheets end with such rows
        if not case or not patient:
            raise ConfigError(
                f"{path} must name a case and its patient in every row; got {case!r} and {patient!r}. Complete the row."
            )
        if known.setdefault(case, patient) != patient:
            raise ConfigError(
                f"{path} must name one patient of each case; {case!r} has {known[case]!r} and {patient!r}."
                " Remove one of the rows."
            )
    return known


def group_matrix(patients: Sequence[str]) -> Tensor:
    """One row per patient, in order of first appearance, with 1 at each of its cases."""
    order = {name: i for i, name in enumerate(dict.fromkeys(patients))}
    matrix = torch.zeros(len(order), len(patients), dtype=torch.float64)
    matrix[[order[name] for name in patients], range(len(patients))] = 1
    return matrix


def patient_places(patients: Sequence[str]) -> Tensor:
    """The number of each case's patient, counted in order of first appearance."""
    order = {name: i for i, name in enumerate(dict.fromkeys(patients))}
    return torch.tensor([order[name] for name in patients])


def resample_weights(patients: Sequence[str], *, number: int = 2000, seed: int = 0) -> Tensor:
    """How often each case is taken in each draw, (draw, case): patients with replacement, with all their cases."""
    return torch.cat(list(resample_blocks(patients, number=number, seed=seed)))


def resample_blocks(patients: Sequence[str], *, number: int = 2000, seed: int = 0) -> Iterator[Tensor]:
    """The rows of `resample_weights`, some at a time: those of ten thousand cases are many."""
    check_integer("resamples", number)
    places = patient_places(patients)
    groups, generator = len(set(patients)), np.random.default_rng(check_seed(seed))
    for size in _block_sizes(number, len(places)):
        drawn = generator.multinomial(groups, [1 / groups] * groups, size=size)
        yield torch.from_numpy(drawn).double()[:, places]


def _block_sizes(number: int, cases: int) -> Iterator[int]:
    """How many draws of so many cases to make at a time."""
    together = max(1, TOGETHER // max(1, cases))
    yield from (min(together, number - start) for start in range(0, number, together))


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Mean over cases of (case, ...) in each draw, (draw, ...), skipping NaN; NaN where nothing is left."""
    known = ~values.isnan()
    total = torch.tensordot(weights, torch.where(known, values, 0), 1)
    number = torch.tensordot(weights, known.double(), 1)
    return torch.where(number > 0, total / number.clamp(min=1), torch.nan)


def quantile_interval(draws: Tensor, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Percentile interval over the first axis, skipping NaN."""
    # numpy, since torch.quantile refuses more than 16 million values.
    with np.errstate(invalid="ignore"):
        flat = draws.flatten(1).numpy()
        empty = np.isnan(flat).all(0)
        low, high = np.nanquantile(np.where(empty, 0.0, flat), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return tuple(torch.from_numpy(np.where(empty, np.nan, end)).view(draws.shape[1:]) for end in (low, high))  # type: ignore[return-value]


def expanded(level: float, patients: int) -> float:
    """The level to take percentiles at, so that the interval of a mean over so few has the level asked for.

    A bootstrap draws from what was seen, whose spread is too small by sqrt((n - 1) / n), and knows of no t
    distribution (Hesterberg 2015, "What teachers should know about the bootstrap").

    >>> round(expanded(0.95, 8), 4), round(expanded(0.95, 60), 4)
    (0.9885, 0.9564)
    """
    if patients < 2:
        return level
    t = special.stdtrit(patients - 1, (1 + level) / 2)
    return float(2 * special.ndtr(math.sqrt(patients / (patients - 1)) * t) - 1)


def wilson(successes: Tensor, number: Tensor, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Wilson's interval of a share, as if all voxels were independent; NaN without any.

    >>> [round(float(x), 4) for x in wilson(torch.tensor(8.0), torch.tensor(10.0))]  # 8 of 10
    [0.4902, 0.9433]
    """
    z = float(special.ndtri((1 + level) / 2))
    n = torch.where(number > 0, number, torch.nan)
    share = successes / n
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)).clamp(min=0).sqrt()
    return (middle - half).clamp(min=0), (middle + half).clamp(max=1)


def error_interval(value: float, draws: Tensor, distances: Tensor, *, level: float = 0.95) -> tuple[float, float]:
    """Interval of an average of absolute gaps, from its bootstrap draws and from how far their gaps are from its own.

    Such an error is too large by chance, and its draws more so: percentiles of them miss the truth, and may miss the
    value itself. By the triangle inequality the error is off by no more than the gaps are on average, which gives the
    lower end; the upper one is the draws' own, less their bias.
    """
    known, far = (each[~each.isnan()].numpy() for each in (draws, distances))
    if not len(known) or not len(far):
        return math.nan, math.nan
    upper = float(np.quantile(known, (1 + level) / 2) - (known.mean() - value))
    return max(0.0, value - float(np.quantile(far, (1 + level) / 2))), max(value, upper)


def swap_blocks(patients: Sequence[str], *, number: int, seed: int = 0) -> Iterator[Tensor]:
    """Which cases two methods swap, some rows at a time: (draw, case) of zeros and ones.

    The cases of a patient are swapped together, by the toss of a coin. These are all ways there are, the one without a
    swap among them, if there are no more than `number`.
    """
    places, groups = patient_places(patients), len(set(patients))
    if 2**groups <= number:
        tossed = np.array(list(itertools.product((0.0, 1.0), repeat=groups)))
        yield torch.from_numpy(tossed)[:, places]
        return
    generator = np.random.default_rng(seed)
    for i, size in enumerate(_block_sizes(number, len(places))):
        some = generator.integers(0, 2, size=(size, groups)).astype(np.float64)
        if i == 0:
            some[0] = 0  # what was observed is one of the ways
        yield torch.from_numpy(some)[:, places]


def permutation_p(differences: Tensor) -> float:
    """Two-sided p: the share of swaps whose difference is as far from 0 as that of the first, which swaps nothing."""
    if differences[0].isnan():
        return math.nan
    known = differences[~differences.isnan()].abs()
    return (known >= known[0] * (1 - 1e-9)).double().mean().item()


def t_test(differences: Tensor, groups: Tensor | None = None) -> float:
    """p of the paired t-test of the mean over cases, which are independent between patients only.

    `groups` are the patients' numbers (`patient_places`) or the rows of `group_matrix`; without them, each case is a
    patient. Of patients with equally many cases this is the test of their means. NaN below 5 patients; 1 where no pair
    differs; where all differ by the same, the p of as many equal signs.
    """
    known = ~differences.isnan()
    values, places = differences[known], _places(groups, len(differences))[known]
    patients = len(set(places.tolist()))
    if patients < FEWEST_PATIENTS:
        return math.nan
    if not values.any():
        return 1.0
    mean = values.mean()
    spread = _group_sums(values - mean, places).square().sum().sqrt().item()
    if spread <= 1e-12 * values.abs().max().item() * len(values):
        return 2.0 ** (1 - patients)
    t = mean.item() * len(values) / spread * math.sqrt((patients - 1) / patients)
    return float(2 * special.stdtr(patients - 1, -abs(t)))


def signed_rank_test(differences: Tensor, groups: Tensor | None = None) -> float:
    """p of Wilcoxon's signed-rank test on the means of patients, those that do not differ left out.

    NaN below 5 patients. `groups` as in `t_test`.
    """
    known = ~differences.isnan()
    places = _places(groups, len(differences))[known]
    total, number = (_group_sums(values, places) for values in (differences[known], torch.ones(len(places)).double()))
    means = (total[number > 0] / number[number > 0]).numpy()
    if len(means) < FEWEST_PATIENTS:
        return math.nan
    from scipy.stats import wilcoxon  # takes a second to import

    return float(wilcoxon(means).pvalue) if means.any() else 1.0


def _places(groups: Tensor | None, cases: int) -> Tensor:
    if groups is None:
        return torch.arange(cases)
    return groups if groups.ndim == 1 else groups.argmax(0)


def _group_sums(values: Tensor, places: Tensor) -> Tensor:
    return values.new_zeros(int(places.max()) + 1 if len(places) else 0).index_add(0, places, values)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for several tests; NaN stays and does not count.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected = [math.nan] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[i] = largest
    return corrected


def with_drawn_labels(stats: BinStatistics, generator: np.random.Generator, *, raters: int = 1) -> BinStatistics:
    """The statistics that the same predictions would have, were they perfectly calibrated.

    Labels are drawn from each bin's mean confidence, voxel by voxel on their own: the errors of these draws are what
    chance alone shows. Neighboring voxels are alike in truth, so that the real floor is higher. Draws of some cases
    after the other are those of all.

    raters: How many draw the labels of a voxel, whose mean is taken.
    """
    chance = stats.mean_confidence.nan_to_num(0.0).clamp(0, 1).numpy()
    drawn = generator.binomial(raters * stats.count.round().long().numpy(), chance)
    labels = torch.from_numpy(drawn).double() / raters
    return BinStatistics(stats.count, stats.confidence_sum, labels, stats.binning)
