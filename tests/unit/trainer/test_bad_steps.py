"""`--debug`: what makes a step bad, that its batch is kept whole, and that its loss comes out of what was kept."""

import json
import math
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import documented
import numpy as np
import pytest
import torch
from scripted import build_trainer, half_right, plant, right

from exgrpo_megatron.config import DebugConfig
from exgrpo_megatron.debug.files import read_bad_step
from exgrpo_megatron.debug.recompute import loss_of
from exgrpo_megatron.debug.verdict import RatioExtremes, faults
from exgrpo_megatron.debug.watch import BadStepWatch
from exgrpo_megatron.debug.write import replace_arrays
from exgrpo_megatron.debug_command import replay_bad_step, replay_recipe, replayed, show_bad_step
from exgrpo_megatron.errors import DataError, UserError
from exgrpo_megatron.types import LossTerms, UpdateResult

FINE = UpdateResult(
    loss=0.5, grad_norm=2.0, skipped=False, learning_rate=1e-6, num_positions=1, num_padding=0,
    terms=LossTerms(*[np.zeros(1)] * 5),
)  # fmt: skip
QUIET = RatioExtremes(0.0, 0)


def watched(tmp_path, data_parallel, **sections):
    """A trainer that keeps bad steps, with stored answers to replay (two optimiser steps a step)."""
    sections = {"policy": {"train_global_batch_size": 8}, **sections}
    trainer = build_trainer(
        tmp_path, half_right, comm=data_parallel, debug={"enabled": True, **sections.pop("debug", {})}, **sections
    )
    for number in (1, 2, 3):
        plant(trainer, f"q{number}", [right(f"q{number}", 2)], k=1)
    return trainer


def run(trainer, steps):
    results = []
    trainer.fit(steps, lambda result: results.append(result) is None)
    return results


def break_weights(trainer):
    """A NaN in the last norm: every log-prob is NaN."""
    actor = trainer.parts.policy
    with torch.no_grad():
        dict(actor._gpt[0].named_parameters())["decoder.final_layernorm.weight"][0] = math.nan


@pytest.mark.parametrize(
    ("changed", "limits", "ratios", "expected"),
    [
        ({}, {}, QUIET, []),
        ({"loss": math.nan, "skipped": True}, {}, QUIET, ["loss nan", "skipped"]),
        ({"grad_norm": math.inf}, {}, QUIET, ["gradient norm inf"]),
        ({"loss": -3.0}, {"max_abs_loss": 2}, QUIET, ["loss -3 beyond debug.max_abs_loss = 2"]),
        ({}, {"max_abs_loss": 0.5, "max_grad_norm": 2.0}, QUIET, []),
        ({}, {"max_grad_norm": 1.5}, QUIET, ["gradient norm 2 above debug.max_grad_norm = 1.5"]),
        # log 1e4 = 9.2103
        ({}, {}, RatioExtremes(9.2, 0), []),
        ({}, {}, RatioExtremes(9.25, 2), [
            "2 log-ratios that are not finite", "log-ratio 9.25 above that of debug.max_ratio = 10000",
        ]),
        ({}, {"max_ratio": None}, RatioExtremes(50.0, 0), []),
    ],
)  # fmt: skip
def test_what_makes_an_optimiser_step_bad(changed, limits, ratios, expected):
    config = DebugConfig.model_validate({"enabled": True, **limits})
    assert faults(config, replace(FINE, **changed), ratios) == expected


