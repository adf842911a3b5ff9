"""The load test's figures are right: against a server whose behaviour is known, and known to have happened.

The server writes down when it really sent each message. The client's stamps are compared with that log one by one, and
its figures within the time that these very messages were on the way, so a busy machine cannot make a right client look
wrong. The nominal behaviour is asserted more loosely.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client.drive import Driver, Health
from client.loadtest import LoadTestError, Plan, Result, find_rate, process_count, run
from client.records import Goal, Record, figures, samples_ms
from client.report import page
from client.schedule import due_times, rescaled
from client.tables import comparison, notes, summary
from client.workload import Item, WorkloadError, folded, load, prompt_ids, random_items
from tests.client.mock_server import MockServer, Script, script

NOMINAL = 0.2  # how far a busy machine may be from the script

WORKLOADS = Path(__file__).parents[2] / "bench" / "workloads"


def items(count: int, tokens: int = 20, **behaviour: object) -> list[Item]:
    tenant = script(**behaviour)
    return [Item(str(index), [1] * 8, {"max_tokens": tokens, "tenant": tenant}) for index in range(count)]


def by_server(server: MockServer) -> list[Record]:
    """The records that a perfect client would have: the server's own clock (one clock on this machine)."""
    records = []
    for name, sent in server.sent.items():
        tokens = sum(sent.counts)
        records.append(
            Record(name, sent.arrived[0], sent.arrived[0], sent.times[-1], "OK", "", 8, tokens, 0, 0.0,
                   list(sent.times), list(sent.counts))
        )  # fmt: skip
    return records


def assert_same(result: Result, truth: Sequence[Record]) -> None:
    """Every message was stamped when it came, and the figures are off by no more than the messages' time on the way."""
    pairs = list(zip(sorted(result.records, key=number), sorted(truth, key=number), strict=True))
    down = np.array([mine - sent for a, b in pairs for mine, sent in zip(a.times, b.times, strict=True)])
    up = np.array([mine.sent - arrived.sent for mine, arrived in pairs])  # the clocks' origins differ by one constant
    assert np.median(down) - np.median(up) < 0.1  # the script waits for a second
    way_ms = 1000 * (down.max() - up.min())
    mine, theirs = samples_ms(result.records), samples_ms(truth)
    for name in ("ttft", "tpot", "e2el", "token_gap"):
        assert len(mine[name]) == len(theirs[name]), name
        for statistic in (np.mean, np.median):
            found, true = float(statistic(mine[name])), float(statistic(theirs[name]))
            assert found == pytest.approx(true, abs=way_ms), (name, statistic.__name__)


def number(record: Record) -> int:
    """Which item it is: the load test ends its request ids in that."""
    return int(record.id.rpartition("-")[2])


@pytest.mark.parametrize("processes", [1, 2])
def test_figures_equal_the_servers_own(server: MockServer, processes: int) -> None:
    result = run(items(8, ttft=1.0, gap=0.03), Plan(server.address, concurrency=4, processes=processes))
    assert_same(result, by_server(server))
    shown = result.figures
    assert shown["completed"] == 8 and shown["failed"] == 0
    assert shown["median_ttft_ms"] == pytest.approx(1000, rel=NOMINAL)
    assert shown["mean_tpot_ms"] == pytest.approx(30, rel=NOMINAL)
    assert shown["median_itl_ms"] == pytest.approx(30, rel=NOMINAL)
    assert shown["total_output_tokens"] == 8 * 20 == server.servicer.tokens
    assert shown["max_concurrent_requests"] == 4
    assert shown["output_throughput"] == pytest.approx(160 / shown["duration"])


def test_an_empty_first_message_is_no_first_token(server: MockServer) -> None:
    result = run(items(4, ttft=1.0, gap=0.02, empty_first=True), Plan(server.address, concurrency=4))
    assert_same(result, by_server(server))
    assert result.figures["median_ttft_ms"] == pytest.approx(1000, rel=NOMINAL)


def test_several_tokens_in_a_message_share_its_gap(server: MockServer) -> None:
    result = run(items(4, tokens=24, ttft=1.0, gap=0.06, per_message=3), Plan(server.address, concurrency=4))
    assert_same(result, by_server(server))
    assert result.figures["median_itl_ms"] == pytest.approx(60, rel=NOMINAL)
    assert result.figures["median_token_gap_ms"] == pytest.approx(20, rel=NOMINAL)
    assert result.figures["mean_tpot_ms"] == pytest.approx(7 * 60 / 23, rel=NOMINAL)
    assert result.figures["total_output_tokens"] == 4 * 24


def test_a_stall_is_in_the_tail_and_not_in_the_median(server: MockServer) -> None:
    result = run(items(4, ttft=1.0, gap=0.02, stall_at=10, stall=0.5), Plan(server.address, concurrency=4))
    assert_same(result, by_server(server))
    assert result.figures["median_itl_ms"] == pytest.approx(20, rel=NOMINAL)
    gaps = samples_ms(result.records)["itl"]
    assert gaps.max() == pytest.approx(520, rel=NOMINAL)


