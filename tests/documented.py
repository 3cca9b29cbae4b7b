"""The commands and Python snippets of the documentation, and the register that says how each is covered."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
REGISTER = ROOT / "tests" / "documented_commands.yaml"
PROGRAMS = {
    *(".ci/run", "bash", "cd", "cp", "curl", "docker", "exgrpo", "export", "git", "hf", "lm_eval", "make", "mkdir"),
    *("nemo", "nemorun", "pip", "python", "sbatch", "scancel", "source", "squeue", "srun", "torchrun", "uv", "vllm"),
}
"""What a command begins with. A block of code that begins with another word is no block of commands."""

_VARIABLES = r"(?:[A-Z][A-Z0-9_]*=\S*\s+)*"
_START = re.compile(rf"(?:\$ )?({_VARIABLES})([^\s=]+)(?:\s|$)")
_PROGRAM = "|".join(map(re.escape, sorted(PROGRAMS - {".ci/run"})))
_IN_COMMENT = re.compile(rf"(?:^|[\s(:])({_VARIABLES}(?:{_PROGRAM})\s+[^\s`].*)$")


@dataclass(frozen=True)
class Command:
    """One command as it is written, without its comment."""

    text: str
    """With continuation lines joined and single spaces outside of quotes."""
    file: str
    line: int
    around: str
    """Its own lines with their comments, and the eight lines above; in a recipe all that stands above."""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Snippet:
    """A block of Python."""

    text: str
    file: str
    line: int


def all_commands() -> list[Command]:
    """Of code blocks of the documents, of the comments at the top of recipes, and of docstrings of examples."""
    found: list[Command] = []
    for path in _documents():
        lines = path.read_text(encoding="utf-8").splitlines()
        for block in _pieces(lines):
            found += _commands_of_block(block, _name(path), lines)
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        found += _commands_of_comments(path)
    for path in sorted((ROOT / "examples").glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        docstring = ast.get_docstring(ast.parse("\n".join(lines)), clean=False) or ""
        for block in _pieces(docstring.splitlines()):
            found += _commands_of_block(block, _name(path), lines)
    return found


def all_snippets() -> list[Snippet]:
    """Blocks of code of the documents that are Python."""
    found = []
    for path in _documents():
        for block in _blocks(path.read_text(encoding="utf-8").splitlines()):
            text = textwrap.dedent("\n".join(line for _, line in block))
            if not _is_command(text) and _is_python(text):
                found.append(Snippet(text, _name(path), block[0][0]))
    return found


def inline_commands() -> Iterator[tuple[str, str]]:
    """(place, text) of `exgrpo ...` within a sentence or table of the documents."""
    for path in _documents():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.startswith("    "):
                for text in re.findall(r"`(exgrpo [^`]+)`", line):
                    yield f"{_name(path)}:{number}", text


@dataclass(frozen=True)
class Entry:
    """How a command is covered, or all commands that match where `*` stands for anything."""

    command: str
    how: dict[str, Any]

    def covers(self, text: str) -> bool:
        if "matches" in self.how:
            return re.fullmatch(".*".join(map(re.escape, self.command.split("*"))), text) is not None
        return self.command == text


def messages() -> list[str]:
    """Texts in blocks of code that begin like commands."""
    return list(yaml.safe_load(REGISTER.read_text(encoding="utf-8"))["texts"])


def register() -> tuple[list[Entry], dict[str, str]]:
    """The entries, and what stands for the placeholders of the documents."""
    content = yaml.safe_load(REGISTER.read_text(encoding="utf-8"))
    entries = [Entry(str(raw.get("command") or raw["matches"]), raw) for raw in content["commands"]]
    return entries, {str(name): str(value) for name, value in content["placeholders"].items()}


def filled_in(text: str, placeholders: dict[str, str]) -> list[str]:
    """The words of a command with placeholders and `$(...)` replaced; of `[...]` all is taken, of `a|b` the first."""
    if re.search(r"\[--|\[[A-Z]", text):
        text = re.sub(r"[\[\]]", " ", text)
        text = re.sub(r"\s\|\s+\S+", " ", text)  # [--step N | --best]
        text = re.sub(r"(\w+)(\|\w+)+", r"\1", text)
    words = shlex.split(re.sub(r"\$\([^)]*\)", placeholders["FILE"], text))  # $(find ...)
    return [placeholder(word, placeholders) for word in words]


def placeholder(word: str, placeholders: dict[str, str]) -> str:
    """A word of a command with what stands for the placeholders in it."""
    if word in placeholders:
        return placeholders[word]
    return re.sub(r"\b[A-Z][A-Z0-9_]*\b", lambda name: placeholders.get(name[0], name[0]), word)


def _documents() -> list[Path]:
    top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [*top, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "kernels").glob("*.md"))]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _blocks(lines: list[str]) -> Iterator[list[tuple[int, str]]]:
    """Fenced and indented blocks of code, as (number, line)."""
    block: list[tuple[int, str]] = []
    fenced = False
    for number, line in enumerate([*lines, ""], start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or (line.startswith("    ") and line.strip()):
            block.append((number, line))
            continue
        elif block and not line.strip() and _goes_on(lines, number):
            block.append((number, ""))
            continue
        if block:
            yield block
        block = []


def _pieces(lines: list[str]) -> Iterator[list[tuple[int, str]]]:
    """Blocks of code, cut at empty lines."""
    for block in _blocks(lines):
        piece: list[tuple[int, str]] = []
        for number, line in [*block, (0, "")]:
            if line.strip():
                piece.append((number, line))
            elif piece:
                yield piece
                piece = []


def _goes_on(lines: list[str], number: int) -> bool:
    """Whether the next line that is not empty is indented as code."""
    later = next((line for line in lines[number:] if line.strip()), "")
    return later.startswith("    ")


def _is_command(text: str) -> bool:
    """Whether a block is one of commands: by its first line that is no comment."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    start = _START.match(first.strip())
    return start is not None and start[2] in PROGRAMS and text.strip() not in messages()


