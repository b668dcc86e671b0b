"""A sandbox of somebody who is not root. Where the tests run as such a user, all the others are about that, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
SOURCES = Path(__file__).parents[2] / "src"

PLAY = """
import asyncio
from pathlib import Path
from rlkit.errors import MissingError
from rlkit.sandbox import CommandTimeout, Limits, Sandbox, Spec, dockerfile, image, sandbox_folders

async def main():
    ground = image.base("host")
    made = Spec(trees=image.trees(ground), limits=Limits(processes=40, memory_bytes=200 << 20))
    try:
        sandbox = await Sandbox.start(made)
    except MissingError as error:
        print("refused", error)
        return
    try:
        assert (await sandbox.run("id -u; echo x > /usr/x; rm /etc/passwd; cat /usr/x")).stdout == b"0\\nx\\n"
        assert (await sandbox.run("true", user="nobody")).exit_code == 126
        assert (await sandbox.run("chmod 666 /dev/null")).exit_code != 0
        assert (await sandbox.run("unshare --user true")).exit_code != 0
        assert (await sandbox.run("head -c 600000000 /dev/zero | tail -c 600000000 | wc -c")).stdout != b"600000000\\n"
        if not sandbox.seal_problem:
            await sandbox.run("mkdir -p /app /logs/verifier; echo work > /app/out")
            for shared in (None, ["/app"]):
                view = await sandbox.open_view(private=["/tests", "/logs/verifier"], shared=shared)
                await sandbox.run("echo forged > /logs/verifier/reward.txt")
                said = (await view.run("cat /app/out; ls /tests /logs/verifier; cat /usr/x")).stdout.split()
                assert said[:3] == [b"work", b"/logs/verifier:", b"/tests:"]
                assert (said[3:] == [b"x"]) == (shared is None)
        await sandbox.run("mkdir -p /locked/inside; chmod 000 /locked/inside /locked")
        try:
            await sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 30", timeout_s=0.5)
        except CommandTimeout:
            pass
    finally:
        await sandbox.stop()
    folder = Path("context")
    folder.mkdir()
    (folder / "f").write_text("copied")
    steps = ["FROM x", "COPY f /f", "RUN rm -r /etc/default && mkdir /etc/default && cat /f > /g"]
    (folder / "Dockerfile").write_text("\\n".join(steps))
    layered = await image.build(dockerfile.read(folder / "Dockerfile"), ground, folder)
    sandbox = await Sandbox.start(Spec(trees=image.trees(layered)))
    try:
        assert (await sandbox.run("cat /g; ls /etc/default")).stdout == b"copied"
    finally:
        await sandbox.stop()
    assert list(sandbox_folders.store().glob("live/*/rlkit-*")) == []
    print("played")

asyncio.run(main())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rlkit-test-user-"))  # where everybody may go, unlike the folder of the tests
    folder.chmod(0o755)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.skipif(not shutil.which("setpriv") or not shutil.which("unshare"), reason="needs util-linux")
def test_a_user_without_root_can_start_sandboxes(place: Path) -> None:
    # An interpreter that lies in root's home is shown in a mount namespace of its own.
    home, python, work = Path(sys.base_prefix), place / "python", place / "work"
    python.mkdir()
    work.mkdir()
    os.chown(work, NOBODY, NOBODY)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    (place / "play.py").write_text(PLAY)
    shutil.copytree(SOURCES, place / "src")
    script = f"""mount --bind {home} {python}
case {home} in /root/*) mount -t tmpfs -o mode=755 none /root && mkdir -p {home} && mount --bind {python} {home};; esac
cd {work}
exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups env -i PATH=$PATH RLKIT_CACHE_DIR={work}/cache \\
    PYTHONPATH={place}/src:{packages} {home}/bin/python3 {place}/play.py"""
    done = subprocess.run(["unshare", "--mount", "sh", "-ec", script], capture_output=True, text=True, check=False)
    if done.stdout.startswith("refused") or "unshare failed" in done.stderr or "can't open file" in done.stderr:
        pytest.skip(done.stdout + done.stderr)
    assert (done.stdout, done.stderr) == ("played\n", "")
