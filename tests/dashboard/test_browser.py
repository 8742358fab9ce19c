"""The page in a real browser: `make test-browser`."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest

from gradwire.dashboard.report import report as make_report
from gradwire.dashboard.server import DashboardServer
from gradwire.dashboard.store import Store
from tests import needs
from tests.dashboard.folders import append, many_steps, note, plan, quality, start, step, validation, whole_run

pytestmark = pytest.mark.full
CHROMIUM = shutil.which("chromium")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
OPTIONS += ["--disable-component-update", "--disable-sync"]
HOSTILE = '<img src=x onerror="window.bad=1"><script>window.bad=1</script>'
# Enough of the canvas is inked: axes alone are fewer pixels.
INK = """id => {
  const canvas = document.querySelector(id + ' canvas'), copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext('2d', {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  let inked = 0;
  for (let i = 3; i < data.length; i += 4) inked += data[i] > 0;
  return inked;
}"""


@pytest.fixture(scope="module")
def browser():
    wanted = "GRADWIRE_TEST_BROWSER" in os.environ
    if CHROMIUM is None:
        assert not wanted, "there is no chromium: apt-get install chromium"
        needs.skip("Chromium", "make test-browser")
    if wanted:
        from playwright.sync_api import sync_playwright
    else:
        sync_playwright = needs.module("playwright.sync_api", "make test-browser").sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


class Watched:
    """Pages whose errors and requests are kept."""

    def __init__(self, browser):
        self.browser, self.errors, self.requests, self.contexts = browser, [], [], []

    def open(self, url, **options):
        context = self.browser.new_context(viewport={"width": 1300, "height": 900}, accept_downloads=True, **options)
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda told: self.errors.append(told.text) if told.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(url)
        return page


@pytest.fixture
def watched(browser):
    """A page may not complain, nor ask anybody but the server that it came from."""
    watched = Watched(browser)
    yield watched
    for context in watched.contexts:
        context.close()
    assert watched.errors == []
    hosts = {urlsplit(url).hostname for url in watched.requests if not url.startswith(("blob:", "data:", "file:"))}
    assert hosts <= {"127.0.0.1"}


@pytest.fixture
def serve():
    """Folders become a server's address."""
    open_ones = []

    def start(*folders):
        store = Store(folders).__enter__()
        server = DashboardServer(store, port=0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        open_ones.append((store, server, thread))
        return server.url

    yield start
    for store, server, thread in open_ones:
        server.shutdown()
        thread.join()
        server.server_close()
        store.__exit__()


def tile(page, name):
    return page.locator(f'[data-tile="{name}"] dd')


def until(page, expression, argument=None):
    page.wait_for_function(expression, arg=argument)


def tile_says(page, name, text):
    until(
        page, "([name, text]) => document.querySelector(`[data-tile='${name}'] dd`)?.textContent === text", [name, text]
    )


def drawn(page, chart):
    page.wait_for_selector(f"{chart} canvas[data-drawn]")
    until(page, f"id => ({INK})(id) > 400", chart)


def table_of(page, chart):
    with page.expect_download() as download:
        page.click(f"{chart} button.csv")
    with open(download.value.path(), newline="") as file:
        return download.value.suggested_filename, list(csv.reader(file))


def eventually(what, seconds=10):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_the_page_shows_a_run(serve, watched, tmp_path):
    page = watched.open(serve(whole_run(tmp_path / "first")))
    tile_says(page, "step", "50")
    assert tile(page, "state").inner_text() == "done"
    assert tile(page, "loss").inner_text() == "0.04"
    assert tile(page, "step time").inner_text() == "100 ms"
    assert tile(page, "sent a step").inner_text() == "1 MB"
    assert tile(page, "against float32").inner_text() == "0.125"
    assert page.title() == "first - gradwire"
    for chart in ("#loss", "#time", "#phases", "#bytes", "#ratio", "#timeline", "#queue", "#updates", "#staleness"):
        drawn(page, chart)
    assert page.locator("#workers tbody tr").count() == 2
    assert page.locator("#plan .reason").inner_text() == "the link is slow"
    assert page.locator("#plan-table tbody td").nth(3).inner_text() == "int4"
    assert "all as none" in page.locator("#plan").inner_text()
    assert "plan 'mixed' is used" in page.locator("#notes").inner_text()
    assert "gradients of rank 1 left out: stale" in page.locator("#notes").inner_text()
    assert "digits" in page.locator("#about").inner_text()
    assert "token" not in page.url
    page.reload()
    tile_says(page, "step", "50")


def test_new_steps_show_without_reload(serve, watched, tmp_path):
    folder = tmp_path / "run"
    append(folder, "rank-0.jsonl", start(steps=100), step(1))
    page = watched.open(serve(tmp_path))
    tile_says(page, "step", "1")
    page.evaluate("window.same = true")
    for number in range(2, 31):
        append(folder, "rank-0.jsonl", step(number))
    append(folder, "rank-0.jsonl", note(30, "something new"))
    tile_says(page, "step", "30")
    assert tile(page, "time left").inner_text() == "7 s"
    page.get_by_text("something new").wait_for()
    until(page, "() => document.querySelector('#workers tbody td:nth-child(4)').textContent === '30'")
    eventually(lambda: table_of(page, "#loss")[1][-1][0] == "30")
    whole_run(tmp_path / "another")
    page.locator("#runs-table").get_by_role("button", name="another").wait_for()
    append(folder, "rank-0.jsonl", {"event": "done", "time": 1.0, "status": "failed", "what": "rank 3 was lost"})
    tile_says(page, "state", "failed")
    page.get_by_text("rank 3 was lost").first.wait_for()
    assert page.evaluate("window.same")


def worker_states(page):
    return page.locator("#workers tbody td:nth-child(3)").all_inner_texts()


def test_a_worker_without_an_end_is_said_to_be_silent_when_another_failed_or_after_a_minute(serve, watched, tmp_path):
    now = time.time()
    failed = {"event": "done", "time": now, "status": "failed", "what": "rank 1 was lost"}
    append(tmp_path / "failed", "rank-0.jsonl", start(0, 2, time=now - 9), step(1, time=now - 5), failed)
    append(tmp_path / "failed", "rank-1.jsonl", start(1, 2, time=now - 9), step(1, time=now - 5))
    page = watched.open(serve(tmp_path / "failed"))
    tile_says(page, "state", "failed")
    told = page.evaluate("seconds => new Date(1000 * seconds).toLocaleTimeString('en-GB')", now - 5)
    eventually(lambda: [each[-8:] for each in worker_states(page)] == ["failed", told])
    assert worker_states(page)[1].startswith("no word since ")
    report = tmp_path / "report.html"
    report.write_bytes(make_report(Store([tmp_path / "failed"]))[0])
    page = watched.open(report.as_uri())
    eventually(lambda: [each[-8:] for each in worker_states(page)] == ["failed", told])
    now = time.time()
    for rank, age in enumerate((1, 50)):
        append(tmp_path / "slow", f"rank-{rank}.jsonl", start(rank, 2, time=now - 90), step(1, time=now - age))
    page = watched.open(serve(tmp_path / "slow"))
    tile_says(page, "state", "running")
    eventually(lambda: worker_states(page) == ["running", "running"], seconds=8)
    eventually(lambda: worker_states(page)[1].startswith("no word since "), seconds=20)
    assert worker_states(page)[0] == "running"


def test_the_page_opens_on_the_run_that_was_started_last_and_stays_there(serve, watched, tmp_path):
    for name, begun in (("a", 1.7e9), ("newest", 1.7e9 + 500), ("c", 1.7e9 + 1)):
        append(tmp_path / name, "rank-0.jsonl", start(time=begun), *[step(each) for each in range(1, 3000)])
    append(tmp_path / "a", "rank-0.jsonl", step(3000, time=1.7e9 + 800))  # the latest record is of an older run
    page = watched.open(serve(tmp_path))
    until(page, "() => document.querySelectorAll('#runs-table .state').length === 3")
    until(page, "() => [...document.querySelectorAll('#runs-table .state')].every((e) => e.textContent === 'running')")
    assert page.title() == "newest - gradwire"
    append(tmp_path / "later", "rank-0.jsonl", start(time=1.7e9 + 900), step(1))
    page.locator("#runs-table").get_by_role("button", name="later").wait_for()
    page.wait_for_timeout(1500)
    assert page.title() == "newest - gradwire"


def test_an_idle_page_asks_only_whether_there_is_news(serve, watched, tmp_path):
    page = watched.open(serve(whole_run(tmp_path / "run")))
    tile_says(page, "step", "50")
    page.wait_for_timeout(1500)
    watched.requests.clear()
    page.wait_for_timeout(2500)
    assert len(watched.requests) >= 2
    assert {urlsplit(url).path for url in watched.requests} == {"/api/runs"}


def test_a_folder_without_runs_says_so_until_there_is_one(serve, watched, tmp_path):
    page = watched.open(serve(tmp_path))
    page.get_by_text("no runs yet").wait_for()
    whole_run(tmp_path / "run")
    tile_says(page, "step", "50")
    assert not page.get_by_text("no runs yet").is_visible()


def test_switches_change_what_the_loss_is_shown_against(serve, watched, tmp_path):
    page = watched.open(serve(whole_run(tmp_path / "run")))
    drawn(page, "#loss")
    name, rows = table_of(page, "#loss")
    assert name == "gradwire-loss.csv"
    assert rows[0] == ["step", "training loss", "validation loss"]
    assert rows[4] == ["4", "0.5", ""]
    assert rows[50] == ["50", "0.04", "0.125"]
    assert len(rows) == 51
    page.click("#loss button[data-value=bytes]")
    rows = table_of(page, "#loss")[1]
    assert (rows[0][0], rows[4][:2]) == ("sent (bytes)", ["4000000", "0.5"])
    page.click("#loss button[data-value=seconds]")
    rows = table_of(page, "#loss")[1]
    assert (rows[0][0], rows[4][:2]) == ("time (s)", ["0.4", "0.5"])
    before = page.locator("#loss canvas").screenshot()
    page.click("#loss button[data-value=log]")
    assert page.locator("#loss button[data-value=log]").get_attribute("aria-pressed") == "true"
    page.wait_for_timeout(200)
    assert page.locator("#loss canvas").screenshot() != before


def test_dragging_zooms_and_a_double_click_resets(serve, watched, tmp_path):
    append(tmp_path / "run", "rank-0.jsonl", start(), *[step(each, loss=float(each % 7)) for each in range(1, 10_001)])
    page = watched.open(serve(tmp_path))
    tile_says(page, "step", "10,000")
    drawn(page, "#loss")
    assert len(table_of(page, "#loss")[1]) <= 1503
    box = page.locator("#loss canvas").bounding_box()
    y = box["y"] + 100
    page.mouse.move(box["x"] + box["width"] * 0.5, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.52, y, steps=3)
    with page.expect_response(lambda told: "from=" in told.url):
        page.mouse.up()
    page.wait_for_timeout(500)
    rows = table_of(page, "#loss")[1][1:]
    steps = [int(row[0]) for row in rows]
    assert steps == list(range(steps[0], steps[0] + len(steps))), "every step of a part is there"
    assert 100 < len(steps) < 400
    assert all(float(row[1]) == int(row[0]) % 7 for row in rows)
    page.locator("#loss canvas").dblclick(position={"x": 300, "y": 100})
    page.wait_for_timeout(500)
    assert [row[0] for row in table_of(page, "#loss")[1]][1::1][-1] == "10000"


def test_charts_answer_to_the_pointer_and_to_keys(serve, watched, tmp_path):
    page = watched.open(serve(whole_run(tmp_path / "run")))
    drawn(page, "#bytes")
    page.hover("#bytes canvas", position={"x": 300, "y": 80})
    tip = page.locator("#bytes .tip")
    tip.wait_for()
    assert "step " in tip.inner_text()
    assert "1 MB" in tip.inner_text()
    page.hover("#timeline canvas", position={"x": 400, "y": 16})
    page.locator("#timeline .tip").wait_for()
    assert "rank 0, step 50" in page.locator("#timeline .tip").inner_text()
    page.mouse.move(5, 5)
    page.focus("#time canvas")
    page.keyboard.press("ArrowRight")
    page.locator("#time .tip").wait_for()
    before = page.locator("#time .tip b").inner_text()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    until(page, "before => document.querySelector('#time .tip b').textContent !== before", before)
    with page.expect_response(lambda told: "from=" in told.url):
        page.keyboard.press("+")
    page.keyboard.press("Escape")
    page.locator("#bytes .legend button").first.click()
    page.locator("#bytes .legend button[aria-pressed=false]").wait_for()


def test_everything_can_be_reached_with_the_tab_key(serve, watched, tmp_path):
    whole_run(tmp_path / "b")
    page = watched.open(serve(whole_run(tmp_path / "a").parent))
    drawn(page, "#staleness")
    reached = set()
    for _ in range(150):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.closest('section')?.id + ' ' + document.activeElement.tagName")
        )
    wanted = {
        f"{each} CANVAS" for each in ("loss", "time", "phases", "bytes", "ratio", "timeline", "queue", "staleness")
    }
    assert wanted | {"runs BUTTON", "runs INPUT", "layers BUTTON", "plan SELECT", "loss BUTTON"} <= reached


def test_tables_are_sorted_and_layers_open(serve, watched, tmp_path):
    page = watched.open(serve(whole_run(tmp_path / "run")))
    names = page.locator("#layers-table tbody td:first-child")
    page.get_by_text("head.weight").first.wait_for()
    assert names.all_inner_texts() == ["head.weight", "body.weight", "tail.weight"]
    page.click("#layers-table th button[data-key=error]")
    assert names.all_inner_texts() == ["head.weight", "tail.weight", "body.weight"]
    page.click("#layers-table th button[data-key=error]")
    assert names.all_inner_texts() == ["body.weight", "tail.weight", "head.weight"]
    assert page.locator("#layers-table th[aria-sort=descending]").inner_text().startswith("relative error")
    assert not page.locator("#layer-history").is_visible()
    page.click("#layers-table tbody button >> text=tail.weight")
    drawn(page, "#layer-history")
    assert table_of(page, "#layer-history")[1][1:] == [["10", "0.2", "0.5"], ["20", "0.2", "0.5"]]
    assert page.locator("#layer-history h2").inner_text() == "Historytail.weight"


def test_any_step_can_be_chosen_for_the_timeline(serve, watched, tmp_path):
    for rank in range(3):
        records = [step(each, compute_s=0.09 if rank == 1 else 0.06, sent=each) for each in range(1, 31)]
        append(tmp_path / "run", f"rank-{rank}.jsonl", start(rank, 3), *records)
    page = watched.open(serve(tmp_path))
    drawn(page, "#timeline")
    assert "rank 1, slow" in page.locator("#workers").inner_text()
    assert page.locator("#workers tr.slow").count() == 1
    assert page.locator("#timeline h2 small").inner_text() == "step 30"
    page.fill("#timeline-step", "7")
    page.keyboard.press("Enter")
    until(page, "() => document.querySelector('#timeline h2 small').textContent === 'step 7'")
    rows = table_of(page, "#timeline")[1]
    assert ["1", "7", "compute", "", "0", "0.09", ""] in rows
    assert ["1", "7", "bucket 1", "none", "0.06", "0.1", "400000"] in rows
    page.click("#timeline .plain >> text=last")
    until(page, "() => document.querySelector('#timeline h2 small').textContent === 'step 30'")


def test_runs_are_compared(serve, watched, tmp_path):
    whole_run(tmp_path / "one")
    whole_run(tmp_path / "two", codec="int8", scale=2.0, steps=40)
    page = watched.open(serve(tmp_path))
    rows = page.locator("#runs-table tbody tr")
    page.get_by_role("button", name="two", exact=True).first.wait_for()
    until(page, "() => document.querySelectorAll('#loss .legend li').length === 4")
    page.fill("#target", "0.2")
    until(page, "() => document.querySelector('#runs-table tbody').innerText.includes('step 10')")
    told = {row.locator("td").nth(1).inner_text(): row.locator("td").all_inner_texts() for row in rows.all()}
    assert told["one"][2:11] == ["done", "int4", "2", "50", "0.04", "5 s", "50 MB", "0.125", "1 s, step 10"]
    assert told["two"][2:11] == ["done", "int8", "2", "40", "0.1", "4 s", "40 MB", "0.125", "2 s, step 20"]
    table = table_of(page, "#loss")[1]
    assert table[0] == ["step", "one", "two", "one, validation", "two, validation"]
    assert table[10] == ["10", "0.2", "0.4", "", ""]
    page.get_by_role("button", name="two", exact=True).first.click()
    tile_says(page, "step", "40")
    page.get_by_label("show one").uncheck()
    until(page, "() => document.querySelectorAll('#loss .legend li').length === 2")
    assert table_of(page, "#loss")[1][0] == ["step", "training loss", "validation loss"]
    page.click("#runs-table th button[data-key=loss]")
    page.click("#runs-table th button[data-key=loss]")
    assert rows.first.locator("td").nth(1).inner_text() == "two"


def test_a_picture_can_be_saved(serve, watched, tmp_path):
    image = needs.module("PIL.Image", "make test-browser")
    page = watched.open(serve(whole_run(tmp_path / "run")))
    for chart in ("#loss", "#timeline", "#staleness"):
        drawn(page, chart)
        with page.expect_download() as download:
            page.click(f"{chart} button.png")
        assert download.value.suggested_filename == f"gradwire-{chart[1:]}.png"
        with image.open(download.value.path()) as picture:
            assert picture.format == "PNG"
            box = page.locator(f"{chart} canvas").bounding_box()
            assert picture.size == (2 * (round(box["width"]) + 32), 2 * (round(box["height"]) + 84))
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_markup_of_a_run_is_text(serve, watched, tmp_path):
    folder = tmp_path / HOSTILE.replace("/", "\u2215")
    layer = {HOSTILE: {"codec": HOSTILE, "error": 0.1, "residual": 0.2}}
    bucket = step(1)["buckets"][0] | {"codec": HOSTILE}
    odd = {"codec": HOSTILE, "host": HOSTILE, "gradwire": HOSTILE, "torch": HOSTILE, "settings": {HOSTILE: HOSTILE}}
    records = [start(**odd), step(1, buckets=[bucket]), quality(1) | {"layers": layer}, note(1, HOSTILE)]
    records += [plan(1, name=HOSTILE, reason=HOSTILE, alternatives={HOSTILE: 1.0}, buckets=[{"method": HOSTILE}])]
    records += [{"event": "drop", "time": 1.0, "step": 1, "rank": HOSTILE, "what": HOSTILE}, validation(1, 0.1)]
    records += [{"event": "done", "time": 1.0, "status": HOSTILE, "what": HOSTILE}]
    append(folder, "rank-0.jsonl", *records)
    whole_run(tmp_path / "other")
    page = watched.open(serve(tmp_path))
    page.locator("#runs-table").get_by_role("button").filter(has_text="window.bad").click()
    page.locator("#notes").get_by_text(HOSTILE, exact=True).wait_for()
    page.locator("#layers-table").get_by_role("button", name=HOSTILE).click()
    drawn(page, "#layer-history")
    page.hover("#timeline canvas", position={"x": 600, "y": 30})
    page.hover("#loss canvas", position={"x": 600, "y": 100})
    page.wait_for_timeout(500)
    for place in (
        "#layers-table",
        "#plan .reason",
        "#plan-table",
        "#plan .facts",
        "#timeline .legend",
        "#about",
        "#workers",
    ):
        assert HOSTILE in page.locator(place).inner_text(), place
    assert page.evaluate("window.bad") is None
    assert page.locator("main img, main script").count() == 0
    assert HOSTILE not in table_of(page, "#layer-history")[1][0]


def test_a_name_is_no_formula_in_a_spreadsheet(serve, watched, tmp_path):
    whole_run(tmp_path / "=cmd()")
    whole_run(tmp_path / 'a,"b"')
    page = watched.open(serve(tmp_path))
    until(page, "() => document.querySelectorAll('#loss .legend li').length === 4")
    assert {"'=cmd()", 'a,"b"'} <= set(table_of(page, "#loss")[1][0])


@pytest.mark.parametrize("path", ["/", "/?token=wrong", "/app.js", "/api/runs"])
def test_without_the_token_there_is_401_and_nothing_else(serve, browser, tmp_path, path):
    url = serve(whole_run(tmp_path / "hidden"))
    page = browser.new_page()
    answer = page.goto(url.split("/?")[0] + path)
    assert answer.status == 401
    assert (
        page.locator("body").inner_text().strip() == "401: open the address that gradwire dash printed, with its token"
    )
    assert page.locator("script, canvas, link").count() == 0
    page.close()


def test_a_server_that_is_gone_is_said_and_one_that_comes_back_is_used(watched, tmp_path):
    whole_run(tmp_path / "run")
    with Store([tmp_path]) as store, DashboardServer(store, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        page = watched.open(server.url)
        tile_says(page, "step", "50")
        page.route("**/api/**", lambda route: route.abort())
        page.get_by_text("no connection to gradwire dash").wait_for()
        page.unroute("**/api/**")
        page.get_by_text("live", exact=True).wait_for()
        server.shutdown()
        thread.join()
    watched.errors[:] = [error for error in watched.errors if "ERR_FAILED" not in error]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_sticks_out_at_any_width(serve, watched, tmp_path, scheme, width):
    whole_run(tmp_path / ("a-run-with-a-rather-long-name-" * 3))
    whole_run(tmp_path / "b")
    page = watched.open(serve(tmp_path), color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    drawn(page, "#staleness")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
    assert dark == (scheme == "dark")


CLICK_TO_PAINT = """async selector => {
  const canvas = document.querySelector('#loss canvas'), before = canvas.dataset.drawn, begun = performance.now();
  document.querySelector(selector).click();
  while (canvas.dataset.drawn === before) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return performance.now() - begun;
}"""


@pytest.mark.timeout(600)
def test_a_million_steps_stay_responsive(watched, tmp_path):
    (tmp_path / "large").mkdir()
    many_steps(tmp_path / "large" / "rank-0.jsonl", 1_000_000)
    whole_run(tmp_path / "small", steps=30)
    os.utime(tmp_path / "small", (1, 1))
    command = [sys.executable, "-m", "gradwire", "dash", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            begun = time.monotonic()
            page = watched.open(url)
            drawn(page, "#loss")
            assert time.monotonic() - begun < 10, "the first chart"
            page.get_by_text("reading").first.wait_for()
            painted, chosen = [], []
            while page.get_by_text("reading").first.is_visible() and len(painted) < 40:
                for value in ("log", "linear", "bytes", "step"):
                    painted.append(page.evaluate(CLICK_TO_PAINT, f"#loss button[data-value={value}]"))
                chosen.append(_choose(page, "small", "30"))
                chosen.append(_choose(page, "large", None))
                page.wait_for_timeout(200)
            assert len(painted) >= 8, "it was read before anything could be clicked"
            print(f"click to paint: {max(painted):.0f} ms at most of {len(painted)}; another run: {max(chosen):.0f} ms")
            assert max(painted) < 500
            assert sorted(chosen)[len(chosen) // 2] < 500
            page.wait_for_function(
                "() => document.querySelector(\"[data-tile='step'] dd\").textContent === '1,000,000'", timeout=240_000
            )
            until(page, "() => document.querySelector(\"[data-tile='state'] dd\").textContent === 'running'")
            page.wait_for_timeout(2500)
            _, rows = table_of(page, "#loss")
            assert len(rows) < 1600
            assert max(int(row[0]) for row in rows[1:]) == 1_000_000
        finally:
            for context in watched.contexts:
                context.close()  # before the server, or it would complain
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(30) == 0


def _choose(page, name, steps):
    """Milliseconds from a click on another run to its numbers on the page."""
    return page.evaluate(
        """async ([name, steps]) => {
          const begun = performance.now();
          [...document.querySelectorAll('#runs-table td.name button')].find(each => each.textContent === name).click();
          const step = () => document.querySelector("[data-tile='step'] dd").textContent;
          const shown = () => document.title.startsWith(name) && (!steps || step() === steps);
          while (!shown()) await new Promise(requestAnimationFrame);
          await new Promise(requestAnimationFrame);
          return performance.now() - begun;
        }""",
        [name, steps],
    )


def test_a_report_opens_from_a_file(watched, tmp_path):
    whole_run(tmp_path / "runs" / "one")
    whole_run(tmp_path / "runs" / "two", codec=HOSTILE, scale=2.0, steps=40)
    command = [sys.executable, "-m", "gradwire", "report", "runs", "-o", "report.html"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    page = watched.open((tmp_path / "report.html").as_uri())
    for chart in ("#loss", "#time", "#phases", "#bytes", "#ratio", "#timeline", "#queue", "#updates", "#staleness"):
        drawn(page, chart)
    page.get_by_role("button", name="two", exact=True).first.click()
    tile_says(page, "step", "40")
    page.get_by_role("button", name="one", exact=True).first.click()
    tile_says(page, "step", "50")
    page.click("#layers-table tbody button >> text=tail.weight")
    drawn(page, "#layer-history")
    assert "report made" in page.locator("#about").inner_text()
    assert table_of(page, "#loss")[1][10] == ["10", "0.2", "0.4", "", ""]
    box = page.locator("#loss canvas").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 100, steps=3)
    page.mouse.up()
    drawn(page, "#loss")
    assert page.evaluate("window.bad") is None
    assert [url for url in watched.requests if not url.startswith(("file:", "blob:"))] == []
