"""`LocalSandbox`: Harbor's environment without a container engine.

Invariant: a task that asks for what a local sandbox does not have (services, a list of hosts, a graphics processor, an
instruction that it does not know) is refused before its trial starts. Nothing that the sandbox writes lies in a folder
of the host's but through a copy that keeps to that folder: the folders of logs are downloaded, not mounted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, override

from harbor.environments.base import ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import ServiceVolumeConfig
from harbor.models.trial.paths import EnvironmentPaths
from pydantic import PositiveInt

from rlkit.envs.harbor.base_environment import OwnEnvironment, result
from rlkit.envs.harbor.verification.sealing import PRIVATE_FOLDERS, TestedWork
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.sandbox import Bind, Limits, Sandbox, Spec, View, dockerfile, image
from rlkit.sandbox.commands import Commands
from rlkit.sandbox.image import HOST, Image
from rlkit.sandbox.inside import landlock
from rlkit.sandbox.spec import MIB
from rlkit.sandbox.streams import OnOutput
from rlkit.sandbox.threads import in_thread


class LocalSandbox(OwnEnvironment):
    """A sandbox of Linux namespaces as an environment of Harbor's.

    Its configuration there: `environment: {import_path: "rlkit.envs.harbor.sandbox:LocalSandbox", kwargs: {…}}`.

    Args:
        rootfs: root file system in the place of a task's `FROM` and `docker_image`: its path, or `host`.
        images: paths, or `host`, by names of images; they come before `rootfs`.
        host_folders: folders shown besides the system's where the root is `host`; written to, they are copied.
        memory_mb: memory for tasks that say nothing.
        processes: processes and threads at one time.
        cpu_s: processor seconds of a single process.
        file_mb: size of a single file, for tasks that say nothing about storage.
        output_mb: kept output of a command.
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
        """Why a verifier cannot have a view of its own here; empty where it can."""
        self._image: Image | None = None
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType]  Harbor's own, as it gives them

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
                f"{services}: a local sandbox is a single machine, and cannot start the services of a compose file: "
                "use a container engine for this task"
            )
        if not self.task_env_config.docker_image:
            dockerfile.read(self.environment_dir / "Dockerfile")
        for mount in self._own_mounts():
            if mount["type"] != "bind":
                raise UsageError(f"a local sandbox mounts files and folders of the host (bind), not {mount['type']}")

    @override
    async def start(self, force_build: bool) -> None:
        await self.stop(delete=True)
        limits = self._limits()
        self._image = made = await self._built(limits, fresh=force_build)
        mounts = self._own_mounts()
        own = {mount["target"] for mount in mounts}
        logs = [target for target in self._mount_targets(writable_only=True) if target not in own]
        workdir = self.task_env_config.workdir
        spec = Spec(
            trees=image.trees(made),
            hostname=self.environment_name.replace("_", "-").lower()[:63] or "sandbox",
            network=self._network_is_public,
            binds=tuple(
                Bind(source=mount["source"], target=mount["target"], read_only=bool(mount.get("read_only")))
                for mount in mounts
            ),
            folders={
                **dict.fromkeys((*made.folders, *([workdir] if workdir else [])), 0o755),
                **dict.fromkeys(logs, 0o777),
            },
            limits=limits,
            uses=made.layers,
        )
        self._sandbox = await Sandbox.start(spec)
        self.logger.debug(f"{self.session_id}: limited to {', '.join(self._sandbox.limit_descriptions)}")
        await self._upload_environment_dir_after_start()

    @override
    async def stop(self, delete: bool) -> None:
        sandbox, self._sandbox, self._view = self._sandbox, None, None
        if sandbox is not None:
            await sandbox.stop()

    async def seal(self, work: TestedWork, user: str | int | None) -> None:
        """Have commands and transfers go to a view with `/tests`, `/logs/verifier` and `/logs/agent` of its own.

        It shows the agent's work. The user of the tests, None for the image's, may write to `/logs/verifier`.
        """
        self._view = await self._running().open_view(private=PRIVATE_FOLDERS, shared=work.folders)
        if (who := self._user(user)) not in (None, "root", "0"):
            folder = str(EnvironmentPaths.verifier_dir)
            done = await self._view.run(["chown", str(who), folder])
            if done.exit_code != 0:
                raise EnvironmentFault(f"chown {who} {folder}: {done.stderr.decode(errors='replace').strip()}")

    async def unseal(self) -> None:
        """Have commands and transfers go to the agent's side again, and end what the tests left running."""
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
        made = self._image
        done = await self._place_of_commands().run(
            command,
            user=self._user(user),
            cwd=cwd or self.task_env_config.workdir or (made.workdir if made else None),
            env={**(made.env if made else {}), **(self._merge_env(env) or {})},
            timeout_s=timeout_sec or None,
            output_bytes=self._output_bytes,
            on_output=self._heard(),
        )
        return result(done.stdout, done.stderr, done.exit_code)

    @override
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._place_of_commands().put(Path(source_path), self._place(target_path))

    @override
    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._place_of_commands().put(Path(source_dir), self._place(target_dir))

    @override
    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._place_of_commands().get(self._place(source_path), Path(target_path), folder=False)

    @override
    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._place_of_commands().get(self._place(source_dir), Path(target_dir), folder=True)

    def _running(self) -> Sandbox:
        if self._sandbox is None:
            raise EnvironmentFault(f"{self.session_id}: the sandbox has not been started, or was stopped")
        return self._sandbox

    def _place_of_commands(self) -> Commands:
        """The sandbox, or the view of it while a verifier runs."""
        return self._view or self._running()

    def _user(self, user: str | int | None) -> str | None:
        who = self._resolve_user(user)
        return str(who) if who is not None else self._image.user if self._image else None

    def _place(self, path: str) -> str:
        return str(self._absolute(path, workdir=self._image.workdir if self._image else None))

    def _limits(self) -> Limits:
        return Limits(
            memory_bytes=(self._effective_memory_mb or self._memory_mb) * MIB,
            processes=self._processes,
            cpus=self._effective_cpus,
            cpu_s=self._cpu_s,
            file_bytes=(self._effective_storage_mb or self._file_mb) * MIB,
        )

    async def _built(self, limits: Limits, *, fresh: bool) -> Image:
        named, path = self.task_env_config.docker_image, self.environment_dir / "Dockerfile"
        if named and not (fresh and path.exists()):
            return await in_thread(self._ground, named)
        recipe = await in_thread(dockerfile.read, path)
        ground = await in_thread(self._ground, recipe.image)
        within_s = self.task_env_config.build_timeout_sec
        return await image.build(recipe, ground, self.environment_dir, limits=limits, fresh=fresh, timeout_s=within_s)

    def _ground(self, name: str) -> Image:
        return image.base(self._images.get(name, self._rootfs), folders=self._host_folders)

    def _own_mounts(self) -> list[ServiceVolumeConfig]:
        """The mounts that a user asked for: Harbor's own are the folders of logs, which are downloaded."""
        paths = EnvironmentPaths()
        logs = {str(path) for path in (paths.agent_dir, paths.user_agent_dir, paths.verifier_dir, paths.artifacts_dir)}
        return [mount for mount in self._mounts if mount["target"] not in logs]

    def _heard(self) -> OnOutput | None:
        callback = self._output_callback()
        if callback is None:
            return None

        async def heard(data: bytes, stream: Literal["stdout", "stderr"]) -> None:
            await callback(data.decode(errors="replace"), stream)

        return heard
