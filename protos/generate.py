"""Writes the generated code beside the .proto files: `python -m protos.generate [FOLDER]`.

Needs the pinned grpcio-tools (extra `dev`). The result is committed, so that installing needs no compiler;
tests/protos/test_generated.py fails when it is stale.
"""

import sys
from pathlib import Path


def generate(target: Path) -> None:
    """Compile both .proto files into `target`/protos."""
    import google.rpc
    import grpc_tools
    from grpc_tools import protoc

    root = Path(__file__).resolve().parent.parent
    includes = [root, Path(grpc_tools.__file__).parent / "_proto", Path(next(iter(google.rpc.__path__))).parent.parent]
    flags = [f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    sources = ["protos/generation.proto", "protos/worker.proto"]
    if protoc.main(["protoc", *(f"-I{folder}" for folder in includes), *flags, *sources]):
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
