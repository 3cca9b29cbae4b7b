"""`exgrpo experience` on a real run whose rollouts follow a script: numbers from its groups, metrics and files."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scripted import make_config

from exgrpo_megatron import cli
from exgrpo_megatron.data.embedded_model import materialize
from exgrpo_megatron.experience.buffer import ExperienceBuffer
from exgrpo_megatron.experience.files import read_summary
from exgrpo_megatron.experience.manifest import read_manifest
from exgrpo_megatron.experience.stats_file import STATS_FILE
from exgrpo_megatron.experience_tools.sources import find_source
from exgrpo_megatron.experience_tools.verify import verify
from exgrpo_megatron.metric_sinks import read_metrics
from exgrpo_megatron.policy import distributed

STEPS = 4
CAPS = {"max_answers_per_question": 2, "eviction": "least_recently_replayed"}


@pytest.fixture
def exgrpo(capsys, monkeypatch, data_parallel):
    """Runs `exgrpo experience ...` in this process; returns exit code, stdout and stderr."""

    class KeptOpen:
        def __getattr__(self, name):
            return getattr(data_parallel, name)

        def shutdown(self):
            pass

    monkeypatch.setattr(distributed, "initialize", lambda *_: KeptOpen())
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["experience", *map(str, args)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def run(kept_run, run_steps, tmp_path):
    """A copy of the folder of a run of four steps with two checkpoints; made once."""
    if not (kept_run / "run").exists():
        options = {"checkpointing": {"export_hf": False, "save_period": 2}, "experience": CAPS}
        run_steps(make_config(kept_run, **options), STEPS)
    shutil.copytree(kept_run / "run", tmp_path / "run")
    return tmp_path / "run"


def checkpoint(run, step=STEPS):
    return run / "checkpoints" / f"step_{step:06d}"


def opened(folder, data_parallel, group_size=4):
    from exgrpo_megatron.config import ExperienceConfig

    buffer = ExperienceBuffer(ExperienceConfig(bucket_weight="counts"), group_size, data_parallel)
    buffer.load(folder)
    return buffer


def answers_of(buffer, *, with_steps=True):
    return {
        (name, bucket, *answer.token_ids.tolist()): (answer.logprobs.tobytes(), with_steps and answer.step)
        for name, bucket in buffer.questions()
        for answer in buffer.answers(name)
    }


def test_stats_are_those_of_the_buffer_and_the_metrics(exgrpo, run, data_parallel):
    code, out, err = exgrpo("stats", run, "--json")
    assert code == 0, err
    found, buffer = json.loads(out), opened(checkpoint(run) / "experience", data_parallel)
    last, records = read_metrics(run / "metrics.jsonl")[-1], read_metrics(run / "metrics.jsonl")
    answers = [answer for name, _ in buffer.questions() for answer in buffer.answers(name)]
    assert (found["questions"], found["answers"]) == (buffer.num_questions, len(answers))
    assert found["tokens"] == sum(len(answer.token_ids) for answer in answers)
    assert found["record_bytes"] == buffer.num_bytes == last["experience/stored_bytes"]
    assert found["questions_by_bucket"] == {str(k): n for k, n in buffer.bucket_sizes().items() if n}
    lengths, ages = [len(answer.token_ids) for answer in answers], [STEPS - answer.step for answer in answers]
    entropies = [-answer.logprobs.mean(dtype=np.float64) for answer in answers]
    for name, values in {"length": lengths, "age": ages, "entropy": entropies}.items():
        assert found["spreads"][name]["mean"] == pytest.approx(np.mean(values), rel=1e-5), name
        assert found["spreads"][name]["median"] == pytest.approx(np.median(values), rel=1e-5), name
    for name in ("experience/evicted_of_question", "experience/already_stored"):
        assert found["totals"][name] == sum(record.get(name, 0) for record in records) > 0
    assert (found["data_questions"], found["data_left"]) == (12, last["data/questions_left"])
    assert found["data_left_share"] == last["data/questions_left"] / 12
    code, out, _ = exgrpo("stats", checkpoint(run))
    assert f"{buffer.num_questions} questions, {len(answers)} answers" in out
    assert "of 12 training questions left" in out


def test_the_step_of_a_run_can_be_chosen_and_one_that_is_not_there_is_named(exgrpo, run):
    older, newer = (json.loads(exgrpo("stats", run, "--json", *step)[1]) for step in (["--step", 2], []))
    assert (older["step"], newer["step"]) == (2, 4)
    assert older["questions"] < newer["questions"]
    code, _, err = exgrpo("stats", run, "--step", 3)
    assert (code, "step_000002, step_000004" in err) == (2, True)
    code, _, err = exgrpo("stats", run / "none")
    assert (code, "no such file or folder" in err) == (2, True)


def test_show_tells_a_questions_history_and_its_answers(exgrpo, run, data_parallel):
    name = next(iter(dict(opened(checkpoint(run) / "experience", data_parallel).questions())))
    code, out, err = exgrpo("show", run, name)
    assert code == 0, err
    assert f"question {name}\n    {name[1:]}+1\n" in out
    assert "tried: 1 of 4 correct" in out
    assert f"history of {STEPS} steps, 1 to {STEPS}\n" in out
    assert out.count("stored answer ") >= 1
    assert f"\\boxed{{{int(name[1:]) + 1}}}<eos>" in out
    assert exgrpo("show", run, f"{name[1:]}+1", "--last", 1)[1].startswith(f"question {name}\n")
    assert "earlier events" in exgrpo("show", run, name, "--last", 1)[1]
    whole = exgrpo("show", checkpoint(run) / "experience", name)[1]
    assert whole.startswith(f"question {name}\n")


def test_a_replayed_question_shows_which_answer_and_its_ratio(exgrpo, run):
    lines = [json.loads(line) for line in (run / "experience_history.jsonl").read_text().splitlines()]
    name, (_, serial, mean, largest) = next(
        (name, event) for line in lines for name, events in line["questions"].items() for event in events
        if event[0] == "replayed"
    )  # fmt: skip
    out = exgrpo("show", run, name)[1]
    assert f"replayed answer {serial}: w {mean:.4g} on average, {largest:.4g} at most" in out


@pytest.mark.parametrize(
    ("wanted", "text"),
    [("q", "12 ids begin with it: 'q"), ("+1", "12 questions have it in their text"), ("zzz", "'zzz': no question of")],
)
def test_a_search_that_does_not_name_one_question_is_refused(exgrpo, run, wanted, text):
    code, _, err = exgrpo("show", run, wanted)
    assert (code, text in err) == (2, True), err


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_an_export_comes_back_as_it_was(exgrpo, run, tmp_path, form, data_parallel):
    before = opened(checkpoint(run) / "experience", data_parallel)
    code, out, err = exgrpo("export", run, "--to", form, "--out", tmp_path / "out", "--texts")
    assert code == 0, err
    assert f"{before.num_answers} answers of {before.num_questions} questions written" in out
    folder = tmp_path / "out"
    if form == "jsonl":
        rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        assert exgrpo("import", folder, "--out", tmp_path / "again")[0] == 0
    else:
        rows = pq.read_table(next(folder.glob("*.parquet"))).to_pylist()
        assert list(dict(opened(folder, data_parallel).questions())) == list(dict(before.questions()))
        assert exgrpo("import", next(folder.glob("*.parquet")), "--out", tmp_path / "again")[0] == 0
    assert all(row["question"] == f"{row['question_id'][1:]}+1" for row in rows)
    assert all(f"\\boxed{{{int(row['question_id'][1:]) + 1}}}" in row["text"] for row in rows)
    assert exgrpo("verify", folder)[0] == 0
    assert answers_of(opened(tmp_path / "again", data_parallel)) == answers_of(before)
    stats = [json.loads(exgrpo("stats", path, "--json")[1]) for path in (run, folder)]
    assert stats[0]["spreads"]["length"] == stats[1]["spreads"]["length"]
    assert stats[0]["questions_by_bucket"] == stats[1]["questions_by_bucket"]
    code, _, err = exgrpo("export", run, "--out", tmp_path / "out")
    assert (code, "out: exists" in err) == (2, True)
    code, _, err = exgrpo("export", run, "--out", tmp_path / "new", "--group-size", 8)
    assert (code, "--group-size 8: " in err, "of groups of 4" in err) == (2, True, True)


def test_a_run_begins_with_what_was_exported(exgrpo, run, tmp_path, run_steps):
    assert exgrpo("export", run, "--out", tmp_path / "out")[0] == 0
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    quick = {"checkpointing": {"enabled": False, "export_hf": False}}
    _, notes = run_steps(make_config(fresh, **quick, experience={"prefill_path": str(tmp_path / "out")}), 1)
    summary = read_summary(tmp_path / "out" / "experience.json")
    assert any(f"{summary.num_answers} answers of {summary.num_questions} questions" in note for note in notes)
    first = json.loads((fresh / "run" / "experience_history.jsonl").read_text().splitlines()[0])["questions"]
    events = [event for listed in first.values() for event in listed if event[0] == "prefilled"]
    assert sum(count for _, count in events) == summary.num_answers


ROW = {"question_id": "q1", "token_ids": [5, 6, 7], "logprobs": [-0.5, -1.0, 0.0], "group_size": 8}


def test_rows_of_others_need_three_columns_and_may_stand_in_any_order(exgrpo, tmp_path, data_parallel):
    rows = [
        {**ROW, "bucket": 3, "step": 9, "note": "mine"},
        {**ROW, "question_id": "q2"},
        {**ROW, "token_ids": [5, 6, 8], "bucket": 3},
        {**ROW, "bucket": 3},
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, err = exgrpo("import", tmp_path / "mine.jsonl", "--out", tmp_path / "out")
    assert code == 0, err
    assert "3 answers of 2 questions written" in out
    assert "1 duplicates left out; columns not used: note" in out
    buffer = opened(tmp_path / "out", data_parallel, 8)
    assert dict(buffer.questions()) == {"q1": 3, "q2": 1}
    first, second = buffer.answers("q1")
    assert (first.token_ids.tolist(), second.token_ids.tolist(), first.step) == ([5, 6, 7], [5, 6, 8], 9)
    assert first.logprobs.tolist() == [-0.5, -1.0, 0.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"question_id": ""}, "`question_id` must be a text that is not empty"),
        ({"question_id": 7}, "`question_id` must be a text"),
        ({"token_ids": None}, "`token_ids` is missing"),
        ({"token_ids": [5, 6.5, 7]}, "`token_ids` must be a list of whole numbers"),
        ({"token_ids": [5, -1, 7]}, "it has token id -1"),
        ({"token_ids": [5, 6, 2**31]}, "is not below 2147483648"),
        ({"logprobs": [-0.5]}, "it has 1 log-probs for 3 tokens"),
        ({"logprobs": [-0.5, "x", 0.0]}, "`logprobs` must be a list of numbers"),
        ({"logprobs": [-0.5, 0.7, 0.0]}, "log-prob 1 of 3 is 0.7, above 0"),
        ({"bucket": 8}, "`bucket` 8 is not in 1..7"),
        ({"bucket": 2}, "`bucket` is 2, but 1 in an earlier row"),
        ({"bucket": True}, "`bucket` must be a whole number"),
        ({"step": -1}, "`step` must be a whole number"),
        ({"group_size": 4}, "`group_size` is 4, but 8"),
    ],
)
def test_a_row_that_breaks_a_rule_is_named_with_its_file(exgrpo, tmp_path, change, text):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(ROW) + "\n\n" + json.dumps({**ROW, **change}) + "\n")
    code, _, err = exgrpo("import", path, "--out", tmp_path / "out")
    assert code == 2
    assert f"{path}, line 3" in err
    assert text in err
    assert not (tmp_path / "out").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.jsonl"]


def test_parquet_of_others_is_checked_by_row_too(exgrpo, tmp_path, data_parallel):
    table = {"question_id": ["a", "a", "b"], "token_ids": [[1], [2], [3, 4]], "logprobs": [[-1.0], [-2.0], [-1.0]]}
    pq.write_table(pa.table(table), tmp_path / "mine.parquet")
    code, _, err = exgrpo("import", tmp_path / "mine.parquet", "--out", tmp_path / "out", "--group-size", 4)
    assert (code, "mine.parquet, row 2, question 'b': the answer cannot be replayed" in err) == (2, True), err
    pq.write_table(pa.table(table).slice(0, 2), tmp_path / "mine.parquet")
    code, _, err = exgrpo("import", tmp_path / "mine.parquet", "--out", tmp_path / "out")
    assert (code, "a column `group_size`, or --group-size" in err) == (2, True), err
    assert exgrpo("import", tmp_path / "mine.parquet", "--out", tmp_path / "out", "--group-size", 4)[0] == 0
    assert [answer.token_ids.tolist() for answer in opened(tmp_path / "out", data_parallel).answers("a")] == [[1], [2]]
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    code, _, err = exgrpo("import", tmp_path / "broken.parquet", "--out", tmp_path / "other", "--group-size", 4)
    assert (code, "cannot be read as Parquet" in err) == (2, True)


def test_a_vocabulary_that_the_token_ids_do_not_fit_is_refused(exgrpo, run, tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps({**ROW, "token_ids": [5, 6, 99_999]}) + "\n")
    code, _, err = exgrpo("import", tmp_path / "mine.jsonl", "--out", tmp_path / "out", "--tokenizer", run / "model")
    assert (code, "token id 99999 is not below" in err) == (2, True), err


def test_what_is_sound_verifies(exgrpo, run):
    for path in (run, checkpoint(run, 2), checkpoint(run) / "experience"):
        code, out, _ = exgrpo("verify", path)
        assert (code, "sound" in out) == (0, True), out
    assert f"a history of {STEPS} steps" in exgrpo("verify", run)[1]


def test_every_corrupt_byte_of_a_record_is_found_and_named(exgrpo, run):
    """One byte in every record of a segment in turn: the message has file, bytes, serial and question."""
    folder = checkpoint(run) / "experience"
    manifest = read_manifest(folder, 4)
    path = manifest.path(0)
    data = path.read_bytes()
    path.unlink()  # a link of the checkpoint before
    for answer in np.flatnonzero(manifest.segment == 0).tolist():
        offset, length = (int(manifest.columns[name][answer]) for name in ("offset", "length"))
        place = offset + (7 * answer + 3) % length
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        code, out, _ = exgrpo("verify", run)
        assert code == 1
        serial, name = int(manifest.columns["serial"][answer]), manifest.question_ids[manifest.question[answer]]
        expected = f"{path}: byte {offset} to {offset + length}, answer {serial} of question '{name}': damaged"
        assert [line for line in out.splitlines() if "damaged" in line] == [f"{expected}: its checksum does not hold"]


FAULTS = {
    "segment gone": (lambda folder: next((folder / "segments").iterdir()).unlink(), "missing, with"),
    "stray segment": (lambda folder: (folder / "segments" / "x.seg").touch(), "x.seg: belongs to no index"),
    "wrong count": (lambda folder: edit(folder, num_answers=99), "says"),
    "retired with answers": (lambda folder: edit(folder, retired=some_question(folder)), "is retired, but has answers"),
    "statistics changed": (
        lambda folder: append(folder / STATS_FILE),
        "questions.parquet: is not as it was saved",
    ),
    "index gone": (lambda folder: next(folder.glob("index-*")).unlink(), "holds no experience"),
}


def edit(folder, **values):
    path = folder / "experience.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def append(path):
    path.write_bytes(path.read_bytes() + b" ")


def some_question(folder):
    return [read_manifest(folder, 4).question_ids[0]]


@pytest.mark.parametrize("fault", FAULTS)
def test_other_faults_of_a_checkpoint_are_named(exgrpo, run, fault):
    plant, text = FAULTS[fault]
    plant(checkpoint(run) / "experience")
    code, out, err = exgrpo("verify", run)
    assert (code, text in out) == (1, True), out + err


def test_an_index_that_names_another_answer_is_found(exgrpo, run):
    """Two answers of one length are exchanged in the index: both records are sound, but not those that are due."""
    path = next((checkpoint(run) / "experience").glob("index-*"))
    table = pq.read_table(path)
    serials = table.column("serial").to_pylist()
    serials[0], serials[1] = serials[1], serials[0]
    changed = table.set_column(table.schema.get_field_index("serial"), table.schema.field("serial"),
                               pa.array(serials, pa.uint32()))  # fmt: skip
    pq.write_table(changed, path)
    code, out, _ = exgrpo("verify", run)
    assert code == 1
    assert out.count("the index and the answer differ in serial") == 2


def test_the_segments_of_a_killed_run_can_be_looked_at_checked_and_exported(exgrpo, run, tmp_path):
    folder = tmp_path / "killed" / "rank-00000"
    folder.mkdir(parents=True)
    segments = sorted((checkpoint(run) / "experience" / "segments").iterdir())
    for number, path in enumerate(segments):
        shutil.copyfile(path, folder / f"segment-{number:06d}.seg")
    whole = json.loads(exgrpo("stats", folder.parent, "--json")[1])
    assert whole["answers"] >= json.loads(exgrpo("stats", run, "--json")[1])["answers"]
    last = folder / f"segment-{len(segments) - 1:06d}.seg"
    last.write_bytes(last.read_bytes()[:-4])
    code, out, _ = exgrpo("verify", folder.parent)
    assert (code, "note: " in out, "breaks off after" in out) == (0, True, True), out
    assert json.loads(exgrpo("stats", folder.parent, "--json")[1])["answers"] == whole["answers"] - 1
    first = folder / "segment-000000.seg"
    data = bytearray(first.read_bytes())
    data[50] ^= 1
    first.write_bytes(data)
    code, out, _ = exgrpo("verify", folder.parent)
    assert (code, "segment-000000.seg: byte 16 to" in out) == (1, True), out
    code, _, err = exgrpo("export", folder.parent, "--out", tmp_path / "out")
    assert (code, "--group-size" in err) == (2, True)
    assert exgrpo("export", folder.parent, "--out", tmp_path / "out", "--group-size", 4)[0] == 0
    assert read_summary(tmp_path / "out" / "experience.json").num_answers == whole["answers"] - 2


def test_rescoring_under_the_same_weights_moves_nothing_and_under_others_says_how_far(
    exgrpo, run, tmp_path, data_parallel, kept_run
):
    """The run's first policy is its base model, whose log-probs the answers of step 1 have by heart (recomputed)."""
    base = run / "model"
    code, out, err = exgrpo("rescore", run, base, "--out", tmp_path / "base")
    assert code == 0, err
    before = opened(checkpoint(run) / "experience", data_parallel)
    after = opened(tmp_path / "base", data_parallel)
    assert after.num_answers == before.num_answers
    assert f"{before.num_answers} answers of {before.num_questions} questions written" in out
    old, new = ({(name, *answer.token_ids.tolist()): answer for name, _ in buffer.questions()
                 for answer in buffer.answers(name)} for buffer in (before, after))  # fmt: skip
    assert old.keys() == new.keys()
    first = [key for key, answer in old.items() if answer.policy_version == 0]
    assert first
    for key in first:
        assert np.abs(old[key].logprobs - new[key].logprobs).max() < 2e-5
    assert exgrpo("rescore", tmp_path / "base", base, "--out", tmp_path / "x")[0] == 2, "no recipe beside it"
    recipe = run / "recipe.yaml"
    code, out, err = exgrpo("rescore", tmp_path / "base", base, "--out", tmp_path / "x", "--recipe", recipe)
    assert code == 0, err
    moved = float(out.split("a token moved by ")[1].split()[0])
    assert moved < 2e-6
    code, out, err = exgrpo("rescore", run, checkpoint(run), "--out", tmp_path / "trained")
    assert code == 0, err
    trained = opened(tmp_path / "trained", data_parallel)
    differences = np.concatenate([
        answer.logprobs.astype(np.float64) - old[(name, *answer.token_ids.tolist())].logprobs
        for name, _ in trained.questions() for answer in trained.answers(name)
    ])  # fmt: skip
    assert float(out.split("a token moved by ")[1].split()[0]) == pytest.approx(np.abs(differences).mean(), rel=1e-3)
    assert f"mean {np.exp(differences).mean():.4g}" in out


