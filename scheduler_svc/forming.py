"""Forms a group of workers, as often as it takes, on a thread of its own, since that is mostly waiting for them.

Knows what a group is formed with and what it must still be: the bits that live requests have been promised hold only
under one fingerprint. Whatever comes of it is put where the loop looks.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread

from protos.step import CannotForm, Description, GroupConfig
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.executor import EpochLost, Executor
from scheduler_svc.messages import EngineFacts

logger = logging.getLogger(__name__)

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
# A group that says it cannot form is believed at the third time: what its ranks lacked at first, a process on its way
# out may still have held.
CANNOT_FORM_TRIES, CANNOT_FORM_PAUSE_S = 3, 1.5


@dataclass(frozen=True, slots=True)
class Formed:
    """A group stands."""

    facts: EngineFacts


@dataclass(frozen=True, slots=True)
class NotFormed:
    """Not yet; `fatal`: and never with these options."""

    reason: str
    fatal: bool = False


class GroupFormer:
    """Args:
    tell: takes the outcome, from any thread.
    has_promises: some request lives that has been promised the bits of the last group.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        tell: Callable[[Formed | NotFormed], object],
        has_promises: Callable[[], bool],
    ) -> None:
        self._config = config
        self._executor = executor
        self._tell = tell
        self._has_promises = has_promises
        self._closed = Event()
        self.joining = 0  # the epoch that was joined last, perhaps not served yet

    def start(self, last_epoch: int, facts: EngineFacts | None) -> None:
        """Begin to form a group after `last_epoch`; `facts` are those of the group before, if there was one."""
        Thread(target=self._try, args=(last_epoch, facts), name="form-group", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _try(self, last_epoch: int, facts: EngineFacts | None) -> None:
        backoff = MIN_BACKOFF_S
        refusals = 0  # in a row
        while not self._closed.is_set():
            try:
                formed = self._join(last_epoch, facts)
            except CannotForm as refusal:
                refusals += 1
                logger.error("no group can be formed (try %d of %d): %s", refusals, CANNOT_FORM_TRIES, refusal)
                if refusals == CANNOT_FORM_TRIES:
                    self._tell(NotFormed(f"no group can be formed: {refusal}", fatal=True))
                    return
                self._tell(NotFormed(str(refusal)))
                self._closed.wait(CANNOT_FORM_PAUSE_S)
                continue
            except EpochLost as lost:
                refusals = 0
                self._tell(NotFormed(str(lost)))
            except ValueError as error:  # options that the model does not allow
                self._tell(NotFormed(str(error), fatal=True))
                return
            except Exception as error:
                logger.exception("forming a group failed")
                self._tell(NotFormed(f"forming a group failed: {error!r}", fatal=True))
                return
            else:
                self._tell(Formed(formed))
                return
            self._closed.wait(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    def _join(self, last_epoch: int, facts: EngineFacts | None) -> EngineFacts:
        config = self._config
        description = self._executor.describe()
        max_seq_len = config.max_seq_len or description.max_position_embeddings
        if max_seq_len > description.max_position_embeddings:
            raise ValueError(
                f"--max-seq-len {max_seq_len} is above the model's {description.max_position_embeddings} positions"
            )
        parts = fingerprint(description, config.sample_at_scheduler)
        if facts is not None and parts != facts.fingerprint and self._has_promises():
            raise EpochLost(f"the workers came back with another fingerprint: {parts}, before {facts.fingerprint}")
        epoch = self.joining = max(description.epoch, last_epoch, self.joining) + 1
        num_blocks = self._executor.join(
            GroupConfig(
                epoch=epoch,
                block_size=config.block_size,
                num_blocks=facts.num_blocks if facts is not None else config.num_blocks,
                max_num_seqs=config.max_num_seqs,
                max_batch_tokens=config.max_batch_tokens,
                max_seq_len=max_seq_len,
                sample_at_scheduler=config.sample_at_scheduler,
                pipeline_depth=config.pipeline_depth,
                step_timeout_s=config.step_timeout_s,
            )
        )
        return EngineFacts(
            description=description,
            epoch=epoch,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            max_seq_len=max_seq_len,
            sample_at="scheduler" if config.sample_at_scheduler else "worker",
            fingerprint=parts,
        )


def fingerprint(description: Description, sample_at_scheduler: bool) -> dict[str, str]:
    """What the workers state, and where sampling happens."""
    return {**description.fingerprint, "sample_at": "scheduler" if sample_at_scheduler else "worker"}
