"""What `bench bandit` learned on someone's prompts, as settings of an engine for production: vLLM, SGLang or transformers.

Those engines take one drafter and one γ, so each workload gets its best fixed arm; where the composite of lookup and model is best,
its model part is taken, and the note says what is lost. Options are those that the engines document.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashspec.drafters.lookup import LONGEST, SHORTEST
from flashspec.models.catalog import EMBEDDED, FAMILIES, HUB_IDS
from flashspec.records import Arm

ENGINES = ("vllm", "sglang", "transformers")


@dataclass(frozen=True)
class Choice:
    """What one workload should run with: the arm, and its rate against plain decoding where it was measured."""

    workload: str
    arm: Arm
    speed_up: float
    note: str = ""


def choices(run: Mapping[str, Any]) -> list[Choice]:
    """The best arm of every workload of one run of `bench bandit` that these engines can express.

    Raises ValueError with a sentence where the run names no fixed arm.
    """
    found = []
    for kind in dict.fromkeys(line["workload"] for line in run["replay"]):
        rates = {line["contestant"]: line["rate"] for line in run["replay"] if line["workload"] == kind}
        fixed = {name: rate for name, rate in rates.items() if name == "plain" or " γ=" in name}
        plain_rates = {name: rate for name, rate in fixed.items() if not name.startswith("lookup-else-")}
        if "plain" not in plain_rates:
            raise ValueError("This is no result of flashspec bench bandit: it names no fixed arms.")
        best = max(plain_rates, key=lambda name: plain_rates[name])
        composite = max(fixed, key=lambda name: fixed[name])
        note = ""
        if composite != best:
            note = f"{composite} was {fixed[composite] / plain_rates[best] - 1:.0%} faster, but needs FlashSpec"
        found.append(Choice(kind, _arm(best), plain_rates[best] / plain_rates["plain"], note))
    return found


def settings(engine: str, arm: Arm, models: str | None = None) -> dict[str, Any]:
    """Documented options of `engine` for an arm. models: a folder that holds the embedded models as ordinary checkpoints.

    Raises ValueError with a sentence for an engine or a drafter that cannot be expressed.
    """
    if engine not in ENGINES:
        raise ValueError(f"There is no engine {engine!r}; choose one of {', '.join(ENGINES)}.")
    if arm.gamma == 0:
        return {}
    if arm.drafter == "lookup":
        return _LOOKUP[engine](arm.gamma)
    return _DRAFT[engine](_place(arm.drafter, models), arm.gamma)


def command(engine: str, target: str, options: Mapping[str, Any], models: str | None = None) -> str:
    """A line to paste."""
    where = _place(target, models)
    if engine == "vllm":
        config = ["--speculative-config", json.dumps(options)] if options else []
        return shlex.join(["vllm", "serve", where, *config])
    if engine == "sglang":
        flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", where, *flags])
    shown = ", ".join(
        f"{name}={'AutoModelForCausalLM.from_pretrained(' + repr(value) + ')' if name == 'assistant_model' else repr(value)}"
        for name, value in options.items()
    )
    return f"model.generate(**inputs{', ' + shown if shown else ''})"


def unpack(name: str, folder: Path) -> Path:
    """An embedded model as an ordinary checkpoint with its tokenizer, for engines that know nothing of packed rows."""
    from flashspec.models.catalog import load_model, load_tokenizer

    place = folder / name
    load_model(name).bfloat16().save_pretrained(place, safe_serialization=True)
    load_tokenizer(name).save_pretrained(place)
    return place


_LOOKUP: dict[str, Callable[[int], dict[str, Any]]] = {
    "vllm": lambda gamma: {
        "method": "ngram", "num_speculative_tokens": gamma, "prompt_lookup_max": LONGEST, "prompt_lookup_min": SHORTEST,
    },
    "sglang": lambda gamma: {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": gamma + 1},
    "transformers": lambda gamma: {"prompt_lookup_num_tokens": gamma, "max_matching_ngram_size": LONGEST},
}  # fmt: skip
_DRAFT: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "vllm": lambda model, gamma: {"method": "draft_model", "model": model, "num_speculative_tokens": gamma},
    "sglang": lambda model, gamma: {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": model, "speculative_num_steps": gamma,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": gamma + 1,
    },
    "transformers": lambda model, gamma: {
        "assistant_model": model, "num_assistant_tokens": gamma, "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
}  # fmt: skip


def _arm(name: str) -> Arm:
    drafter, _, gamma = name.partition(" γ=")
    return Arm(drafter, int(gamma or 0))


def _place(name: str, models: str | None) -> str:
    """Where that engine finds a model: a hub id, or a folder of unpacked embedded ones."""
    name = FAMILIES[name].target if name in FAMILIES else name
    if name == "early-exit":
        raise ValueError("Early exit is a drafter of FlashSpec alone; choose another arm for this engine.")
    if name in EMBEDDED:
        if models is None:
            raise ValueError(
                f"{name} is packed for FlashSpec; say with --models where to write it as an ordinary checkpoint."
            )
        return f"{models.rstrip('/')}/{name}"
    return HUB_IDS.get(name, name)