def test_a_model_with_another_vocabulary_is_refused_by_name(exgrpo, run, tmp_path):
    other = materialize("embedded:chain-qwen2", tmp_path / "other", seed=1)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[5:7]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(content))
    code, _, err = exgrpo("rescore", run, other, "--out", tmp_path / "out")
    assert code == 2
    assert f"{other} has another vocabulary" in err
    assert "embedded:chain-qwen2" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (json.dumps({**ROW, "question_id": "\ud800"}), "half of a surrogate pair"),
        ("[" * 100_000, "not JSON (maximum recursion depth"),
        (json.dumps({**ROW, "logprobs": [-1e39] * len(ROW["logprobs"])}), "is -inf"),
        (json.dumps({**ROW, "group_size": 2**30}), "`group_size` 1073741824 is above 10000"),
        (json.dumps({**ROW, "bucket": "x" * 1000}), "whole number from 0 on, found 'xxx"),
    ],
)
def test_hostile_rows_are_refused_by_a_short_message(exgrpo, tmp_path, line, text):
    (tmp_path / "mine.jsonl").write_text(line + "\n")
    code, _, err = exgrpo("import", tmp_path / "mine.jsonl", "--out", tmp_path / "out")
    assert (code, text in err, len(err) < 500 + len(str(tmp_path))) == (2, True, True), err


