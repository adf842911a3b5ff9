"""One request, one answer, whatever the number of ranks, the pipeline's depth, the place of sampling, the threads."""

import pytest

from bench.traffic import Crowd, mixed_requests
from tests.cluster import Cluster

pytestmark = pytest.mark.services

REQUESTS = mixed_requests(21, count=10)
MODES = {
    "depth 4, small steps": dict(pipeline_depth=4, max_batch_tokens=24, max_num_seqs=5),
    "two ranks, sampled at the scheduler": dict(tp=2, sample_at="scheduler", max_batch_tokens=48),
    "four ranks, depth 1": dict(tp=4, pipeline_depth=1),
    "two threads, a small pool of small blocks": dict(threads=2, block_size=4, kv_blocks=60, max_num_seqs=12),
}
MORE_MODES = {
    "depth 1": dict(pipeline_depth=1),
    "sampled at the scheduler": dict(sample_at="scheduler"),
    "two ranks": dict(tp=2),
    "four ranks, depth 4": dict(tp=4, pipeline_depth=4),
    "two threads": dict(threads=2),
    "no prefix cache": dict(no_prefix_cache=True),
}


for _request in REQUESTS[::3]:
    _request.sampling.return_logits = True


def answers(model, **flags):
    with Cluster(model, **flags) as cluster:
        found = Crowd(cluster.address, REQUESTS).join()
    assert all(answer.is_whole(max(1, request.sampling.n)) for answer, request in zip(found, REQUESTS))
    return found


@pytest.fixture(scope="module")
def reference(tiny):
    found = answers(tiny, pipeline_depth=2)
    assert any(answer.choices[0].logits for answer in found)
    return found


@pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
def test_the_bits_do_not_depend_on_the_deployment(tiny, reference, flags):
    found = answers(tiny, **flags)
    if "sample_at" in flags:  # the fingerprint says so, and the bits are the same all the same
        assert all(a.fingerprint != b.fingerprint for a, b in zip(found, reference))
        for answer, other in zip(found, reference):
            answer.fingerprint = other.fingerprint
    assert found == reference


@pytest.mark.slow
@pytest.mark.parametrize("flags", MORE_MODES.values(), ids=MORE_MODES)
def test_the_bits_do_not_depend_on_the_deployment_either(tiny, reference, flags):
    test_the_bits_do_not_depend_on_the_deployment(tiny, reference, flags)


@pytest.mark.slow
def test_fast_is_another_fingerprint(tiny, reference):
    (found, *_) = answers(tiny, numerics="fast")
    assert found.fingerprint != reference[0].fingerprint