def test_the_loss_and_norm_of_a_kept_step_come_out_of_its_numbers_and_of_its_tokens(tmp_path, data_parallel):
    # Every norm is above the limit: the step is kept, though nothing is wrong with it. It is skipped too, so that the
    # weights that were kept are those it was computed with.
    trainer = watched(
        tmp_path, data_parallel, debug={"max_grad_norm": 1e-6, "weights": True},
        policy={"skip_grad_norm_above": 1e-6, "train_global_batch_size": 8}, loss_fn={"entropy_coeff": 0.01},
    )  # fmt: skip
    (result,) = run(trainer, 1)
    kept = read_bad_step(tmp_path / "run" / "debug" / "step_000001")
    assert (kept.step, kept.missing_ranks, len(kept.updates)) == (1, [], 2)
    assert np.mean([update.loss for update in kept.updates]) == pytest.approx(result.metrics["policy/loss"], rel=1e-12)
    assert max(update.grad_norm for update in kept.updates) == result.metrics["policy/grad_norm"]
    for update in kept.updates:
        assert loss_of(update) == pytest.approx(update.loss, rel=1e-5, abs=1e-9)
    (snippet,) = (one.text for one in documented.all_snippets() if one.file == "docs/debug.md")
    exec(snippet.replace("runs/default/debug/step_000012", str(kept.folder)), {})
    config = replay_recipe(kept.folder)
    again = replayed(kept, kept.folder / "weights", config, data_parallel)
    assert [again[number].loss for number in (0, 1)] == pytest.approx(
        [update.loss for update in kept.updates], rel=1e-6
    )
    # An optimiser step before it, even one without a gradient, leaves what the second is computed with.
    still = [replace(one, policy_weight=0.0, entropy_weight=0.0) for one in kept.updates[0].sequences]
    after = replayed(
        replace(kept, updates=[replace(kept.updates[0], sequences=still), kept.updates[1]]),
        kept.folder / "weights", config, data_parallel,
    )  # fmt: skip
    assert (after[0].grad_norm, after[0].skipped) == (0.0, True)
    assert (after[1].loss, after[1].grad_norm) == (again[1].loss, again[1].grad_norm)
    norms = [update.grad_norm for update in kept.updates]
    assert [again[number].grad_norm for number in (0, 1)] == pytest.approx(norms, rel=1e-5)


def test_a_kept_step_says_where_every_sequence_comes_from(tmp_path, data_parallel):
    trainer = watched(tmp_path, data_parallel, debug={"max_grad_norm": 1e-6})
    (result,) = run(trainer, 1)
    kept = read_bad_step(tmp_path / "run" / "debug" / "step_000001")
    rows = [pair for update in kept.updates for pair in zip(update.sequences, update.origins, strict=True)]
    assert len(rows) == 16
    members = {
        (group.question.id, member.token_ids.tobytes()): member
        for group in result.groups
        for member in group.trajectories
    }
    for sequence, origin in rows:
        member = members[origin.question_id, sequence.response_ids.tobytes()]
        assert (origin.reward, origin.correct) == (member.reward, member.correct)
        assert origin.answer == trainer.parts.tokenizer.decode(member.token_ids)
        assert origin.question == f"{origin.question_id[1:]}+1"
        assert (sequence.old_logprobs == member.logprobs).all()
    stored = [(sequence.stored.question_id, origin.question_id) for sequence, origin in rows if sequence.replayed]
    assert len(stored) == 2
    assert all(name == question for name, question in stored)
    content = json.loads((kept.folder / "rank_00000.json").read_text())
    assert content["metrics"]["policy/grad_norm"] == result.metrics["policy/grad_norm"]
    assert content["seed"] == trainer.config.grpo.seed


def test_a_weight_that_is_no_number_is_named_and_the_losses_come_out_as_nan(tmp_path, data_parallel):
    trainer = watched(
        tmp_path, data_parallel, debug={"weights": True}, loss_fn={"old_logprobs": "engine"},
        experience={"answer_choice": "newest"},
    )  # fmt: skip
    run(trainer, 1)
    assert not (tmp_path / "run" / "debug").exists(), "the first step is good"
    break_weights(trainer)
    (result,) = run(trainer, 2)
    (note,) = [warning for warning in result.warnings if warning.startswith("bad: ")]
    folder = tmp_path / "run" / "debug" / "step_000002"
    assert note.startswith("bad: optimiser step 1: loss nan, gradient norm nan, skipped")
    assert note.endswith(
        f"Its batch is in {folder}: `exgrpo debug {folder}` shows it. Its weights are not kept: tensor "
        "model.norm.weight has NaN or infinite values as torch.float32."
    )
    kept = read_bad_step(folder)
    assert [update.skipped for update in kept.updates] == [True, True]
    assert all(math.isnan(loss_of(update)) for update in kept.updates)
    assert not (folder / "weights").exists()
    text = (folder / "rank_00000.json").read_text()
    assert (
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["metrics"]["policy/grad_norm"]
        == "nan"
    )