def test_places_of_other_peoples_rows_are_not_relied_on(exgrpo, tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps({**ROW, "position": "first", "answer_index": [1]}) + "\n")
    assert json.loads(exgrpo("stats", tmp_path / "mine.jsonl", "--json")[1])["answers"] == 1


def test_parquet_with_two_columns_of_a_name_or_an_odd_group_size_is_refused(exgrpo, tmp_path):
    columns = [pa.array(["a"]), pa.array([[1]]), pa.array([[-1.0]]), pa.array(["b"])]
    names = ["question_id", "token_ids", "logprobs", "question_id"]
    pq.write_table(pa.table(columns, names=names), tmp_path / "two.parquet")
    code, _, err = exgrpo("import", tmp_path / "two.parquet", "--out", tmp_path / "out", "--group-size", 4)
    assert (code, "two columns are called `question_id`" in err) == (2, True), err
    odd = pa.table(columns[:3], names=names[:3]).replace_schema_metadata({b"exgrpo.group_size": b"2000000000"})
    pq.write_table(odd, tmp_path / "odd.parquet")
    code, _, err = exgrpo("stats", tmp_path / "odd.parquet")
    assert (code, "its group size is b'2000000000', not 2 to 10000" in err) == (2, True), err


def test_folders_beside_what_is_written_are_left_alone_and_bad_targets_named(exgrpo, tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "out.incomplete").mkdir()
    assert exgrpo("import", tmp_path / "mine.jsonl", "--out", tmp_path / "out")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.jsonl", "out", "out.incomplete"]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in (tmp_path / "mine.jsonl" / "sub", tmp_path / ("n" * 300), tmp_path / "link"):
        code, _, err = exgrpo("import", tmp_path / "mine.jsonl", "--out", out)
        assert (code, "--out" in err) == (2, True), err


