"""Compile the CPU's loops into the compiler's cache: the first worker after an installation then starts like any other.

    python -m worker_svc.ops.precompile

About half a minute of one core, once. Does nothing where numba is absent. A worker that finds no cache compiles the
same loops by itself, only later.
"""

import torch

from worker_svc.ops.invariance import probe


def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        numerics = probe(dtype)
        if numerics.row_steps == "compiled":
            from worker_svc.ops.cpu_compiled import CompiledCpuOps

            CompiledCpuOps(dtype, numerics).warm_up(dtype)


if __name__ == "__main__":
    main()