def test_failures_count_apart_and_in_no_latency(server: MockServer) -> None:
    mixed = [
        *items(4, ttft=0.1, gap=0.01),
        *items(3, ttft=0.9, fail_at=0),
        *items(2, ttft=0.1, gap=0.01, fail_at=5, fail_code="UNAVAILABLE"),
        *items(1, tokens=0, ttft=0.1),
    ]
    result = run(mixed, Plan(server.address, concurrency=10, goal=Goal({"ttft": 1000})))
    shown = result.figures
    assert shown["completed"] == 5 and shown["failed"] == 5
    assert shown["errors"] == {"INTERNAL": 3, "UNAVAILABLE": 2}
    assert len(samples_ms(result.records)["ttft"]) == 4  # the one without tokens has no first one
    assert shown["p99_ttft_ms"] < 500
    assert shown["total_output_tokens"] == 4 * 20
    assert shown["good_share"] == pytest.approx(0.4)
    assert any("INTERNAL" in line for line in notes(document(result)))


def test_an_open_loop_is_measured_from_the_intended_start(server: MockServer) -> None:
    server.servicer.default = Script(ttft=0.05, gap=0.01)
    result = run(items(30, ttft=0.05, gap=0.01), Plan(server.address, rate=20.0, seed=3))
    due = sorted(record.due for record in result.records)
    assert due == pytest.approx(due_times(30, 20.0, 1.0, 3), abs=1e-6)
    assert all(record.sent >= record.due - 0.002 for record in result.records)  # timers round to milliseconds
    late = {**result.figures, "sent": [record.sent - record.due for record in result.records]}
    assert late["mean_ttft_intended_ms"] - late["mean_ttft_ms"] == pytest.approx(np.mean(late["sent"]) * 1000, abs=0.01)


def test_more_requests_than_places_wait_for_a_place(server: MockServer) -> None:
    result = run(items(9, tokens=5, ttft=0.1, gap=0.01), Plan(server.address, concurrency=3))
    assert result.figures["max_concurrent_requests"] == 3
    assert 3 * 0.14 * 0.98 <= result.figures["duration"] <= 3 * 0.14 * 2.5  # three rounds, on a busy machine too


def test_warmups_are_sent_and_not_counted(server: MockServer) -> None:
    result = run(items(3, tokens=2), Plan(server.address, concurrency=1, warmups=2))
    assert len(result.records) == 3 and len(server.sent) == 5


@pytest.mark.parametrize(
    ("cpu_share", "lag_ms", "word"), [(0.97, 3.0, "--processes 2"), (0.05, 45.0, "core of its own"), (0.3, 2.0, "")]
)
def test_a_client_that_cannot_keep_up_says_so(cpu_share: float, lag_ms: float, word: str) -> None:
    from client.loadtest import _client

    record = Record("a", 0.0, 0.0, 1.0, completion_tokens=2, times=[0.5, 1.0], counts=[1, 1])
    found = _client({0: Health(cpu_share, 0.0, [lag_ms] * 100)}, Plan("x", concurrency=1), items(1))
    said = " ".join(notes(document(Result([record], figures([record], 1.0, Goal()), found))))
    assert word in said if word else not said


def test_an_unreachable_server_and_a_dead_client_process_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.loadtest.process_main", exits_at_once)
    with pytest.raises(LoadTestError, match="exited with code 7"):
        run(items(1), Plan("127.0.0.1:1", concurrency=1))


def exits_at_once(*_: object) -> None:
    raise SystemExit(7)


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_spawned_clients_never_hang_after_channels_were_made(server: MockServer, rounds: int) -> None:
    from client import Lockstep

    with Lockstep(server.address) as client:
        client.info()  # gRPC has its threads in this process now; a forked child would hang
        for _ in range(rounds):
            assert run(items(2, tokens=2), Plan(server.address, concurrency=2, processes=2)).figures["completed"] == 2


def test_processes_follow_the_streams() -> None:
    many = items(1000)
    assert process_count(many, Plan("x", concurrency=64)) == 1
    assert process_count(many, Plan("x", concurrency=64, processes=5)) == 5


def test_figures_by_hand() -> None:
    records = [
        Record("a", 0.0, 0.1, 0.9, prompt_tokens=10, completion_tokens=4, times=[0.3, 0.5, 0.9], counts=[1, 1, 2]),
        Record("b", 0.0, 0.0, 0.5, code="INTERNAL", times=[0.2], counts=[1]),
        Record("c", 0.5, 0.5, 0.7, prompt_tokens=5, completion_tokens=1, times=[0.7], counts=[1]),
    ]
    shown = figures(records, 1.0, Goal({"ttft": 200.5, "tpot": 150}))
    assert shown["median_ttft_ms"] == pytest.approx(200) and shown["mean_e2el_ms"] == pytest.approx(500)
    assert shown["mean_tpot_ms"] == pytest.approx(200)  # (0.9 - 0.3) / 3; the request of one token has none
    assert shown["mean_itl_ms"] == pytest.approx(300) and shown["mean_token_gap_ms"] == pytest.approx(200)
    assert shown["mean_ttft_intended_ms"] == pytest.approx(250)
    assert shown["request_goodput"] == pytest.approx(1.0)  # only c: a is too slow for tpot, b failed
    assert shown["max_output_tokens_per_s"] == 5 and shown["max_concurrent_requests"] == 2


