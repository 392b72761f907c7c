import json

import pytest

from flashspec import cli
from flashspec.check import ALPHA, Verdict, report
from flashspec.records import trace_from_json
from flashspec.verifiers import load_verifier


def test_generate_with_a_policy(capsys, tmp_path) -> None:
    file = tmp_path / "trace.json"
    arguments = ["generate", "one two one two one two", "--max-new-tokens", "20", "--save", str(file)]
    assert cli.main([*arguments, "--policy", "contextual"]) == 0
    assert "contextual, block rule" in capsys.readouterr().out
    rounds = trace_from_json(file.read_bytes()).rounds
    assert all(round.estimates and str(round.arm) in round.estimates for round in rounds)
    assert any(round.seconds.policy > 0 for round in rounds)
    assert cli.main([*arguments, "--policy", "magic"]) == 2
    assert "no policy 'magic'" in capsys.readouterr().err


def test_generate_streams_and_saves(capsys, tmp_path) -> None:
    saved = tmp_path / "trace.json"
    arguments = [
        "generate",
        "Name three fruits.",
        "--max-new-tokens",
        "12",
        "--temperature",
        "0",
        "--drafter",
        "nano",
        "--gamma",
        "2",
        "--save",
        str(saved),
    ]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"nano γ=2, block rule, T = 0, verified by {load_verifier().name}" in printed
    assert "12 tokens in" in printed
    trace = trace_from_json(saved.read_bytes())
    assert sum(len(round.emitted) for round in trace.rounds) == 12
    assert {"device", "torch", "transformers"} <= trace.machine.keys()


def test_every_option_of_generate_reaches_the_request() -> None:
    options = cli._parser().parse_args(
        [
            "generate",
            "x",
            "--rule",
            "token",
            "--max-new-tokens",
            "5",
            "--seed",
            "9",
            "--stop",
            "END",
            "--stop-below",
            "0.2",
            "--temperature",
            "0.4",
            "--top-k",
            "7",
            "--top-p",
            "0.8",
            "--min-p",
            "0.1",
            "--repetition-penalty",
            "1.1",
            "--presence-penalty",
            "0.2",
            "--frequency-penalty",
            "0.3",
            "--logit-bias",
            "4=-2",
        ]
    )
    request = cli._request(options)
    assert (request.rule, request.max_new_tokens, request.seed, request.stop, request.stop_below) == (
        "token",
        5,
        9,
        ("END",),
        0.2,
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.4, 7, 0.8, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
    assert sampling.logit_bias == {4: -2.0}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", " "], "prompt is empty"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "x", "--gamma", "-2"], "choose 0"),
        (["generate", "x", "--drafter", "oracle"], "no drafter 'oracle'"),
        (["generate", "x", "--rule", "magic"], "no rule 'magic'"),
        (["generate", "x", "--logit-bias", "word"], "ID=BIAS"),
        (["generate", "x", "--family", "giant"], "no family 'giant'"),
        (["generate", "x" * 20_000, "--max-new-tokens", "1"], "shorten the prompt"),
        (["check", "--samples", "10"], "at least 1000"),
        (["check", "--temperatures", "-1"], "negative"),
        (["pull", "giant"], "nothing to pull"),
    ],
)
def test_bad_input_gets_one_sentence_and_status_2(capsys, arguments, sentence) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert error.count("\n") == 1


def test_check_prints_a_verdict(capsys) -> None:
    arguments = ["check", "--samples", "1000", "--temperatures", "1.3", "--only", "lookup", "--rules", "token"]
    assert cli.main(arguments) in (0, 1)  # with 1000 samples the power of the gate is not assured, its report is
    printed = capsys.readouterr().out
    assert "pass  enumeration, block rule" in printed
    assert "pass  gate, T = 1.3, token rule, lookup: 1000 samples" in printed
    assert "gate rejects: last accepted token overwritten" in printed
    assert printed.strip().splitlines()[-1].startswith(("EXACT: all", "NOT EXACT:"))


def test_report_fails_when_one_check_fails() -> None:
    lines: list[str] = []
    assert report(iter([Verdict("a", True, ""), Verdict("b", True, "")]), lines.append)
    assert f"α = {ALPHA}" in lines[-1]
    assert not report(iter([Verdict("a", True, ""), Verdict("b", False, "")]), lines.append)
    assert lines[-1] == "NOT EXACT: 1 of 2 checks failed: b."


def test_models_lists_the_families(capsys) -> None:
    assert cli.main(["models"]) == 0
    assert "embedded       ready" in capsys.readouterr().out


def test_terminal_output_shows_control_characters_instead_of_sending_them() -> None:
    assert cli._styled("accepted", "a\x1b[2Jb", colour=False) == "a\\x1b[2Jb"
    assert cli._styled("rejected", " x", colour=False) == "[× x]"
    assert cli._styled("bonus", "y", colour=True) == "\033[36my\033[0m"


def test_an_interrupted_run_keeps_its_trace(monkeypatch, tmp_path, capsys) -> None:
    from flashspec.engine import SpeculativeDecoder

    rounds = SpeculativeDecoder.rounds

    def interrupted(self, *arguments):
        for count, round in enumerate(rounds(self, *arguments)):
            if count == 3:
                raise KeyboardInterrupt
            yield round

    monkeypatch.setattr(SpeculativeDecoder, "rounds", interrupted)
    saved = tmp_path / "trace.json"
    assert cli.main(["generate", "Name three fruits.", "--save", str(saved)]) == 130
    assert len(json.loads(saved.read_bytes())["rounds"]) == 3
    assert "ended by: interruption" in capsys.readouterr().out
