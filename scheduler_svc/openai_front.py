"""`vllm.grpc.engine.VllmEngine`: what the public gateway `smg` speaks to its workers, so that an OpenAI-compatible HTTP
API, routing over replicas and retries come with it. An optional extra (package smg-grpc-proto).

A translation and nothing else: requests become ours and take the same way. Plain proto3 scalars of that protocol mean
"unset" at zero. Text is made by the gateway, tokens leave here; logprobs are the model's raw ones, as OpenAI's are.
What we do not build (constraints, multimodal input, transfers of keys and values) is refused.
"""

import asyncio
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import code_pb2
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from protos import generation_pb2 as pb
from scheduler_svc import statuses
from scheduler_svc.calls import Calls, Context, abort
from scheduler_svc.messages import EngineState

SERVICE_NAME = vllm.DESCRIPTOR.services_by_name["VllmEngine"].full_name
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
PIECE_BYTES = 64 << 10
STATS_TIMEOUT_S = 2.0
FINISH = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
    pb.FINISH_REASON_ERROR: "error",
}


class Unsupported(Exception):
    """A field of theirs that nothing here builds."""


@dataclass(slots=True)
class _Whole:
    """What a choice has said so far: the final message of a call without streaming carries everything."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[pb.TokenAlternatives] = field(default_factory=list)


class VllmEngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    def __init__(self, calls: Calls) -> None:
        self._calls, self._front = calls, calls.front
        self._started = time.time()
        self._last_request = 0.0

    async def Generate(self, request: Any, context: Context) -> None:
        self._last_request = time.time()
        try:
            ours = translate(request)
        except Unsupported as error:
            await abort(context, statuses.status(code_pb2.UNIMPLEMENTED, str(error)))
        answer = _Answer(request.stream, ours.sampling.HasField("logprobs"))

        async def write(event: pb.GenerateEvent) -> None:
            for message in answer.messages(event):
                await context.write(message)

        await self._calls.serve_one(ours, context, write)

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        state = self._front.shown_state
        message = state.value + (f": {self._front.reason}" if self._front.reason else "")
        return vllm.HealthCheckResponse(healthy=state is EngineState.SERVING, message=message)

    async def Abort(self, request: Any, context: Context) -> Any:
        self._front.abort(request.request_ids)
        return vllm.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        model = self._front.model
        if model is None:
            await abort(context, statuses.unavailable(f"the scheduler is starting: {self._front.reason}"))
        engine, description = model.engine, model.engine.description
        return vllm.GetModelInfoResponse(
            model_path=description.model_path,
            tokenizer_path=str(model.tokenizer_folder),
            served_model_name=description.model,
            is_generation=True,
            max_context_length=engine.max_seq_len,
            max_req_input_len=engine.max_seq_len - 1,
            vocab_size=description.vocab_size,
            eos_token_ids=sorted(model.facts.eos_ids),
            bos_token_id=description.bos_token_id or 0,
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        model = self._front.model
        if model is None:
            await abort(context, statuses.unavailable(f"the scheduler is starting: {self._front.reason}"))
        engine = model.engine
        return vllm.GetServerInfoResponse(
            active_requests=self._front.num_live,
            is_paused=self._front.shown_state is not EngineState.SERVING,
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.time() - self._started,
            server_type="lockstep",
            data_parallel_size=1,
            kv_cache_dtype=engine.description.kv_dtype,
            block_size=engine.block_size,
            model_dtype=engine.description.dtype,
            max_num_seqs=engine.max_num_seqs,
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        model, values = self._front.model, await self._stats()
        if model is None or values is None:
            await abort(context, statuses.unavailable("the engine does not answer"))
        engine = model.engine
        running, waiting = int(values["requests_running"]), int(values["requests_waiting"])
        total = engine.num_blocks * engine.block_size
        used = round(values["kv_cache_usage_ratio"] * total)
        load = vllm.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used,
            max_total_num_tokens=total,
            token_usage=values["kv_cache_usage_ratio"],
            max_running_requests=engine.max_num_seqs,
        )
        return vllm.GetLoadsResponse(dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        model = self._front.model
        if model is None or model.tokenizer is None:
            await abort(context, statuses.unavailable("there is no tokenizer to give"))
        data = bundle(model.tokenizer_folder)
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        for at, piece in enumerate(pieces):
            last = at == len(pieces) - 1
            yield common.GetTokenizerChunk(data=piece, sha256=hashlib.sha256(data).hexdigest() if last else "")

    async def _stats(self) -> Mapping[str, float] | None:
        answer: asyncio.Future[Mapping[str, float]] = asyncio.get_running_loop().create_future()
        self._front.ask_stats(lambda values: None if answer.done() else answer.set_result(values))
        try:
            return await asyncio.wait_for(answer, STATS_TIMEOUT_S)
        except TimeoutError:
            return None


class _Answer:
    """Our events as their messages: chunks while streaming, one `complete` for each choice."""

    def __init__(self, stream: bool, wants_logprobs: bool) -> None:
        self._stream, self._wants_logprobs = stream, wants_logprobs
        self._prompt_tokens = 0
        self._whole: dict[int, _Whole] = {}
        self._scores: list[pb.PromptLogprob] = []
        self._endings: list[Any] = []

    def messages(self, event: pb.GenerateEvent) -> list[Any]:
        if event.HasField("started"):
            self._prompt_tokens = event.started.prompt_tokens
        self._scores += event.prompt_logprobs
        whole = self._whole.setdefault(event.index, _Whole())
        whole.token_ids += event.token_ids
        whole.logprobs += event.logprobs
        whole.alternatives += event.alternatives
        messages = []
        if self._stream and event.token_ids:
            chunk = vllm.GenerateStreamChunk(
                token_ids=event.token_ids,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(event.token_ids),
                index=event.index,
            )
            if self._wants_logprobs:
                chunk.output_logprobs.CopyFrom(_output_logprobs(event.token_ids, event.logprobs, event.alternatives))
            if self._scores:
                chunk.input_logprobs.CopyFrom(self._input_logprobs())
            messages.append(vllm.GenerateResponse(chunk=chunk))
        if event.HasField("finish"):
            self._endings.append(self._complete(event, whole))
        if event.HasField("usage"):  # the counts are known with the last choice
            for ending in self._endings:
                ending.complete.cached_tokens = event.usage.cached_tokens
            messages += self._endings
        return messages

    def _complete(self, event: pb.GenerateEvent, whole: _Whole) -> Any:
        complete = vllm.GenerateComplete(
            finish_reason=FINISH[event.finish.reason],
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(whole.token_ids),
            index=event.index,
        )
        stop = event.finish.stop_reason
        if stop.WhichOneof("kind") == "text":
            complete.matched_stop_str = stop.text
        elif stop.WhichOneof("kind") == "token_id":
            complete.matched_token_id = stop.token_id
        if not self._stream:
            complete.output_ids.extend(whole.token_ids)
            if self._wants_logprobs:
                complete.output_logprobs.CopyFrom(_output_logprobs(whole.token_ids, whole.logprobs, whole.alternatives))
            if self._scores and event.index == 0:
                complete.input_logprobs.CopyFrom(self._input_logprobs())
        return vllm.GenerateResponse(complete=complete)

    def _input_logprobs(self) -> Any:
        found = vllm.InputLogProbs()
        for score in self._scores:
            found.token_logprobs.add(**({"value": score.logprob} if score.HasField("logprob") else {}))
            top = found.top_logprobs.add()
            top.values.extend(a.logprob for a in score.alternatives)
            top.token_ids.extend(a.token_id for a in score.alternatives)
        self._scores = []
        return found


def _output_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[pb.TokenAlternatives]
) -> Any:
    found = vllm.OutputLogProbs(token_ids=token_ids, token_logprobs=logprobs)
    for row in alternatives:
        top = found.top_logprobs.add()
        top.values.extend(a.logprob for a in row.alternatives)
        top.token_ids.extend(a.token_id for a in row.alternatives)
    return found


def translate(request: Any) -> pb.GenerateRequest:
    """Their request as ours. Raises Unsupported, naming the field."""
    ours = pb.GenerateRequest()
    if request.request_id:
        ours.request_id = request.request_id
    kind = request.WhichOneof("input")
    if kind == "text":
        ours.text = request.text
    elif kind == "tokenized":
        ours.token_ids.ids.extend(request.tokenized.input_ids)
    for name in ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs"):
        if request.HasField(name):
            raise Unsupported(f"{name} is not supported")
    if request.extra_mm_inputs:
        raise Unsupported("extra_mm_inputs is not supported")
    theirs = request.sampling_params
    constraint = theirs.WhichOneof("constraint")
    if constraint is not None:
        raise Unsupported(f"structured output ({constraint}) is not supported")
    if theirs.HasField("truncate_prompt_tokens"):
        raise Unsupported("truncate_prompt_tokens is not supported")
    _translate_sampling(theirs, ours.sampling)
    return ours


def _translate_sampling(theirs: Any, ours: pb.SamplingParams) -> None:
    for name in ("temperature", "max_tokens", "logprobs", "prompt_logprobs"):  # those with presence
        if theirs.HasField(name):
            setattr(ours, name, getattr(theirs, name))
    for name in ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n"):
        if getattr(theirs, name):  # theirs has no presence here: zero is unset
            setattr(ours, name, getattr(theirs, name))
    if theirs.min_tokens:
        ours.min_tokens = theirs.min_tokens
    if theirs.HasField("seed"):
        ours.seed = theirs.seed % (1 << 64)
    ours.stop.extend(theirs.stop)
    ours.stop_token_ids.extend(theirs.stop_token_ids)
    ours.ignore_eos = theirs.ignore_eos
    ours.include_stop_str_in_output = theirs.include_stop_str_in_output
    ours.skip_special_tokens = theirs.skip_special_tokens
    ours.logprob_mode = pb.LOGPROB_MODE_RAW
    for token_id, bias in theirs.logit_bias.items():
        ours.logit_bias[token_id] = bias


def bundle(folder: Path) -> bytes:
    """The files that a tokenizer is made of, as one zip; the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in TOKENIZER_FILES:
            if (folder / name).exists():
                archive.writestr(zipfile.ZipInfo(name), (folder / name).read_bytes())
    return buffer.getvalue()


def add_openai_front(server: grpc.aio.Server, calls: Calls) -> Sequence[str]:
    """Register the service; its name, for reflection."""
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineService(calls), server)
    return (SERVICE_NAME,)
