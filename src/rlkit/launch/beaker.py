# beaker is optional.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
"""Submission of jobs to Beaker, through beaker-py.

Invariant: a job continues if its caller stops following it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rlkit.errors import MissingError, RlkitError, RunFailed, ServiceError, missing_extra
from rlkit.types import Json

if TYPE_CHECKING:
    from beaker import Beaker
    from beaker.types import BeakerWorkload

_POLL_S = 5.0


def submit(
    spec: Mapping[str, Json], *, workspace: str | None, name: str | None, follow: bool, note: Callable[[str], None]
) -> str:
    """Submit an experiment, specified by `rlkit.launch.job.make_spec`, and return its URL.

    Args:
        workspace: workspace of the experiment; None for the account's default.
        name: name of the experiment; None for a name that Beaker chooses.
        follow: pass the job's output to `note` until it ends.

    Raises:
        MissingError: beaker-py is not installed, or there is no account.
        ServiceError: Beaker rejected the request or failed.
        RunFailed: the followed job failed.
    """
    try:
        with make_client(workspace) as beaker:
            from beaker.types import BeakerExperimentSpec

            workload = beaker.experiment.create(spec=BeakerExperimentSpec.from_json(dict(spec)), name=name)
            url = beaker.workload.url(workload)
            note(f"submitted {url}")
            if follow:
                _follow(beaker, workload, note)
            return url
    except RlkitError:
        raise
    except Exception as error:  # beaker-py passes on exceptions of gRPC and requests
        raise ServiceError(f"Beaker: {type(error).__name__}: {error}") from error


def _follow(beaker: Beaker, workload: BeakerWorkload, note: Callable[[str], None]) -> None:
    """Print the output of a job, and of the jobs that replace it after a preemption."""
    from beaker.types import BeakerWorkloadStatus

    job_ids = set[str]()
    while True:
        job = beaker.workload.get_latest_job(workload)
        if job is not None and job.id not in job_ids and job.status.HasField("started"):
            job_ids.add(job.id)
            for entry in beaker.job.logs(job, follow=True):
                note(entry.message.decode(errors="replace").rstrip("\n"))
        workload = beaker.workload.get(workload.experiment.id)
        status = BeakerWorkloadStatus.from_any(workload.status)
        if status == BeakerWorkloadStatus.succeeded:
            return
        if status in (BeakerWorkloadStatus.failed, BeakerWorkloadStatus.canceled):
            raise RunFailed(f"the job {status.name}: {beaker.workload.url(workload)}")
        time.sleep(_POLL_S)


def make_client(workspace: str | None) -> Beaker:
    """Return a client of Beaker; MissingError if beaker-py is not installed, or there is no account."""
    try:
        from beaker import Beaker
        from beaker.exceptions import BeakerConfigurationError
    except ImportError:
        raise missing_extra("beaker") from None
    options = {} if workspace is None else {"default_workspace": workspace}
    try:
        return Beaker.from_env(check_for_upgrades=False, **options)
    except BeakerConfigurationError as error:
        raise MissingError(f"there is no Beaker account on this machine ({error}): set BEAKER_TOKEN") from error
