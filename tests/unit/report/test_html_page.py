"""The HTML page of a run: what it says, and that no text in it can become markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from page_run import ANSWER, HOSTILE, write_page_run
from run_folder import write_run

from exgrpo_megatron.data.tokenizer import load_tokenizer
from exgrpo_megatron.errors import DataError
from exgrpo_megatron.experience.history import HISTORY_FILE
from exgrpo_megatron.report.html_data import page_data
from exgrpo_megatron.report.html_page import safe_json, write_page
from exgrpo_megatron.report.run_data import load_run


class Page(HTMLParser):
    """Scripts and tags of a page, as a browser's tokenizer would find them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.policy, self._in = [], {}, None, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append((tag, found))
        if tag == "script":
            self._in = found.get("id", "code")
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        if self._in:
            self.scripts[self._in] = self.scripts.get(self._in, "") + data


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_page_run(tmp_path_factory.mktemp("page") / "<b>run & 'co'<")


@pytest.fixture(scope="module")
def page(run_dir):
    path, notes = write_page(run_dir)
    return path.read_text(encoding="utf-8"), notes


def payload(text):
    return json.loads(Page(text).scripts["data"])


def test_nothing_in_json_ends_a_script_element():
    text = safe_json({"x": "</script><!-- & \u2028"})
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == {"x": "</script><!-- & \u2028"}


def test_hostile_texts_are_data_and_no_tags(page):
    found = Page(page[0])
    assert payload(page[0])["questions"]["text"][:4] == HOSTILE
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert [tag for tag, _ in found.tags].count("img") == 0
    assert [tag for tag, _ in found.tags].count("b") == 0  # of the folder's name
    assert "&lt;b&gt;run &amp; &#39;co&#39;&lt;" in page[0]


def test_the_page_loads_nothing_and_runs_its_own_script_alone(page):
    found = Page(page[0])
    assert not [tag for tag, attributes in found.tags if {"src", "srcset", "data", "action"} & attributes.keys()]
    assert all(attributes["href"].startswith("#") for _, attributes in found.tags if "href" in attributes)
    assert "@import" not in page[0]
    assert "url(" not in page[0]
    digest = base64.b64encode(hashlib.sha256(found.scripts["code"].encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in found.policy


def test_a_question_has_what_its_history_adds_up_to(page):
    """q0: 2 and 5 of 8 right, 2 stored, 1 evicted, 1 replayed; q1: 7 and 8, retired in step 3; q2: 0; q3: not tried."""
    data = payload(page[0])
    questions = data["questions"]
    names = [data["statuses"][status] for status in questions["status"][:4]]
    assert names == ["in the buffer", "retired", "never right", "not tried"]
    assert questions["rate"][:4] == [round(7 / 16, 4), round(15 / 16, 4), 0, None]
    assert questions["last"][:4] == [5, 8, 0, None]
    assert questions["last_step"][:4] == [2, 3, 1, None]
    assert questions["stored"][:4] == [1, 0, 0, 0]
    assert questions["replays"][:4] == [1, 1, 0, 0]
    assert questions["ratio"][:2] == [1.25, 0.5]
    assert questions["evicted"][0] == 1
    assert questions["retired_step"][:2] == [None, 3]
    events = [[step, data["kinds"][kind], *values] for step, kind, *values in data["events"][0]]
    assert events[-2:] == [[2, "replayed", 0, 1.25, 2.5], [2, "evicted", 1, "max_answers_per_question"]]
    assert len(questions["id"]) == 200


def test_replayed_answers_have_their_text_as_long_as_a_checkpoint_has_them(page, run_dir):
    text = load_tokenizer(run_dir / "model").decode(ANSWER)
    assert payload(page[0])["answers"] == {"0": [text, len(ANSWER), 1, -0.5]}
    assert [note for note in page[1] if note.startswith("1 of 2 replayed answers are in no checkpoint")]


def test_a_limit_on_texts_takes_the_answers_replayed_last(run_dir):
    data = page_data(load_run(run_dir), run_dir, 1)
    assert data.payload["answers"] == {}  # answer 2, of step 3, is in no checkpoint
    assert [note for note in data.notes if note.startswith("2 answers were replayed; texts")]


def test_a_damaged_answer_is_counted(tmp_path):
    run = write_page_run(tmp_path / "run")
    (segment,) = (run / "checkpoints").glob("*/experience/segments/*.seg")
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content)
    data = page_data(load_run(run), run, 10)
    assert data.payload["answers"] == {}
    assert "1 replayed answers are damaged in the checkpoints." in data.notes


def test_without_a_history_buckets_come_from_the_newest_checkpoint(tmp_path):
    run = write_page_run(tmp_path / "run")
    (run / HISTORY_FILE).unlink()
    data = page_data(load_run(run), run, 10)
    questions = data.payload["questions"]
    assert (questions["last"][0], questions["stored"][0], questions["status"][0]) == (1, 1, 3)
    assert any("step_000002" in note for note in data.notes)
    assert all(events == [] for events in data.payload["events"])


def test_runs_without_replay_or_questions_have_a_page(tmp_path):
    run = write_run(tmp_path / "run", num_steps=2, replay=False)
    (run / "recipe.yaml").write_text(
        (run / "recipe.yaml").read_text().replace("{generator: chain_arithmetic}", "{path: gone.jsonl}")
    )
    path, notes = write_page(run)
    text = path.read_text()
    assert payload(text)["questions"]["id"] == []
    assert any("gone.jsonl" in note for note in notes)
    assert "on-policy, no replay" in text


def test_a_history_that_is_none_is_refused_with_its_line(tmp_path):
    run = write_page_run(tmp_path / "run", checkpoint=False)
    (run / HISTORY_FILE).write_text('{"step":1,"questions":{}}\nnonsense,\n')
    with pytest.raises(DataError, match="line 2"):
        page_data(load_run(run), run, 10)


def test_long_series_are_thinned_and_keep_their_last_value(tmp_path):
    run = write_run(tmp_path / "run", num_steps=1, validation=False)
    lines = [json.dumps({"step": step, "reward/pass_rate": step / 5001}) for step in range(1, 5002)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    series = page_data(load_run(run), run, 0).payload["metrics"]["reward/pass_rate"]
    assert len(series["steps"]) <= 2000
    assert (series["steps"][-1], series["values"][-1]) == (5001, 1)


def test_the_recipe_and_its_variant_are_in_the_page_without_a_script(page):
    assert "<code>experience.bucket_weight</code>" in page[0]
    assert "paper: accuracy" in page[0]
    assert "<code>grpo.num_prompts_per_step</code></th><td><code>32</code>" in page[0]
