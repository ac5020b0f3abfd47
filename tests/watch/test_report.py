"""The report page shows the parts it is given and no others, escapes all text and loads nothing."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import fields, replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from raypipe import report
from raypipe.images import decode as images
from raypipe.report import (
    Check,
    Cleaning,
    Dropped,
    Evidence,
    Gate,
    Header,
    Lineage,
    Page,
    Picture,
    Search,
    Slice,
    Step,
    Timeline,
    Trial,
    charts,
)
from raypipe.work.tables import p_text

HOSTILE = "<script>alert('x')</script>\"'><img src=https://evil.example/x.png onerror=alert(1)>"
SECTIONS = {
    "timeline": "What happened",
    "gate": "Champion against challenger",
    "search": "Search",
    "cleaning": "Cleaning",
}
SECTIONS |= {"lineage": "Lineage", "checks": "Drift check: poly"}
LOADS = {"src", "href", "srcset", "data", "poster", "action", "background", "xlink:href"}


class Outline(HTMLParser):
    """Tags, attributes and text of a page, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.images: list[dict[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "img":
            self.images.append(dict(attrs))


def photograph(seed: int, side_px: int = 80, kind: str = "png", mode: str = "L") -> bytes:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(
        0, 256, (side_px, side_px) if mode == "L" else (side_px, side_px, 3), dtype=np.uint8
    )
    Image.fromarray(pixels).save(buffer := io.BytesIO(), kind)
    return buffer.getvalue()


def check(name: str = "poly", is_drift: bool = True, pictures: int = 2, side_px: int = 80) -> Check:
    rng = np.random.default_rng(3)
    return Check(
        name=name,
        is_drift=is_drift,
        p_value=3e-12 if is_drift else 0.41,
        alpha=0.01,
        reference_images=1052,
        batch_images=420,
        evidence=(
            Evidence("mmd", "embeddings", 0.18, 3e-12, 0.01, is_drift),
            Evidence("chi2", "labels", 2.0, None, None, False),
        ),
        reference_scores=rng.beta(1, 5, 300),
        batch_scores=rng.beta(2, 3, 200),
        projection=(rng.normal(size=(300, 2)), rng.normal(2, 1, size=(200, 2))),
        unusual=tuple(
            Picture(photograph(i, side_px), f"new{i}.png", "distance 9.4") for i in range(pictures)
        ),
        typical=tuple(
            Picture(photograph(100 + i, side_px), f"old{i}.png", "score 0.1")
            for i in range(pictures)
        ),
    )


@pytest.fixture
def page() -> Page:
    trials = tuple(
        Trial(
            i + 1,
            f"trial-{i}",
            {"train.lr": 10.0**-i, "model.name": "resnet18"},
            0.9 - i / 50,
            5,
            i > 2,
            [0.5, 0.6, 0.9 - i / 50],
        )
        for i in range(5)
    )
    picture = Picture(photograph(7), "cell.png")
    return Page(
        Header(
            "Solar cells",
            "Polycrystalline cells arrived.",
            "run-1",
            datetime(2026, 3, 2, 14, 15, tzinfo=UTC),
            (("Model", "m"),),
        ),
        checks=(check(), check("control", is_drift=False)),
        gate=Gate(
            True,
            "better on poly",
            1,
            2,
            (
                Slice("mono", 210, 0.905, 0.901, -0.004, 0.83),
                Slice("poly", 302, 0.735, 0.877, 0.142, 0.0),
            ),
        ),
        search=Search("val accuracy", trials),
        cleaning=Cleaning(
            90, 10, {"duplicate": 6, "broken": 4}, (Dropped(picture, "duplicate", picture),)
        ),
        timeline=Timeline(
            (Step("Ingest", "1,074 images", 3.2), Step("Upload", "no workspace", None, "skipped"))
        ),
        lineage=Lineage((("Table", "cells@v7"),), "run:\n  seed: 7\n"),
    )


def test_the_summary_says_the_verdicts_in_words(page: Page) -> None:
    html = report.render(page)
    for words in (
        "Drift found: poly",
        "No drift: control",
        "Champion 1 → 2, +14.2 points on poly",
        "Kept 90 of 100 images",
    ):
        assert words in html
    assert "\N{MINUS SIGN}0.4 points on mono" in html, (
        "a slice that got worse must show at the top too"
    )
    stays = report.render(replace(page, gate=Gate(False, "no slice is better", 1, 2)))
    assert "Champion 1 stays" in stays and "Not promoted" in stays


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_section_appears_exactly_when_its_data_is_given(page: Page, name: str) -> None:
    heading = f"<h2>{SECTIONS[name]}</h2>"
    given: dict[str, Any] = {name: getattr(page, name)}
    absent: dict[str, Any] = {name: next(f for f in fields(Page) if f.name == name).default}
    assert heading in report.render(page)
    alone = replace(Page(page.header), **given)
    assert [
        other for other in SECTIONS if f"<h2>{SECTIONS[other]}</h2>" in report.render(alone)
    ] == [name]
    assert heading not in report.render(replace(page, **absent))


def test_every_link_inside_the_page_has_its_target_and_every_picture_its_words(page: Page) -> None:
    seen = Outline(report.render(page))
    ids = [value for name, value in seen.attributes if name == "id"]
    targets = [
        value[1:] for name, value in seen.attributes if name == "href" and value.startswith("#")
    ]
    assert len(ids) == len(set(ids)) and targets and set(targets) <= set(ids)
    assert len(seen.images) == 10 and all(image["alt"] for image in seen.images)
    assert "Dropped, cell.png" in {image["alt"] for image in seen.images}


def test_hostile_strings_are_text_and_nothing_is_loaded(page: Page) -> None:
    hostile = Picture(b"no picture", HOSTILE, HOSTILE)
    full = replace(
        page,
        header=replace(
            page.header,
            title=HOSTILE,
            subtitle=HOSTILE,
            run_id=HOSTILE,
            facts=((HOSTILE, HOSTILE),),
        ),
        checks=(
            replace(
                check(HOSTILE),
                evidence=(Evidence(HOSTILE, HOSTILE, 1.0, 0.5, None, True),),
                score_name=HOSTILE,
                unusual=(hostile,),
            ),
        ),
        gate=Gate(True, HOSTILE, HOSTILE, HOSTILE, (Slice(HOSTILE, 1, 0.1, 0.2, 0.1, None),)),
        search=Search(HOSTILE, (Trial(1, HOSTILE, {HOSTILE: HOSTILE}, 0.5, 1, curve=(0.5,)),)),
        cleaning=Cleaning(1, 1, {HOSTILE: 1}, (Dropped(hostile, HOSTILE, hostile),)),
        timeline=Timeline((Step(HOSTILE, HOSTILE, 1.0, HOSTILE),)),
        lineage=Lineage(((HOSTILE, HOSTILE),), HOSTILE),
    )
    html = report.render(full)
    assert html.count("&lt;script&gt;") >= 30, (
        "the hostile text must have reached the page for this test to mean anything"
    )
    seen, honest = Outline(html), Outline(report.render(page))
    assert "script" not in seen.tags and not [
        name for name, _ in seen.attributes if name.startswith("on")
    ]
    assert set(seen.tags) <= set(honest.tags) | {"wbr"}
    for outline in (seen, honest):
        loads = [value for name, value in outline.attributes if name in LOADS]
        assert loads and all(value.startswith(("data:", "#")) for value in loads)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in html and "http" not in report.render(page).replace(
        "http-equiv", ""
    )


def test_the_template_never_turns_escaping_off() -> None:
    template = Path(report.__file__).with_name("report.html.j2").read_text()
    assert not re.search(r"\|\s*safe\b|autoescape|Markup", template)


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a" + bytes(40),
        photograph(1)[:2000],
        b"<svg onload=alert(1)>",
    ],
)
def test_a_broken_picture_becomes_a_labelled_placeholder(page: Page, broken: bytes) -> None:
    html = report.render(
        replace(
            page, cleaning=Cleaning(1, 1, {}, (Dropped(Picture(broken, "cell7.png"), "broken"),))
        )
    )
    assert 'aria-label="Dropped, cell7.png, cannot be decoded"' in html


