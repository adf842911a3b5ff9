"""The live display of a load test: one line of progress and the running figures."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from client.drive import Progress as Counts


class Live:
    """Draws on standard error while it is entered; `watch` is given to loadtest.run."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        columns = (
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.fields[said]}", markup=False),
        )
        self._bar = Progress(*columns, console=console or Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=total, said="")
        self._seen: list[tuple[float, int]] = []

    def __enter__(self) -> "Live":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def watch(self, elapsed: float, counts: list[Counts]) -> None:
        """Called several times a second."""
        del elapsed
        tokens, sent, first, done, failed = (
            sum(getattr(one, name) for one in counts) for name in ("tokens", "sent", "first", "done", "failed")
        )
        now = time.monotonic()
        self._seen = [*(entry for entry in self._seen if now - entry[0] < 2.0), (now, tokens)]
        since, before = self._seen[0]
        rate = (tokens - before) / (now - since) if now > since else 0.0
        said = f"{first - done} running, {sent - first} waiting, {rate:,.0f} tokens/s"
        if with_token := sum(one.with_token for one in counts):
            said += f", TTFT {sum(one.waited_s for one in counts) / with_token * 1000:,.0f} ms"
        if failed:
            said += f", {failed} failed"
        if (busiest := max(one.cpu_share for one in counts)) > 0.8:
            said += f", a client process is busy ({busiest:.0%} of a core)"
        self._bar.update(self._task, completed=done, said=said)
