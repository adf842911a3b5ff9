"""The service from its start to its end: health, drain, lost workers, dead engines, taken ports, idleness."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from scheduler_svc import app, forming, loop
from tests.services.pseudo import Pseudo, greedy, write_tokenizer
from tests.services.served import Served, finish, logprobs, request, text, tokens, wait_until

pytestmark = pytest.mark.services
LONG = dict(max_tokens=60, ignore_eos=True, temperature=0)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health(channel, service="lockstep.v1.Generation"):
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status


class Process:
    """A scheduler process over the pseudo-model."""

    def __init__(self, folder, step_s=0.01, *flags, listen="127.0.0.1:0"):
        write_tokenizer(folder)
        command = [sys.executable, "-m", "tests.services.launch", str(folder), str(step_s)]
        command += ["--listen", listen, "--max-seq-len", "512", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        line = self.process.stdout.readline()
        assert line.startswith(app.READY_MARK), (line, self.process.stderr.read())
        self.address = line.split()[-1]
        self.channel = grpc.insecure_channel(self.address)
        self.stub = rpc.GenerationStub(self.channel)
        return self

    def __exit__(self, *_):
        self.channel.close()
        children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.errors = self.process.stderr.read()
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()
        _, alive = psutil.wait_procs(children, 10)
        assert not alive, "the engine process outlived its parent"

    def engine(self):
        (child,) = psutil.Process(self.process.pid).children()
        return child


# Health


def test_health_follows_the_workers(tmp_path):
    model = Pseudo()
    model.down = True
    with Served(tmp_path, model) as served:
        assert health(served.channel) == health(served.channel, "") == NOT_SERVING
        error = served.refused(max_tokens=1)
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "starting" in error.details()
        with pytest.raises(grpc.RpcError, match="starting"):
            served.stub.GetModelInfo(pb.GetModelInfoRequest())
        model.down = False
        served.wait_state("serving")
        assert health(served.channel) == health(served.channel, "") == SERVING
        model.down = True
        model.lose()
        wait_until(lambda: health(served.channel) == NOT_SERVING, 5)
        model.down = False
        wait_until(lambda: health(served.channel) == SERVING, 5)
        assert served.generate(max_tokens=2)


def test_model_info_states_what_was_found_out(tmp_path):
    with Served(tmp_path, num_blocks=33, block_size=8) as served:
        info = served.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model, info.max_seq_len, info.tp, info.dtype) == ("pseudo", 64, 1, "float32")
        assert (info.num_blocks, info.block_size, list(info.eos_token_ids), info.bos_token_id) == (33, 8, [257], 256)


def test_reflection_names_the_service(tmp_path):
    with Served(tmp_path) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        (reply,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in reply.list_services_response.service}
        assert {"lockstep.v1.Generation", "grpc.health.v1.Health"} <= names


# Lost workers

STREAMS = [
    dict(temperature=0.0, prompt=[30] * 20),
    dict(seed=4, logprobs=3, prompt=[31] * 20),
    dict(seed=5, repetition_penalty=1.3, presence_penalty=0.5, prompt=[32] * 3),
    dict(seed=6, n=3, prompt=[33] * 7),
]


def test_streams_go_on_with_the_same_bits_when_workers_are_lost(tmp_path):
    messages = [request(**LONG | dict(max_tokens=40) | more) for more in STREAMS]
    with Served(tmp_path / "a") as calm:
        expected = [calm.generate(message) for message in messages]
    model = Pseudo(step_s=0.004)
    with Served(tmp_path / "b", model) as served:
        calls = [served.stub.Generate(message, timeout=60) for message in messages]
        heads = [[next(call)] for call in calls]
        for _ in range(3):
            model.down = True
            model.lose()
            wait_until(lambda: served.stats().state == "recovering", 5)
            model.down = False
            served.wait_state("serving")
            time.sleep(0.03)
        results = [head + list(call) for head, call in zip(heads, calls)]
        values = served.stats().values
        assert values["recoveries_total"] == 3 and values["engine_epoch"] == 4
        served.wait_idle()
    for result, want in zip(results, expected):
        for index in range(3):
            assert tokens(result, index) == tokens(want, index)
            assert (text(result, index), logprobs(result, index)) == (text(want, index), logprobs(want, index))


def test_a_request_whose_every_step_breaks_the_group_ends_and_the_next_is_served(tmp_path):
    model = Pseudo()
    model.breaking = (40, 41)
    with Served(tmp_path, model) as served:
        call = served.stub.Generate(request(prompt=[40, 41], **LONG), timeout=30)
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert served.stats().values["recoveries_total"] == loop.FRUITLESS_EPOCHS
        served.wait_state("serving")
        assert tokens(served.generate(prompt=[42], **LONG)) == greedy([42], 60)
        served.wait_idle()


def test_past_the_recovery_timeout_streams_end_and_new_requests_are_refused(tmp_path):
    model = Pseudo(step_s=0.004)
    with Served(tmp_path, model, recovery_timeout_s=0.3) as served:
        calls = [served.stub.Generate(request(**LONG), timeout=20) for _ in range(4)]
        next(calls[0])
        model.down = True
        model.lose()
        waiting = served.stub.Generate(request(**LONG), timeout=20)  # may wait for the workers
        for call in [*calls, waiting]:
            with pytest.raises(grpc.RpcError) as error:
                list(call)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert served.refused(**LONG).code() is grpc.StatusCode.UNAVAILABLE
        model.down = False
        served.wait_state("serving")
        assert tokens(served.generate(**LONG)) == greedy([1, 2, 3], 60)
        served.wait_idle()


def test_workers_that_come_back_different_do_not_continue_streams(tmp_path):
    model = Pseudo(step_s=0.004)
    with Served(tmp_path, model, recovery_timeout_s=0.5) as served:
        call = served.stub.Generate(request(**LONG), timeout=20)
        next(call)
        model.fingerprint = {"numerics": "pseudo 2"}
        model.lose()
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "came back with another fingerprint" in error.value.details()  # and not only that time was over
        served.wait_state("serving")
        parts = served.generate(max_tokens=1)[0].started.fingerprint.parts
        assert parts["numerics"] == "pseudo 2"


def test_a_group_that_can_never_form_ends_streams_with_its_reason_and_the_process_with_2(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(forming, "CANNOT_FORM_PAUSE_S", 0.2)
    model = Pseudo(step_s=0.004)
    with Served(tmp_path, model, recovery_timeout_s=60) as served:
        call = served.stub.Generate(request(**LONG), timeout=20)
        next(call)
        model.cannot_form = 100
        model.lose()
        wait_until(lambda: model.refused_joins == 1)
        assert health(served.channel) == NOT_SERVING
        waiting = served.stub.Generate(request(**LONG), timeout=20)
        for one in (call, waiting):
            with pytest.raises(grpc.RpcError) as error:
                list(one)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "no group can be formed: rank 1: out of memory" in error.value.details()
        served._thread.join(10)
        assert served.exit_code == 2 and model.refused_joins == 3
    assert "lockstep-scheduler: no group can be formed: rank 1: out of memory" in capfd.readouterr().err


def test_memory_that_comes_free_in_time_is_no_end(tmp_path, monkeypatch):
    monkeypatch.setattr(forming, "CANNOT_FORM_PAUSE_S", 0.05)
    model = Pseudo(step_s=0.004)
    with Served(tmp_path, model) as served:
        for _ in range(2):  # the count starts anew with each group
            call = served.stub.Generate(request(**LONG), timeout=20)
            head = [next(call)]
            model.cannot_form = 2
            model.lose()
            assert tokens(head + list(call)) == greedy([1, 2, 3], 60)


def test_requests_cancelled_during_recovery_do_not_come_back(tmp_path):
    model = Pseudo(step_s=0.004)
    with Served(tmp_path, model) as served:
        call = served.stub.Generate(request(**LONG), timeout=20)
        next(call)
        model.down = True
        model.lose()
        call.cancel()
        wait_until(lambda: served.stats().values["requests_live"] == 0)
        model.down = False
        served.wait_state("serving")
        served.wait_idle()


# Drain


def drain_calls(process, count, max_tokens):
    calls = [process.stub.Generate(request(**LONG | dict(max_tokens=max_tokens)), timeout=30) for _ in range(count)]
    for call in calls:
        next(call)
    return calls


def test_sigterm_lets_running_streams_finish_and_takes_no_new_ones(tmp_path):
    with Process(tmp_path) as process:
        calls = drain_calls(process, 4, 100)
        process.process.send_signal(signal.SIGTERM)
        wait_until(lambda: health(process.channel) == NOT_SERVING, 2)
        with pytest.raises(grpc.RpcError) as error:
            list(process.stub.Generate(request(max_tokens=1), timeout=5))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in error.value.details()
        assert all(tokens(list(call)) == greedy([1, 2, 3], 100)[1:] for call in calls)
        assert process.process.wait(10) == 0


def test_what_outlasts_the_drain_time_gets_a_final_status(tmp_path):
    with Process(tmp_path, 0.02, "--drain-timeout", "0.3") as process:
        calls = drain_calls(process, 4, 400)
        begun = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        for call in calls:
            events = []
            with pytest.raises(grpc.RpcError) as error:
                for event in call:
                    events.append(event)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "drain" in error.value.details()
            assert finish(events).reason == pb.FINISH_REASON_ABORT
        assert process.process.wait(10) == 0 and time.monotonic() - begun < 5


def test_a_second_signal_ends_at_once(tmp_path):
    with Process(tmp_path, 0.02) as process:
        calls = drain_calls(process, 1, 400)
        process.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.process.poll() is None and calls[0].is_active()
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(3) == app.EXIT_AT_ONCE


def test_an_idle_scheduler_drains_at_once(tmp_path):
    with Process(tmp_path) as process:
        begun = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(10) == 0 and time.monotonic() - begun < 3


# Processes


def test_the_engine_ends_with_its_parent_however_that_dies(tmp_path):
    with Process(tmp_path) as process:
        engine = process.engine()
        assert "lockstep-engine" in engine.cmdline() and engine.name() == "lockstep-engine"
        process.process.send_signal(signal.SIGKILL)
        engine.wait(10)


def test_a_dead_engine_ends_streams_with_unavailable_and_the_process_with_an_error(tmp_path):
    with Process(tmp_path, 0.02) as process:
        (call,) = drain_calls(process, 1, 400)
        process.engine().send_signal(signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE and "engine process" in error.value.details()
        assert process.process.wait(10) == app.EXIT_ENGINE


def test_a_frozen_engine_is_noticed_and_replaced(tmp_path):
    with Process(tmp_path, 0.02) as process:
        (call,) = drain_calls(process, 1, 400)
        process.engine().send_signal(signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert process.process.wait(15) == app.EXIT_ENGINE


def test_logs_that_nobody_reads_hold_nothing_up(tmp_path):
    """Stderr is a pipe here that is never read: 64 KB of lines fill it."""
    with Process(tmp_path, 0.0) as process:
        for at in range(600):
            message = request([at % 250], max_tokens=1, request_id=f"{at}" + "x" * 200)
            assert len(list(process.stub.Generate(message, timeout=10))) == 1


def test_a_taken_port_is_an_error_that_names_it(tmp_path):
    with Process(tmp_path) as process:
        second = Process(tmp_path, 0.01, listen=process.address)
        _, errors = second.process.communicate(timeout=20)
        assert second.process.returncode == app.EXIT_PORT
        assert f"port {process.address.rpartition(':')[2]} " in errors


def test_options_that_the_model_does_not_allow_end_the_process_with_the_numbers(tmp_path):
    process = Process(tmp_path, 0.01, "--max-seq-len", "513")
    _, errors = process.process.communicate(timeout=20)
    assert process.process.returncode == app.EXIT_OPTIONS
    assert "--max-seq-len 513 is above the model's 512 positions" in errors


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", "nohost"],
        ["--max-num-seqs", "0"],
        ["--listen", "x"],
        ["--tls-cert", "x"],
        ["--kv-blocks", "-1"],
        ["--form-timeout", "0"],
        ["--tokens-file", "/does/not/exist"],
        ["--unknown"],
    ],
)
def test_contradicting_options_are_usage_errors(flags, capsys):
    with pytest.raises(SystemExit) as error:
        app.configure(["--workers", "a:1", *flags])
    assert error.value.code == 2 and capsys.readouterr().err


def test_nothing_burns_a_core_when_idle(tmp_path):
    with Process(tmp_path, 0.001, "--metrics", "127.0.0.1:0") as process:
        list(process.stub.Generate(request(**LONG), timeout=20))
        processes = [psutil.Process(process.process.pid), process.engine()]
        time.sleep(0.5)
        before = [sum(one.cpu_times()[:2]) for one in processes]
        time.sleep(2.0)
        assert max(sum(one.cpu_times()[:2]) - was for one, was in zip(processes, before)) < 0.06


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pings_earn_no_goaway_and_a_silent_stream_completes(tmp_path):
    model = Pseudo()
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with Served(tmp_path, model) as served, grpc.insecure_channel(served.address, options) as channel:
        states = []
        channel.subscribe(states.append)
        stub = rpc.GenerationStub(channel)
        model.hold()
        call = stub.Generate(request(max_tokens=3, temperature=0, ignore_eos=True))
        time.sleep(120)
        model.go()
        assert tokens(list(call)) == greedy([1, 2, 3], 3)
        time.sleep(60)
        assert tokens(list(stub.Generate(request(max_tokens=3, temperature=0, ignore_eos=True))))
        assert states.count(grpc.ChannelConnectivity.READY) == 1, states


# Metrics


def test_the_prometheus_endpoint_tells_what_dashboards_ask_for(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Process(tmp_path, 0.005, "--metrics-port", str(port), "--log-format", "json") as process:
        for _ in range(3):
            list(process.stub.Generate(request([9] * 20, max_tokens=10, ignore_eos=True), timeout=20))
        with pytest.raises(grpc.RpcError):
            list(process.stub.Generate(request(top_p=0.0), timeout=20))
        list(process.stub.Generate(request([9] * 20, max_tokens=1, request_id="last", tenant="t"), timeout=20))
        time.sleep(0.1)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        samples = {
            (sample.name, *sorted(v for k, v in sample.labels.items() if k not in ("model_name", "le"))): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        assert samples["lockstep_generation_tokens_total",] == 31
        assert samples["lockstep_requests_finished_total", "length"] == 4
        assert samples["lockstep_requests_refused_total", "INVALID_ARGUMENT"] == 1
        assert samples["lockstep_time_to_first_token_seconds_count",] == 4
        assert samples["lockstep_inter_token_latency_seconds_count",] == 27
        assert samples["lockstep_prefix_cache_hits_total",] > 0
        assert samples["lockstep_requests_running",] == samples["lockstep_requests_waiting",] == 0
        for name in (
            "kv_cache_usage_ratio", "preemptions_total", "prompt_tokens_total", "recoveries_total", "engine_epoch",
            "e2e_request_latency_seconds_sum", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum",
            "digests_agreed_total", "prefix_cache_queries_total",
        ):  # fmt: skip
            assert (f"lockstep_{name}",) in samples, name
        assert samples["lockstep_step_seconds_total", "plan"] > 0
    lines = [json.loads(line) for line in process.errors.splitlines() if line.startswith("{")]
    (last,) = [line for line in lines if line.get("request_id") == "last"]
    assert (last["status"], last["finish"], last["completion_tokens"], last["tenant"]) == ("OK", "length", 1, "t")
    assert "9, 9" not in process.errors  # never a prompt


@pytest.mark.parametrize(
    ("mutate", "test"),
    [
        (lambda m: m.setattr(loop.EngineLoop, "_lose", lambda *_: None), test_health_follows_the_workers),
        (
            lambda m: m.setattr(loop.Scheduler, "abort_step", lambda self, epoch, now: setattr(self, "_epoch", epoch)),
            test_streams_go_on_with_the_same_bits_when_workers_are_lost,
        ),
    ],
    ids=["losses ignored", "rows not introduced again"],
)
def test_broken_recovery_does_not_pass(tmp_path, mutate, test, monkeypatch):
    mutate(monkeypatch)
    monkeypatch.setattr("tests.services.test_lifecycle.wait_until", lambda c, timeout_s=1: wait_until(c, 1))
    monkeypatch.setattr(Served, "wait_state", lambda self, state, timeout_s=2: wait_until(
        lambda: self.stats().state == state, 2
    ))  # fmt: skip
    with pytest.raises(Exception):  # noqa: B017
        test(tmp_path)
