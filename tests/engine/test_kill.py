"""`kill -9` in the middle of saves: what was complete loads, what was not is never seen.

First the process that is killed saves through the server's own `CheckpointStore`, over and over, so that many kills hit
the middle of a save; then it is a whole server that a client saves on.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types

from rlkit.engine import EngineServer
from rlkit.engine.model.config import read_config
from rlkit.engine.storage.checkpoints import CheckpointStore

from .conftest import connect
from .helpers import ce_datum, logprobs_of

KILLS = 20
SERVER_KILLS = 3
TEXT = [72, 101, 108, 108, 111]
PATH = "tinker://killed:train:0/weights/state"

# For each line of its input it becomes a process that saves over and over: one that imported anew each time would take
# seconds. Every number of a checkpoint is its step.
NURSERY = """
import os, sys
from pathlib import Path
import torch
from rlkit.engine.storage.checkpoints import CheckpointInfo, CheckpointStore, write_adapter
from rlkit.engine.model.config import read_config
from rlkit.engine.model.lora import LoraSettings, make_adapter

settings = LoraSettings(256)
adapter = make_adapter(read_config(Path(sys.argv[2])), settings, seed=0)
store = CheckpointStore(Path(sys.argv[1]))
for line in sys.stdin:
    child = os.fork()
    if not child:
        store.sweep()
        for step in range(int(line), int(line) + 10_000):
            adapter.flat.fill_(step)
            moments = torch.full((2, adapter.flat.numel()), float(step))
            info = CheckpointInfo("llama", settings, step)
            store.save("killed:train:0", "weights", "state", info, write_adapter(adapter, moments), overwrite=True)
            os.write(1, b"%d %d\\n" % (os.getpid(), step))
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


@contextmanager
def nursery(program: str, root: Path, model: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(root), str(model)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def killed_while_saving(process: subprocess.Popen[str], first: int, rng: random.Random) -> int:
    """Let it save from step `first` on and kill it at some point; the last step of which it said that it is saved."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{first}\n")
    pid, saved_step = process.stdout.readline().split()
    time.sleep(rng.uniform(0, 0.05))
    os.kill(int(pid), signal.SIGKILL)
    for line in process.stdout:
        if line == "dead\n":
            return int(saved_step)
        saved_step = line.split()[1]
    raise AssertionError("the nursery ended")


@pytest.mark.slow
def test_the_last_complete_checkpoint_loads_after_a_kill_at_any_moment(
    resolve: Callable[[str], Path], tmp_path: Path
) -> None:
    rng = random.Random(0)
    root, model = tmp_path / "root", resolve("llama")
    folder = root / "killed_train_0" / "weights" / "state"
    config = read_config(model)
    store = CheckpointStore(root)
    saved_step = interrupted = 0
    with nursery(NURSERY, root, model) as process:
        for _ in range(KILLS):
            saved_step = killed_while_saving(process, saved_step + 2, rng)
            interrupted += len(list(folder.iterdir())) != 2
            steps = store.get(PATH).info.steps
            assert saved_step <= steps <= saved_step + 1
            adapter, moments = store.load(PATH, config)
            assert moments is not None
            assert torch.equal(adapter.flat.unique(), torch.tensor([float(steps)]))
            assert torch.equal(moments.unique(), torch.tensor([float(steps)]))
            assert [checkpoint.path for checkpoint in store.checkpoints()] == [PATH]
    assert interrupted > 0
    with EngineServer(root=root, resolve=resolve) as server, connect(server) as client:
        assert len(list(folder.iterdir())) == 2
        rest = tinker.RestClient(base_url=server.url, api_key=server.api_key)
        assert [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints] == [PATH]
        client.create_training_client_from_state_with_optimizer(PATH).result().save_state("again").result()


# For each line of its input it becomes a server, and says where.
SERVERS = """
import os, sys, time
from pathlib import Path
import torch.fx.experimental.symbolic_shapes  # the first backward pass would import it, which takes seconds
from rlkit.engine import EngineServer

model = Path(sys.argv[2])
for line in sys.stdin:
    child = os.fork()
    if not child:
        server = EngineServer(root=Path(sys.argv[1]), resolve=lambda name: model, threads=1).start()
        os.write(1, f"{os.getpid()} {server.url} {server.api_key}\\n".encode())
        while True:
            time.sleep(60)
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def result_or_death[T](future: tinker.APIFuture[T], killed: threading.Event) -> T:
    """The result, or TimeoutError once the server is dead: the client would go on asking for minutes."""
    while True:
        dead = killed.is_set()
        try:
            return future.result(0.2)
        except TimeoutError:
            if dead:
                raise


def saved_until_killed(pid: int, url: str, key: str, after_s: float) -> tuple[list[str], list[list[float]]]:
    """Train and save on a server that is killed meanwhile: the paths it said it saved, and what each model answers."""
    client = tinker.ServiceClient(base_url=url, api_key=key)
    trainer = client.create_lora_training_client("llama", rank=64, seed=1).result()
    paths: list[str] = []
    answers: list[list[float]] = []
    killed = threading.Event()

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        killed.set()

    timer = threading.Timer(after_s, kill)
    try:
        for step in range(1000):
            trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=0.01))
            output = result_or_death(trainer.forward([ce_datum(TEXT)], "cross_entropy"), killed)
            answers.append(logprobs_of(output)[0].tolist())
            saving = trainer.save_state(f"state{step}")
            if not step:
                timer.start()
            paths.append(result_or_death(saving, killed).path)
    except TimeoutError:
        timer.join()
    client.holder.close()
    return paths, answers


@pytest.mark.slow
def test_checkpoints_confirmed_by_a_killed_server_load_in_the_next(
    resolve: Callable[[str], Path], tmp_path: Path
) -> None:
    rng = random.Random(0)
    root = tmp_path / "root"
    saved: list[dict[str, list[float]]] = []
    with nursery(SERVERS, root, resolve("llama")) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(SERVER_KILLS):
            process.stdin.write("next\n")
            pid, url, key = process.stdout.readline().split()
            paths, answers = saved_until_killed(int(pid), url, key, rng.uniform(0, 0.3))
            assert process.stdout.readline() == "dead\n"
            saved.append(dict(zip(paths, answers, strict=False)))
    saved_paths = {path for paths in saved for path in paths}
    with EngineServer(root=root, resolve=resolve) as server, connect(server) as client:
        rest = tinker.RestClient(base_url=server.url, api_key=server.api_key)
        listed = {c.tinker_path for c in rest.list_user_checkpoints(limit=1000).result().checkpoints}
        assert saved_paths <= listed
        # Of each killed server one more may be complete, which nobody was told of.
        assert len(listed - saved_paths) <= SERVER_KILLS
        for path, answer in [list(paths.items())[-1] for paths in saved if paths]:
            trainer = client.create_training_client_from_state_with_optimizer(path).result()
            again = logprobs_of(trainer.forward([ce_datum(TEXT)], "cross_entropy").result())[0]
            assert again.tolist() == answer
        for path in listed - saved_paths:
            client.create_training_client_from_state_with_optimizer(path).result()
    assert saved_paths


def test_a_killed_first_save_leaves_no_checkpoint(resolve: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "killed_train_0" / "weights" / "state"
    (folder / "0123456789abcdef").mkdir(parents=True)
    (folder / "0123456789abcdef" / "tensors.safetensors").write_bytes(b"half")
    with EngineServer(root=tmp_path, resolve=resolve):
        assert not folder.exists()