@pytest.mark.parametrize(("kind", "mode"), [("png", "L"), ("jpeg", "RGB"), ("webp", "RGB")])
def test_a_thumbnail_is_small_keeps_its_shape_and_may_be_png_or_jpeg(kind: str, mode: str) -> None:
    wide = Image.open(io.BytesIO(photograph(1, mode=mode))).resize((400, 100))
    wide.save(buffer := io.BytesIO(), kind)
    uri = report.thumbnail(buffer.getvalue())
    assert uri and uri.startswith("data:image/jpeg;base64,"), "noise is smaller as JPEG"
    assert decode(uri).size == (160, 40)
    Image.new(mode, (300, 300), 200 if mode == "L" else (200, 20, 20)).save(
        buffer := io.BytesIO(), kind
    )
    assert (report.thumbnail(buffer.getvalue()) or "").startswith("data:image/png"), (
        "a flat area is smaller as PNG"
    )


def test_sixteen_bit_gray_is_scaled_and_not_clipped_to_white() -> None:
    Image.fromarray(np.linspace(0, 60000, 100 * 100).reshape(100, 100).astype(np.uint16)).save(
        buffer := io.BytesIO(), "png"
    )
    pixels = np.asarray(decode(report.thumbnail(buffer.getvalue()) or ""))
    assert 100 < pixels.mean() < 155


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_thumbnail_stands_as_the_model_saw_it(turn: int) -> None:
    """Photographs of a phone lay on their side, and a transparent ground was black."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 20, 3), np.uint8)
    photo = Image.fromarray(noise).resize((100, 60), Image.Resampling.NEAREST)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    photo.save(buffer := io.BytesIO(), "png", exif=exif)
    seen_HWC = images.decode(buffer.getvalue())
    shown_HWC = np.asarray(decode(report.thumbnail(buffer.getvalue()) or ""))
    assert shown_HWC.shape == seen_HWC.shape
    assert np.abs(shown_HWC.astype(int) - seen_HWC).mean() < 10

    clear = Image.new("RGBA", (30, 30), (0, 0, 0, 0))
    clear.save(buffer := io.BytesIO(), "png")
    assert np.asarray(decode(report.thumbnail(buffer.getvalue()) or "")).min() == 255


def decode(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def test_equal_input_gives_equal_bytes_and_write_leaves_only_the_page(
    page: Page, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "report.html"
    assert report.write(page, path) == path
    first = path.read_bytes()
    report.write(page, path)
    assert path.read_bytes() == first == report.render(page).encode()
    assert list(path.parent.iterdir()) == [path]


def test_a_name_that_is_no_utf_8_costs_no_page_and_leaves_nothing_beside_it(
    page: Page, tmp_path: Path
) -> None:
    """A byte of the command line that is no UTF-8: the search was over, and its page an error."""
    odd = replace(page, header=replace(page.header, title="runs/\udcff"))
    assert "runs/?" in report.write(odd, tmp_path / "report.html").read_text("utf-8")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        report.write(page, tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "folder"}


def test_a_page_with_48_photographs_stays_below_3_mb(page: Page) -> None:
    html = report.render(
        replace(page, checks=(check(pictures=24, side_px=300),))
    )  # of noise, the worst case for both encoders
    assert html.count("data:image/") == 2 * 24 + 2
    assert len(html.encode()) < 3_000_000


def test_charts_stay_inside_their_square_and_survive_odd_numbers() -> None:
    nan = float("nan")
    odd = replace(
        check(),
        reference_scores=[0.0, 1.0, nan, 7.0],
        batch_scores=[0.5],
        projection=(np.zeros((3, 2)), np.zeros((1, 2))),
    )
    search = Search(
        "loss",
        (
            Trial(1, "a", {}, 0.5, 1, curve=[0.5]),
            Trial(2, "b", {}, None, 0),
            Trial(3, "c", {}, 0.4, 3, curve=[nan, 0.5, 0.4]),
        ),
    )
    for drawing in (
        charts.histogram(odd),
        charts.scatter(odd),
        charts.curves(search),
        charts.parallel(tried()),
        charts.histogram(check()),
        charts.scatter(check()),
    ):
        assert drawing is not None
        for _, _, path in drawing.lines:
            assert "nan" not in path
            assert all(0 <= int(n) <= 1000 for n in re.findall(r"-?\d+", path))
        assert all(-0.01 <= at <= 100.01 for at, _ in [*drawing.x_ticks, *drawing.y_ticks])
    assert (
        charts.histogram(replace(odd, batch_scores=[nan])) is None
        and charts.scatter(replace(odd, projection=None)) is None
    )
    assert charts.curves(Search("loss", (Trial(1, "a", {}, None, 0),))) is None


def tried(metric: str = "val_accuracy", sign: int = 1) -> Search:
    """The best has the highest rate. One failed, one has no frozen_blocks. All share a dropout."""
    settings: list[dict[str, Any]] = [
        {"train.lr": 0.1, "model.mode": "finetune", "model.frozen_blocks": 3, "model.dropout": 0.2},
        {"train.lr": 0.01, "model.mode": "frozen", "model.dropout": 0.2},
        {
            "train.lr": 0.0001,
            "model.mode": "finetune",
            "model.frozen_blocks": 0,
            "model.dropout": 0.2,
        },
    ]
    rows = [
        Trial(i, f"trial {i}", changes, sign * (0.9 - i / 10), 5)
        for i, changes in enumerate(settings, 1)
    ]
    return Search(
        metric,
        (*rows, Trial(4, "trial 4", settings[0], None, 0)),
        20,
        {"train.lr": 0.9, "model.mode": 0.1},
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_parallel_coordinates_show_what_was_tried_and_the_best_on_top(sign: int) -> None:
    drawing = charts.parallel(tried(sign=sign))
    assert drawing is not None
    assert [label for _, label in drawing.x_ticks] == [
        "lr",
        "mode",
        "frozen_blocks",
        "val_accuracy",
    ], "dropout never varied"
    assert [look for look, _, _ in drawing.lines] == ["third", "second", "best"], (
        "the best is drawn last; a failure is not"
    )
    spots = [re.findall(r"(\d+),(\d+)", path) for _, _, path in drawing.lines]
    assert spots[2] == [("0", "0"), ("333", "1000"), ("667", "0"), ("1000", "0")]
    assert len(spots[1]) == 3, "a field that was not set is left out of its line"
    assert spots[1][0] == ("0", "333"), "three decades of rates are logarithmic"
    assert "lr 0.0001 to 0.1; mode finetune, frozen" in drawing.note
    assert f"val_accuracy {sign * 0.6:.3g} to {sign * 0.8:.3g}" in drawing.note, (
        "the best is on top, which may be the lowest"
    )
    assert charts.parallel(Search("loss", (Trial(1, "a", {"train.lr": 0.1}, 0.5, 1),))) is None


def test_ticks_of_large_numbers_differ_and_equal_ones_are_a_chart() -> None:
    """Labels from 1,234,567 to 1,234,570 were all 1.23457e+06, and one label of 1e17 an error."""
    labels_N = np.array([1234567.0, 1234570.0])
    drawing = charts.residuals(labels_N, labels_N)
    assert drawing is not None
    labels = [label for _, label in drawing.x_ticks]
    assert "1234568" in labels and len(set(labels)) == len(labels)
    alike_N = np.array([1e17, 1e17])
    drawing = charts.residuals(alike_N, alike_N)
    assert drawing is not None and "nan" not in drawing.lines[0][2]
    # What was short stays short.
    assert [label for _, label in charts._ticks(0, 1)] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]


def test_one_value_written_in_two_ways_is_no_axis() -> None:
    """`choice(0, .1)` drew 0, and search.start said 0.0: the page ended in a ZeroDivisionError."""
    rows = [
        Trial(i, f"trial {i}", {"model.dropout": one}, 0.5 + i, 1) for i, one in enumerate((0, 0.0))
    ]
    assert charts.parallel(Search("val_accuracy", tuple(rows))) is None


def test_a_search_says_what_it_saved_and_what_decided(page: Page) -> None:
    html = report.render(Page(page.header, search=tried()))
    assert (
        "15 of 20 epochs (75.0&nbsp;%)" in html
        and "What decided" in html
        and "What was tried, and how it did" in html
    )
    assert "What decided" not in report.render(
        Page(page.header, search=Search("loss", (Trial(1, "a", {}, 0.5, 1),)))
    )


def test_heads_that_were_fitted_at_once_are_not_counted_as_trials(page: Page) -> None:
    rows = (
        Trial(1, "first-1", {}, 0.9, 1, fitted=True),
        Trial(2, "trial-1", {}, 0.8, 5),
        Trial(3, "trial-2", {}, None, 0),
    )
    html = report.render(Page(page.header, search=Search("val_accuracy", rows)))
    assert "first-1, best of 2 trials and 1 head of the first answer" in html
    assert "2 trials and 1 head of the first answer, 0 stopped early" in html


def test_a_histogram_holds_every_image_once() -> None:
    scores = np.random.default_rng(0).uniform(size=1000)
    drawing = charts.histogram(replace(check(), reference_scores=scores, batch_scores=scores[:10]))
    assert drawing is not None
    heights = [
        [1000 - int(y) for y in re.findall(r"V(\d+)h", path)] for _, _, path in drawing.lines
    ]
    top = max(np.histogram(s, charts.BINS, (0, 1))[0].max() / s.size for s in (scores, scores[:10]))
    for bars in heights:
        assert len(bars) == charts.BINS and sum(bars) / 1000 * top == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (report.chance(3e-12), "< 0.000001"),
        (report.chance(0.0), "≈ 0"),
        (report.chance(0.0000234), "0.000023"),
        (report.chance(0.0412), "0.041"),
        (report.chance(1.0), "1.00"),
        # Not as the limits, on whose other side they might lie.
        (report.chance(0.04999), "0.04999"),
        (report.chance(0.05), "0.050"),
        (report.chance(0.0500001), "0.0500001"),
        (report.chance(0.01004), "0.01004"),
        (report.chance(0.0199999, 0.02), "0.0199999"),
        (report.chance(0.0496, 0.0499), "0.0496"),
        (p_text(0.049999), "0.049999"),
        (p_text(0.05), "0.05"),
        (p_text(0.00333334, 0.01 / 3), "0.00333334"),
        (p_text(0.0123456), "0.0123"),
        (report.chance(float("nan")), "–"),
        (p_text(float("nan")), "–"),
        (report.points(0.142), "+14.2"),
        (report.points(-0.0041), "\N{MINUS SIGN}0.4"),
        (report.points(-0.0001), "\N{MINUS SIGN}0.01"),
        (report.points(-0.000001), "+0.0"),
        (report.number(1234567), "1,234,567"),
        (report.number(9999.6), "10,000"),
        (report.cell(12345.678), "12346"),
        (report.cell({"least": 9999.6, "most": 1e9}), "least 10000, most 1e+09"),
        (report.number(1e-05), "1e-5"),
        (report.number(-0.000123456), "\N{MINUS SIGN}0.0001235"),
        (report.number(True), "True"),
        (report.number("resnet18"), "resnet18"),
        (report.begun(1, 0), "1 trial"),
        (report.begun(2000, 1), "2,000 trials and 1 head of the first answer"),
    ],
)
def test_numbers_read_well(text: str, shown: str) -> None:
    assert text == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (3.21, "3.2&nbsp;s"),
        (42.4, "42&nbsp;s"),
        (59.9, "1 min 00 s"),
        (372, "6 min 12 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_read_well(page: Page, seconds: float, shown: str) -> None:
    assert f"1 step in {shown}." in report.render(
        Page(page.header, timeline=Timeline((Step("x", "y", seconds),)))
    )
