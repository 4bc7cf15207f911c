"""Groups of cases: numbers against means by hand, gaps against scipy's permutation test, and files that are wrong."""

import csv
import itertools
import math

import numpy as np
import pytest
import torch
from cohorts import run, write_cohort
from handmade import evaluation_of
from scipy import stats as scipy_stats
from typer.testing import CliRunner

from segcal import ConfigError, FileError, compare_groups
from segcal.cli import app
from segcal.evaluation.groups import read_groups

SITES = ["north"] * 7 + ["south"] * 8
CASES = [f"case {i}" for i in range(15)]


@pytest.fixture
def gaps():
    """ACE of each case and class: the south is worse by 0.1."""
    noise = np.random.default_rng(0).uniform(0, 0.1, (15, 1))
    return torch.from_numpy(0.05 + noise + 0.1 * (np.array(SITES) == "south")[:, None])


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def table(tmp_path):
    return write(
        tmp_path / "groups.csv", "case,site\n" + "".join(f"{c},{s}\n" for c, s in zip(CASES, SITES, strict=True))
    )


def test_values_are_means_over_the_cases_of_a_group(gaps, table):
    found = compare_groups(evaluation_of(gaps, torch.full((15, 1), 0.8), cases=CASES), table, permutations=200)
    south = found.find("site", "south", label="liver", metric="ace")
    own = gaps[7:, 0].numpy()
    assert (south.cases, south.patients) == (8, 8)
    assert south.value == pytest.approx(own.mean())
    assert south.std == pytest.approx(own.std(ddof=1))
    half = scipy_stats.t.ppf(0.975, 7) * own.std(ddof=1) / math.sqrt(8)
    assert (south.low, south.high) == pytest.approx((own.mean() - half, own.mean() + half), abs=0.25 * half)
    pooled = found.find("site", "south", average="micro pooled", label="liver", metric="ace")
    assert pooled.value == pytest.approx(own.mean())  # one bin, of one sign, of equally many voxels
    assert pooled.low <= pooled.value <= pooled.high


def test_the_gap_is_that_of_the_furthest_groups_and_its_p_that_of_scipy(gaps, table):
    found = compare_groups(evaluation_of(gaps, torch.full((15, 1), 0.8), cases=CASES), table, permutations=20_000)
    gap = found.gap("site", label="liver", metric="ace")
    north, south = gaps[:7, 0].numpy(), gaps[7:, 0].numpy()
    assert (gap.lowest, gap.highest) == ("north", "south")
    assert gap.gap == pytest.approx(south.mean() - north.mean())
    assert gap.low < gap.gap < gap.high
    assert gap.low > 0
    weak = evaluation_of(
        gaps - 0.08 * torch.tensor([[s == "south"] for s in SITES]), torch.full((15, 1), 0.8), cases=CASES
    )
    weaker = compare_groups(weak, table, permutations=20_000).gap("site", label="liver", metric="ace")
    values = (gaps[:, 0] - 0.08 * torch.tensor([s == "south" for s in SITES])).numpy()
    expected = scipy_stats.permutation_test(
        (values[:7], values[7:]), lambda a, b, axis: abs(a.mean(axis) - b.mean(axis)), vectorized=True,
        alternative="greater", n_resamples=np.inf,
    ).pvalue  # fmt: skip
    assert weaker.p == pytest.approx(expected, abs=0.015)
    same = compare_groups(weak, table, permutations=200).gap("site", label="liver", metric="dice")
    assert (same.gap, same.p, same.stars) == (0, 1, "")


def test_p_is_uniform_where_groups_do_not_matter(tmp_path):
    """Two frames of each of 18 patients, in three groups by chance: p below 0.2 in about a fifth of 25 cohorts."""
    generator, below = np.random.default_rng(1), 0
    cases = [f"patient{i:03}_frame{k:02}" for i in range(18) for k in (1, 2)]
    for _ in range(25):
        of_patient = generator.permutation(["a"] * 6 + ["b"] * 6 + ["c"] * 6)
        path = write(
            tmp_path / "g.csv", "patient,kind\n" + "".join(f"patient{i:03},{g}\n" for i, g in enumerate(of_patient))
        )
        own = np.repeat(generator.uniform(0, 0.2, (18, 1)), 2, 0) + generator.uniform(0, 0.02, (36, 1))
        evaluation = evaluation_of(torch.from_numpy(own), torch.full((36, 1), 0.8), cases=cases)
        found = compare_groups(evaluation, path, permutations=99, resamples=2)
        assert found.find("kind", "a", metric="ace").patients == 6
        below += found.gap("kind", metric="ace").p <= 0.2
    assert 1 <= below <= 11  # 5 on average; a test of cases would be below far more often


