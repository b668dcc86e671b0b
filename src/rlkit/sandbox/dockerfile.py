"""Parser for the Dockerfile instructions that tasks use.

Invariant: unsupported instructions, flags and forms raise an error with file and line. Only CMD, EXPOSE, LABEL,
MAINTAINER and STOPSIGNAL are ignored: they do not affect an image's files.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlkit.errors import UsageError, did_you_mean

_SUPPORTED = ("FROM", "RUN", "COPY", "ADD", "ENV", "WORKDIR", "USER", "ARG", "SHELL")
_WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
_HEREDOC = re.compile(r"(?<!\S)\d*<<-?(['\"]?)([A-Za-z_]\w*)\1(?!\S)")  # only as a separate word, so not `1<<n`
_VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?:(:?[-+])((?:[^{}]|\{[^{}]*\})*))?\})", re.DOTALL)
_FLAG = re.compile(r"--([a-z]+)(?:=(\S*))?(?:\s+|$)")
_QUOTED_WORD = re.compile(r"(?:\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|\S)+", re.DOTALL)
_WORDS = TypeAdapter(list[str])


@dataclass(frozen=True)
class Instruction:
    """An instruction with its continuation lines joined, and its here-documents as (delimiter, content)."""

    name: str
    text: str
    location: str
    documents: tuple[tuple[str, str], ...] = ()

    def error(self, problem: str) -> UsageError:
        """Return an error with the instruction's file and line."""
        return UsageError(f"{self.location}: {problem}")


@dataclass(frozen=True)
class Run:
    """Run a program as the image's user."""

    arguments: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    user: str | None
    location: str


@dataclass(frozen=True)
class Copy:
    """Copy files of the context, or a here-document; `target` is absolute, and ends in a slash if it is a folder."""

    sources: tuple[str, ...]
    target: str
    owner: str | None
    mode: int | None
    text: str | None
    location: str


@dataclass(frozen=True)
class Folder:
    """Make a folder."""

    path: str