def test_what_raises_in_a_step_is_kept_with_its_traceback(tmp_path, data_parallel):
    trainer = watched(tmp_path, data_parallel)
    update, calls = trainer.parts.policy.update, []

    def second_fails(*args, **keywords):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory, say")
        return update(*args, **keywords)

    trainer.parts.policy.update = second_fails
    with pytest.raises(RuntimeError, match="out of memory"):
        run(trainer, 1)
    kept = read_bad_step(tmp_path / "run" / "debug" / "step_000001")
    assert kept.reasons == ["RuntimeError: out of memory, say"]
    assert "second_fails" in kept.traceback
    first, second = kept.updates
    assert loss_of(first) == pytest.approx(first.loss, rel=1e-5, abs=1e-9)
    assert (second.loss, second.skipped, loss_of(second)) == (None, None, None)
    assert len(second.sequences) == 8


def test_what_raises_before_any_optimiser_step_is_kept_too(tmp_path, data_parallel):
    # The stored answers are scored by weights that are no numbers, and none can be chosen.
    trainer = watched(tmp_path, data_parallel)
    run(trainer, 1)
    break_weights(trainer)
    with pytest.raises(ValueError, match="must be finite"):
        run(trainer, 2)
    kept = read_bad_step(tmp_path / "run" / "debug" / "step_000002")
    assert kept.updates == []
    assert "scores of stored answers must be finite" in kept.reasons[0]


