"""A whole run by the command line with every tracker on, and secrets wherever a run can meet one."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]
import pytest

from rlkit.store.journal import read_records
from rlkit.trackers.sync import read_progress
from tests.trackers.stubs import docent_stub
from tests.trackers.wandb_stub import sync_offline_runs

ENV = """
import base64
import os
from urllib.parse import urlencode
import rlkit

class Leaky(rlkit.Env):
    def __init__(self, number: int, password: str):
        self.number, self.password, self.task_id = number, password, f"task-{number}"

    async def rollout(self, policy):
        reply = await policy.chat([{"role": "user", "content": "2+2"}])
        secrets = f"{os.environ['CANARY_API_KEY']} {os.environ['DOTENV_TOKEN']} {self.password}"
        if self.number % 4 == 0 and reply.turn.completion[0] % 2:
            basic = base64.b64encode(f"me:{os.environ['CANARY_API_KEY']}".encode()).decode()
            query = urlencode({"key": os.environ["CANARY_API_KEY"]})
            url = f"https://me:{self.password}@server/?{query}"
            told = f"the server refused {secrets}, Authorization: Basic {basic}, {url}"
            raise ConnectionError(told) from KeyError(secrets)
        return rlkit.Outcome(float(reply.turn.completion[0] % 3), info={"login": secrets})

def tasks(password: str):
    return [Leaky(number, password) for number in range(8)]
"""
CONFIG = """
envs:
  leaky: {env: env.py:tasks, args: {password: "${MY_LOGIN}"}}
steps: 3
batch: {groups: 4, group_size: 3}
rollouts: {max_retries: 20}
sampling: {max_tokens: 4}
track:
  wandb: {mode: offline, project: sums}
  tensorboard: {}
"""
CANARIES = {
    "CANARY_API_KEY": "canary-1/of+the environment",
    "DOTENV_TOKEN": "canary-2-of-the-file",
    "MY_LOGIN": "canary-3-of-the-configuration-77",
    "DOCENT_API_KEY": "canary-4-of-docent",
    "TINKER_PASSWORD": "canary-5-unused",
}


def texts(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Everything that is written below a folder, as it reads once it is unpacked."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path, path.read_bytes()
            if path.suffix == ".parquet":
                yield path, repr(pq.ParquetFile(path).read().to_pylist()).encode()  # pyright: ignore
        elif path.is_dir() and path.name == "journal":
            for record in read_records(path):
                yield path, record.content


@pytest.mark.slow
def test_run_reaches_every_tracker_without_secrets(tmp_path: Path, byte_model_dir: Path) -> None:
    work, runs = tmp_path / "work", tmp_path / "runs"
    work.mkdir()
    (work / "env.py").write_text(ENV)
    (work / "config.yaml").write_text(CONFIG)
    (work / ".env").write_text(f"DOTENV_TOKEN={CANARIES['DOTENV_TOKEN']}\nMY_LOGIN={CANARIES['MY_LOGIN']}\n")
    environ = {name: value for name, value in CANARIES.items() if name not in ("DOTENV_TOKEN", "MY_LOGIN")}
    optional = list[str]()
    for name in ("trackio", "docent"):
        try:
            __import__(name)
        except ImportError:
            continue
        except DeprecationWarning:  # of how docent is written
            pass
        optional.append(name)
    with docent_stub() as stub:
        services = [f"track.{name}={{}}" for name in optional]
        services += [f"track.docent.url={stub.url}"] if "docent" in optional else []
        completed = subprocess.run(
            [
                sys.executable,
                "-m",
                "rlkit",
                "train",
                "config.yaml",
                "--name",
                "all",
                f"model={byte_model_dir}",
                *services,
            ],
            cwd=work,
            env={**os.environ, **environ, "RLKIT_RUNS_DIR": str(runs), "TRACKIO_DIR": str(tmp_path / "trackio")},
            capture_output=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr.decode()
        assert b"failed and may be incomplete" not in completed.stderr

        directory = runs / "all"
        assert {
            name: read_progress(directory, name).step for name in ["wandb", "tensorboard", *optional]
        } == dict.fromkeys(["wandb", "tensorboard", *optional], 3)
        (wandb_run,), sent_on = sync_offline_runs(directory)
        assert [item["step"] for item in wandb_run.steps] == [1, 2, 3]
        assert wandb_run.exit_code == 0
        if "docent" in optional:
            assert {item["metadata"]["step"] for item in stub.runs} == {1, 2, 3}
        everything = [*texts(runs), *texts(tmp_path / "trackio")]
        everything += [(Path("stdout"), completed.stdout), (Path("stderr"), completed.stderr)]
        everything += [(Path("docent"), body) for body in stub.bodies]
        everything += [(Path("wandb sync"), body) for body in sent_on]
    encoded = [base64.b64encode(bytes(offset) + b"canary")[(0, 2, 3)[offset] : -4] for offset in range(3)]
    leaking_paths = {path for path, text in everything if any(item in text for item in (b"canary", *encoded))}
    assert not leaking_paths
    assert any(b"the server refused" in text for _, text in everything)  # what leaks is there, without the secrets
