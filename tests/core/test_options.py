"""What the operator says about the core reaches it, and what cannot be meant is refused before anything starts."""

from queue import SimpleQueue

import pytest

from protos.step import Description
from scheduler_svc.app import configure
from scheduler_svc.core.decision_log import RecordedScheduler, main
from scheduler_svc.loop import EngineLoop
from scheduler_svc.messages import EngineFacts

WORKERS = ("--workers", "127.0.0.1:1")


def core_of(*flags: str):
    """The core that a scheduler with these flags makes once its workers stand."""
    config, _options = configure([*WORKERS, *flags])
    loop = EngineLoop(config.engine, None, SimpleQueue(), lambda notices: None)
    facts = EngineFacts(Description, 1, 16, 100, 8, 64, 512, "worker", {})
    return loop._make_core(facts)


def test_every_policy_of_the_core_has_its_flag():
    config = core_of().config
    assert (config.ageing_s, config.fair_tenants, config.watermark) == (60.0, False, 0.0)
    assert (config.max_queue, config.max_queued_tokens, config.forecast) == (1024, 1 << 24, True)
    assert config.order == "arrival"
    config = core_of(
        *("--ageing", "5", "--fair-tenants", "--watermark", "0.1", "--max-queued-tokens", "5000"),
        *("--order", "makespan"),
        *("--max-queue", "7", "--no-forecast", "--no-prefix-cache", "--pipeline-depth", "3"),
    ).config
    assert (config.ageing_s, config.fair_tenants, config.watermark) == (5.0, True, 0.1)
    assert (config.max_queue, config.max_queued_tokens, config.forecast) == (7, 5000, False)
    assert (config.prefix_cache, config.pipeline_depth, config.order) == (False, 3, "makespan")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--ageing", "-1"), "--ageing is -1.0; it cannot be negative"),
        (("--ageing", "inf"), "--ageing is inf"),
        (("--ageing", "nan"), "--ageing is nan"),
        (("--order", "shortest"), "invalid choice: 'shortest'"),
        (("--watermark", "1"), "--watermark is 1; it is a share below 1"),
        (("--watermark", "nan"), "--watermark is nan"),
        (("--max-queued-tokens", "-1"), "--max-queued-tokens is -1"),
        (("--decision-log-mib", "0"), "--decision-log-mib is 0; at least 1 is needed"),
        (("--max-queue", "many"), "invalid int value: 'many'"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        configure([*WORKERS, *flags])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_decision_log_is_a_folder_that_the_tool_reads(tmp_path, capsys):
    core = core_of("--decision-log", str(tmp_path / "log"), "--decision-log-mib", "1")
    assert isinstance(core, RecordedScheduler)
    assert core.plan(1.0) is None
    core.drain()
    assert main([str(tmp_path / "log")]) == 0
    assert capsys.readouterr().out == "2 decisions in 1 files agree\n"
