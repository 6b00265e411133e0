"""The page of a run: whole, true to ``run.json``, and drawn by a real browser without an error."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overspill.cli.app import app
from overspill.errors import OffloadError
from overspill.facts.stats import FIGURES
from overspill.facts.trace import LANES, StepMark, Trace
from overspill.observe import page as page_module
from overspill.observe.page import make_page, page_of, write_page
from overspill.observe.pictures import LANE_COLOURS
from overspill.observe.trace_files import load_trace, save_trace
from overspill.train.job import run
from tests.unit.test_train_job import Quiet, small

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=4000",
    "--window-size=1200,2800",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run beside the one in memory."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    place = tmp_path_factory.mktemp("run")
    run(small(place, compare=True), Quiet())
    return place / "out"


def facts_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found.group(1))


def by_hand(**changes: Any) -> tuple[dict[str, Any], Trace]:
    """Values of a run that nothing has run."""
    trace = Trace(origin_ns=0)
    trace.add("compute", "head", 1_000, 9_000)
    trace.add_step(StepMark(1, 0, 10_000))
    steps = [{"step": 1, "loss": 1.0, "tokens": 8, "wall_s": 1e-5, "cpu_s": 1e-5, "bound_s": 1e-5}]
    made = {"model": "m", "steps": steps, "memory": {}, "plan": {}, "step_s": 1e-5, **changes}
    return made, trace


# -- without a browser ----------------------------------------------------------------------------


def test_a_run_writes_its_page_and_the_page_has_its_figures(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    facts = facts_of(page)
    assert facts["run"] == json.loads((folder / "run.json").read_text())
    steps = load_trace(folder / "trace.json").steps
    assert [number for number, *_ in facts["lanes"]["measured"]["steps"]] == [3, 4]
    length = (steps[-1].finished_ns - steps[-2].started_ns) / 1000
    assert facts["lanes"]["measured"]["end"] == pytest.approx(length, abs=0.2)
    assert facts["lanes"]["planned"]["spans"]
    tried = facts["run"]["next"]["with"]
    assert {"one GiB more of host memory", "one more disk", "twice the tokens"} <= set(tried)
    assert {"moments='int8'", "update='step'"} <= set(tried)
    assert all(step_s > 0 for step_s in tried.values())
    assert tried["twice the tokens"] > facts["run"]["next"]["step_s"]


def test_nothing_is_loaded_from_elsewhere(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    without = page.replace("http://www.w3.org/2000/svg", "")  # a name, not a place
    assert "http://" not in without and "https://" not in without
    assert "@import" not in page and "url(" not in page

    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(str(v) for name, v in attrs if name in ("src", "href", "data"))

    Links().feed(page)
    assert found == ["#summary"]


def test_names_do_not_end_the_script_they_are_in() -> None:
    made, trace = by_hand(model="</script><script>alert(1)</script>", start="<!--")
    page = make_page(made, trace, None)
    assert "alert(1)</script>" not in page
    assert facts_of(page)["run"]["model"] == made["model"]
    assert "&lt;/script&gt;" in page


def test_numbers_that_json_does_not_have_are_none() -> None:
    made, trace = by_hand(step_s=float("nan"), memory={"host": [float("inf"), 1]})
    facts = facts_of(make_page(made, trace, None))
    assert facts["run"]["step_s"] is None and facts["run"]["memory"]["host"] == [None, 1]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no run: run.json is missing"),
        ({"run.json": "{}"}, "holds no run: trace.json is missing"),
        ({"run.json": "[", "trace.json": ""}, "is not valid JSON"),
        ({"run.json": '{"model": "m"}', "trace.json": None}, "'steps' is missing"),
        ({"run.json": "5", "trace.json": None}, "'model' is missing"),
        ({"run.json": "{}", "trace.json": "{}"}, "is not a trace of overspill"),
    ],
)
def test_what_is_no_run_is_said(tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    for name, text in files.items():
        if text is None:
            save_trace(by_hand()[1], tmp_path / name)
        else:
            (tmp_path / name).write_text(text)
    with pytest.raises(OffloadError, match=message):
        page_of(tmp_path)
    answer = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert answer.exit_code != 0
    assert not (tmp_path / "report.html").exists(), "nothing is written"


def test_more_than_a_browser_draws_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest spans of all steps stay, and the highest levels."""
    monkeypatch.setattr(page_module, "LONGEST", 10)
    made, trace = by_hand()
    for k in range(100):
        trace.add("read", f"r{k}", 50 * k, 50 * k + (40 if k % 10 == 9 else 1))
        trace.level(50 * k, 0, 10_000 if k == 57 else k, 0)
    lanes = facts_of(make_page(made, trace, None))["lanes"]["measured"]
    names = [name for _, name, *_ in lanes["spans"]]
    assert names == ["head", *(f"r{k}" for k in range(9, 99, 10))] or len(names) == 10
    assert {"r9", "r89"} <= set(names)
    assert max(host for _, _, host, _ in lanes["levels"]) == 10_000


