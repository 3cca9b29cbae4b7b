"""Every command of the documentation has an entry that says how it is covered, parses, and resolves its recipe."""

import re
import shutil
from functools import cache
from pathlib import Path

import documented
import pytest
import typer
from documented import ROOT, filled_in

from exgrpo_megatron import cli
from exgrpo_megatron.recipe import load_recipe
from exgrpo_megatron.recipe_table import derived_table
from exgrpo_megatron.sweep.arms import make_arms, make_runs, parse_axis

COMMANDS = documented.all_commands()
ENTRIES, PLACEHOLDERS = documented.register()
NEMO_RL = ROOT / "tests" / "unit" / "nemo_rl" / "files" / "examples" / "configs"
USAGE = typer.BadParameter.__mro__[1]  # what typer raises for a wrong command line
COVERED_BY = {"run", "test", "stage", "needs"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands' files are: the recipes, a recipe of one's own, and NeMo-RL's."""
    folder = tmp_path_factory.mktemp("documented")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (folder / "examples").mkdir()
    (folder / "examples" / "configs").symlink_to(NEMO_RL)
    shutil.copy(ROOT / "recipes" / "quickstart.yaml", folder / "my.yaml")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def entries_of(command):
    exact = [entry for entry in ENTRIES if "command" in entry.how and entry.covers(command.text)]
    return exact or [entry for entry in ENTRIES if "matches" in entry.how and entry.covers(command.text)]


def test_every_command_has_one_entry_and_every_entry_a_command():
    assert len(COMMANDS) > 120
    uncovered = [f"{command.place}: {command.text}" for command in COMMANDS if len(entries_of(command)) != 1]
    assert uncovered == []
    used = [entries_of(command)[0].command for command in COMMANDS]
    assert [entry.command for entry in ENTRIES if entry.command not in used] == []
    assert len({entry.command for entry in ENTRIES}) == len(ENTRIES)


def test_every_entry_says_how_in_one_way_that_exists():
    ci = (ROOT / ".ci" / "run").read_text()
    for entry in ENTRIES:
        ways = COVERED_BY & set(entry.how)
        assert len(ways) == 1, f"{entry.command}: {ways}"
        if "test" in entry.how:
            path, _, name = entry.how["test"].partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), entry.how["test"]
        if "stage" in entry.how:
            line = f"stage {entry.how['stage']} {entry.how.get('as', entry.command)}"
            assert line in ci.splitlines(), line


def test_what_ci_does_not_have_is_said_where_the_command_stands():
    unsaid = [
        f"{command.place}: {entry.how['says']!r} is not said near {command.text}"
        for command in COMMANDS
        for entry in entries_of(command)
        if "needs" in entry.how and entry.how["says"] not in command.around
    ]
    assert unsaid == []


def exgrpo_words():
    """The words behind `exgrpo` of every command that has them, torchrun's included; with where it stands."""
    for command in COMMANDS:
        words = [word for word in filled_in(command.text, PLACEHOLDERS) if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "exgrpo":
            yield command, words[1:]
        elif "exgrpo_megatron" in words:
            assert words[words.index("exgrpo_megatron") - 1] == "-m"
            yield command, words[words.index("exgrpo_megatron") + 1 :]


@pytest.mark.parametrize(("command", "words"), exgrpo_words(), ids=lambda value: getattr(value, "place", ""))
def test_it_parses_and_its_recipe_is_resolved(here, command, words):
    resolve(parsed(words))


def test_torchrun_takes_its_own_options():
    from torch.distributed.run import get_args_parser

    checked = 0
    for command in COMMANDS:
        words = [word for word in filled_in(command.text, PLACEHOLDERS) if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "torchrun":
            args = get_args_parser().parse_args(words[1:])
            assert args.module or (ROOT / args.training_script).is_file(), command.place
            checked += 1
    assert checked > 20


def test_programs_and_make_targets_are_there():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    for command in COMMANDS:
        words = [word for word in filled_in(command.text, PLACEHOLDERS) if not re.match(r"[A-Z_]+=", word)]
        if words[0] == "make":
            assert words[1] in targets, command.place
        if words[0] == "python" and not words[1].startswith("-"):
            assert (ROOT / words[1]).is_file(), command.place


def test_commands_within_sentences_exist(here):
    """`exgrpo show RECIPE --world-size N` in a sentence: the command and its options; arguments may be left out."""
    places = {text: place for place, text in documented.inline_commands()}
    assert len(places) > 25
    for text, place in places.items():
        words = filled_in(text, {**PLACEHOLDERS, "COMMAND": "show"})
        if words[-1] == "--help" or "experience" in words:
            continue
        try:
            resolve(parsed(words[1:]))
        except USAGE as error:
            if (
                not re.search("Missing|requires an argument", str(error))
                and type(error).__name__ != "NoArgsIsHelpError"
            ):
                raise AssertionError(f"{place}: {text}") from error


def test_every_show_command_runs(exgrpo, here):
    shown = [words for _, words in exgrpo_words() if words[0] == "show"]
    assert len(shown) > 10
    for words in shown:
        result = exgrpo(*words)
        assert result.code == 0, result.err


def parsed(words):
    """(name of the command, its parameters); raises click's error for what it does not take."""
    command = typer.main.get_command(cli.app)
    name, context = "exgrpo", None
    while words and hasattr(command, "resolve_command"):  # a group; its class depends on the version of typer
        context = command.context_class(command, info_name=name, parent=context)
        name, command, words = command.resolve_command(context, list(words))
    assert context is not None
    return name, command.make_context(name, list(words), parent=context).params


def resolve(call):
    name, given = call
    if name == "sweep":
        varied = [parse_axis(text) for text in given["vary"] or ()]
        arms = make_arms(given["recipes"], given["arm"] or (), varied, given["override"] or ())
        assert make_runs(arms, [1], ["grpo.seed"], Path("out"))
    elif "recipe" in given:
        assert numbers_of(given["recipe"], tuple(given["overrides"] or ()))


@cache
def numbers_of(recipe, overrides):
    return derived_table(load_recipe(recipe, overrides))
