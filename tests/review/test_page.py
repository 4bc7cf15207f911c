"""The review in a real browser: order, filters, keys, decisions on disk, two at once, hostile names, 2,000 cases."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
from browsing import reads_by_all
from cohorts import write_cohort
from matplotlib.image import imread
from reviews import HOSTILE, Client, save_evaluation

from segcal import evaluate
from segcal.review import read_decisions
from segcal.review.serving import serve_review
from segcal.review.volumes import Volumes


@pytest.fixture
def page(visit, server):
    with visit(server.url) as opened:
        yield opened


def rows(page) -> list[str]:
    return page.locator(".row .what > span:first-child").all_inner_texts()


def chosen(page) -> str:
    return page.locator('.row[aria-selected="true"] .what > span:first-child').inner_text()


def wait_until(page, holds) -> None:
    """The page's policy forbids Playwright's own way to wait for a condition."""
    for _ in range(200):
        if holds():
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"did not come: {page.locator('main').inner_text()}")


def on_disk(server) -> dict[str, tuple[str, str]]:
    return {each.case: (each.decision, each.comment) for each in read_decisions(server.decisions)}


def wait_for_disk(page, server, expected: dict[str, tuple[str, str]]) -> None:
    wait_until(page, lambda: on_disk(server) == expected)


def test_the_worst_case_is_first_and_open_with_the_numbers_of_the_evaluation(page, client):
    (result,) = client.ask("/api/cases").json
    assert rows(page) == [f"case_{i:02d}" for i in range(12)]
    assert page.locator("#case-title").inner_text() == chosen(page) == "case_00"
    assert page.locator(".row .value").first.inner_text() == f"{result['quality'][0][0]:.3f}"
    cells = page.locator("#numbers tbody tr").nth(1).locator("th, td").all_inner_texts()
    values = {m["heading"]: result["values"][m["name"]][0][1] for m in result["metrics"]}
    digits = {m["heading"]: m["digits"] for m in result["metrics"]}
    shown = ["\u2013" if value is None else f"{value:.{digits[name]}f}" for name, value in values.items()]
    assert cells == ["class 1", *shown, ""]


def test_keys_step_decide_and_are_on_disk(page, server):
    page.keyboard.press("n")
    assert chosen(page) == "case_01"
    page.keyboard.press("p")
    assert chosen(page) == "case_00"
    page.keyboard.press("a")  # and on to the next
    assert chosen(page) == "case_01"
    page.keyboard.press("r")
    wait_for_disk(page, server, {"case_00": ("accept", ""), "case_01": ("reject", "")})
    wait_until(page, lambda: "2 of 12 cases decided" in page.locator("#progress").inner_text())
    page.keyboard.press("k")
    assert page.locator('[data-decision="reject"]').get_attribute("aria-pressed") == "true"
    page.keyboard.press("u")
    wait_for_disk(page, server, {"case_00": ("accept", "")})


def test_clicks_and_a_comment_are_on_disk_and_keys_do_not_act_while_one_types(page, server):
    page.locator(".row").nth(4).click()
    page.keyboard.press("t")
    page.keyboard.type("near the apex")  # n, a, r, p and t are letters here
    page.keyboard.press("Control+Enter")
    wait_for_disk(page, server, {"case_04": ("", "near the apex")})
    page.uncheck("#onward")
    page.click('[data-decision="reject"]')
    wait_for_disk(page, server, {"case_04": ("reject", "near the apex")})
    assert chosen(page) == "case_04"


def test_a_comment_is_saved_by_itself_soon_after_the_last_key(page, server):
    page.fill("#comment", "typed")
    wait_for_disk(page, server, {"case_00": ("", "typed")})


def test_a_comment_that_is_being_typed_goes_along_with_a_decision(page, server):
    page.fill("#comment", "typed")
    page.click('[data-decision="accept"]')
    wait_for_disk(page, server, {"case_00": ("accept", "typed")})
    assert page.locator("#comment").input_value() == ""  # of the next case


def test_the_reviewers_name_is_written(visit, results):
    with serve_review(results, reviewer="Ada") as server, visit(server.url) as page:
        page.keyboard.press("a")
        page.fill("#reviewer", "Grace")
        page.locator("#list").focus()
        page.keyboard.press("a")
        wait_for_disk(page, server, {"case_00": ("accept", ""), "case_01": ("accept", "")})
        assert [each.reviewer for each in read_decisions(server.decisions)] == ["Ada", "Grace"]


def test_decisions_are_there_again_after_a_reload_and_after_a_restart(visit, results):
    with serve_review(results) as server, visit(server.url) as page:
        page.keyboard.press("a")
        page.wait_for_selector(".row.accept")
        page.reload()
        page.wait_for_selector(".row.accept")
        assert chosen(page) == "case_01"  # the first that is not decided
    with serve_review(results) as server, visit(server.url) as page:
        assert page.locator(".row.accept").count() == 1
        assert page.locator("#progress").inner_text().startswith("1 of 12 cases decided: 1 accepted")


def test_filters_by_name_class_decision_and_metric(page, client):
    (result,) = client.ask("/api/cases").json
    page.fill('[name="text"]', "_1")
    assert rows(page) == ["case_10", "case_11"]
    assert page.locator("#shown").inner_text().startswith("2 of 12 cases")
    page.fill('[name="text"]', "")
    page.select_option('[name="metric"]', "dice")
    page.select_option('[name="class"]', "2")
    dices = [row[2] for row in result["values"]["dice"]]
    bound = sorted(dices)[6]
    page.fill('[name="from"]', str(bound))
    quality = [row[2] for row in result["quality"]]
    expected = sorted((i for i in range(12) if dices[i] >= bound), key=lambda i: (quality[i], i))
    assert rows(page) == [f"case_{i:02d}" for i in expected]
    page.fill('[name="from"]', "")
    page.select_option('[name="class"]', "0")
    page.select_option('[name="order"]', "name")
    page.keyboard.press("Escape")
    page.locator("#list").focus()
    page.keyboard.press("a")
    page.select_option('[name="decision"]', "open")
    wait_until(page, lambda: len(rows(page)) == 11)
    page.select_option('[name="decision"]', "accept")
    assert rows(page) == ["case_00"]
    page.select_option('[name="order"]', "down")
    page.select_option('[name="decision"]', "")
    whole = [row[0] for row in result["values"]["dice"]]
    assert rows(page) == [f"case_{i:02d}" for i in sorted(range(12), key=lambda i: (-whole[i], i))]


def test_two_browsers_see_each_other_and_a_conflict_is_shown_not_written_over(visit, results):
    with serve_review(results) as server, visit(server.url) as one, visit(server.url, expected=("409",)) as two:
        two.evaluate("clearInterval(1); for (let i = 0; i < 100; i++) clearInterval(i)")  # it hears nothing
        one.fill("#reviewer", "Ada")
        one.uncheck("#onward")
        one.locator("#list").focus()
        one.keyboard.press("r")
        wait_for_disk(one, server, {"case_00": ("reject", "")})
        two.uncheck("#onward")
        two.keyboard.press("a")
        trouble = two.locator(".trouble")
        trouble.wait_for()
        assert "case_00: Ada has decided meanwhile: reject. You wanted: accept." in trouble.inner_text()
        assert on_disk(server) == {"case_00": ("reject", "")}
        trouble.get_by_text("Use mine").click()
        wait_for_disk(two, server, {"case_00": ("accept", "")})
        one.wait_for_selector('[data-decision="accept"][aria-pressed="true"]')  # it is told
        assert two.locator(".trouble").count() == 0


def test_a_decision_that_comes_while_one_types_is_a_conflict_too(visit, server, client):
    with visit(server.url, expected=("409",)) as page:
        page.locator("#comment").press_sequentially("mine", delay=10)
        client.decide("case_00", "reject", comment="theirs", by="Ada")
        for _ in range(8):  # still typing when the page hears of it
            page.locator("#comment").press_sequentially("!", delay=400)
            if page.locator(".trouble").count():
                break
        trouble = page.locator(".trouble")
        trouble.wait_for()
        assert "Ada has decided meanwhile: reject, theirs. You wanted: mine!" in trouble.inner_text()
        assert on_disk(server) == {"case_00": ("reject", "theirs")}
        trouble.get_by_text("Keep theirs").click()
        assert page.locator("#comment").input_value() == "theirs"
        page.wait_for_timeout(1300)
        assert on_disk(server) == {"case_00": ("reject", "theirs")}


def test_a_server_that_is_gone_is_told_and_the_decision_stays_on_the_page(visit, results):
    gone = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET")
    with serve_review(results) as server:
        opened = visit(server.url, expected=gone)
        page = opened.__enter__()
    page.keyboard.press("a")
    page.locator(".trouble").wait_for()
    assert "case_00 is not saved: the server does not answer" in page.locator(".trouble").inner_text()
    assert page.get_by_text("Try again").count() == 1
    page.get_by_text("Drop").click()
    opened.__exit__(None, None, None)


def test_hostile_names_and_comments_are_text(visit, tmp_path):
    names = [HOSTILE, "=cmd|' /C calc'!A0", "../../etc/passwd", "ünïcødé \u202e gnp"]
    save_evaluation(tmp_path / "evaluation.npz", names)
    with serve_review(tmp_path) as server, visit(server.url) as page:
        assert sorted(rows(page)) == sorted(names)
        page.uncheck("#onward")
        for name in names:
            page.locator(".row", has_text=name).first.click()
            assert page.locator("#case-title").inner_text() == name
            page.fill("#comment", f"={HOSTILE}\n@x")
            page.click('[data-decision="accept"]')
            wait_until(page, lambda: page.locator("#saved").inner_text().startswith("Saved"))
        wait_for_disk(page, server, dict.fromkeys(names, ("accept", f"={HOSTILE}\n@x")))
        assert page.locator("img, main script").count() == 0


def test_an_address_with_another_token_shows_no_case(browser, server):
    with browser.new_context() as context:
        page = context.new_page()
        answer = page.goto(server.url[:-1] + ("A" if server.url[-1] != "A" else "B"))
        assert answer.status == 403
        assert "case_" not in page.content()


def test_a_foreign_page_can_neither_read_nor_write(browser, server, results):
    """A page of another origin in the same browser, even with the token."""
    client = Client(server.url)
    with browser.new_context() as context:
        page = context.new_page()
        page.route("http://evil.example/", lambda route: route.fulfill(body="<p>evil</p>", content_type="text/html"))
        page.goto("http://evil.example/")
        tried = page.evaluate(
            """async ([origin, token]) => {
                const tell = (promise) => promise.then((answer) => answer.status, () => "refused");
                const headers = { "X-Segcal-Token": token };
                const decision = { case: "case_00", decision: "accept", comment: "", reviewer: "", seen: 0 };
                const body = JSON.stringify(decision);
                return [
                    await tell(fetch(`${origin}/api/cases`, { headers })),
                    await tell(fetch(`${origin}/?token=${token}`)),
                    await tell(fetch(`${origin}/api/decisions`, { method: "PUT", body, headers })),
                    await tell(fetch(`${origin}/api/decisions`, { method: "POST", body, mode: "no-cors" })),
                ];
            }""",
            [client.origin, client.token],
        )
        assert tried[:3] == ["refused"] * 3
        framed = page.evaluate(
            """(url) => new Promise((done) => {
                const frame = Object.assign(document.createElement("iframe"), { src: url });
                frame.onload = () => done(frame.contentDocument?.body?.innerText ?? "closed");
                document.body.append(frame);
            })""",
            server.url,
        )
        assert framed in ("closed", "")
    assert not server.decisions.exists()


@pytest.mark.parametrize("width", [420, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_does_not_scroll_sideways(page, width, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_list_of_2000_cases_has_few_rows_and_all_are_reached(visit, tmp_path):
    save_evaluation(tmp_path / "evaluation.npz", [f"case_{i:04d}" for i in range(2000)], classes=1, voxels=8)
    with serve_review(tmp_path) as server, visit(server.url) as page:
        (result,) = Client(server.url).ask("/api/cases").json
        ordered = sorted(range(2000), key=lambda i: (result["quality"][i][0], i))
        seen = set()
        for _ in range(20):
            page.evaluate(
                "new Promise((done) => { const list = document.getElementById('list');"
                " list.scrollTop += list.scrollHeight / 20;"
                " requestAnimationFrame(() => requestAnimationFrame(done)); })"
            )
            seen |= set(rows(page))
            assert page.locator(".row").count() < 60
        assert len(seen) > 400
        assert rows(page)[-1] == f"case_{ordered[-1]:04d}"
        page.locator("#list").focus()
        page.keyboard.press("End")
        assert page.locator("#place").inner_text() == "2000 of 2000"
        page.keyboard.press("Home")
        assert page.locator("#place").inner_text() == "1 of 2000"
        page.fill('[name="text"]', "case_1234")
        assert rows(page) == ["case_1234"]


def test_lists_are_told_to_those_who_hear_them(page):
    assert page.locator("#list").get_attribute("aria-activedescendant") == page.locator(".row").first.get_attribute(
        "id"
    )
    first = page.locator("#list").get_by_role("option").first
    assert (first.get_attribute("aria-setsize"), first.get_attribute("aria-posinset")) == ("12", "1")
    page.locator("#list").focus()
    page.keyboard.press("ArrowDown")
    assert chosen(page) == "case_01"
    page.locator("#list").focus()
    page.keyboard.press("a")
    page.locator("#list").get_by_role("option", name="accepted").wait_for()


@pytest.mark.parametrize("width", [420, 1400])
def test_axe_finds_nothing_grave(visit, tmp_path, width):
    write_cohort(tmp_path, 3)
    evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out")
    with serve_review(tmp_path / "out") as server, visit(server.url, expected=("WebGL", "GPU")) as page:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_selector("[data-shown]", timeout=60_000)
        page.keyboard.press("a")
        page.keyboard.press("p")
        page.wait_for_selector(".row.accept")
        reads_by_all(page)


def test_volumes_are_shown_in_full_and_the_next_case_follows(visit, tmp_path):
    write_cohort(tmp_path, 3)
    evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out")
    quiet = ("WebGL", "GPU stall")  # what the driver says of a machine without a GPU
    with (
        serve_review(tmp_path / "out", images=tmp_path / "L") as server,
        visit(server.url, expected=quiet) as page,
    ):
        first = chosen(page)
        page.wait_for_selector(f'[data-shown="{first}"]', timeout=60_000)
        picture = imread(io.BytesIO(page.locator("[data-part=picture]").screenshot()))
        assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 20  # it is not blank
        page.keyboard.press("n")
        second = chosen(page)
        page.wait_for_selector(f'[data-shown="{second}"]', timeout=60_000)
        assert second != first
        page.locator("[data-part=stage]").focus()
        page.keyboard.press("c")  # a key of the viewer: the next class
        wait_until(page, lambda: page.locator("[data-part=class]").input_value() == "1")
        page.keyboard.press("a")  # one of the review
        wait_for_disk(page, server, {second: ("accept", "")})


def test_the_picture_of_another_case_is_never_shown_below_a_name(visit, tmp_path, monkeypatch):
    write_cohort(tmp_path, 2)
    evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out")
    with serve_review(tmp_path / "out") as server, visit(server.url, expected=("WebGL", "GPU")) as page:
        picture = page.locator("[data-part=picture]")
        page.wait_for_selector("[data-shown]", timeout=60_000)
        assert picture.is_visible()
        read, go_on = Volumes._read, threading.Event()
        monkeypatch.setattr(Volumes, "_read", lambda *given: (go_on.wait(30), read(*given))[1])
        page.keyboard.press("n")
        page.wait_for_timeout(500)
        assert not picture.is_visible()
        go_on.set()
        page.wait_for_selector(f'[data-shown="{chosen(page)}"]', timeout=60_000)
        assert picture.is_visible()


def test_a_case_without_volumes_says_why_and_can_be_decided(visit, tmp_path):
    write_cohort(tmp_path, 2)
    evaluate(tmp_path / "P", tmp_path / "L", tmp_path / "out")
    (tmp_path / "P" / "case_0.nii.gz").write_bytes(b"damaged")
    with serve_review(tmp_path / "out") as server, visit(server.url, expected=("400", "WebGL", "GPU")) as page:
        page.locator(".row", has_text="case_0").click()
        wait_until(page, lambda: "case_0" in page.locator("#no-volumes").inner_text())
        page.keyboard.press("r")
        wait_for_disk(page, server, {"case_0": ("reject", "")})