def test_the_command_writes_it_where_it_is_asked_to(folder: Path, tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "a.html")])
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "a.html").read_text() == (folder / "report.html").read_text()


# -- in a browser ---------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is here")

ACTS = f"<script>{(Path(__file__).parent / 'page_acts.js').read_text()}</script>"


def browse(page: Path, profile: Path, *more: str) -> str:
    """What a browser prints of a page.  Raises where the page's script has failed."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *QUIET, f"--user-data-dir={profile}", *more, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, console
    return done.stdout


class Texts(HTMLParser):
    """The words of each element that has an ``id`` or ``data-figure``, by it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.tags: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if tag not in ("meta", "link", "br", "hr", "img", "input"):
            self._open.append(given.get("data-figure") or given.get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        if self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for name in filter(None, self._open):
            self.texts[name] = self.texts.get(name, "") + data


@needs_browser
def test_a_run_without_figures_still_has_a_page(folder: Path, tmp_path: Path) -> None:
    """Of no step, of no loss, with nothing known of what else there is to try."""
    made = json.loads((folder / "run.json").read_text())
    made.update(steps=[], loss_first=None, loss_last=None, next={"step_s": None, "with": {}})
    del made["comparison"]
    page = tmp_path / "bare.html"
    page.write_text(make_page(made, by_hand()[1], None))
    assert 'data-ready="yes"' in browse(page, tmp_path / "profile", "--dump-dom")


@pytest.fixture
def texts(folder: Path, tmp_path: Path) -> Texts:
    page = tmp_path / "acted.html"
    page.write_text((folder / "report.html").read_text().replace("</body>", ACTS + "</body>"))
    found = Texts()
    found.feed(browse(page, tmp_path / "profile", "--dump-dom"))
    return found


@needs_browser
def test_a_browser_shows_the_figures_of_the_run(texts: Texts, folder: Path) -> None:
    figures = json.loads((folder / "run.json").read_text())
    first, last = figures["loss_first"], figures["loss_last"]
    assert f"{first:.4f} → {last:.4f}" in texts.texts["loss"]
    for name, value in (
        ("step", figures["step_s"]),
        ("in_memory", figures["comparison"]["step_s"]),
    ):
        shown = [float(n) for n in re.findall(r"([\d.]+) ms", texts.texts[name])]
        assert any(abs(n - 1000 * value) < 0.006 * 1000 * value for n in shown), (name, shown)
    ratio = float(re.findall(r"([\d.]+) times", texts.texts["in_memory"])[0])
    assert ratio == pytest.approx(figures["step_s"] / figures["comparison"]["step_s"], rel=0.006)
    number, unit = re.findall(r"([\d.,]+) (MiB|GiB)", texts.texts["process"])[0]
    size = float(number.replace(",", "")) * {"MiB": 2**20, "GiB": 2**30}[unit]
    assert size == pytest.approx(figures["peak_rss_bytes"], rel=0.006)
    for key in ("bound", "stalls", "cpu", "training"):
        assert FIGURES[key].name in texts.texts[key]
    for change in figures["next"]["with"]:
        assert change in texts.texts["next"]
    assert texts.tags.count("canvas") == 2 and texts.tags.count("svg") == 3


@needs_browser
def test_lanes_zoom_move_and_tell_by_keys_and_mouse(texts: Texts, folder: Path) -> None:
    seen = json.loads(texts.texts["seen"])
    assert seen.pop("hover").startswith("compute: ")
    steps = json.loads((folder / "run.json").read_text())["steps"]
    assert seen.pop("step").startswith(f"step {steps[-2]['step']}: offloaded ")
    assert seen == dict.fromkeys(("zoomed", "moved", "reset", "wheel", "button"), True)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_pictures_are_drawn_light_and_dark(folder: Path, tmp_path: Path, dark: bool) -> None:
    image = pytest.importorskip("matplotlib.image")
    shot = tmp_path / "page.png"
    mode = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    browse(folder / "report.html", tmp_path / "profile", f"--screenshot={shot}", mode)
    picture = (image.imread(shot)[..., :3] * 255).round().astype(int)
    ground = picture[5, 5].sum()
    assert (ground < 150) == dark
    used = {span.lane for span in load_trace(folder / "trace.json").spans()}
    for lane in set(LANES) & used:
        colour = [int(LANE_COLOURS[lane][k : k + 2], 16) for k in (1, 3, 5)]
        assert (abs(picture - colour).sum(axis=-1) < 6).sum() > 20, lane


def test_the_page_of_a_folder_is_written_again(folder: Path) -> None:
    (folder / "report.html").write_text("old")
    assert write_page(folder).read_text() != "old"
