"""The file of decisions: whole at every moment, exact, safe to open in a spreadsheet, and nobody's decision is lost."""

from __future__ import annotations

import csv
import io
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segcal.errors import ConfigError, FileError
from segcal.review import ReviewDecision, read_decisions
from segcal.review.decisions import ConflictError, Decisions, decisions_text

NASTY = st.text(st.sampled_from("=+-@'\",;|\t\n\r \\aé\uff1d漢😀")) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0")
)


@given(case=NASTY, comment=NASTY, reviewer=NASTY)
def test_texts_are_read_back_exactly_whatever_they_hold(tmp_path_factory, case, comment, reviewer):
    path = tmp_path_factory.mktemp("exact") / "decisions.csv"
    made = Decisions(path).decide(ReviewDecision(case, "reject", comment, reviewer), seen=0)[1]
    assert read_decisions(path) == [made]
    assert (made.case, made.comment, made.reviewer) == (case, comment, reviewer)


@given(comment=NASTY)
def test_no_cell_is_a_formula_wherever_a_spreadsheet_begins_one(comment):
    text = decisions_text([ReviewDecision("=case", "accept", comment, "@me")])
    plain = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    # As programs do that split at other signs, and take quotes that do not open a cell for part of it.
    split = re.split('[,;|\t\n\r"]', text)
    assert [cell for cell in (*plain, *split) if cell[:1] in tuple("=+-@\uff1d\uff0b\uff0d\uff20")] == []


def test_the_columns_are_those_that_are_promised_and_the_time_is_utc(tmp_path):
    path = tmp_path / "decisions.csv"
    Decisions(path).decide(ReviewDecision("case_1", "accept", "fine", "Ada"), seen=0)
    (row,) = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    assert list(row) == ["case", "decision", "comment", "reviewer", "time"]
    assert [row[name] for name in ("case", "decision", "comment", "reviewer")] == ["case_1", "accept", "fine", "Ada"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row["time"])


def test_a_change_from_what_is_not_the_last_revision_is_refused_and_nothing_written(tmp_path):
    decisions = Decisions(tmp_path / "decisions.csv")
    first, _ = decisions.decide(ReviewDecision("a", "accept"), seen=0)
    before = decisions.path.read_bytes()
    with pytest.raises(ConflictError, match="a: somebody else has decided meanwhile"):
        decisions.decide(ReviewDecision("a", "reject"), seen=0)
    assert decisions.path.read_bytes() == before
    assert decisions.decide(ReviewDecision("a", "reject"), seen=first)[0] > first


def test_the_same_again_changes_nothing(tmp_path):
    decisions = Decisions(tmp_path / "decisions.csv", clock=iter(["then", "later"]).__next__)
    first = decisions.decide(ReviewDecision("a", "accept"), seen=0)
    assert decisions.decide(ReviewDecision("a", "accept"), seen=first[0]) == first


def test_a_decision_that_is_taken_back_leaves_no_row(tmp_path):
    decisions = Decisions(tmp_path / "decisions.csv")
    revision, _ = decisions.decide(ReviewDecision("a", "accept"), seen=0)
    decisions.decide(ReviewDecision("b", "", "only a comment"), seen=0)
    decisions.decide(ReviewDecision("a", ""), seen=revision)
    assert [each.case for each in read_decisions(decisions.path)] == ["b"]


def test_rows_of_other_cases_and_earlier_reviews_stay(tmp_path):
    path = tmp_path / "decisions.csv"
    Decisions(path).decide(ReviewDecision("of another cohort", "reject"), seen=0)
    Decisions(path).decide(ReviewDecision("a", "accept"), seen=0)
    assert [(each.case, each.decision) for each in read_decisions(path)] == [
        ("of another cohort", "reject"),
        ("a", "accept"),
    ]


def test_edits_by_hand_are_kept_and_count_as_somebody_elses(tmp_path):
    decisions = Decisions(tmp_path / "decisions.csv")
    seen, _ = decisions.decide(ReviewDecision("a", "accept"), seen=0)
    by_hand = decisions.path.read_text().replace('"accept"', '"reject"') + "c,accept,by hand,,\n"
    decisions.path.write_text(by_hand)
    decisions.decide(ReviewDecision("b", "accept"), seen=0)
    with pytest.raises(ConflictError):
        decisions.decide(ReviewDecision("a", "accept"), seen=seen)
    found = {each.case: each.decision for each in read_decisions(decisions.path)}
    assert found == {"a": "reject", "c": "accept", "b": "accept"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("case,class,threshold\n", "must have the columns case, decision"),  # as `segcal decide` writes
        ("", "must have the columns"),
        ("case,decision,comment,reviewer,time\na,maybe,,,\n", "must be accept, reject or empty; got 'maybe'"),
        ("case,decision,comment,reviewer,time\na,accept\n", "line 2 must have 5 cells; it has 2"),
        ("case,decision,comment,reviewer,time\na,accept,,,\na,reject,,,\n", "'a' has another one above"),
        ('case,decision,comment,reviewer,time\na,accept,"no end,,\n', "must be a line of a CSV file"),
        (b"case\xff", "in UTF-8"),
    ],
)
def test_a_file_that_is_something_else_is_refused_and_left_as_it_is(tmp_path, content, told):
    path = tmp_path / "decisions.csv"
    raw = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(raw)
    with pytest.raises(FileError, match=told):
        Decisions(path)
    assert path.read_bytes() == raw


def test_damage_while_it_is_held_is_told_and_not_written_over(tmp_path):
    decisions = Decisions(tmp_path / "decisions.csv")
    decisions.path.write_text("nonsense\n")
    with pytest.raises(FileError):
        decisions.decide(ReviewDecision("a", "accept"), seen=0)
    assert decisions.path.read_text() == "nonsense\n"


@pytest.mark.parametrize(
    "decision",
    [
        ReviewDecision("a", "maybe"),
        ReviewDecision("a", "accept", comment="x" * 10_001),
        ReviewDecision("a", "accept", comment="half \ud800"),
        ReviewDecision("a", "accept", reviewer="\0"),
    ],
)
def test_what_could_not_be_read_back_is_refused(tmp_path, decision):
    decisions = Decisions(tmp_path / "decisions.csv")
    with pytest.raises(ConfigError):
        decisions.decide(decision, seen=0)
    assert not decisions.path.exists()


def test_a_second_holder_is_refused_until_the_first_is_gone(tmp_path):
    path = tmp_path / "decisions.csv"
    told = "must be written by one review at a time"
    with Decisions.held(path), pytest.raises(ConfigError, match=told), Decisions.held(path):
        pass
    with Decisions.held(path) as again:
        again.decide(ReviewDecision("a", "accept"), seen=0)
    assert [each.name for each in tmp_path.iterdir()] == ["decisions.csv"]


def test_many_at_once_lose_no_decision(tmp_path):
    decisions = Decisions(tmp_path / "decisions.csv")

    def decide(who: int) -> None:
        for i in range(20):
            decisions.decide(ReviewDecision(f"{who}-{i}", "accept"), seen=0)

    threads = [threading.Thread(target=decide, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.case for each in read_decisions(decisions.path)} == {f"{w}-{i}" for w in range(6) for i in range(20)}
