"""The CUDA path of a worker: Triton kernels in one reduction order, the ops over them, graphs and the runner."""
