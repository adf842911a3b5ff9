"""`lockstep-worker`: one rank as a process.

Knows the command line and the order of starting: settle the process, read the snapshot's headers, bind the port, load,
say SERVING. A snapshot that cannot be served ends the process with code 2 and its reason before any port is bound; a
taken port ends it with code 3.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from worker_svc import launch

SECRET_VARIABLE = "LOCKSTEP_WORKER_SECRET"  # protos.worker_link, which must not be imported before the launch


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep-worker", description="One tensor-parallel rank of a model.")
    parser.add_argument("--listen", default="127.0.0.1:50061", metavar="HOST:PORT")
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="a Hugging Face snapshot folder")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of the group")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, with an index if there are several")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), help="default: the checkpoint's")
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16"), help="of keys and values; default: the model's")
    parser.add_argument("--numerics", default="invariant", choices=("invariant", "fast"))
    parser.add_argument("--tp-invariant", action="store_true", help="on CUDA: the same bits with any --tp, at a price")
    parser.add_argument("--no-cuda-graphs", action="store_true", help="launch kernels one by one: for debugging")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: all cores")
    parser.add_argument("--kv-memory", type=float, metavar="GIB", help="for the KV cache; default: what is sane")
    parser.add_argument(
        "--random-weights", type=int, metavar="SEED", help="draw weights on the device; --model needs a config only"
    )
    parser.add_argument(
        "--advertise", metavar="HOST", help="how the other ranks reach this one; default: the host of --listen"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="with --tls-key and --tls-ca: mutual TLS")
    parser.add_argument("--tls-key", type=Path, metavar="FILE")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="whose certificates may call")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not 0 <= options.rank < options.tp:
        parser.error(f"--rank {options.rank} of --tp {options.tp}")
    tls = (options.tls_cert, options.tls_key, options.tls_ca)
    if any(tls) and not all(tls):
        parser.error("--tls-cert, --tls-key and --tls-ca come together")
    threads = options.threads or launch.available_cores()
    launch.name_process("lockstep-worker")
    launch.keep_large_buffers()
    launch.fix_reductions(options.numerics, threads)
    logging.basicConfig(level=logging.INFO, format=f"lockstep-worker {options.rank}: %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)

    # only now that the environment is settled: these import torch
    from worker_svc.config import WorkerConfig
    from worker_svc.serve import ServeConfig, serve

    try:
        serve(
            WorkerConfig(
                model=options.model,
                rank=options.rank,
                tp=options.tp,
                device=options.device,
                dtype=options.dtype,
                kv_dtype=options.kv_dtype,
                numerics=options.numerics,
                tp_invariant=options.tp_invariant,
                threads=threads,
                cuda_graphs=not options.no_cuda_graphs,
                kv_memory_bytes=None if options.kv_memory is None else int(options.kv_memory * 2**30),
                random_weights=options.random_weights,
            ),
            ServeConfig(
                listen=options.listen,
                advertise=options.advertise or options.listen.rpartition(":")[0],
                secret=os.environ.get(SECRET_VARIABLE) or None,
                tls=tls if all(tls) else None,
            ),
        )
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: a collective that still waits for a lost peer would hold the interpreter's end up


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
