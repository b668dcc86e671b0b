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


async def build_image(folder: Path, text: str, *, rebuild: bool = False) -> image.Image:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    return await image.build(dockerfile.read(folder / "Dockerfile"), image.base("host"), folder, rebuild=rebuild)


async def run_in_image(built_image: image.Image, function: Callable[[Sandbox], Awaitable[None]]) -> None:
    folders = dict.fromkeys(built_image.folders, 0o755)
    sandbox = await Sandbox.start(Spec(trees=image.trees(built_image), folders=folders, uses=built_image.layers))
    try:
        await function(sandbox)
    finally:
        await sandbox.stop()


def layers() -> list[str]:
    return sorted(path.name for path in (sandbox_folders.store() / "layers").glob("*"))


def test_a_dockerfile_becomes_layers_that_are_built_once(cache: Path, tmp_path: Path) -> None:
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
    outputs: list[bytes] = []

    async def look(sandbox: Sandbox) -> None:
        done = await sandbox.run(
            "cat data.txt again; ./tool.sh; ls /usr/bin/env /usr/lib/new; cat when", cwd="/app/deep"
        )
        assert done.stdout.startswith(f"datahello {tmp_path.name}\ntool /app/deep\n".encode())
        assert b"/usr/bin/env" in done.stderr
        outputs.append(done.stdout)

    async def main() -> None:
        before = len(layers())
        built_image = await build_image(context, text)
        assert (built_image.workdir, len(built_image.layers), len(layers()) - before) == ("/app/deep", 3, 3)
        await run_in_image(built_image, look)
        again = await build_image(context, text)
        assert again.layers == built_image.layers
        await run_in_image(again, look)
        await run_in_image(await build_image(context, text, rebuild=True), look)
        (context / "data.txt").write_text("data")
        assert (await build_image(context, text)).layers == built_image.layers
        (context / "data.txt").write_text("other")
        assert len(set((await build_image(context, text)).layers) & set(built_image.layers)) == 0

    asyncio.run(main())
    assert outputs[0] == outputs[1] != outputs[2]
    assert Path("/usr/bin/env").exists()


def test_concurrent_builds_of_a_layer_build_it_once(cache: Path, tmp_path: Path) -> None:
    text = f"FROM x\nRUN echo {tmp_path} && date +%N > /when\n"

    async def main() -> None:
        before = len(layers())
        images = await asyncio.gather(*(build_image(tmp_path / "context", text) for _ in range(6)))
        assert len({built_image.layers for built_image in images}) == 1
        assert len(layers()) - before == 1

    asyncio.run(main())


def test_a_layer_is_rebuilt_once_and_not_under_its_users(cache: Path, tmp_path: Path) -> None:
    text = f"FROM x\nRUN echo {tmp_path} && date +%N > /when && echo kept > /usr/lib/kept\n"

    async def main() -> None:
        outputs: list[bytes] = []

        async def look(sandbox: Sandbox) -> None:
            outputs.append((await sandbox.run("cat /when /usr/lib/kept")).stdout)

        async def look_twice(sandbox: Sandbox) -> None:
            await look(sandbox)
            for built_image in await asyncio.gather(
                *(build_image(tmp_path / "context", text, rebuild=True) for _ in range(3))
            ):
                await run_in_image(built_image, look)
            await look(sandbox)

        await run_in_image(await build_image(tmp_path / "context", text), look_twice)
        assert outputs[0] == outputs[4] != outputs[1] == outputs[2] == outputs[3]

    asyncio.run(main())


def test_a_layer_whose_builder_is_killed_is_removed(cache: Path, tmp_path: Path) -> None:
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


def test_a_failed_step_names_line_and_reason_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    async def main() -> None:
        before = layers()
        with pytest.raises(EnvironmentFault, match=r"Dockerfile:2: RUN failed with exit code 7: out\s+err"):
            await build_image(tmp_path / "context", "FROM x\nRUN echo out; echo err >&2; exit 7\n")
        assert layers() == before

    asyncio.run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away in a sandbox")
def test_file_owners_and_users_follow_the_dockerfile(cache: Path, tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "f").write_text("x")
    text = "FROM x\nCOPY --chown=nobody:1 --chmod=640 f /f\nUSER nobody\nRUN id -u > /tmp/who\n"

    async def look(sandbox: Sandbox) -> None:
        assert (await sandbox.run("stat -c '%u:%g %a' /f; cat /tmp/who")).stdout == b"65534:1 640\n65534\n"

    async def main() -> None:
        built_image = await build_image(context, text)
        assert built_image.user == "nobody"
        await run_in_image(built_image, look)
        with pytest.raises(UsageError, match="Dockerfile:2: --chown=noone-here"):
            await build_image(context, "FROM x\nCOPY --chown=noone-here f /f\n")

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

    asyncio.run(run_in_image(image.base(str(rootfs)), look))
    assert sorted(path.name for path in rootfs.iterdir()) == ["bin", "lib", "lib64", "usr"]


@pytest.mark.parametrize("folder", ["missing", ".", "file"])
def test_a_folder_of_the_host_must_exist(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    path = folder if folder == "." else str(tmp_path / folder)
    with pytest.raises(UsageError, match=f"host_folders: {path} is not the absolute path of a folder on this machine"):
        image.base("host", folders=("/usr", path))


def test_old_unused_layers_are_removed_if_there_are_too_many(cache: Path, tmp_path: Path) -> None:
    async def main() -> image.Image:
        built_image = await build_image(tmp_path / "c", f"FROM x\nRUN echo {tmp_path} > /one\nRUN echo two > /two\n")
        await run_in_image(built_image, lambda sandbox: asyncio.sleep(0))
        return built_image

    built_image = asyncio.run(main())
    assert image.prune(max_bytes=0) == 0
    for name in built_image.layers:
        os.utime(sandbox_folders.store() / "layers" / name, (0, 0))
    place = sandbox_folders.SandboxFolder(built_image.layers[:1])
    image.prune(max_bytes=0)
    place.remove()
    assert built_image.layers[0] in layers()
    assert built_image.layers[1] not in layers()