def _is_python(text: str) -> bool:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Assign) for node in tree.body)


def _commands_of_block(block: list[tuple[int, str]], file: str, lines: list[str]) -> Iterator[Command]:
    dedented = textwrap.dedent("\n".join(line for _, line in block)).splitlines()
    if not _is_command("\n".join(dedented)):
        return
    prompts = dedented[0].startswith("$ ")
    position = 0
    while position < len(dedented):
        start, written = position, [dedented[position]]
        position += 1
        while position < len(dedented) and _continues(written[-1], dedented[position]):
            written.append(dedented[position])
            position += 1
        first = written[0].strip()
        if not first or first.startswith("#") or (prompts and not first.startswith("$ ")):
            continue
        number = block[start][0]
        begins = _START.match(first)
        assert begins is not None, f"{file}:{number}: {first!r}"
        assert begins[2] in PROGRAMS, f"{file}:{number}: {first!r}: not in PROGRAMS"
        yield _command(written, file, number, lines)


def _continues(line: str, following: str) -> bool:
    """Whether the next line belongs to the command: after a backslash, or as more of `COMMAND [--option]`."""
    return _without_comment(line).endswith("\\") or following.lstrip().startswith("[")


def _commands_of_comments(path: Path) -> Iterator[Command]:
    """Of the comment at the top of a recipe: `# Run: exgrpo ...`, or a line of its own."""
    lines = path.read_text(encoding="utf-8").splitlines()
    top = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    number = 0
    while number < top:
        start, found = number, _IN_COMMENT.search(lines[number].lstrip("# "))
        number += 1
        if found is None or "`" in found[1].split("#")[0] or _is_sentence(found[1]):
            continue
        written = [found[1]]
        while written[-1].endswith("\\"):
            written.append(lines[number].lstrip("# "))
            number += 1
        yield _command(written, _name(path), start + 1, lines)


def _is_sentence(text: str) -> bool:
    """Prose that happens to have a program's name in it: no argument of a command has such words."""
    return re.match(r"(?:export|make|source|nemo)\s+(?!demo\b|test\b|setup\b)\w", text) is not None


def _command(written: list[str], file: str, line: int, lines: list[str]) -> Command:
    joined = " ".join(_without_comment(part).rstrip().removesuffix("\\").strip() for part in written)
    in_recipe = file.startswith("recipes/")
    if in_recipe:  # remarks behind commands, and commands in brackets
        joined = re.split(r"\s{2,}\(|\):$", joined)[0]
    above = "\n".join(lines[0 if in_recipe else max(0, line - 9) : line - 1 + len(written)])
    return Command(joined.removeprefix("$ ").strip(), file, line, above)


def _without_comment(line: str) -> str:
    """Up to ` #` outside of quotes."""
    quote = ""
    for index, character in enumerate(line):
        if character in "'\"":
            quote = "" if quote == character else quote or character
        elif character == "#" and not quote and (index == 0 or line[index - 1] == " "):
            return line[:index].rstrip()
    return line.rstrip()
