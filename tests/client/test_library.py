"""The library against a server of known behaviour: streams, batches, cancelling, errors, reconnecting."""

import asyncio
import time

import grpc
import pytest

from client import (
    NEVER,
    AsyncLockstep,
    Chat,
    Completion,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidRequest,
    Lockstep,
    LockstepError,
    Overloaded,
    RetryPolicy,
    ServerError,
    Unreachable,
)
from client.run import Run
from tests.client.mock_server import MockServer, Script, script

QUICK = RetryPolicy(patience_s=5.0, first_backoff_s=0.02, max_backoff_s=0.1)


def expected(length: int, tokens: int) -> tuple[int, ...]:
    return tuple((length + at) % 1000 for at in range(tokens))


def wait_until(condition: object, timeout_s: float = 3.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_a_stream_gives_the_same_as_the_whole_answer(server: MockServer) -> None:
    with Lockstep(server.address) as client:
        whole = client.generate([1, 2, 3], max_tokens=6, logprobs=0)
        stream = client.stream([1, 2, 3], max_tokens=6, logprobs=0)
        deltas = list(stream)
    assert whole.token_ids == expected(3, 6) == sum((delta.token_ids for delta in deltas), ())
    assert whole.text == "".join(delta.text for delta in deltas) == stream.completion.text
    assert whole.usage.completion_tokens == 6 and whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs[0] == float("-inf")


def test_every_choice_arrives(server: MockServer) -> None:
    with Lockstep(server.address) as client:
        answer = client.generate([1, 2, 3], max_tokens=4, n=3)
    assert [choice.token_ids for choice in answer.choices] == [expected(3 + index, 4) for index in range(3)]


def test_leaving_the_loop_cancels_on_the_server(server: MockServer) -> None:
    server.servicer.default = Script(gap=0.05)
    with Lockstep(server.address) as client:
        for _ in client.stream("x", max_tokens=1000, request_id="left"):
            break
        wait_until(lambda: server.sent["left"].cancelled == 1)


def test_leaving_an_async_loop_cancels_on_the_server(server: MockServer) -> None:
    server.servicer.default = Script(gap=0.05)

    async def leave() -> None:
        async with AsyncLockstep(server.address) as client:
            async for _ in client.stream("x", max_tokens=1000, request_id="left"):
                break
            await asyncio.sleep(0.3)
            assert server.sent["left"].cancelled == 1

    asyncio.run(leave())


def test_a_batch_keeps_order_and_an_error_takes_one_place(server: MockServer) -> None:
    with Lockstep(server.address) as client:
        answers = client.batch([[1] * length for length in (5, 2, 9)] + ["bad", "fine"], max_tokens=3, window=2)
    assert [len(server.sent)] == [5]
    assert [answer.token_ids for answer in answers[:3] if isinstance(answer, Completion)] == [
        expected(length, 3) for length in (5, 2, 9)
    ]
    assert isinstance(answers[3], InvalidRequest) and answers[3].fields == {"prompt": "prompt: bad"}
    assert isinstance(answers[4], Completion)


def test_an_async_batch_gives_the_same(server: MockServer) -> None:
    async def run() -> list[object]:
        async with AsyncLockstep(server.address) as client:
            return list(await client.batch([[1] * length for length in (5, 2, 9)], max_tokens=3, window=2))

    answers = asyncio.run(run())
    assert [answer.token_ids for answer in answers if isinstance(answer, Completion)] == [
        expected(length, 3) for length in (5, 2, 9)
    ]


def test_a_chat_goes_as_messages(server: MockServer) -> None:
    with Lockstep(server.address) as client:
        client.chat([{"role": "user", "content": "hi"}], max_tokens=1, request_id="chat")
        client.generate(Chat([{"role": "user", "content": "hi"}]), max_tokens=1, request_id="same")
    first, second = server.sent["chat"].requests[0], server.sent["same"].requests[0]
    assert first.chat == second.chat and first.chat.messages[0].role == "user"


def test_absent_stays_absent_and_zero_is_sent(server: MockServer) -> None:
    with Lockstep(server.address) as client:
        client.generate("x", max_tokens=1, temperature=0.0, request_id="zero")
    sampling = server.sent["zero"].requests[0].sampling
    assert sampling.HasField("temperature") and not sampling.HasField("top_p") and not sampling.HasField("seed")


@pytest.mark.parametrize("seed", [-1, 2**64, -(2**63) - 1])
def test_a_value_the_wire_cannot_carry_is_refused_by_name(seed: int) -> None:
    with Lockstep("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match="seed"):
        client.generate("x", seed=seed)


@pytest.mark.parametrize("kill", ["fail", "streams"])
def test_a_cut_stream_continues_with_nothing_lost_or_doubled(server: MockServer, kill: str) -> None:
    server.servicer.default = Script(gap=0.02, fail_at=10 if kill == "fail" else -1, fail_code="UNAVAILABLE")
    with Lockstep(server.address, retry=QUICK) as client:
        stream = client.stream([1] * 4, max_tokens=30, n=2, logprobs=0, request_id="cut")
        for index, _ in enumerate(stream):
            if kill == "streams" and index in (7, 31):
                server.kill_streams()
    answer = stream.completion
    assert [choice.token_ids for choice in answer.choices] == [expected(4, 30), expected(5, 30)]
    assert [len(choice.logprobs) for choice in answer.choices] == [30, 30]
    assert answer.text == "".join(f"{token} " for token in expected(4, 30))
    assert answer.resumed == (1 if kill == "fail" else 2) and answer.usage.completion_tokens == 60
    again = server.sent["cut"].requests[1]
    assert again.resume.seed == 7 and again.expected_fingerprint == "mock" and again.request_id == "cut"


def test_a_mutant_that_forgets_what_it_has_is_caught(server: MockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    message = Run.message

    def forgetful(self: Run, now: float) -> object:
        made = message(self, now)
        made.ClearField("resume")
        return made

    monkeypatch.setattr(Run, "message", forgetful)
    server.servicer.default = Script(gap=0.01)
    with Lockstep(server.address, retry=QUICK) as client:
        stream = client.stream([1] * 4, max_tokens=20)
        for index, _ in enumerate(stream):
            if index == 5:
                server.kill_streams()
    assert stream.completion.token_ids != expected(4, 20)


def test_another_replica_takes_the_stream_over() -> None:
    with MockServer() as first, MockServer() as second:
        first.servicer.default = second.servicer.default = Script(gap=0.02)
        with Lockstep([first.address, second.address], retry=QUICK) as client:
            stream = client.stream([1] * 4, max_tokens=20, request_id="moves")
            for index, _ in enumerate(stream):
                if index == 5:
                    first.stop()
        assert stream.completion.token_ids == expected(4, 20)
        assert len(first.sent["moves"].requests) == len(second.sent["moves"].requests) == 1


def test_a_scheduler_that_comes_back_on_its_port_is_found_again() -> None:
    first = MockServer()
    first.servicer.default = Script(gap=0.02)
    with Lockstep(first.address, retry=QUICK) as client:
        stream = client.stream([1] * 4, max_tokens=20)
        second = None
        for index, _ in enumerate(stream):
            if index == 5:
                first.stop()
                second = MockServer(address=first.address)
        assert stream.completion.token_ids == expected(4, 20)
        assert second is not None
        second.stop()


def test_a_replica_with_other_bits_is_refused() -> None:
    with MockServer() as first, MockServer("other") as second:
        first.servicer.default = Script(gap=0.02)
        with Lockstep([first.address, second.address], retry=QUICK) as client:
            stream = client.stream([1] * 4, max_tokens=20)
            with pytest.raises((FingerprintMismatch, Unreachable)) as caught:
                for index, _ in enumerate(stream):
                    if index == 5:
                        first.stop()
        assert caught.value.partial is not None and len(caught.value.partial.token_ids) >= 6


def test_an_async_stream_and_a_batch_are_resumed_too(server: MockServer) -> None:
    server.servicer.default = Script(gap=0.02)

    async def run() -> None:
        async with AsyncLockstep(server.address, retry=QUICK) as client:
            stream, count = client.stream([1] * 4, max_tokens=20), 0
            async for _ in stream:
                count += 1
                if count == 5:
                    await asyncio.to_thread(server.kill_streams)
            assert stream.completion.token_ids == expected(4, 20) and stream.completion.resumed == 1
            count, answers = 0, {}
            async for index, news in client.batch_stream([[1] * length for length in range(1, 9)], max_tokens=20):
                count += 1
                if count == 40:
                    await asyncio.to_thread(server.kill_streams)
                if isinstance(news, Completion):
                    answers[index] = news
            assert [answers[index].token_ids for index in range(8)] == [expected(at, 20) for at in range(1, 9)]
            assert all(answer.resumed == 1 for answer in answers.values())

    asyncio.run(run())


def test_a_blocking_batch_is_resumed_too(server: MockServer) -> None:
    server.servicer.default = Script(gap=0.02)
    count, answers = 0, {}
    with Lockstep(server.address, retry=QUICK) as client:
        for index, news in client.batch_stream([[1] * length for length in range(1, 9)], max_tokens=20):
            count += 1
            if count == 40:
                server.kill_streams()
            if isinstance(news, Completion):
                answers[index] = news
    assert [answers[index].token_ids for index in range(8)] == [expected(at, 20) for at in range(1, 9)]


@pytest.mark.parametrize("many", [False, True])
def test_a_full_queue_is_tried_again_when_the_server_says(server: MockServer, many: bool) -> None:
    busy = script(refuse=2, retry_after=0.2)
    began = time.monotonic()
    with Lockstep(server.address, retry=QUICK) as client:
        if many:
            answer = client.batch(["x"], max_tokens=2, tenant=busy, request_id="busy")[0]
        else:
            answer = client.generate("x", max_tokens=2, tenant=busy, request_id="busy")
    assert isinstance(answer, Completion) and answer.token_ids == expected(1, 2)
    assert time.monotonic() - began >= 0.4


def test_a_full_queue_is_an_error_when_patience_ends(server: MockServer) -> None:
    with Lockstep(server.address, retry=RetryPolicy(patience_s=0.3)) as client, pytest.raises(Overloaded):
        client.generate("x", tenant=script(refuse=100, retry_after=0.1))


def test_a_fault_of_the_request_is_not_tried_again(server: MockServer) -> None:
    with Lockstep(server.address, retry=QUICK) as client:
        with pytest.raises(ServerError) as caught:
            client.generate([1], max_tokens=8, tenant=script(fail_at=3), request_id="nan")
        with pytest.raises(InvalidRequest):
            client.generate("bad", request_id="bad")
        with pytest.raises(FingerprintMismatch):
            client.generate("x", expected_fingerprint="another")
    assert len(server.sent["nan"].requests) == len(server.sent["bad"].requests) == 1
    assert caught.value.partial is not None and caught.value.partial.token_ids == expected(1, 3)


def test_the_deadline_is_total_over_all_attempts(server: MockServer) -> None:
    began = time.monotonic()
    with Lockstep(server.address, retry=QUICK) as client, pytest.raises(DeadlineExceeded):
        client.generate("x", tenant=script(refuse=1000, retry_after=0.1), timeout_s=0.5)
    assert time.monotonic() - began < 1.5


def test_no_server_is_a_clear_error_in_time() -> None:
    began = time.monotonic()
    with Lockstep("127.0.0.1:1", retry=RetryPolicy(patience_s=1.0)) as client, pytest.raises(Unreachable):
        client.generate("x")
    with Lockstep("no-such-host.invalid:1", retry=RetryPolicy(patience_s=1.0)) as client:
        with pytest.raises(Unreachable, match=r"no-such-host|DNS|resol"):
            client.info()
    assert 1.0 < time.monotonic() - began < 8.0


def test_never_tries_once(server: MockServer) -> None:
    with Lockstep(server.address, retry=NEVER) as client, pytest.raises(LockstepError):
        client.generate("x", tenant=script(refuse=1), request_id="once")
    assert len(server.sent["once"].requests) == 1


def test_a_token_travels_with_every_call(server: MockServer) -> None:
    with Lockstep(server.address, token="secret") as client:
        client.generate("x", max_tokens=1, request_id="with")
    assert server.sent["with"].metadata["authorization"] == "Bearer secret"


def test_a_starting_server_is_waited_for() -> None:
    with MockServer() as first:
        address = first.address
    with Lockstep(address, retry=QUICK) as client:
        with pytest.raises(grpc.FutureTimeoutError):
            grpc.channel_ready_future(grpc.insecure_channel(address)).result(timeout=0.2)
        import threading

        late: list[MockServer] = []
        timer = threading.Timer(0.5, lambda: late.append(MockServer(address=address)))
        timer.start()
        assert client.info().model == "mock"
        timer.join()
        late[0].stop()
