from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.errors import UsageError
from rlkit.sandbox.dockerfile import Copy, Folder, Recipe, Run, read


def read_recipe(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    return read(path)


def runs(recipe: Recipe) -> list[Run]:
    return [step for step in recipe.steps if isinstance(step, Run)]


def copies(recipe: Recipe) -> list[Copy]:
    return [step for step in recipe.steps if isinstance(step, Copy)]


def test_a_typical_dockerfile_of_a_task_is_parsed(tmp_path: Path) -> None:
    recipe = read_recipe(
        tmp_path,
        """# syntax=docker/dockerfile:1
ARG VERSION=24.04
FROM --platform=linux/amd64 ubuntu:${VERSION} AS base

LABEL a=b
RUN apt-get update && apt-get install -y \\
    # a comment in the middle
    tmux \\

    curl
ENV A=1 B="two words" C=$A'$A'
WORKDIR /app
WORKDIR sub/../other
COPY --chown=1:2 --chmod=644 one.txt two.txt ./
copy ["with space.txt", "/x"]
USER agent:staff
RUN ["echo", "$A"]
CMD ["bash"]
""",
    )
    assert (recipe.image, recipe.workdir, recipe.user) == ("ubuntu:24.04", "/app/other", "agent:staff")
    assert recipe.env == {"A": "1", "B": "two words", "C": "$A"}
    first, second = runs(recipe)
    assert first.arguments[:2] == ("/bin/sh", "-c")
    assert first.arguments[2].split() == ["apt-get", "update", "&&", "apt-get", "install", "-y", "tmux", "curl"]
    assert (second.arguments, second.user, second.workdir) == (("echo", "$A"), "agent:staff", "/app/other")
    assert first.location.endswith("Dockerfile:6")
    words_copy, json_copy = copies(recipe)
    assert (words_copy.sources, words_copy.target, words_copy.owner, words_copy.mode) == (
        ("one.txt", "two.txt"),
        "/app/other/",
        "1:2",
        0o644,
    )
    assert (json_copy.sources, json_copy.target) == (("with space.txt",), "/x")
    assert [step.path for step in recipe.steps if isinstance(step, Folder)] == ["/app", "/app/other"]


def test_variables_are_substituted_as_docker_does(tmp_path: Path) -> None:
    recipe = read_recipe(
        tmp_path,
        """ARG OUT=x
FROM image
ARG IN=given
ARG OUT
ARG NONE
ENV PLAIN the whole line
ENV A=${IN}/a B=${NONE:-default} C=${IN:+set} D=${NONE:+set} E=\\$IN F=${NONE-kept} G='${IN}' H="${IN} x"
ENV OLD=$PLAIN
WORKDIR /$IN/${OUT}
RUN true
""",
    )
    assert recipe.env == {
        "PLAIN": "the whole line",
        "A": "given/a",
        "B": "default",
        "C": "set",
        "D": "",
        "E": "$IN",
        "F": "kept",
        "G": "${IN}",
        "H": "given x",
        "OLD": "the whole line",
    }
    assert recipe.workdir == "/given/x"
    assert runs(recipe)[0].env["IN"] == "given"


def test_here_documents_are_parsed(tmp_path: Path) -> None:
    recipe = read_recipe(
        tmp_path,
        """FROM image
RUN <<EOF
echo one
# not a comment of the Dockerfile
echo two
EOF
RUN cat <<-'END' > /file && true
\tindented
\tEND
COPY <<TEXT /etc/config
key = 1
TEXT
RUN echo $((1 << n)); cat <<< word
""",
    )
    whole, fed, plain = (step.arguments[2] for step in runs(recipe))
    assert whole == "echo one\n# not a comment of the Dockerfile\necho two\n"
    assert fed == "cat <<-'END' > /file && true\nindented\nEND"
    assert plain == "echo $((1 << n)); cat <<< word"
    assert (copies(recipe)[0].text, copies(recipe)[0].target) == ("key = 1\n", "/etc/config")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("VOLUME /data", "VOLUME is not supported"),
        ('ENTRYPOINT ["x"]', "ENTRYPOINT is not supported"),
        ("WORKDRI /x", "Did you mean 'WORKDIR'"),
        ("FROM other", "second FROM"),
        ("COPY --from=base /a /b", "--from"),
        ("COPY --parents a b", "--parents is not supported"),
        ("COPY alone", "sources and a target"),
        ("ADD https://example.org/x /x", "ADD of a URL or an archive"),
        ("ADD x.tar.gz /x", "ADD of a URL or an archive"),
        ("COPY --chmod=u+x a b", "octal"),
        ("RUN --mount=type=secret,id=x true", "type=cache"),
        ("RUN --network=none true", "not supported"),
        ("RUN <<EOF\ntrue", "has no end"),
        ("ENV A", "has no value"),
        ("ENV A=1 B", "NAME=value"),
        ("SHELL bash", "JSON list"),
        ("RUN", "RUN has no arguments"),
        ("COPY 'a b", "No closing quotation"),
    ],
)
def test_an_unsupported_instruction_names_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_recipe(tmp_path, f"FROM image\n\n# comment\n{line}\n")
    assert says in str(raised.value)
    assert f"{tmp_path}/Dockerfile:4: " in str(raised.value)


def test_an_invalid_dockerfile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no FROM"):
        read_recipe(tmp_path, "ARG X=1\n")
    with pytest.raises(UsageError, match=":1: RUN appears before FROM"):
        read_recipe(tmp_path, "RUN true\n")
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="escape character"):
        read_recipe(tmp_path, "# escape=`\nFROM x\n")
    with pytest.raises(UsageError, match="platform"):
        read_recipe(tmp_path, "FROM --platform=windows/amd64 x\n")
