"""Export of trained weights as files that other programs load.

Invariant: a folder that is there is whole; whatever goes wrong leaves none behind.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from rlkit._util.files import write_text
from rlkit._util.model_names import hub_id
from rlkit._util.threads import in_thread
from rlkit.config.schema import ServiceConfig
from rlkit.errors import MissingError, ServiceError, UsageError
from rlkit.service.connect import ServiceAddress, reach_service
from rlkit.service.sdk import TinkerService

type ExportForm = Literal["adapter", "merged", "raw"]
"""A LoRA adapter in the layout of `peft`, a whole model in that of `transformers`, or the files of the service."""


async def export(
    path: str,
    directory: Path,
    *,
    form: ExportForm = "adapter",
    service: ServiceConfig | None = None,
    note: Callable[[str], None] = lambda message: None,
) -> None:
    """Write a checkpoint as files: through tinker-cookbook's `weights`, which knows the models of the service.

    Args:
        path: `tinker://…/weights/…` path of training state.
        directory: folder to make.
        form: an adapter, for serving beside its base model; the model with the adapter merged into it; or the files as
            the service keeps them, for which the base model is not needed.
        service: keeps the checkpoint; by default the service of a run without settings.
        note: receives one line for the user while the service does not answer.

    Raises:
        UsageError: there is no such checkpoint, the directory is there already or cannot be written, or the model has
            no such form.
        MissingError: the service cannot be reached, or the base model cannot be had.
        ServiceError: the service failed.
    """
    if not path.startswith("tinker://") or "/weights/" not in path:
        raise UsageError(f"{path!r} is no training state, a path like tinker://…/weights/…; only that can be exported")
    directory = _free(directory)
    async with reach_service(service or ServiceConfig(), note=note) as at:
        async with TinkerService(base_url=at.base_url, api_key=at.api_key, connector=at.connector) as connection:
            model = await connection.model_of(path)
        base = str(await in_thread(_resolve, model)) if at.embedded and form != "raw" else model
        await in_thread(lambda: _write(path, directory, form, at, base=base, name=hub_id(model)))


def _free(directory: Path) -> Path:
    """Return the place to make a directory at, where nothing is and something can be written."""
    try:
        place = directory.resolve()
        if directory.is_symlink() or place.exists():
            raise UsageError(f"{directory} is there already: choose another name")
        parent = next(folder for folder in place.parents if folder.exists())
        with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=parent):
            return place
    except (OSError, RuntimeError) as error:  # the latter of links that lead nowhere but to themselves
        raise _unwritable(directory, error) from error


def _unwritable(directory: Path, error: Exception) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return UsageError(f"{directory} cannot be written: {reason}")


def _write(path: str, directory: Path, form: ExportForm, at: ServiceAddress, *, base: str, name: str | None) -> None:
    """Download and build a checkpoint, given where tinker-cookbook finds its base model, and the model's own name."""
    made = [folder for folder in directory.parents if not folder.exists()]
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that it gets its name at once when it is whole.
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as work:
            adapter, whole = Path(work) / "adapter", Path(work) / "made"
            _download(path, whole if form == "raw" else adapter, at)
            if form != "raw":
                _build(base, adapter, whole, form)
            if form == "adapter":
                config = whole / "adapter_config.json"  # with the place where tinker-cookbook found the base model
                settings = json.loads(config.read_text()) | {"base_model_name_or_path": name}
                write_text(config, json.dumps(settings, indent=2) + "\n")
            mode = whole.stat().st_mode & 0o666
            for file in filter(Path.is_file, whole.rglob("*")):
                file.chmod(mode)  # safetensors writes for its owner alone
            whole.rename(directory)
            made.clear()
    except OSError as error:
        raise _unwritable(directory, error) from error
    finally:
        with suppress(OSError):  # somebody else may have put something there meanwhile
            for parent in made:
                parent.rmdir()


def _download(path: str, adapter: Path, at: ServiceAddress) -> None:
    from tinker_cookbook import weights
    from tinker_cookbook.exceptions import WeightsDownloadError

    try:
        with _key(at.api_key), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the SDK, about how tinker-cookbook calls it
            weights.download(tinker_path=path, output_dir=str(adapter), base_url=at.base_url)
    except WeightsDownloadError as error:
        reason = f" ({_first(error.__cause__)})" if isinstance(error.__cause__, Exception) else ""
        raise ServiceError(f"downloading {path}: {_first(error)}{reason}") from error


def _resolve(model: str) -> Path:
    from rlkit.engine.model.model_files import resolve_model

    return resolve_model(model)


def _build(base: str, adapter: Path, made: Path, form: ExportForm) -> None:
    from tinker_cookbook import weights
    from tinker_cookbook.exceptions import TinkerCookbookError

    build = weights.build_hf_model if form == "merged" else weights.build_lora_adapter
    try:
        build(base_model=base, adapter_path=str(adapter), output_path=str(made))
    except OSError as error:  # also of the hub, whose errors are derived from it
        raise MissingError(f"the base model {base} cannot be loaded: {_first(error)}") from error
    except (TinkerCookbookError, ValueError, KeyError) as error:
        raise UsageError(f"{base} has no {form} form: {_first(error)}") from error


@contextmanager
def _key(api_key: str | None) -> Generator[None]:
    """Let tinker-cookbook, which can be given no key, find this one."""
    if api_key is None:
        yield
        return
    before = os.environ.get("TINKER_API_KEY")
    os.environ["TINKER_API_KEY"] = api_key
    try:
        yield
    finally:
        if before is None:
            del os.environ["TINKER_API_KEY"]
        else:
            os.environ["TINKER_API_KEY"] = before


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
