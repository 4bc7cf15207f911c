"""Cases in the report, shown by NiiVue in a real browser: what is seen and told is what numpy says of the volumes."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import nibabel
import numpy as np
import pytest
import torch
from cohorts import STRAIGHT, run, save
from PIL import Image
from scipy import ndimage
from typer.testing import CliRunner

from segcal import EvaluationAccumulator
from segcal.cli import app
from segcal.report import build_report
from segcal.viewer import CaseVolumes, ViewedCase, case_curves

SHAPE = (22, 18, 14)
CLASSES = ('</script><script>alert(1)</script>"', "a&b 'q' <img src=x onerror=alert(1)>")
CASES = ("</script><img src=x onerror=alert(1)>", 'two "quoted" #/?=%20')
METHODS = ("old", "<b>new</b>")
STAGE = "[data-part=stage]"
PLACE = re.compile(r"(\w+) (\d+) of (\d+); at the cross: probability ([\d.]+)(?:, label (yes|no))?")


def blob(center, radii):
    """1 inside an ellipsoid, falling off around it."""
    grids = np.meshgrid(*map(np.arange, SHAPE), indexing="ij")
    distance = np.sqrt(sum(((g - c) / r) ** 2 for g, c, r in zip(grids, center, radii, strict=True)))
    return np.clip(1.5 - distance, 0, 1)


LABELS = np.stack([blob((8, 7, 5), (5, 4, 3)) > 0.5, blob((15, 11, 9), (3, 4, 2)) > 0.5]).astype(np.uint8)
FLAT = np.diag([1.0, 1.0, 2.0, 1.0])


def made(seed, count=2):
    """Probabilities of exclusive classes (class, x, y, z) that are about the labels, in 255ths, background first."""
    noise = np.random.default_rng(seed).normal(size=(count, *SHAPE))
    shift = ndimage.gaussian_filter(noise, (0, 2, 2, 1)) * (2 + seed)
    parts = np.clip(ndimage.gaussian_filter(LABELS[:count].astype(float), (0, 1, 1, 0.6)) + shift * 0.4, 0, 1)
    parts = parts / np.maximum(parts.sum(0), 1)
    steps = np.floor(parts * 255).astype(int)
    return np.concatenate([255 - steps.sum(0, keepdims=True), steps]) / 255


def volumes_of(name, probabilities, *, labels=LABELS, image=None, classes=CLASSES, affine=FLAT):
    """Probabilities: (method, class, x, y, z)."""
    bytes_ = np.rint(probabilities * 255).astype(np.uint8)
    return CaseVolumes(name, classes, METHODS[: len(bytes_)], bytes_, labels, image, (1.0, 1.0, 2.0), affine, True)


def evaluation_of(names, probabilities, labels):
    """Of cases (case, class with background, x, y, z) and labels (class, x, y, z)."""
    accumulator = EvaluationAccumulator()
    truth = torch.from_numpy((labels * np.array([1, 2])[:, None, None, None]).max(0).astype(np.int64))
    for name, each in zip(names, probabilities, strict=True):
        accumulator.update(torch.from_numpy(each[None].astype(np.float32)), truth[None], [name])
    return replace(accumulator.compute(), classes=("background", *CLASSES))


@pytest.fixture(scope="module")
def probabilities():
    """(method, case, class, x, y, z), the background first."""
    return np.array([[made(2 * m + c) for c in range(2)] for m in range(2)])


@pytest.fixture(scope="module")
def report(tmp_path_factory, probabilities):
    evaluations = {m: evaluation_of(CASES, each, LABELS) for m, each in zip(METHODS, probabilities, strict=True)}
    image = np.rint(ndimage.gaussian_filter(LABELS.max(0).astype(float), 1) * 200).astype(np.uint8)
    viewed = []
    for c, name in enumerate(CASES):
        curves = [case_curves(each.foreground(), name) for each in evaluations.values()]
        viewed.append(ViewedCase(volumes_of(name, probabilities[:, c, 1:], image=image), curves, f"<i>number</i> {c}"))
    out = tmp_path_factory.mktemp("viewer") / "report.html"
    return build_report(evaluations, out, cases=viewed, resamples=20)


def shown(page, case=None):
    page.locator("#viewer").scroll_into_view_if_needed()
    page.wait_for_function(
        "(c) => { const now = document.querySelector('[data-shown]'); return now && (!c || now.dataset.shown === c); }",
        arg=case,
    )
    page.focus(STAGE)
    return page


def told(page, part):
    return page.locator(f"[data-part={part}]").inner_text()


def place(page):
    """Plane, slice from 0, slices, probability and label at the cross."""
    plane, number, of, p, label = PLACE.fullmatch(told(page, "place")).groups()
    return plane, int(number) - 1, int(of), float(p), label


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)
    page.wait_for_timeout(30)


def picture(page):
    return np.asarray(Image.open(io.BytesIO(page.locator(STAGE).screenshot())).convert("RGB")).astype(int)


def slide(page, part, value):
    page.locator(f"[data-part={part}]").evaluate(
        "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", value
    )


COLORED = """([r, g, b]) => {
  const lines = document.querySelector("[data-part=lines]");
  const copy = Object.assign(document.createElement("canvas"), { width: lines.width, height: lines.height });
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(lines, 0, 0);
  const d = pen.getImageData(0, 0, copy.width, copy.height).data;
  const near = (i) => Math.abs(d[i] - r) + Math.abs(d[i + 1] - g) + Math.abs(d[i + 2] - b) < 60 && d[i + 3] > 200;
  let found = 0;
  for (let i = 0; i < d.length; i += 4) found += near(i);
  return found;
}"""
WHITE, YELLOW = [255, 255, 255], [255, 225, 25]


def test_numbers_at_the_threshold_are_those_of_the_voxels(page, probabilities):
    shown(page)
    for method, cls, step in ((0, 0, 49), (0, 0, 19), (0, 1, 79), (1, 1, 34), (1, 0, 4)):
        page.select_option("[data-part=method]", str(method))
        page.select_option("[data-part=class]", str(cls))
        slide(page, "threshold", step)
        p, true = probabilities[method, 0, cls + 1].astype(np.float32).astype(float), LABELS[cls] == 1
        threshold = (step + 1) / 100
        decided = p >= threshold
        dice = 2 * (decided & true).sum() / (decided.sum() + true.sum())
        expected = 2 * p[decided].sum() / (decided.sum() + p.sum())
        voxels = f"{float(f'{decided.sum():.4g}'):,.0f}"
        words = f"p ≥ {threshold:.2f}, DSC {dice:.3f}, expected DSC {expected:.3f}, volume {voxels} voxels"
        page.wait_for_function("(w) => document.querySelector('[data-part=numbers]').innerText === w", arg=words)
    page.locator("[data-part=threshold]").focus()
    press(page, "]", "]", "[")
    assert told(page, "numbers").startswith("p ≥ 0.05")  # the slider has its own keys
    page.focus(STAGE)
    press(page, "]", "]", "[")
    assert told(page, "numbers").startswith("p ≥ 0.06")


def test_the_first_view_and_the_worst_slice_are_where_the_error_is_largest(page, probabilities):
    shown(page)
    for plane, axis, key in (("axial", 2, "1"), ("coronal", 1, "2"), ("sagittal", 0, "3")):
        press(page, key)
        error = np.abs(probabilities[0, 0, 1] - LABELS[0])
        worst = int(error.sum(tuple(i for i in range(3) if i != axis)).argmax())
        assert place(page)[:3] == (plane, worst, SHAPE[axis])
        press(page, "ArrowUp", "ArrowUp", "ArrowDown", "PageDown")
        assert place(page)[1] == max(0, min(SHAPE[axis] - 1, worst + 1) - 10)
        press(page, "w")
        assert place(page)[1] == worst
    page.select_option("[data-part=class]", "1")
    page.get_by_role("button", name="Worst slice").click()
    error = np.abs(probabilities[0, 0, 2] - LABELS[1]).sum((1, 2))
    page.wait_for_function(
        f"() => document.querySelector('[data-part=place]').innerText.startsWith('sagittal {error.argmax() + 1} ')"
    )


def test_another_method_is_shown_at_the_same_place(page, probabilities):
    shown(page)
    for key, axis, index in (("1", 2, 5), ("2", 1, 7), ("3", 0, 8)):
        press(page, key)
        slide(page, "slice", index + 1)
        assert place(page)[1:3] == (index, SHAPE[axis])
    for method in (0, 1, 0):
        expected = f"{probabilities[method, 0, 1, 8, 7, 5]:.2f}"
        label = "yes" if LABELS[0, 8, 7, 5] else "no"
        words = f"sagittal 9 of {SHAPE[0]}; at the cross: probability {expected}, label {label}"
        page.wait_for_function("(w) => document.querySelector('[data-part=place]').innerText === w", arg=words)
        press(page, "m")
    page.wait_for_function("() => document.querySelector('[data-part=method]').value === '1'")
    press(page, "M", "c")
    page.wait_for_function("() => document.querySelector('[data-part=method]').value === '0'")
    assert page.input_value("[data-part=class]") == "1"
    assert place(page)[:2] == ("sagittal", 8)


def test_names_are_shown_as_they_are_and_a_case_can_be_chosen(page):
    shown(page, CASES[0])
    assert page.locator("[data-part=class] option").all_inner_texts() == list(CLASSES)
    assert page.locator("[data-part=method] option").all_inner_texts() == list(METHODS)
    options = page.locator("#viewed option").all_inner_texts()
    assert options == [f"{name} (<i>number</i> {c})" for c, name in enumerate(CASES)]
    assert f"labels: {CLASSES[0]}" in told(page, "key")
    assert page.locator("#viewer img").count() == 0
    before = picture(page)
    page.select_option("#viewed", "1")
    shown(page, CASES[1])
    assert np.abs(picture(page) - before).max() > 30
    page.get_by_role("link", name="numbers of this case").click()
    page.locator("#case").wait_for()
    assert page.locator("#case-title").inner_text() == CASES[1]


def test_overlays_and_contours_can_be_seen_and_switched(page):
    shown(page)
    page.wait_for_timeout(100)
    with_all = picture(page)
    assert len(np.unique(with_all.reshape(-1, 3), axis=0)) > 100  # not blank
    assert page.evaluate(COLORED, WHITE) > 50
    assert page.evaluate(COLORED, YELLOW) > 20
    slide(page, "threshold", 95)
    fewer = page.evaluate(COLORED, YELLOW)
    slide(page, "threshold", 5)
    assert page.evaluate(COLORED, YELLOW) > fewer
    page.focus(STAGE)
    press(page, "l")
    assert page.evaluate(COLORED, WHITE) == page.evaluate(COLORED, YELLOW) == 0
    seen = {"probability": picture(page)}
    for overlay in ("error", "none"):
        press(page, "o")
        page.wait_for_function("(o) => document.querySelector('[data-part=overlay]').value === o", arg=overlay)
        page.wait_for_timeout(100)
        seen[overlay] = picture(page)
    color = {name: (np.ptp(seen[name], axis=2) > 25).sum() for name in seen}
    assert color["none"] < min(color["probability"], color["error"]) / 4  # but the cross
    press(page, "o")
    page.wait_for_function("() => document.querySelector('[data-part=overlay]').value === 'probability'")


def test_contours_lie_on_the_borders_that_the_picture_has(watch, tmp_path):
    """An image that is the label: in all planes, no line is further from its border than two pixels."""
    affine = np.array([[-1.0, 0, 0, 9], [0, 1, 0, -3], [0, 0, 2, 1], [0, 0, 0, 1]])
    label = np.zeros((1, *SHAPE), np.uint8)
    label[0, 3:12, 4:9, 2:8] = 1
    label[0, 3:6, 4:14, 2:5] = 1  # an L, which no mirror turns into itself
    volumes = volumes_of("one", np.zeros((1, 1, *SHAPE)), labels=label, image=label[0] * 255, classes=("x",))
    evaluation = evaluation_of(["one"], [made(0)], LABELS)
    report = build_report({"old": evaluation}, tmp_path / "r.html", cases=[ViewedCase(volumes)], resamples=20)
    for flipped in (volumes, replace(volumes, affine=FLAT @ affine @ np.diag([-1, 1, 1, 1]))):
        build_report({"old": evaluation}, report, cases=[ViewedCase(flipped)], resamples=20)
        with watch(report) as page:
            shown(page)
            for plane, index in (("1", 3), ("2", 6), ("3", 4)):
                press(page, plane)
                slide(page, "slice", index + 1)
            page.evaluate("document.querySelector('.viewer-wait').remove()")
            page.focus(STAGE)
            page.wait_for_timeout(100)
            lines = picture(page)
            press(page, "l")
            page.wait_for_timeout(100)
            bare = picture(page)
            white = bare.min(2) > 200
            drawn = np.abs(lines - bare).max(2) > 60
            assert drawn.sum() > 500
            border = ndimage.binary_dilation(white, iterations=3) & ~ndimage.binary_erosion(white, iterations=3)
            assert (drawn & ~border).sum() == 0
            assert page.locator("[data-part=class]").is_hidden()  # there is but one


def test_keys_are_the_stages_alone_and_the_wheel_is_the_pages_until_it_is_clicked(page):
    shown(page)
    page.locator("[data-part=plane]").focus()
    before = place(page)
    press(page, "w", "ArrowRight")
    assert place(page)[0] != before[0]  # the list's own key
    page.evaluate("document.activeElement.blur()")
    box = page.locator(STAGE).bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] / 2)
    top, here = page.evaluate("scrollY"), place(page)
    page.mouse.wheel(0, 60)
    page.wait_for_function("(y) => scrollY > y", arg=top)
    assert place(page) == here
    page.mouse.click(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.4)
    top, here = page.evaluate("scrollY"), told(page, "place")
    page.mouse.wheel(0, 60)
    page.wait_for_function("(old) => document.querySelector('[data-part=place]').innerText !== old", arg=here)
    assert page.evaluate("scrollY") == top
    assert page.evaluate(f"document.activeElement === document.querySelector('{STAGE}')")
    press(page, "?")
    assert page.locator("[data-part=help]").get_attribute("open") is not None


def test_one_plane_alone_fills_the_stage_and_a_narrow_window_has_no_scroll_bar(page):
    shown(page)
    press(page, "f")
    assert page.is_checked("[data-part=alone]")
    assert page.evaluate(COLORED, WHITE) > 50
    page.set_viewport_size({"width": 420, "height": 900})
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_volumes_come_out_of_the_page_as_they_went_in(page, probabilities):
    def out_of_page(*which):
        file = page.evaluate("async ([i, ...which]) => [...(await embeddedSource(i).volume(...which))]", [1, *which])
        return np.asarray(nibabel.Nifti1Image.from_bytes(bytes(file)).dataobj)

    for cls in range(2):
        np.testing.assert_array_equal(out_of_page("label", None, cls), LABELS[cls])
        for method in range(2):
            bytes_ = np.rint(probabilities[method, 1, cls + 1] * 255)
            np.testing.assert_array_equal(out_of_page("probability", method, cls), bytes_)
    image = np.rint(ndimage.gaussian_filter(LABELS.max(0).astype(float), 1) * 200)
    np.testing.assert_array_equal(out_of_page("image", None, None), image // 4 * 4)  # 64 shades of gray


def test_a_broken_volume_is_told_and_others_can_be_looked_at(watch, report, tmp_path):
    text = report.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    start = text.index('data-volume="0 image null null">') + len('data-volume="0 image null null">')
    broken.write_text(text[:start] + "AAAA" + text[start + 4 :], encoding="utf-8")
    with watch(broken) as page:
        page.locator("#viewer").scroll_into_view_if_needed()
        page.wait_for_function(
            "() => document.querySelector('[data-part=wait]').innerText.startsWith('This case cannot be shown')"
        )
        page.select_option("#viewed", "1")
        shown(page, CASES[1])
        assert page.locator("[data-part=wait]").is_hidden()


def test_the_policy_lets_in_two_scripts_by_their_hash_and_nothing_else(report):
    text = report.read_text(encoding="utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    policy = policy.replace("&#39;", "'")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"('sha256-[\w+/=]+' ?){2}", rules["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/=]+'", rules["style-src"])
    assert rules["img-src"] == "data:"
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}


def test_a_report_without_cases_has_nothing_of_it(tmp_path):
    evaluation = evaluation_of(CASES, [made(0), made(1)], LABELS)
    text = build_report({"net": evaluation}, tmp_path / "r.html", resamples=20).read_text(encoding="utf-8")
    for word in ("niivue", "mountViewer", "viewer-stage", 'id="viewer"'):
        assert word not in text
    assert len(text) < 200_000


def write_files(folder, *, regions=False, flat=False, single=False):
    """A cohort of one case on disk, of the kind asked for; the options that evaluate it."""
    probabilities, truth = np.moveaxis(made(0), 0, -1).astype(np.float32), LABELS[0] + 2 * LABELS[1]
    if single:
        probabilities, truth = probabilities[..., 1], LABELS[0]
    if flat:
        probabilities, truth = probabilities[:, :, 5], truth[:, :, 5]
    affine = STRAIGHT
    save(folder / "P" / "one.nii.gz", probabilities[:, :, None] if flat else probabilities, affine)
    save(folder / "L" / "one.nii.gz", truth.astype(np.uint8), affine)
    if regions:
        (folder / "regions.toml").write_text("[regions]\nwhole = [1, 2]\ncore = [2]\n")
        return ["--regions", str(folder / "regions.toml")]
    return ["--sigmoid"] if single else []


@pytest.mark.parametrize("kind", ["regions", "flat", "single"])
def test_the_command_shows_cases_of_every_kind(watch, tmp_path, kind):
    options = write_files(tmp_path, **{kind: True})
    done = run(tmp_path, *options)
    assert done.exit_code == 0, done.output
    command = ["report", str(tmp_path / "out"), "--predictions", str(tmp_path / "P"), "--labels", str(tmp_path / "L")]
    done = CliRunner().invoke(app, [*command, "--cases", "3", "--by", "nll", "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    with watch(tmp_path / "r.html") as page:
        shown(page, "one")
        names = {"regions": ["whole", "core"], "flat": ["class 1", "class 2"], "single": ["class 1"]}[kind]
        assert page.locator("[data-part=class] option").all_inner_texts() == names
        p = made(0)[1:].sum(0) if kind == "regions" else made(0)[1]
        true = LABELS.max(0) == 1 if kind == "regions" else LABELS[0] == 1
        if kind == "flat":
            p, true = p[:, :, 5], true[:, :, 5]
            assert page.locator("[data-part=slice]").is_hidden()
            assert page.locator("[data-part=worst]").is_hidden()
        decided = p.astype(np.float32) >= 0.5
        dice = 2 * (decided & true).sum() / (decided.sum() + true.sum())
        assert f"DSC {dice:.3f}, " in told(page, "numbers")
        assert page.evaluate(COLORED, WHITE) > 20
        assert len(np.unique(picture(page).reshape(-1, 3), axis=0)) > 20
        if kind == "regions":
            press(page, "c")
            page.wait_for_function("() => document.querySelector('[data-part=class]').value === '1'")
            assert "labels: core" in told(page, "key")


def test_without_labels_there_are_probabilities_and_promises(watch, tmp_path):
    write_files(tmp_path)
    assert run(tmp_path).exit_code == 0
    command = ["report", str(tmp_path / "out"), "--predictions", str(tmp_path / "P"), "--cases", "1"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    with watch(tmp_path / "r.html") as page:
        shown(page)
        assert page.locator("[data-part=overlay] option:not([hidden])").all_inner_texts() == ["probability", "none"]
        assert page.locator("[data-part=worst]").is_hidden()
        assert page.evaluate(COLORED, WHITE) == 0
        assert page.evaluate(COLORED, YELLOW) > 20
        press(page, "o", "o")
        assert page.input_value("[data-part=overlay]") == "probability"
        assert "label" not in told(page, "place")


def test_the_affine_in_the_page_is_that_of_the_box(watch, tmp_path):
    write_files(tmp_path)
    assert run(tmp_path).exit_code == 0
    save(tmp_path / "I" / "one.nii.gz", np.random.default_rng(0).random(SHAPE).astype(np.float32), STRAIGHT)
    command = ["report", str(tmp_path / "out"), "--predictions", str(tmp_path / "P"), "--labels", str(tmp_path / "L")]
    command += ["--images", str(tmp_path / "I"), "--cases", "1", "--worst", "1", "--out", str(tmp_path / "r.html")]
    assert CliRunner().invoke(app, command).exit_code == 0
    with watch(tmp_path / "r.html") as page:
        shown(page)
        facts = page.evaluate("(({shape, hasImage}) => ({shape, hasImage}))(DATA.viewed[0])")
        assert facts["hasImage"]
        file = page.evaluate("async () => [...(await embeddedSource(0).volume('label', null, 0))]")
        box = nibabel.Nifti1Image.from_bytes(bytes(file))
        whole = nibabel.load(tmp_path / "L" / "one.nii.gz")
        assert box.affine[:3, :3] == pytest.approx(whole.affine[:3, :3])
        first = np.argwhere(np.asarray(box.dataobj))[0]
        assert box.affine @ [*first, 1] == pytest.approx(whole.affine @ [*np.argwhere(LABELS[0])[0], 1])
        assert all(length <= full for length, full in zip(facts["shape"], SHAPE, strict=True))
        assert page.locator("#maps figure").count() == 1
