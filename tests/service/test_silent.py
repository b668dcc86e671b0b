"""A server that takes connections and never answers, and the real SDK."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

RUN = """
import sys
from rlkit.cli import main
sys.argv = ["rlkit", "train", "examples/arithmetic.yaml", *sys.argv[1:], "service.timeout_s=3", "--name", "silent"]
main()
"""


def test_a_server_that_never_answers_ends_the_command_with_one_line(byte_model_dir: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        environ = os.environ | {
            "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
            "TINKER_API_KEY": "tml-no-such-key",
            "RLKIT_RUNS_DIR": str(tmp_path),
        }
        ended = subprocess.run(
            [sys.executable, "-c", RUN, f"model={byte_model_dir}"],
            cwd=root,
            env=environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert ended.returncode == 1, ended.stderr
    assert "starting a training session: no answer within 3 s" in ended.stderr
    assert "Traceback" not in ended.stderr
