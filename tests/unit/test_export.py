"""Settings for other engines: real option names, the measured arms, nothing invented."""

import json
from pathlib import Path

import pytest

from flashspec import cli, export
from flashspec.records import Arm

SAVED = Path(__file__).parents[2] / "assets" / "benchmarks" / "bandit_cpu.json"


def run_of(family: str = "smollm2-135m") -> dict:
    return next(r for r in json.loads(SAVED.read_text())["runs"] if r["family"] == family)


def test_choices_are_the_best_measured_arms() -> None:
    run = run_of()
    for choice in export.choices(run):
        rates = {line["contestant"]: line["rate"] for line in run["replay"] if line["workload"] == choice.workload}
        single = {name: rate for name, rate in rates.items() if " γ=" in name and not name.startswith("lookup-else-")}
        assert rates[str(choice.arm)] == max(*single.values(), rates["plain"])
        assert choice.speed_up == pytest.approx(rates[str(choice.arm)] / rates["plain"])
    assert {choice.workload for choice in export.choices(run)} == {line["workload"] for line in run["replay"]}


@pytest.mark.parametrize("arm", [Arm("lookup", 5), Arm("nano", 3)])
def test_transformers_knows_every_option(arm) -> None:
    from transformers import GenerationConfig

    options = export.settings("transformers", arm, "/tmp/models")
    options.pop("assistant_model", None)
    unused = GenerationConfig().update(**options)
    assert unused == {}


def test_transformers_really_generates_with_them(embedded_float32) -> None:
    import torch

    options = export.settings("transformers", Arm("nano", 2), "/tmp/models")
    assert options.pop("assistant_model") == "/tmp/models/nano"
    ids = torch.tensor([embedded_float32.encode("Name two birds.")])
    out = embedded_float32.target.generate(
        ids, max_new_tokens=8, do_sample=False, assistant_model=embedded_float32.models["nano"], **options
    )
    plain = embedded_float32.target.generate(ids, max_new_tokens=8, do_sample=False)
    assert out.tolist() == plain.tolist()


def test_documented_options_of_servers() -> None:
    assert export.settings("vllm", Arm("lookup", 5)) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 6,
        "prompt_lookup_min": 2,
    }
    assert export.settings("vllm", Arm("qwen2.5-0.5b", 4)) == {
        "method": "draft_model",
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "num_speculative_tokens": 4,
    }
    line = export.command("sglang", "qwen2.5-1.5b", export.settings("sglang", Arm("qwen2.5-0.5b", 4)))
    assert line.startswith(
        "python -m sglang.launch_server --model-path Qwen/Qwen2.5-1.5B-Instruct --speculative-algorithm STANDALONE"
    )
    assert "--speculative-num-steps 4" in line
    assert "--speculative-num-draft-tokens 5" in line
    assert export.command("vllm", "qwen2.5-1.5b", {}) == "vllm serve Qwen/Qwen2.5-1.5B-Instruct"


def test_the_command_line_writes_checkpoints_that_load(tmp_path, capsys) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = ["export", "vllm", str(SAVED), "--family", "smollm2-135m", "--models", str(tmp_path)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "vllm serve HuggingFaceTB/SmolLM2-135M-Instruct --speculative-config" in printed
    assert str(tmp_path) in printed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nano")
    assert model.config.num_hidden_layers == 6
    assert AutoTokenizer.from_pretrained(tmp_path / "nano").vocab_size == 49152


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["export", "vllm", "nowhere.json"], "no file nowhere.json"),
        (["export", "vllm", str(SAVED), "--family", "giant"], "no run of giant"),
        (["export", "vllm", str(SAVED), "--family", "smollm2-135m"], "--models"),
    ],
)
def test_bad_input_gets_a_sentence(arguments, sentence, capsys) -> None:
    assert cli.main(arguments) == 2
    assert sentence in capsys.readouterr().err