def test_an_attribute_that_differs_within_patients_is_exchanged_within_them(tmp_path):
    cases = [f"patient{i:03}_frame{k:02}" for i in range(8) for k in (1, 2)]
    path = write(
        tmp_path / "g.csv", "case,phase\n" + "".join(f"{c},{'ED' if c.endswith('01') else 'ES'}\n" for c in cases)
    )
    of_patient = np.random.default_rng(2).uniform(0.05, 0.4, 8)
    own = np.stack([of_patient, of_patient + 0.01], 1).reshape(16, 1)  # a small difference, the same in all
    evaluation = evaluation_of(torch.from_numpy(own), torch.full((16, 1), 0.8), cases=cases)
    gap = compare_groups(evaluation, path, permutations=4000).gap("phase", label="liver", metric="ace")
    assert gap.gap == pytest.approx(0.01)
    assert (gap.low, gap.high) == pytest.approx((0.01, 0.01))
    assert gap.p == pytest.approx(2 / 2**8, abs=0.006)  # all of 8 patients the one way, or the other


def group_file(path, name, groups):
    """Write the group of each case."""
    return write(path, f"case,{name}\n" + "".join(f"{case},{group}\n" for case, group in groups.items()))


def test_a_group_that_the_gap_leaves_out_is_no_part_of_its_test(tmp_path):
    """Of the third site only 4 patients have the class, so that it is left out, however far it lies from the others."""
    sites = ["east"] * 6 + ["north"] * 6 + ["south"] * 8
    dices = np.array([0.5, 0.6, 0.7, 0.8, 0.9, 0.1] * 2 + [0.05] * 8)
    absent = [(case, 0) for case in (5, 11, 16, 17, 18, 19)]
    cases = [f"case {i}" for i in range(20)]
    path = group_file(tmp_path / "g.csv", "site", dict(zip(cases, sites, strict=True)))

    def gap_of(dices):
        dice = torch.from_numpy(dices)[:, None]
        found = compare_groups(evaluation_of(0 * dice, dice, cases=cases, absent=absent), path, permutations=4000)
        return found.gap("site", label="liver", metric="dice")

    same = gap_of(dices)
    assert (same.gap, same.p) == (pytest.approx(0, abs=1e-12), 1)
    dices[6:11] -= [0.2, 0.3, 0.1, 0.2, 0.1]
    lower = gap_of(dices)
    assert (lower.lowest, lower.highest) == ("north", "east")
    assert lower.gap == pytest.approx(0.18)
    expected = scipy_stats.permutation_test(  # all ways to deal 10 patients with the class to two sites
        (dices[:5], dices[6:11]), lambda a, b, axis: abs(a.mean(axis) - b.mean(axis)), vectorized=True,
        alternative="greater", n_resamples=np.inf,
    ).pvalue  # fmt: skip
    assert lower.p == pytest.approx(expected, abs=0.03)


