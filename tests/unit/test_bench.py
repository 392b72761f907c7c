import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flashspec import cli
from flashspec.bench import baselines, report
from flashspec.bench.workloads import workloads
from flashspec.verifiers import reason_without_triton

ROOT = Path(__file__).parents[2]
SAVED = ROOT / "assets" / "benchmarks" / "verify_h200.json"


def test_readme_table_is_the_saved_result() -> None:
    assert report.table(report.load(SAVED)) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_saved_result_names_its_machine() -> None:
    saved = report.load(SAVED)
    assert {"device", "versions", "date", "command", "copy_bandwidth"} <= saved.keys()
    assert len(saved["rows"]) == 64


def test_bench_verify_runs_without_a_gpu_and_says_what_it_skipped(capsys, tmp_path, monkeypatch) -> None:
    from flashspec.bench import verify

    if torch.cuda.is_available():
        return
    monkeypatch.setattr(verify, "GAMMAS", (1,))
    monkeypatch.setattr(verify, "VOCABULARIES", (1000,))
    saved = tmp_path / "out.json"
    assert cli.main(["bench", "verify", "--out", str(saved)]) == 0
    assert "skipped" in capsys.readouterr().out
    assert all("eager" in row["launched"] for row in json.loads(saved.read_text())["rows"])


def test_report_of_a_missing_file_gets_a_sentence(capsys) -> None:
    assert cli.main(["bench", "report", "nowhere.json"]) == 2
    assert "bench verify --out" in capsys.readouterr().err


def test_baselines_do_the_same_job() -> None:
    """Both eager versions and top-p: the first token's law is p, to four standard errors."""
    torch.manual_seed(0)
    batch = 20_000
    logits = torch.randn(1, 3, 6).expand(batch, -1, -1).contiguous()
    draft_logits = torch.randn(1, 2, 6).expand(batch, -1, -1).contiguous()
    temperature = torch.full((batch,), 0.8)
    for top_p, function in (
        (1.0, baselines.eager),
        (1.0, baselines.eager_lean),
        (0.8, lambda *a: baselines.eager(*a, top_p=0.8)),
    ):
        q = torch.softmax(draft_logits[0] / 0.8, -1)
        p = torch.softmax(logits[0, 0] / 0.8, -1)
        if top_p < 1:
            q, p = baselines._nucleus(q, top_p), baselines._nucleus(p[None], top_p)[0]
        ids = torch.stack([torch.multinomial(q[i], batch, replacement=True) for i in range(2)], -1)
        tokens, _ = function(logits, draft_logits, ids, temperature)
        share = torch.bincount(tokens[:, 0], minlength=6) / batch
        assert ((share - p).abs() <= 4 * (p * (1 - p) / batch).sqrt() + 1e-6).all()