@pytest.mark.parametrize("to", ["parquet", "jsonl"])
def test_any_changed_bit_of_an_export_is_found(exgrpo, run, tmp_path, to):
    exgrpo("export", run, "--out", tmp_path / "out", "--to", to)
    source, rng = find_source(tmp_path / "out"), np.random.default_rng(1)
    assert not verify(source).faults
    for path in sorted((tmp_path / "out").iterdir()):
        for place in rng.integers(path.stat().st_size, size=12).tolist():
            sound = path.read_bytes()
            data = bytearray(sound)
            data[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
            assert verify(source).faults, f"{path.name}, byte {place}"
            path.write_bytes(sound)


def test_damage_between_whole_records_of_a_live_run_is_no_half_written_end(run, tmp_path):
    segment = next((checkpoint(run) / "experience" / "segments").glob("*.seg"))
    live = tmp_path / "live" / "rank-00000"
    live.mkdir(parents=True)
    data = bytearray(segment.read_bytes())
    data[16 + 5] ^= 64  # the length in the header of the first record, behind the 16 bytes that begin a segment
    (live / "segment-000000.seg").write_bytes(data)
    faults = verify(find_source(live.parent)).faults
    assert len(faults) == 1
    assert "byte 16 to" in faults[0]
    (live / "segment-000000.seg").write_bytes(segment.read_bytes()[:-3])
    found = verify(find_source(live.parent))
    assert (found.faults, len(found.notes)) == ([], 1)


def test_a_file_of_the_experience_without_a_checksum_of_the_checkpoint_is_named(exgrpo, run):
    digests = checkpoint(run) / "files.json"
    digests.write_text(digests.read_text().replace("experience/index", "experience/jndex"))
    code, out, _ = exgrpo("verify", run)
    assert code == 1
    assert "files.json: has no SHA-256 of experience/index-00000-of-00001.parquet" in out
