from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rlkit.errors import EnvironmentFault, UsageError
from rlkit.sandbox import Sandbox, Spec, dockerfile, image, sandbox_folders

pytestmark = pytest.mark.usefixtures("can_sandbox")


async def built(folder: Path, text: str, *, rebuild: bool = False) -> image.Image:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    return await image.build(dockerfile.read(folder / "Dockerfile"), image.base("host"), folder, rebuild=rebuild)


async def inside(made: image.Image, function: Callable[[Sandbox], Awaitable[None]]) -> None:
    folders = dict.fromkeys(made.folders, 0o755)
    sandbox = await Sandbox.start(Spec(trees=image.trees(made), folders=folders, uses=made.layers))
    try:
        await function(sandbox)
    finally:
        await sandbox.stop()


def layers() -> list[str]:
    return sorted(path.name for path in (sandbox_folders.store() / "layers").glob("*"))


def test_a_dockerfile_becomes_layers_that_are_taken_once(cache: Path, tmp_path: Path) -> None:
    text = f"""FROM ubuntu:24.04
ARG WORD={tmp_path.name}
ENV GREETING=hello
WORKDIR /app/deep
COPY data.txt tool.sh ./
RUN echo $GREETING $WORD > said && rm -f /usr/bin/env && mkdir /usr/lib/new
RUN ["sh", "-c", "cat said > again; date +%N > when"]
"""
    context = tmp_path / "context"
    context.mkdir()
    (context / "data.txt").write_text("data")
    (context / "tool.sh").write_text("#!/bin/sh\necho tool $(pwd)\n")
    (context / "tool.sh").chmod(0o755)
    seen: list[bytes] = []

    async def look(sandbox: Sandbox) -> None:
        done = await sandbox.run(
            "cat data.txt again; ./tool.sh; ls /usr/bin/env /usr/lib/new; cat when", cwd="/app/deep"
        )
        assert done.stdout.startswith(f"datahello {tmp_path.name}\ntool /app/deep\n".encode())
        assert b"/usr/bin/env" in done.stderr
        seen.append(done.stdout)

    async def main() -> None:
        before = len(layers())
        made = await built(context, text)
        assert (made.workdir, len(made.layers), len(layers()) - before) == ("/app/deep", 3, 3)
        await inside(made, look)
        again = await built(context, text)
        assert again.layers == made.layers
        await inside(again, look)
        await inside(await built(context, text, rebuild=True), look)
        (context / "data.txt").write_text("data")
        assert (await built(context, text)).layers == made.layers
        (context / "data.txt").write_text("other")
        assert len(set((await built(context, text)).layers) & set(made.layers)) == 0

    asyncio.run(main())
    assert seen[0] == seen[1] != seen[2]
    assert Path("/usr/bin/env").exists()


def test_a_layer_that_many_want_at_once_is_built_once(cache: Path, tmp_path: Path) -> None:
    text = f"FROM x\nRUN echo {tmp_path} && date +%N > /when\n"

    async def main() -> None:
        before = len(layers())
        made = await asyncio.gather(*(built(tmp_path / "context", text) for _ in range(6)))
        assert len({one.layers for one in made}) == 1
        assert len(layers()) - before == 1

    asyncio.run(main())


def test_a_layer_is_built_anew_once_and_not_under_those_who_use_it(cache: Path, tmp_path: Path) -> None:
    text = f"FROM x\nRUN echo {tmp_path} && date +%N > /when && echo kept > /usr/lib/kept\n"

    async def main() -> None:
        said: list[bytes] = []

        async def look(sandbox: Sandbox) -> None:
            said.append((await sandbox.run("cat /when /usr/lib/kept")).stdout)

        async def look_twice(sandbox: Sandbox) -> None:
            await look(sandbox)
            for made in await asyncio.gather(*(built(tmp_path / "context", text, rebuild=True) for _ in range(3))):
                await inside(made, look)
            await look(sandbox)

        await inside(await built(tmp_path / "context", text), look_twice)
        assert said[0] == said[4] != said[1] == said[2] == said[3]

    asyncio.run(main())


def test_a_layer_whose_builder_is_killed_goes(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM x\nRUN echo {tmp_path} > /large\n")
    code = """if True:
        import asyncio, os, pathlib, sys
        from rlkit.sandbox import dockerfile, image
        image._store_layer = lambda *layer: os.kill(os.getpid(), 9)
        folder = pathlib.Path(sys.argv[1])
        asyncio.run(image.build(dockerfile.read(folder / "Dockerfile"), image.base("host"), folder))
    """
    before = layers()
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert len(list(sandbox_folders.store().glob("**/large"))) == 1
    sandbox_folders.sweep()
    assert list(sandbox_folders.store().glob("**/large")) == []
    assert layers() == before


def test_a_step_that_fails_says_where_and_why_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    async def main() -> None:
        before = layers()
        with pytest.raises(EnvironmentFault, match=r"Dockerfile:2: RUN failed with exit code 7: out\s+err"):
            await built(tmp_path / "context", "FROM x\nRUN echo out; echo err >&2; exit 7\n")
        assert layers() == before

    asyncio.run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away in a sandbox")
def test_owners_and_users(cache: Path, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "f").write_text("x")
    text = "FROM x\nCOPY --chown=nobody:1 --chmod=640 f /f\nUSER nobody\nRUN id -u > /tmp/who\n"

    async def look(sandbox: Sandbox) -> None:
        assert (await sandbox.run("stat -c '%u:%g %a' /f; cat /tmp/who")).stdout == b"65534:1 640\n65534\n"

    async def main() -> None:
        made = await built(context, text)
        assert made.user == "nobody"
        await inside(made, look)
        with pytest.raises(UsageError, match="Dockerfile:2: --chown=noone-here"):
            await built(context, "FROM x\nCOPY --chown=noone-here f /f\n")

    asyncio.run(main())


def test_a_folder_is_a_root_file_system_if_it_looks_like_one(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a root file system"):
        image.base(str(tmp_path))
    rootfs = tmp_path / "rootfs"
    (rootfs / "bin").mkdir(parents=True)
    for folder in ("usr", "lib", "lib64"):
        (rootfs / folder).mkdir()

    async def look(sandbox: Sandbox) -> None:
        assert (await sandbox.run("true")).exit_code == 126  # it is as empty as that folder

    asyncio.run(inside(image.base(str(rootfs)), look))
    assert sorted(path.name for path in rootfs.iterdir()) == ["bin", "lib", "lib64", "usr"]


def test_old_layers_go_when_there_are_too_many_and_young_or_used_ones_stay(cache: Path, tmp_path: Path) -> None:
    async def main() -> image.Image:
        made = await built(tmp_path / "c", f"FROM x\nRUN echo {tmp_path} > /one\nRUN echo two > /two\n")
        await inside(made, lambda sandbox: asyncio.sleep(0))
        return made

    made = asyncio.run(main())
    assert image.prune(max_bytes=0) == 0
    for name in made.layers:
        os.utime(sandbox_folders.store() / "layers" / name, (0, 0))
    place = sandbox_folders.SandboxFolder(made.layers[:1])
    image.prune(max_bytes=0)
    place.remove()
    assert made.layers[0] in layers()
    assert made.layers[1] not in layers()