def test_a_mutant_that_counts_messages_as_tokens_is_caught() -> None:
    record = Record("a", 0.0, 0.0, 1.0, completion_tokens=2, times=[0.5, 1.0], counts=[1, 3])
    right = figures([replace(record, completion_tokens=4)], 1.0, Goal())
    wrong = figures([record], 1.0, Goal())  # the messages' number in place of the server's usage
    assert right["total_output_tokens"] == 4 and wrong["total_output_tokens"] != 4
    assert wrong["mean_tpot_ms"] != right["mean_tpot_ms"]


def test_schedules_are_poisson_and_end_in_time() -> None:
    times = due_times(4000, 50.0, 1.0, seed=1)
    assert times[-1] == pytest.approx(80.0) and times == due_times(4000, 50.0, 1.0, seed=1)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05) and gaps.std() == pytest.approx(1 / 50, rel=0.1)
    regular = np.diff(due_times(4000, 50.0, 100.0, seed=1))
    assert regular.std() < 0.2 * regular.mean()
    assert due_times(3, math.inf) == [0.0, 0.0, 0.0]
    assert rescaled([0.0, 5.0, 10.0], 1.0) == [0.0, 1.5, 3.0] and rescaled([0.0, 2.0], None) == [0.0, 2.0]


def test_workload_files_give_the_ids_that_the_format_says() -> None:
    loaded = load(WORKLOADS / "tiny32.jsonl", {})
    assert len(loaded) == 32
    ids = np.random.default_rng(6000).integers(1000, 40000, 110).tolist()
    assert loaded[0].prompt == ids == prompt_ids(6000, 110)
    assert loaded[0].options["ignore_eos"] is True and loaded[0].options["max_tokens"] == 45
    small, changed = folded(loaded, 384)
    assert changed == 32 and max(max(item.prompt) for item in small) < 384  # type: ignore[arg-type, type-var]


def test_prompt_files_and_bad_lines(tmp_path: Path) -> None:
    lines = [
        {"prompt": "hello", "max_tokens": 3},
        {"prompt_ids": [1, 2], "seed": 4},
        {"messages": [{"role": "user", "content": "hi"}], "arrival_s": 1.5},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    loaded = load(path, {"max_tokens": 9})
    assert [item.options["max_tokens"] for item in loaded] == [3, 9, 9] and loaded[2].arrival_s == 1.5
    path.write_text('{"prompt": "x"}\n{"promt": "x"}\n')
    with pytest.raises(WorkloadError, match=r"prompts.jsonl:2: .*promt"):
        load(path, {})
    assert random_items(5, (3, 9), (2, 4), 1, {}) == random_items(5, (3, 9), (2, 4), 1, {})


@pytest.mark.parametrize("capacity", [3.0, 17.0, 0.4])
def test_find_rate_finds_the_capacity(capacity: float) -> None:
    def attempt(some: Sequence[Item], plan: Plan) -> Result:
        assert plan.rate is not None
        share = 1.0 if plan.rate <= capacity else capacity / plan.rate
        return Result([], {"good_share": share}, {})

    probes = find_rate(items(5), Plan("x", goal=Goal({"ttft": 500})), 0.99, 1.0, attempt=attempt)
    best = max(probe.rate for probe in probes if probe.kept)
    assert capacity / 1.07 <= best <= capacity * 1.011
    with pytest.raises(LoadTestError, match="goal"):
        find_rate(items(5), Plan("x"), 0.99, 1.0, attempt=attempt)


def document(result: Result) -> dict[str, object]:
    from client.loadtest_command import _document

    plan = Plan("x", concurrency=4, goal=Goal({"ttft": 1000}))
    return _document(result, plan, {"model": "mock"}, len(result.records), "", None)


def test_the_result_is_strict_json_and_the_page_is_self_contained(server: MockServer) -> None:
    named = [*items(3, tokens=4, gap=0.01), *items(1, fail_at=0)]
    named[0] = replace(named[0], id="</script><script>alert(1)</script>")
    made = document(run(named, Plan(server.address, concurrency=4, goal=Goal({"ttft": 1000}))))
    json.dumps(made, allow_nan=False)
    text = page(made)
    assert text.count("</script>") == 2 and "http://www.w3.org/2000/svg" in text
    assert not any(word in text for word in ("src=", "@import", "fetch(", "https://"))
    assert summary(made).row_count > 10
    assert comparison(made, made, ["a", "b"]).row_count > 10


def test_nothing_of_a_driver_is_shared_between_runs() -> None:
    from client.drive import Share

    share = Share("x", [], None, 0, "a")
    assert Driver(share, lambda: None).fresh is not Driver(share, lambda: None).fresh
