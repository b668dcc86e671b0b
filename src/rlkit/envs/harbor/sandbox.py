"""`LocalSandbox`: a Harbor environment without a container engine.

Invariant: a task that needs a feature that a local sandbox lacks (services, an allowlist of hosts, a GPU, an
unsupported instruction) raises an error before its trial starts. Files of the sandbox are only copied to a folder of
the host, and cannot leave it: the folders of logs are downloaded, not mounted.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, override

from harbor.environments.base import ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import ServiceVolumeConfig
from harbor.models.trial.paths import EnvironmentPaths
from pydantic import PositiveInt

from rlkit._util.threads import in_sandbox_thread as in_thread
from rlkit.envs.harbor.base_environment import LimitedEnvironment
from rlkit.envs.harbor.verification.sealing import PRIVATE_FOLDERS, TestedWork
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.sandbox import Bind, Limits, Sandbox, Spec, View, dockerfile, image
from rlkit.sandbox.commands import Commands
from rlkit.sandbox.image import HOST, Image
from rlkit.sandbox.inside import landlock
from rlkit.sandbox.spec import MIB
from rlkit.sandbox.streams import OnOutput


class LocalSandbox(LimitedEnvironment):
    """A sandbox of Linux namespaces as a Harbor environment.

    In Harbor's configuration: `environment: {import_path: "rlkit.envs.harbor.sandbox:LocalSandbox", kwargs: {…}}`.

    Args:
        rootfs: root file system that replaces a task's `FROM` and `docker_image`: a path, or `host`.
        images: root file systems (paths, or `host`) by name of the image; they override `rootfs`.
        host_folders: additional folders of the host to show if the root is `host`; copied on write.
        memory_mb: memory for tasks that set no memory.
        processes: maximum number of processes and threads.
        cpu_s: processor seconds of a single process.
        file_mb: size of a single file, for tasks that set no storage.
        output_mb: size of a command's output, beyond which it is dropped.
    """

    def __init__(
        self,
        *args: object,
        rootfs: str = HOST,
        images: dict[str, str] | None = None,
        host_folders: list[str] | None = None,
        memory_mb: PositiveInt = 4096,
        processes: PositiveInt = 1024,
        cpu_s: PositiveInt = 3600,
        file_mb: PositiveInt = 8192,
        output_mb: PositiveInt = 16,
        **kwargs: object,
    ) -> None:
        self._rootfs = rootfs
        self._images = images or {}
        self._host_folders = tuple(host_folders or ())
        self._memory_mb, self._processes, self._cpu_s = memory_mb, processes, cpu_s
        self._file_mb, self._output_bytes = file_mb, output_mb * MIB
        self._sandbox: Sandbox | None = None
        self._view: View | None = None
        self.seal_problem = landlock.confinement_problem()
        """Reason why a verifier cannot have a separate view here; empty if it can."""
        self._image: Image | None = None
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType]  Harbor's arguments, passed through

    @staticmethod
    @override
    def type() -> str:
        return "local-sandbox"

    @property
    @override
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @override
    def _validate_definition(self) -> None:
        services = self.environment_dir / "docker-compose.yaml"
        if services.exists():
            raise UsageError(
                f"{services}: a local sandbox cannot start the services of a compose file: use a container engine for "
                "this task"
            )
        if not self.task_env_config.docker_image:
            dockerfile.read(self.environment_dir / "Dockerfile")
        for mount in self._user_mounts():
            if mount["type"] != "bind":
                raise UsageError(f"a local sandbox mounts files and folders of the host (bind), not {mount['type']}")

    @override
    async def start(self, force_build: bool) -> None:
        await self.stop(delete=True)
        limits = self._limits()
        self._image = built = await self._build_image(limits, rebuild=force_build)
        mounts = self._user_mounts()
        mount_targets = {mount["target"] for mount in mounts}
        logs = [target for target in self._mount_targets(writable_only=True) if target not in mount_targets]
        workdir = self.task_env_config.workdir
        spec = Spec(
            trees=image.trees(built),
            hostname=self.environment_name.replace("_", "-").lower()[:63] or "sandbox",
            network=self._network_is_public,
            binds=tuple(
                Bind(source=mount["source"], target=mount["target"], read_only=bool(mount.get("read_only")))
                for mount in mounts
            ),
            folders={
                **dict.fromkeys((*built.folders, *([workdir] if workdir else [])), 0o755),
                **dict.fromkeys(logs, 0o777),
            },
            limits=limits,
            uses=built.layers,
        )
        self._sandbox = await Sandbox.start(spec)
        self.logger.debug(f"{self.session_id}: limited to {', '.join(self._sandbox.limit_descriptions)}")
        await self._upload_environment_dir_after_start()

    @override
    async def stop(self, delete: bool) -> None:
        sandbox, self._sandbox, self._view = self._sandbox, None, None
        if sandbox is not None:
            await sandbox.stop()

    def forward_port(self, port: int) -> AbstractAsyncContextManager[None]:
        """Forward a port of the sandbox's loopback to the host's, see `Sandbox.forward_port`."""
        return self._require_sandbox().forward_port(port)

    async def seal(self, work: TestedWork, user: str | int | None) -> None:
        """Redirect commands and transfers to a view with private `/tests`, `/logs/verifier` and `/logs/agent`.

        Args:
            work: parts of the agent's work that the view shows.
            user: user of the tests, who may write to `/logs/verifier`; None for the image's user.
        """
        self._view = await self._require_sandbox().open_view(private=PRIVATE_FOLDERS, shared=work.folders)
        if (owner := self._user_name(user)) not in (None, "root", "0"):
            folder = str(EnvironmentPaths.verifier_dir)
            chown = await self._view.run(["chown", str(owner), folder])
            if chown.exit_code != 0:
                raise EnvironmentFault(f"chown {owner} {folder}: {chown.stderr.decode(errors='replace').strip()}")

    async def unseal(self) -> None:
        """Redirect commands and transfers to the sandbox again, and end all processes of the tests."""
        view, self._view = self._view, None
        if view is not None:
            await view.close()

    @override
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        built = self._image
        completed = await self._commands().run(
            command,
            user=self._user_name(user),
            cwd=cwd or self.task_env_config.workdir or (built.workdir if built else None),
            env={**(built.env if built else {}), **(self._merge_env(env) or {})},
            timeout_s=timeout_sec or None,
            output_bytes=self._output_bytes,
            on_output=self._make_output_callback(),
        )
        return ExecResult(
            stdout=completed.stdout.decode(errors="replace"),
            stderr=completed.stderr.decode(errors="replace"),
            return_code=completed.exit_code,
        )

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._commands().put(Path(source_path), self._sandbox_path(target_path))

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._commands().put(Path(source_dir), self._sandbox_path(target_dir))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._commands().get(self._sandbox_path(source_path), Path(target_path), folder=False)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._commands().get(self._sandbox_path(source_dir), Path(target_dir), folder=True)

    def _require_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            raise EnvironmentFault(f"{self.session_id}: the sandbox has not been started, or was stopped")
        return self._sandbox

    def _commands(self) -> Commands:
        """Return the sandbox, or its view while a verifier runs."""
        return self._view or self._require_sandbox()

    def _user_name(self, user: str | int | None) -> str | None:
        name = self._resolve_user(user)
        return str(name) if name is not None else self._image.user if self._image else None

    def _sandbox_path(self, path: str) -> str:
        return str(self._resolve_path(path, workdir=self._image.workdir if self._image else None))

    def _limits(self) -> Limits:
        return Limits(
            memory_bytes=(self._effective_memory_mb or self._memory_mb) * MIB,
            processes=self._processes,
            cpus=self._effective_cpus,
            cpu_s=self._cpu_s,
            file_bytes=(self._effective_storage_mb or self._file_mb) * MIB,
        )

    async def _build_image(self, limits: Limits, *, rebuild: bool) -> Image:
        image_name, path = self.task_env_config.docker_image, self.environment_dir / "Dockerfile"
        if image_name and not (rebuild and path.exists()):
            return await in_thread(self._base_image, image_name)
        recipe = await in_thread(dockerfile.read, path)
        base = await in_thread(self._base_image, recipe.image)
        timeout_s = self.task_env_config.build_timeout_sec
        return await image.build(
            recipe, base, self.environment_dir, limits=limits, rebuild=rebuild, timeout_s=timeout_s
        )

    def _base_image(self, name: str) -> Image:
        return image.base(self._images.get(name, self._rootfs), folders=self._host_folders)

    def _user_mounts(self) -> list[ServiceVolumeConfig]:
        """Return the user's mounts, without Harbor's mounts of log folders; logs are downloaded instead."""
        paths = EnvironmentPaths()
        logs = {str(path) for path in (paths.agent_dir, paths.user_agent_dir, paths.verifier_dir, paths.artifacts_dir)}
        return [mount for mount in self._mounts if mount["target"] not in logs]

    def _make_output_callback(self) -> OnOutput | None:
        callback = self._output_callback()
        if callback is None:
            return None

        async def on_output(data: bytes, stream: Literal["stdout", "stderr"]) -> None:
            await callback(data.decode(errors="replace"), stream)

        return on_output
