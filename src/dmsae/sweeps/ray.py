"""Jobs on Ray (https://www.ray.io), an extra: `pip install dmsae[ray]`."""

import os
from pathlib import Path
from typing import Any

from dmsae.errors import SweepError
from dmsae.sweeps.cluster import ClusterConfig
from dmsae.sweeps.engines import Handle
from dmsae.sweeps.job import Job
from dmsae.sweeps.work import Work


class Ray:
    """A Ray cluster, or one that is started on this machine. Jobs end with the command that started them."""

    poll_seconds, outlives_us = 0.2, False

    def __init__(self, cluster: ClusterConfig) -> None:
        try:
            import ray
        except ImportError as error:
            raise SweepError("--cluster.engine ray needs the package ray: pip install 'dmsae[ray]'.") from error
        self._ray, self._cluster = ray, cluster
        if not ray.is_initialized():
            ours = {name: value for name, value in os.environ.items() if name.startswith("DMSAE_")}
            ray.init(
                address=cluster.address or None,
                runtime_env={"env_vars": ours},
                include_dashboard=False if not cluster.address else None,
                log_to_driver=False,
            )

        has = ray.cluster_resources()
        for resource, wanted in (("CPU", cluster.cpus), ("GPU", cluster.gpus)):
            if not cluster.address and wanted > has.get(resource, 0):  # Ray would wait for more for ever
                raise SweepError(
                    f"A job wants {wanted} {resource}s and this machine has {has.get(resource, 0):.0f}: lower "
                    f"--cluster.{resource.lower()}s, or give the --cluster.address of a larger one."
                )

    def start(self, job: Job, directory: Path) -> Handle:
        share: dict[str, Any] = {"num_cpus": self._cluster.cpus, "num_gpus": self._cluster.gpus}
        if self._cluster.memory_gb:
            share["memory"] = round(self._cluster.memory_gb * 2**30)
        task = self._ray.remote(max_retries=0, **share)(_run)
        return _RayHandle(self._ray, task.remote(Work(job, directory, Path.cwd(), self._cluster.cpus)))

    def find(self, directory: Path) -> Handle | None:
        return None


class _RayHandle:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference, self._asked = ray, reference, False

    def is_over(self) -> bool:
        ready, _ = self._ray.wait([self._reference], timeout=0)
        return bool(ready)

    def stop(self) -> None:
        if not self._asked:  # once: a second interrupt would not let a training save
            self._ray.cancel(self._reference)
        self._asked = True


def _run(work: Work) -> None:
    """Do the work; its status says how it ended."""
    try:
        work()
    except Exception:
        return
