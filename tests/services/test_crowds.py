"""Many clients of one service: ids that collide, pools that are too small, more requests than anybody can keep."""

import queue
import resource
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2

from protos import generation_pb2 as pb
from protos import generation_pb2_grpc as rpc
from tests.services.pseudo import Pseudo, V, greedy
from tests.services.served import Served, finish, logprobs, request, text, tokens, usage


def prompt_of(at):
    return [at % V, at // V, 7]


class Client:
    """One channel and one GenerateMany call of its own; `close` when all is sent."""

    def __init__(self, address):
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._outbox = queue.Queue()
        self._call = rpc.GenerationStub(self._channel).GenerateMany(iter(self._outbox.get, None), timeout=120)

    def send(self, message):
        self._outbox.put(pb.ClientMessage(request=message))

    def close(self):
        self._outbox.put(None)

    def next(self):
        return next(self._call).events

    def read(self):
        """Events by request id, to the end of the call."""
        found = {}
        for message in self._call:
            for event in message.events:
                found.setdefault(event.request_id, []).append(event)
        self._channel.close()
        return found


# Ids


def test_two_clients_that_both_number_from_zero_do_not_mix(tmp_path):
    """The second one's ids are refused while the first one's live; each stream is what it is alone."""
    with Served(tmp_path, Pseudo(step_s=0.01)) as served:
        first, second = Client(served.address), Client(served.address)
        for at in range(6):
            first.send(request(prompt_of(at), request_id=str(at), max_tokens=40, temperature=0, ignore_eos=True))
        seen = {event.request_id for event in first.next()}
        while len(seen) < 6:
            seen |= {event.request_id for event in first.next()}
        for at in range(9):
            second.send(request(prompt_of(at + 50), request_id=str(at), max_tokens=5, temperature=0, ignore_eos=True))
        second.close(), first.close()
        theirs, ours = second.read(), first.read()
        for at in range(9):
            events = theirs[str(at)]
            if at < 6:
                assert [event.status.code for event in events] == [code_pb2.ALREADY_EXISTS]
            else:
                assert tokens(events) == greedy(prompt_of(at + 50), 5)
        for at in range(6):
            whole = greedy(prompt_of(at), 40)
            got = tokens(ours[str(at)])
            assert got == whole[len(whole) - len(got) :] and len(got) > 30
        served.wait_idle()


def test_of_many_with_one_id_at_one_moment_only_one_runs(tmp_path):
    with Served(tmp_path, Pseudo(step_s=0.002)) as served:

        def ask(at):
            try:
                events = served.generate(
                    prompt=prompt_of(at), request_id="x", max_tokens=20, temperature=0, ignore_eos=True
                )
            except grpc.RpcError as error:
                return error.code().name
            assert tokens(events) == greedy(prompt_of(at), 20), "somebody else's tokens"
            return "OK"

        with ThreadPoolExecutor(20) as pool:
            for _ in range(5):
                codes = Counter(pool.map(ask, range(20)))
                assert codes["OK"] >= 1 and codes["OK"] + codes["ALREADY_EXISTS"] == 20, codes
                assert ask(3) == "OK", "the id is free as soon as its stream has ended"
        served.wait_idle()


# Preemption

VARIANTS = [
    dict(temperature=0),
    dict(seed=4, temperature=1),
    dict(seed=5, repetition_penalty=1.3, presence_penalty=0.5),
    dict(seed=6, logprobs=2),
    dict(seed=7, min_tokens=60),
    dict(seed=8, stop=["\x00\x00"]),
    dict(seed=9, top_k=20, top_p=0.9),
    dict(seed=10, frequency_penalty=0.3, logprobs=0),
]


@pytest.mark.parametrize("blocks, block_size", [(24, 16), (70, 4), (9, 64)])
@pytest.mark.parametrize("forecast", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_preempted_requests_are_told_what_a_large_pool_tells_them(tmp_path, cache, forecast, blocks, block_size):
    """Eight requests of 20 + 60 tokens in a pool for about half of them."""
    messages = [
        request(prompt=[20 + at] * 20, max_tokens=60, ignore_eos=True, **more) for at, more in enumerate(VARIANTS)
    ]
    options = dict(max_seq_len=128, prefix_cache=cache, forecast=forecast, block_size=block_size)

    def outcomes(folder, num_blocks):
        with Served(tmp_path / folder, Pseudo(num_blocks=num_blocks), **options) as served:
            streams = [list(call) for call in [served.stub.Generate(message, timeout=60) for message in messages]]
            served.wait_idle()
            return streams, served.stats().values["preemptions_total"]

    expected, none = outcomes("large", 1000)
    streams, preemptions = outcomes("small", blocks)
    assert none == 0 and (forecast or preemptions >= 4)
    for events, whole in zip(streams, expected):
        assert (tokens(events), logprobs(events), text(events)) == (tokens(whole), logprobs(whole), text(whole))
        assert finish(events).reason == finish(whole).reason
        assert len(tokens(events)) == usage(events).completion_tokens <= 60 and usage(events).prompt_tokens == 20
    assert sum(len(tokens(events)) == 60 for events in streams) >= 7


# Scores and shared prefixes


@pytest.mark.parametrize("lengths", [(33, 20), (17, 32)])
def test_scores_of_overlapping_prompts_do_not_depend_on_order(tmp_path, lengths):
    base = np.random.default_rng(0).integers(0, V, 60).tolist()
    prompts = [base[: lengths[0]], [*base[: lengths[1]], 5, 6]]

    def scores(folder, order, **options):
        with Served(tmp_path / folder, **options) as served:
            found = {}
            for which in order:
                served.generate(prompt=prompts[which], max_tokens=2, ignore_eos=True)
                events = served.generate(prompt=prompts[which], prompt_logprobs=1, max_tokens=2, ignore_eos=True)
                found[which] = [entry.logprob for event in events for entry in event.prompt_logprobs]
            return [found[0], found[1]]

    expected = scores("off", (0, 1), prefix_cache=False)
    assert [len(found) for found in expected] == [len(prompt) for prompt in prompts]
    assert scores("a", (0, 1)) == expected == scores("b", (1, 0))


# Floods


@pytest.mark.parametrize("count", [1200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_a_flood_of_long_prompts_ends_each_once_and_memory_does_not_grow_with_it(tmp_path, count):
    """As many as slots and queue hold are answered; all others are refused at once, and leave nothing."""
    model = Pseudo(step_s=0.01, max_position_embeddings=2048)
    sizes = dict(max_seq_len=1100, max_num_seqs=8, max_queue=92, num_blocks=600, max_batch_tokens=512)
    with Served(tmp_path, model, **sizes, check_invariants=False) as served:
        peaks = []
        for _ in range(2):
            client = Client(served.address)
            prompt = [at % V for at in range(1000)]
            for at in range(count):
                client.send(request([at % V, *prompt[1:]], request_id=str(at), n=1 + at % 2, max_tokens=2, seed=at))
            client.close()
            events = client.read()
            ends = Counter()
            for rows in events.values():
                (end,) = [event for event in rows if event.HasField("usage") or event.HasField("status")]
                assert end is rows[-1]
                ends[code_pb2.Code.Name(end.status.code)] += 1
            assert sum(ends.values()) == count and set(ends) == {"OK", "RESOURCE_EXHAUSTED"}, ends
            assert ends["OK"] >= 50 and ends["RESOURCE_EXHAUSTED"] > count // 2, ends
            served.wait_idle()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        assert peaks[1] - peaks[0] < 50, f"MiB after each flood: {peaks}"