def test_bench_bandit_measures_prints_and_keeps(tmp_path, capsys) -> None:
    out = tmp_path / "bandit.json"
    common = [
        "bench",
        "bandit",
        "--per-workload",
        "1",
        "--max-new-tokens",
        "12",
        "--out",
        str(out),
        "--policies",
        "rule",
        "contextual",
        "ucb1",
    ]
    assert cli.main([*common, "--temperature", "0"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "milliseconds a round",
        "headroom of switching",
        "oracle (knows the text)",
        "mixed, by the clock",
        "contextual",
    ):
        assert part in printed
    assert cli.main([*common, "--live", "0"]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["temperature"] for run in runs] == [0.0, 0.7]
    assert runs[0]["live"]
    assert not runs[1]["live"]
    for run in runs:
        for workload in {line["workload"] for line in run["replay"]}:
            fixed = [line for line in run["replay"] if line["workload"] == workload and not line["choices"]]
            oracle = next(line for line in fixed if line["contestant"].startswith("oracle"))
            assert max(line["rate"] for line in fixed) == oracle["rate"]  # nothing beats who knows the text
            assert sorted(line["of_best"] for line in fixed if line is not oracle)[-1] == pytest.approx(1.0)
    assert "by the clock" in report.bandit_table(json.loads(out.read_text()))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policies", "magic"], "no policy 'magic'"),
        (["--per-workload", "0"], "at least 1"),
        (["--prompts", "nowhere.jsonl"], "cannot be read as prompts"),
    ],
)
def test_bad_bandit_settings_get_a_sentence(arguments, sentence, capsys) -> None:
    assert cli.main(["bench", "bandit", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_spec_bench_files_are_read(tmp_path) -> None:
    file = tmp_path / "question.jsonl"
    rows = [
        {"category": "math_reasoning", "turns": ["a", "b"]},
        {"category": "writing", "turns": ["c"]},
        {"category": "stem", "turns": ["d"]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert workloads(str(file)) == {"math reasoning": ["a"], "chat": ["c", "d"]}
    ours = workloads()
    assert list(ours) == ["chat", "code edit", "summary", "arithmetic", "report with code"]
    assert all(len(prompts) >= 5 and len(set(prompts)) == len(prompts) for prompts in ours.values())


def test_bench_alpha_agrees_with_decoding(embedded, tmp_path, capsys, monkeypatch) -> None:
    """The share of first drafts that a real run accepts is the acceptance that `bench alpha` tells, and greedy lookup is all or nothing."""
    from flashspec.bandits import Fixed
    from flashspec.bench import alpha
    from flashspec.engine import Request
    from flashspec.records import Arm
    from flashspec.sampling import SamplingParams

    prompts = {"chat": ["Tell me about the sea.", "How do birds fly?"], "list": ["Name ten animals."]}
    result = alpha.run(embedded, prompts, temperature=1.3, tokens=64, write=lambda _: None)
    expected = np.mean([line["alpha"] for line in result["lines"] if line["drafter"] == "nano"])
    first = [
        round.drafted[0].verdict == "accepted"
        for seed in range(6)
        for prompt in ("Tell me about the sea.", "Name ten animals.")
        for round in embedded.decoder().rounds(
            embedded.encode(prompt), Request(64, SamplingParams(1.3), seed=seed), Fixed(Arm("nano", 1))
        )
        if round.drafted
    ]
    assert np.mean(first) == pytest.approx(expected, abs=0.12)
    greedy = alpha.run(embedded, prompts, temperature=0.0, tokens=32, write=lambda _: None)
    lookup = next(line for line in greedy["lines"] if line["drafter"] == "lookup")
    assert 0 <= lookup["drafts"] < 1
    out = tmp_path / "alpha.json"
    monkeypatch.setattr(cli, "_load", lambda options: embedded)
    assert cli.main(["bench", "alpha", "--per-workload", "1", "--max-new-tokens", "16", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "repeated 4-grams of tiny on all texts" in printed
    table = report.TABLES["alpha"](json.loads(out.read_text()))
    assert "lookup-else-nano" in table
    assert "| embedded, 0.7 | chat |" in table


def test_bench_decode_names_every_contestant_and_finds_greedy_equal(embedded, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(cli, "_load", lambda options: embedded)
    prompts = tmp_path / "question.jsonl"
    prompts.write_text(json.dumps({"category": "writing", "turns": ["Name three birds."]}))
    out = tmp_path / "decode.json"
    arguments = ["bench", "decode", "--prompts", str(prompts), "--temperature", "0", "--max-new-tokens", "12"]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    lines = {line["method"]: line for line in json.loads(out.read_text())["runs"][0]["lines"]}
    assert {
        "transformers generate",
        "transformers assisted by nano",
        "FlashSpec plain",
        "FlashSpec bandit",
    } <= lines.keys()
    ours = {name: line for name, line in lines.items() if name.startswith("FlashSpec")}
    assert len({line["digest"] for line in ours.values()}) == 1  # greedy: the same ids, whoever drafts
    assert all(line["differs"] == 0 for line in ours.values())
    assert lines["transformers generate"]["of_reference"] == 1
    assert all(line["tokens"] <= 24 for line in lines.values())
    assert "FlashSpec bandit" in report.TABLES["decode"](json.loads(out.read_text()))
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    assert cli.main([*arguments, "--gguf", "nowhere.gguf"]) == 2
    assert "llama-cpp-python is not installed" in capsys.readouterr().err


def test_repetition_counts_what_stood_before() -> None:
    from flashspec.bench.alpha import repetition

    assert repetition([1, 2, 3, 4, 5, 6, 7]) == 0
    assert repetition([1, 2, 3]) == 0  # too short for any
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repetition([7] * 10) == pytest.approx(6 / 7)


@pytest.mark.parametrize("name", ["bandit_cpu", "alpha", "decode_cpu", "decode_h200", "batch_h200", "shapes_h200"])
def test_readme_shows_the_saved_results(name) -> None:
    result = report.load(ROOT / "assets" / "benchmarks" / f"{name}.json")
    assert report.TABLES[result["benchmark"]](result) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_break_even_is_where_tokens_just_pay() -> None:
    from flashspec.bench.shapes import break_even

    alpha = break_even(1.75, 2)
    assert alpha is not None
    assert 1 + alpha + alpha**2 == pytest.approx(1.75)
    assert break_even(0.9, 3) == 0.0  # a round that costs less than a plain step
    assert break_even(4.01, 3) is None


@pytest.mark.parametrize("name", ["batch", "shapes"])
def test_benchmarks_for_a_gpu_say_so_without_one(name, capsys) -> None:
    if torch.cuda.is_available():
        return
    assert cli.main(["bench", name]) == 2
    assert "GPU" in capsys.readouterr().err


def test_a_plot_that_is_not_there_gets_a_sentence(capsys, tmp_path) -> None:
    saved = ROOT / "assets" / "benchmarks" / "shapes_h200.json"
    assert cli.main(["bench", "report", str(saved), "--plot", str(tmp_path / "x.svg")]) == 2
    assert "no plot of a shapes result" in capsys.readouterr().err


def test_plot_of_decoding_shows_every_contestant(tmp_path) -> None:
    saved = ROOT / "assets" / "benchmarks" / "decode_h200.json"
    pytest.importorskip("matplotlib")
    report.plot_decode(report.load(saved), tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 10_000


@pytest.mark.skipif(reason_without_triton() is not None, reason=str(reason_without_triton()))
def test_shapes_are_measured_in_the_interpreter_too(monkeypatch) -> None:
    from flashspec.bench import shapes

    small = shapes.Shape(layers=1, hidden=32, inner=48, heads=2, groups=1, width=16, vocabulary=60)
    monkeypatch.setattr(shapes, "GAMMAS", (2,))
    monkeypatch.setattr(shapes, "PAIRS", (("8B", "1B"),))
    [line] = shapes.run(lambda text: None, repeats=1, shapes={"8B": small, "1B": small})["lines"]
    assert min(line[part] for part in ("plain", "draft", "read", "verify")) > 0
    cost = (line["draft"] + line["read"] + line["verify"]) / line["plain"]
    assert line["break_even"] == shapes.break_even(cost, 2)