def test_a_patient_in_two_groups_is_permuted_within_and_the_others_with_each_other(tmp_path):
    generator = np.random.default_rng(4)
    cases = [f"patient{i:03}_frame{k:02}" for i in range(11) for k in (1, 2)]
    groups = ["north"] * 10 + ["south"] * 10 + ["north", "south"]
    own = generator.uniform(0.05, 0.1, 22) + 0.02 * (np.array(groups) == "south")
    path = group_file(tmp_path / "g.csv", "site", dict(zip(cases, groups, strict=True)))
    evaluation = evaluation_of(torch.from_numpy(own)[:, None], torch.full((22, 1), 0.8), cases=cases)
    gap = compare_groups(evaluation, path, permutations=10_000).gap("site", label="liver", metric="ace")

    ways = []
    for chosen in itertools.combinations(range(10), 5):
        for swapped in (False, True):
            north = [case for case in range(20) if case // 2 in chosen] + [21 if swapped else 20]
            south = [case for case in range(22) if case not in north]
            ways.append(abs(own[south].mean() - own[north].mean()))
    assert gap.gap == pytest.approx(ways[0])
    assert gap.p == pytest.approx(np.mean(np.array(ways) >= ways[0] - 1e-12), abs=0.01)
    assert gap.p < 0.05


def test_one_patient_in_two_groups_leaves_the_others_independent_in_the_interval(tmp_path):
    """Both groups have the same values, in the same order: the interval must be that of two independent means."""
    cases = [f"patient{i:03}_frame01" for i in range(24)] + ["patient024_frame01", "patient024_frame02"]
    groups = ["north"] * 12 + ["south"] * 12 + ["north", "south"]
    values = np.random.default_rng(5).uniform(0.05, 0.3, 12)
    own = np.concatenate([values, values, [0.15, 0.15]])
    path = group_file(tmp_path / "g.csv", "site", dict(zip(cases, groups, strict=True)))
    evaluation = evaluation_of(torch.from_numpy(own)[:, None], torch.full((26, 1), 0.8), cases=cases)
    gap = compare_groups(evaluation, path, permutations=10).gap("site", label="liver", metric="ace")
    half = scipy_stats.t.ppf(0.975, 12) * math.sqrt(2 / 13) * own[:13].std(ddof=1)
    assert (gap.lowest, gap.highest) == ("north", "south")
    assert (gap.low, gap.high) == pytest.approx((-half, half), abs=0.25 * half)


def test_p_is_uniform_where_some_patients_are_in_two_groups(tmp_path):
    """12 patients in one of two groups by chance, 4 in both: p below 0.2 in about a fifth of 25 cohorts."""
    generator, below = np.random.default_rng(3), 0
    cases = [f"patient{i:03}_frame{k:02}" for i in range(16) for k in (1, 2)]
    for _ in range(25):
        of_patients = np.repeat(generator.permutation(["a"] * 6 + ["b"] * 6), 2)
        within = [group for _ in range(4) for group in generator.permutation(["a", "b"])]
        path = group_file(tmp_path / "g.csv", "kind", dict(zip(cases, [*of_patients, *within], strict=True)))
        own = np.repeat(generator.uniform(0, 0.2, (16, 1)), 2, 0) + generator.uniform(0, 0.02, (32, 1))
        evaluation = evaluation_of(torch.from_numpy(own), torch.full((32, 1), 0.8), cases=cases)
        below += compare_groups(evaluation, path, permutations=99, resamples=2).gap("kind", metric="ace").p <= 0.2
    assert 1 <= below <= 11  # 5 on average


def test_small_groups_have_no_interval_and_no_part_in_gaps(gaps, tmp_path):
    sites = ["north"] * 6 + ["east"] * 2 + ["south"] * 7
    path = write(tmp_path / "g.csv", "case,site\n" + "".join(f"{c},{s}\n" for c, s in zip(CASES, sites, strict=True)))
    found = compare_groups(evaluation_of(gaps, torch.full((15, 1), 0.8), cases=CASES), path, permutations=50)
    assert math.isnan(found.find("site", "east", metric="ace").low)
    assert {found.gap("site", metric="ace").lowest, found.gap("site", metric="ace").highest} == {"north", "south"}
    assert "site: no intervals, and no gaps, of groups with fewer than 5 patients: east (2)." in found.notes
    sites = ["north"] * 12 + ["east"] * 3
    write(path, "case,site\n" + "".join(f"{c},{s}\n" for c, s in zip(CASES, sites, strict=True)))
    found = compare_groups(evaluation_of(gaps, torch.full((15, 1), 0.8), cases=CASES), path, permutations=50)
    assert found.gaps == ()
    assert "site: no gap, for fewer than two groups have 5 patients." in found.notes


def test_missing_unknown_and_empty_are_named(tmp_path):
    path = write(tmp_path / "groups.csv", "case,site,sex\na,north,\nb,south,f\nz,north,m\n,,\n")
    found = read_groups(path, ["a", "b", "c"])
    assert found.attributes == {"site": {"a": "north", "b": "south"}, "sex": {"b": "f"}}
    assert found.notes == (
        "groups.csv does not name 1 case, in no group: c.",
        "groups.csv names 1 case that the evaluation does not have: z.",
        "1 case without a value of sex, in no group: a.",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must begin with the names of its columns"),
        ("name,site\na,north\n", "the first case or patient"),
        ("case\na\n", "must begin with the names of its columns"),
        ("case,site,site\na,north,x\n", "'site' came more than once"),
        ("case,site\na\n", "in every row; row 2 is 'a'"),
        ("case,site\na,north\na,south\n", "'a' came with other values, too"),
        ("case,site\nx,north\n", "must name a case of the evaluation, as 'a'; it has 'x'"),
        (
            "case,age\n" + "".join(f"{c},{i}\n" for i, c in enumerate("abcdefghijklmnopqrstuvw")),
            "at most 20 groups; age has 23",
        ),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        read_groups(write(tmp_path / "g.csv", text), list("abcdefghijklmnopqrstuvw"))


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(FileError, match="cannot be read"):
        read_groups(tmp_path / "nowhere.csv", ["a"])


def test_evaluate_writes_groups_and_the_report_shows_them(tmp_path):
    write_cohort(tmp_path, cases=10)
    path = write(tmp_path / "g.csv", "case,site\n" + "".join(f"case_{i},{'ab'[i % 2]}\n" for i in range(10)))
    done = run(tmp_path, "--groups", str(path))
    assert done.exit_code == 0, done.output
    assert "largest gap" in done.output
    with (tmp_path / "out" / "group_summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "out" / "cases.csv").open() as file:
        aces = [
            float(r["value"])
            for r in csv.DictReader(file)
            if (r["class"], r["metric"]) == ("class 1", "ace") and int(r["case"][-1]) % 2 == 0
        ]
    (row,) = [
        r for r in rows if (r["group"], r["average"], r["class"], r["metric"]) == ("a", "macro", "class 1", "ace")
    ]
    assert float(row["value"]) == pytest.approx(np.mean(aces))
    arguments = ["report", str(tmp_path / "out"), "--out", str(tmp_path / "r.html"), "--groups", str(path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "r.html").read_text()
    assert '<a href="#groups">Groups</a>' in page
    assert page.count("data:image/svg+xml;base64,") == 1
    assert run(tmp_path).exit_code == 0
    assert not (tmp_path / "out" / "group_summary.csv").exists()  # those of the last time are gone


def test_patients_without_groups_are_refused(tmp_path):
    done = run(write_cohort(tmp_path, cases=1), "--patients", "none")
    assert done.exit_code == 2
    assert "--patients must be used with --groups" in done.output
