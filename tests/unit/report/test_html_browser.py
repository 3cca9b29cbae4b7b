"""The page in headless Chromium: its script runs under its own policy, and the table does what it says."""

import json
import re
import shutil
import subprocess

import pytest
from page_run import HOSTILE, write_page_run

from exgrpo_megatron.report.html_page import write_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")

# Appended to the page without its policy, which forbids any script but the page's own.
STEPS = """
const found = {}, count = () => document.getElementById("question-count").textContent;
const rows = () => [...document.querySelectorAll("#question-table tbody tr")].map((row) => row.cells[0].textContent);
const type = (id, value) => {
  const field = document.getElementById(id);
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
};
const head = (name) => document.querySelector(`th[data-column=${name}]`);
found.charts = document.querySelectorAll("#charts svg").length;
found.all = [count(), rows().length, rows()[2]];
document.querySelectorAll("#pager button")[2].click();
found.secondPage = rows()[0];
type("search", "question 12");
found.search = [count(), rows()];
type("search", "");
type("filter-status", "3");
found.stored = [count(), rows()];
type("filter-status", "");
head("rate").querySelector("button").click();
found.best = [rows().slice(0, 3), head("rate").getAttribute("aria-sort")];
head("rate").querySelector("button").click();
found.worst = [rows().slice(0, 3), head("rate").getAttribute("aria-sort")];
type("search", "question 4");
document.querySelector("#question-table tbody button").click();
found.untried = document.getElementById("question-body").textContent;
document.getElementById("question").close();
type("search", "q0");
document.querySelector("#question-table tbody button").click();
found.opened = document.getElementById("question").open;
found.prose = [...document.querySelectorAll("#question-body .prose")].map((node) => node.textContent);
found.history = [...document.querySelectorAll("#question-body tbody tr")].map((row) => row.textContent);
document.getElementById("theme").click();
found.theme = document.documentElement.dataset.theme;
found.pwned = document.documentElement.dataset.pwned || "no";
document.title = JSON.stringify(found);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path, _ = write_page(write_page_run(tmp_path_factory.mktemp("browser") / "run"))
    return path


@pytest.fixture
def dom(tmp_path):
    """The page as it stands after its scripts have run, and what the browser said."""

    def dump(url):
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
        command = [CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return dump


def test_the_page_draws_itself_from_disk_under_its_policy(page, dom):
    """Twelve charts, two of buckets and the chooser's; the question named in the address is open."""
    text, said = dom(f"{page.as_uri()}#question-0")
    assert said == []
    assert 'data-ready="true"' in text
    assert len(re.findall("<figcaption>", text)) == 12 + 2 + 1 + 1
    assert "pwned=" not in text
    assert re.search(r'<dialog[^>]* open=""', text)


def test_questions_are_searched_sorted_and_shown(page, dom, tmp_path):
    text = page.read_text(encoding="utf-8")
    driven = tmp_path / "driven.html"
    without = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    driven.write_text(without.replace("</body>", f"<script>{STEPS}</script></body>"), encoding="utf-8")
    text, said = dom(driven.as_uri())
    assert said == []
    title = re.search("<title>(.*)</title>", text)[1]
    found = json.loads(title.replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    # Of twelve: these metrics have nothing replayed yet (share, ratio, age), and no number of questions left.
    assert found["charts"] == 8
    assert found["all"] == ["200 questions", 50, HOSTILE[2]]
    assert found["secondPage"] == "question 50"
    # Both words occur, in any place: 12, 112, and 120 to 129.
    assert found["search"] == ["12 of 200 questions", [f"question {i}" for i in (12, 112, *range(120, 130))]]
    assert found["stored"] == ["1 of 200 questions", [HOSTILE[0]]]
    assert found["best"] == [[HOSTILE[1], HOSTILE[0], HOSTILE[2]], "descending"]
    assert found["worst"] == [[HOSTILE[2], HOSTILE[0], HOSTILE[1]], "ascending"]
    assert "No history" in found["untried"]
    assert found["opened"]
    assert found["prose"][:2] == [HOSTILE[0], "0"]
    assert found["history"][-2:] == [
        "2replayedanswer 0: mean w 1.25, largest 2.5",
        "2evictedanswer 1: max_answers_per_question",
    ]
    assert found["theme"] in ("dark", "light")
    assert found["pwned"] == "no"