@contextmanager
def files_of_at_most(num_bytes):
    """What a full disk does: a write beyond that fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_run_goes_on_where_a_bad_step_cannot_be_kept(tmp_path, data_parallel):
    trainer = watched(tmp_path, data_parallel, debug={"max_grad_norm": 1e-6, "max_dumps": 1, "weights": True})
    folder = tmp_path / "run" / "debug"
    folder.write_text("in the way")
    (first,) = run(trainer, 1)
    assert any("Its batch could not be kept (1 since the start): [Errno 20]" in text for text in first.warnings)
    folder.unlink()
    with files_of_at_most(4096):  # torch's state alone has 5056
        (second,) = run(trainer, 2)
    assert any("could not be kept (2 since the start): cannot write" in text for text in second.warnings)
    assert list((folder / "step_000002").iterdir()) == [], "a part of it would be taken for the whole"
    with files_of_at_most(100_000):
        (third,) = run(trainer, 3)
    (note,) = [text for text in third.warnings if text.startswith("bad: ")]
    assert "Its weights are not kept: " in note
    assert "too large" in note
    assert len(read_bad_step(folder / "step_000003").updates) == 2
    # Only what was kept counts against debug.max_dumps.
    (fourth,) = run(trainer, 4)
    assert any("the 4th since the start, and not kept (debug.max_dumps)" in text for text in fourth.warnings)


def test_arrays_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    path.write_text("before")
    with files_of_at_most(4096), pytest.raises(UserError, match=r"cannot write .*too large"):
        replace_arrays(path, {"x": np.zeros(5000, np.uint8)})
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [(path.name, "before")]


@pytest.mark.parametrize("size", [None, 4096])
def test_what_raises_is_seen_also_where_it_cannot_be_kept(tmp_path, data_parallel, caplog, size):
    trainer = watched(tmp_path, data_parallel)
    if size is None:
        (tmp_path / "run" / "debug").write_text("in the way")

    def fails(*args, **keywords):
        raise RuntimeError("out of memory, say")

    trainer.parts.policy.update = fails
    with files_of_at_most(size or 1 << 30), pytest.raises(RuntimeError, match="out of memory") as raised:
        run(trainer, 1)
    assert raised.value.__context__ is None
    assert "step 1 raised; its batch could not be kept: " in caplog.text


def test_what_an_earlier_start_kept_of_a_step_is_not_mixed_with_what_is_kept_now(tmp_path, data_parallel):
    trainer = watched(tmp_path, data_parallel, debug={"max_grad_norm": 1e-6})
    run(trainer, 1)
    folder = tmp_path / "run" / "debug" / "step_000001"

    def leave():
        for path in [path for path in folder.iterdir() if path.stem == "rank_00000"]:
            shutil.copy(path, path.with_stem("rank_00001"))
        (folder / "weights").mkdir()
        (folder / "notes.txt").touch()

    def again():
        trainer.parts = replace(trainer.parts, watch=BadStepWatch(trainer.config))
        trainer.last_step = 0
        run(trainer, 1)

    leave()
    again()
    names = ["notes.txt", "rank_00000.json", "rank_00000.jsonl", "rank_00000.safetensors", "recipe.yaml"]
    assert sorted(path.name for path in folder.iterdir()) == names
    # One that raises cannot ask the others, whose older files are told apart by the start that wrote them.
    leave()
    trainer.parts.policy.update = None
    with pytest.raises(TypeError):
        again()
    assert not (folder / "weights").exists()
    edit(folder / "rank_00000.json", ranks=2, data_parallel_size=2)
    edit(folder / "rank_00001.json", ranks=2, data_parallel_size=2, data_parallel_rank=1)
    kept = read_bad_step(folder)
    assert (kept.missing_ranks, len(kept.updates), kept.updates[0].whole) == ([1], 1, False)
    assert "TypeError" in kept.reasons[0]


def edit(path, **changed):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_texts_may_have_any_character_that_ends_lines(tmp_path, data_parallel):
    trainer = watched(tmp_path, data_parallel, debug={"max_grad_norm": 1e-6})
    decode, odd = trainer.parts.tokenizer.decode, "a\u2028b\u2029c\x85d\re\nf"
    trainer.parts.tokenizer.decode = lambda ids: decode(ids) + odd
    run(trainer, 1)
    kept = read_bad_step(tmp_path / "run" / "debug" / "step_000001")
    assert {origin.answer[-len(odd) :] for update in kept.updates for origin in update.origins} == {odd}


def test_a_damaged_folder_is_refused_in_one_sentence(tmp_path, data_parallel):
    run(watched(tmp_path, data_parallel, debug={"max_grad_norm": 1e-6}), 1)
    folder = tmp_path / "run" / "debug" / "step_000001"
    content = json.loads((folder / "rank_00000.json").read_text())
    updates = content["updates"]
    sequences = updates[0]["sequences"]
    tokens = sum(sequence["response_tokens"] for sequence in sequences)

    def with_sequence(**changed):
        return {"updates": [{**updates[0], "sequences": [{**sequences[0], **changed}, *sequences[1:]]}, updates[1]]}

    longer = sequences[0]["response_tokens"] + 1
    for changed, message in [
        ({"reasons": [1]}, "rank_00000: reasons.0: Input should be a valid string"),
        ({"ranks": 10**8}, "rank_00000: ranks: Input should be less than or equal to 1000000"),
        (
            with_sequence(response_tokens=longer),
            f"response_ids of a rank has shape ({tokens},), its sequences {tokens + 1} tokens",
        ),
        (with_sequence(response_tokens="x"), "rank_00000: updates.0.sequences.0.response_tokens: Input should be"),
        (with_sequence(response_tokens=0), "rank_00000: updates.0.sequences.0.response_tokens: Input should be"),
        ({"updates": [*updates, updates[0]]}, "rank_00000.safetensors lacks update_2.entropy"),
    ]:
        edit(folder / "rank_00000.json", **{**content, **changed})
        with pytest.raises(DataError) as refused:
            read_bad_step(folder)
        assert str(refused.value).startswith(f"{folder} is damaged: ")
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)


def test_ranks_that_came_to_different_optimiser_steps_are_shown(tmp_path, data_parallel, capsys):
    run(watched(tmp_path, data_parallel, debug={"max_grad_norm": 1e-6}), 1)
    folder = tmp_path / "run" / "debug" / "step_000001"
    for path in [path for path in folder.iterdir() if path.stem == "rank_00000"]:
        shutil.copy(path, path.with_stem("rank_00001"))
    updates = json.loads((folder / "rank_00000.json").read_text())["updates"]
    early = [{**updates[0], "loss": None, "grad_norm": None, "skipped": None, "learning_rate": None}]
    edit(folder / "rank_00000.json", ranks=40, data_parallel_size=2)
    edit(folder / "rank_00001.json", ranks=40, data_parallel_size=2, data_parallel_rank=0, updates=early)
    kept = read_bad_step(folder)
    assert [update.loss for update in kept.updates] == [float(update["loss"]) for update in updates]
    # Of the first one of the ranks has no ratios, and of both the second half of the sequences is missing.
    assert [loss_of(update) for update in kept.updates] == [None, None]
    assert kept.missing_ranks == list(range(2, 40))
    show_bad_step(folder)
    shown = capsys.readouterr().out
    assert "20, 21 and 18 more\n" in shown
    assert "optimiser step 2: only the sequences of some ranks are there\n" in shown


def test_no_more_steps_are_kept_than_the_recipe_says(tmp_path, data_parallel):
    trainer = watched(tmp_path, data_parallel, debug={"max_grad_norm": 1e-6, "max_dumps": 1})
    results = run(trainer, 2)
    assert [path.name for path in (tmp_path / "run" / "debug").iterdir()] == ["step_000001"]
    assert any("not kept (debug.max_dumps)" in warning for warning in results[1].warnings)


def test_a_skipped_step_says_how_to_keep_the_next(tmp_path, data_parallel):
    trainer = build_trainer(tmp_path, half_right, comm=data_parallel, policy={"skip_grad_norm_above": 1e-6})
    (result,) = run(trainer, 1)
    (warning,) = [text for text in result.warnings if "optimiser steps skipped" in text]
    assert warning.endswith("; `exgrpo train --debug` keeps the batch of such a step")
    assert not (tmp_path / "run" / "debug").exists()


def test_the_command_shows_a_step_and_computes_it_again(tmp_path, data_parallel, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    trainer = watched(tmp_path, data_parallel, debug={"max_grad_norm": 1e-6})
    run(trainer, 1)
    folder = tmp_path / "run" / "debug" / "step_000001"
    show_bad_step(folder)
    first = read_bad_step(folder).updates[0]
    shown = capsys.readouterr().out
    assert "above debug.max_grad_norm = 1e-06" in shown
    row = next(line for line in shown.splitlines() if line.lstrip().startswith("1 ")).split()
    assert (row[1], row[2], row[5]) == ("8", str(sum(s.replayed for s in first.sequences)), f"{first.loss:.9g}")
    assert float(row[-1]) == pytest.approx(first.loss, rel=1e-5)
    monkeypatch.setenv("COLUMNS", "60")
    show_bad_step(folder)
    narrow = capsys.readouterr().out
    assert f"loss                 {first.loss:.9g}\n" in narrow  # a line a value, none of them cut
    assert f"norm                 {first.grad_norm:.9g}\n" in narrow
    assert "…" not in narrow
    monkeypatch.setenv("COLUMNS", "200")
    marked = shutil.copytree(folder, tmp_path / "[b]of[red]" / "[/b]")
    show_bad_step(marked)
    assert f"{marked}\n" in capsys.readouterr().out
    replay_bad_step(folder, tmp_path / "run" / "model", replay_recipe(folder), data_parallel)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("1 ")).split()
    assert float(row[-2]) == pytest.approx(first.loss, rel=1e-4)
    assert float(row[-1]) == pytest.approx(first.grad_norm, rel=1e-4)


def test_the_documented_snippet_prints_each_loss_beside_itself(tmp_path, data_parallel, capsys):
    trainer = watched(tmp_path, data_parallel, debug={"max_grad_norm": 1e-6})
    run(trainer, 1)
    page = (Path(__file__).resolve().parents[3] / "docs" / "debug.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    assert code.count("runs/default/debug/step_000012") == 1
    exec(code.replace("runs/default/debug/step_000012", str(tmp_path / "run" / "debug" / "step_000001")), {})
    printed = [line.split(" [")[0].split() for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 2
    for logged, again in printed:
        assert float(again) == pytest.approx(float(logged), rel=1e-5)


def test_another_folder_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"no folder of a bad step: it has no rank_00000\.json"):
        read_bad_step(tmp_path)