@dataclass
class Recipe:
    """The steps that build an image, and the environment, folder and user of commands that run in it."""

    image: str
    steps: list[Run | Copy | Folder] = field(default_factory=list[Run | Copy | Folder])
    env: dict[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    user: str | None = None


def read(path: Path) -> Recipe:
    """Read a Dockerfile; raise a UsageError with file and line."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return _Reader().read_recipe(list(read_instructions(text, name=str(path))), str(path))


def read_instructions(text: str, *, name: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile."""
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, first in lines:
        start = first.strip()
        if re.match(r"#\s*escape\s*=\s*`", start):
            raise UsageError(f"{name}:{number}: escape character other than the backslash is not supported")
        if not start or start.startswith("#"):
            continue
        parts = [first.rstrip()]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            parts.append(next((line.rstrip() for _, line in lines if line.strip() and line.lstrip()[0] != "#"), ""))
        instruction = "".join(parts).strip()
        word, _, rest = instruction.partition(" ") if " " in instruction else instruction.partition("\t")
        location = f"{name}:{number}"
        marks = _HEREDOC.finditer(rest) if word.upper() in ("RUN", "COPY", "ADD") else ()
        documents = tuple((mark[2], _document(lines, mark, location)) for mark in marks)
        yield Instruction(word.upper(), rest.strip(), location, documents)


def _document(lines: Iterator[tuple[int, str]], mark: re.Match[str], location: str) -> str:
    document: list[str] = []
    strips_tabs = "<<-" in mark[0]
    for _, raw_line in lines:
        line = raw_line.lstrip("\t") if strips_tabs else raw_line
        if line == mark[2]:
            return "".join(f"{text}\n" for text in document)
        document.append(line)
    raise UsageError(f"{location}: the here-document <<{mark[2]} has no end")


@dataclass(eq=False)
class _Reader:
    _stage_args: dict[str, str] = field(default_factory=dict[str, str])
    _global_args: dict[str, str] = field(default_factory=dict[str, str])
    _shell: tuple[str, ...] = ("/bin/sh", "-c")
    _recipe: Recipe | None = None

    def read_recipe(self, instructions: list[Instruction], name: str) -> Recipe:
        for instruction in instructions:
            if instruction.name in _WITHOUT_EFFECT:
                continue
            if instruction.name not in _SUPPORTED:
                near = did_you_mean(instruction.name, _SUPPORTED)
                supported = ", ".join((*_SUPPORTED, *_WITHOUT_EFFECT))
                raise instruction.error(
                    f"{instruction.name} is not supported by the local sandbox.{near} "
                    f"Use a container engine for this task. Supported: {supported}"
                )
            if not instruction.text:
                raise instruction.error(f"{instruction.name} has no arguments")
            if instruction.name == "FROM":
                self._from(instruction)
            elif instruction.name == "ARG":
                self._arg(instruction)
            elif self._recipe is None:
                raise instruction.error(f"{instruction.name} appears before FROM")
            else:
                self._step(self._recipe, instruction)
        if self._recipe is None:
            raise UsageError(f"{name} has no FROM instruction")
        return self._recipe

    def _from(self, instruction: Instruction) -> None:
        if self._recipe is not None:
            raise instruction.error("second FROM: the local sandbox does not support several stages")
        flags, rest = _split_flags(instruction, {"platform"})
        words = self._substitute(rest).split()
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise instruction.error(f"expected FROM image [AS name], not {rest!r}")
        if not flags.get("platform", "linux").startswith(("linux", "$")):
            raise instruction.error(f"platform {flags['platform']!r} is not supported by the local sandbox")
        self._recipe = Recipe(words[0])
        self._global_args, self._stage_args = self._stage_args, {}

    def _arg(self, instruction: Instruction) -> None:
        for word in self._words(instruction, instruction.text):
            name, has_default, default = word.partition("=")
            value = self._substitute(default) if has_default else self._global_args.get(name)
            if value is not None:
                self._stage_args[name] = value

    def _step(self, recipe: Recipe, instruction: Instruction) -> None:
        text = instruction.text
        match instruction.name:
            case "RUN":
                recipe.steps.append(self._run(recipe, instruction))
            case "COPY" | "ADD":
                recipe.steps.append(self._copy(recipe, instruction))
            case "ENV":
                recipe.env |= self._env(instruction)
            case "WORKDIR":
                recipe.workdir = _join_path(recipe.workdir, self._substitute(_unquote(text)))
                recipe.steps.append(Folder(recipe.workdir))
            case "USER":
                recipe.user = self._substitute(text)
            case _:
                words = _json_words(text)
                if not words:
                    raise instruction.error(f"SHELL must be a JSON list of words, not {text!r}")
                self._shell = tuple(words)

    def _run(self, recipe: Recipe, instruction: Instruction) -> Run:
        flags, text = _split_flags(instruction, {"mount", "network", "security"})
        if not set(re.findall(r"type=(\w+)", flags.get("mount", ""))) <= {"cache", "tmpfs"} or (
            "mount" in flags and "type=" not in flags["mount"]
        ):
            raise instruction.error("RUN --mount is only supported with type=cache and type=tmpfs")
        if flags.get("network", "default") != "default" or "security" in flags:
            raise instruction.error("RUN --network and --security are not supported")
        arguments = tuple(_json_words(text))
        if not arguments:
            documents = instruction.documents
            if len(documents) == 1 and _HEREDOC.fullmatch(text):
                text = documents[0][1]
                if text.startswith("#!"):
                    raise instruction.error("here-documents with a #! line are not supported")
            else:
                text += "".join(f"\n{body}{mark}" for mark, body in documents)
            arguments = (*self._shell, text)
        return Run(arguments, {**self._stage_args, **recipe.env}, recipe.workdir, recipe.user, instruction.location)

    def _copy(self, recipe: Recipe, instruction: Instruction) -> Copy:
        flags, text = _split_flags(instruction, {"chown", "chmod", "link", "from"})
        if "from" in flags:
            raise instruction.error(f"{instruction.name} --from is not supported by the local sandbox")
        words = _json_words(text) or self._words(instruction, text)
        words = [self._substitute(word) for word in words]
        if len(words) < 2:
            raise instruction.error(f"{instruction.name} needs sources and a target, not {text!r}")
        *sources, target = words
        if instruction.name == "ADD":
            for source in sources:
                if "://" in source or source.startswith("git@") or re.search(r"\.(tar|tgz|tbz2?|txz)(\.\w+)?$", source):
                    raise instruction.error("ADD of a URL or an archive is not supported: use RUN with curl or tar")
        if instruction.documents and (len(sources) != 1 or len(instruction.documents) != 1):
            raise instruction.error(f"{instruction.name} with a here-document takes exactly one source")
        mode = flags.get("chmod")
        if mode is not None and not re.fullmatch("[0-7]{3,4}", mode):
            raise instruction.error(f"--chmod must be an octal number, not {mode!r}")
        joined_path = _join_path(recipe.workdir, target)
        is_folder = target.endswith(("/", "/.")) or target in (".", "..") or len(sources) > 1
        return Copy(
            tuple(sources),
            joined_path.rstrip("/") + "/" if is_folder else joined_path,
            self._substitute(flags["chown"]) if "chown" in flags else None,
            int(mode, 8) if mode else None,
            instruction.documents[0][1] if instruction.documents else None,
            instruction.location,
        )

    def _env(self, instruction: Instruction) -> dict[str, str]:
        first = instruction.text.split(None, 1)
        if "=" not in first[0]:
            if len(first) == 1:
                raise instruction.error(f"ENV {first[0]} has no value")
            return {first[0]: self._substitute(_unquote(first[1]))}
        pairs: dict[str, str] = {}
        for word in _QUOTED_WORD.findall(instruction.text):
            name, equals, value = word.partition("=")
            if not equals:
                raise instruction.error(f"expected ENV NAME=value, not {word!r}")
            pairs[name] = self._value(value)
        return pairs

    def _value(self, text: str) -> str:
        """Return a value without its quotes; variables in single quotes are not substituted."""
        pieces = re.findall(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|(?:\\.|[^'\"\\])+|.", text, re.DOTALL)
        return "".join(
            _unquote(piece) if piece.startswith("'") else self._substitute(_unquote(piece)) for piece in pieces
        )

    def _substitute(self, text: str) -> str:
        variables = {**self._stage_args, **(self._recipe.env if self._recipe else {})}

        def value(match: re.Match[str]) -> str:
            if match[1]:
                return match[1]
            name, operator, word = match[2] or match[3], match[4] or "", match[5] or ""
            current = variables.get(name)
            is_set = bool(current) if operator.startswith(":") else current is not None
            if operator.endswith("+"):
                return self._substitute(word) if is_set else ""
            if operator and not is_set:
                return self._substitute(word)
            return current or ""

        return _VARIABLE.sub(value, text)

    def _words(self, instruction: Instruction, text: str) -> list[str]:
        try:
            return shlex.split(text)
        except ValueError as error:
            raise instruction.error(str(error)) from error


def _split_flags(instruction: Instruction, supported: set[str]) -> tuple[dict[str, str], str]:
    flags: dict[str, str] = {}
    text = instruction.text
    while match := _FLAG.match(text):
        if match[1] not in supported:
            raise instruction.error(f"{instruction.name} --{match[1]} is not supported")
        flags[match[1]] = f"{flags[match[1]]} {match[2]}" if match[1] in flags else match[2] or ""
        text = text[match.end() :]
    return flags, text


def _json_words(text: str) -> list[str]:
    """Return the words of an instruction in exec form (a JSON list); an empty list for other forms."""
    with suppress(ValidationError):
        return _WORDS.validate_json(text, strict=True)
    return []


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _join_path(folder: str, path: str) -> str:
    """Return an absolute path without `.` and `..`."""
    return "/" + posixpath.normpath(posixpath.join(folder, path)).lstrip("/")
