"""Export of trained weights as files for other programs.

Invariant: an exported folder is complete; a failed export leaves no files behind.
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
from rlkit.errors import MissingError, UsageError
from rlkit.tinker_client.connect import reach_service
from rlkit.tinker_client.connector import ServiceAddress
from rlkit.tinker_client.sdk import TinkerService, translate_error

type ExportForm = Literal["adapter", "merged", "raw"]
"""LoRA adapter in the layout of `peft`, merged model in the layout of `transformers`, or the service's own files."""


async def export(
    path: str,
    directory: Path,
    *,
    form: ExportForm = "adapter",
    service: ServiceConfig | None = None,
    note: Callable[[str], None] = lambda message: None,
) -> None:
    """Write a checkpoint as files, with tinker-cookbook's `weights`.

    Args:
        path: `tinker://…/weights/…` path of training state.
        directory: folder to create.
        form: form of the files. `raw` does not need the base model.
        service: service that stores the checkpoint; by default the one that a default configuration uses.

    Raises:
        UsageError: the checkpoint does not exist, the directory exists or cannot be written, or the model cannot be
            exported in this form.
        MissingError: the service or the base model is not available.
        ServiceError: the service failed.
    """
    from rlkit.engine.model.model_files import resolve_model  # imported late to keep `rlkit.tools` light

    if not path.startswith("tinker://") or "/weights/" not in path:
        raise UsageError(f"{path!r} is not a training state: only tinker://…/weights/… paths can be exported")
    directory = resolve_directory(directory)
    async with reach_service(service or ServiceConfig(), note=note) as at:
        async with TinkerService(at) as connection:
            model = await connection.model_of(path)
        base = str(await in_thread(resolve_model, model)) if at.embedded and form != "raw" else model
        await in_thread(lambda: _write(path, directory, form, at, base=base, name=hub_id(model)))


def resolve_directory(directory: Path) -> Path:
    """Return the absolute path of a new directory; UsageError if it exists or its parent cannot be written."""
    try:
        path = directory.resolve()
        if directory.is_symlink() or path.exists():
            raise UsageError(f"{directory} exists: choose another name")
        parent = next(folder for folder in path.parents if folder.exists())
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=parent):
            return path
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise _make_write_error(directory, error) from error


def _make_write_error(directory: Path, error: Exception) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return UsageError(f"{directory} cannot be written: {reason}")


def _write(path: str, directory: Path, form: ExportForm, at: ServiceAddress, *, base: str, name: str | None) -> None:
    """Download and build a checkpoint.

    Args:
        base: path or hub name of the base model, for tinker-cookbook.
        name: hub name of the base model, if known.
    """
    with create_folder(directory) as output:
        adapter = output.parent / "adapter"
        _download(path, output if form == "raw" else adapter, at)
        if form != "raw":
            _build(base, adapter, output, form)
        if form == "adapter":
            config = output / "adapter_config.json"  # contains this machine's path of the base model
            settings = json.loads(config.read_text()) | {"base_model_name_or_path": name}
            write_text(config, json.dumps(settings, indent=2) + "\n")
        mode = output.stat().st_mode & 0o666
        for file in filter(Path.is_file, output.rglob("*")):
            file.chmod(mode)  # safetensors makes files readable only by their owner


@contextmanager
def create_folder(directory: Path) -> Generator[Path]:
    """Yield the path of a folder to fill, which becomes `directory` at the end; UsageError if it cannot be written."""
    new_parents = [folder for folder in directory.parents if not folder.exists()]
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        # In the target's parent folder, so that one rename completes the export.
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as work:
            output = Path(work) / "output"
            yield output
            output.rename(directory)
            new_parents.clear()
    except OSError as error:
        raise _make_write_error(directory, error) from error
    finally:
        with suppress(OSError):  # another process may have added files
            for parent in new_parents:
                parent.rmdir()


def _download(path: str, adapter: Path, at: ServiceAddress) -> None:
    from tinker_cookbook import weights
    from tinker_cookbook.exceptions import WeightsDownloadError

    try:
        with _set_api_key(at.api_key), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the SDK warns about a call in tinker-cookbook
            weights.download(tinker_path=path, output_dir=str(adapter), base_url=at.base_url)
    except WeightsDownloadError as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise translate_error(cause, f"downloading {path}") from error


def _build(base: str, adapter: Path, output: Path, form: ExportForm) -> None:
    from tinker_cookbook import weights
    from tinker_cookbook.exceptions import TinkerCookbookError

    build = weights.build_hf_model if form == "merged" else weights.build_lora_adapter
    try:
        build(base_model=base, adapter_path=str(adapter), output_path=str(output))
    except OSError as error:  # the hub's errors are OSErrors, too
        raise MissingError(f"the base model {base} cannot be loaded: {_first_line(error)}") from error
    except (TinkerCookbookError, ValueError, KeyError) as error:
        raise UsageError(f"{base} cannot be exported in the form {form}: {_first_line(error)}") from error


@contextmanager
def _set_api_key(api_key: str | None) -> Generator[None]:
    """Set TINKER_API_KEY, the only way to pass a key to tinker-cookbook."""
    previous = os.environ.get("TINKER_API_KEY")
    os.environ |= {} if api_key is None else {"TINKER_API_KEY": api_key}
    try:
        yield
    finally:
        os.environ.pop("TINKER_API_KEY", None)
        os.environ |= {} if previous is None else {"TINKER_API_KEY": previous}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
