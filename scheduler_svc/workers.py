"""Where the workers are and how to reach them, as a value that travels to the engine process and connects there."""

from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.executor import Executor
from scheduler_svc.security import TlsFiles

READY_TIMEOUT_S = 10.0  # then whom the scheduler waits for is told, and it goes on waiting


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Args:
    addresses: host:port of each rank, rank 0 first.
    secret: what the workers were started with; None: they take anyone on loopback.
    record: folder for the step stream; None: it is not recorded.
    record_bytes: what the folder may grow to.
    form_timeout_s: how long a group may take to form; None: what suits the workers' device.
    """

    addresses: tuple[str, ...]
    secret: str | None = None
    tls: TlsFiles | None = None
    sample_at_scheduler: bool = False
    record: Path | None = None
    record_bytes: int = 256 << 20
    form_timeout_s: float | None = None

    def connect(self) -> Executor:
        """Imports here what only the engine process needs."""
        from scheduler_svc.remote import RemoteExecutor

        credentials = self.tls.channel_credentials() if self.tls is not None else None
        executor: Executor = RemoteExecutor(
            self.addresses,
            ready_timeout_s=READY_TIMEOUT_S,
            form_timeout_s=self.form_timeout_s,
            secret=self.secret,
            credentials=credentials,
        )
        if self.sample_at_scheduler:
            from scheduler_svc.host_sampling import HostSampling

            executor = HostSampling(executor)
        if self.record is not None:
            from scheduler_svc.recording import Recording

            executor = Recording(executor, self.record, self.record_bytes)
        return executor
