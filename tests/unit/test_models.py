import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from worlds import ids, llama

from flashspec.bandits import Fixed
from flashspec.engine import Request
from flashspec.models import catalog, lean, packing, tokenizers
from flashspec.models.catalog import load_family
from flashspec.records import Arm
from flashspec.sampling import SamplingParams
from flashspec.verifiers import reason_without_triton


def word_tokenizer(words, **special) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a")), **special
    )


@pytest.fixture
def folder(tmp_path):
    """Writes a model with its tokenizer and gives the folder's name."""

    def write(name, words=("a", "b", "c", "d", "e", "f", "g", "<end>"), seed=0, eos="<end>", vocabulary=97):
        target = tmp_path / name
        llama(vocabulary, seed=seed).save_pretrained(target)
        word_tokenizer(words, eos_token=eos).save_pretrained(target)
        return str(target)

    return write


def test_embedded_family_loads_and_shares_its_models(embedded) -> None:
    assert embedded.drafters == ("plain", "lookup", "nano", "early-exit", "lookup-else-nano")
    assert set(embedded.decoder().drafters) == set(embedded.drafters)
    first, second = embedded.decoder(), embedded.decoder()
    assert first.target.weights is second.target.weights
    assert first.target.tokens is not second.target.tokens
    assert embedded.eos == {2}


def test_acceptance_of_the_embedded_pair_keeps_its_floor(embedded) -> None:
    """nano drafts for tiny: greedy acceptance at γ = 3 on three prompts stays above one half."""
    drafted = accepted = 0
    for prompt in (
        "Explain why the sky is blue.",
        "Give me five tips for a good night's sleep.",
        "Write a letter to a friend.",
    ):
        request = Request(max_new_tokens=48, sampling=SamplingParams(temperature=0), candidates=0)
        for round in embedded.decoder().rounds(embedded.encode(prompt), request, Fixed(Arm("nano", 3))):
            drafted, accepted = drafted + len(round.drafted), accepted + round.tau
    assert accepted / drafted > 0.5


def test_any_two_folders_make_a_family(folder) -> None:
    target, draft = folder("target"), folder("draft", seed=1, vocabulary=104)
    family = load_family(target=target, drafters=[draft], device="cpu")
    assert "draft" in family.drafters
    assert family.arms()[-1] == Arm("lookup-else-draft", 3)
    rounds = family.decoder().rounds([1, 2, 3], Request(max_new_tokens=8), Fixed(Arm("draft", 2)))
    assert 1 <= len(ids(list(rounds))) <= 8


def test_different_tokenizers_are_refused_at_load(folder) -> None:
    target = folder("target")
    swapped = folder("swapped", words=("a", "c", "b", "d", "e", "f", "g", "<end>"))  # the same size
    longer = folder("longer", words=("a", "b", "c", "d", "e", "f", "g", "<end>", "h"))
    ending = folder("ending", eos="g")
    for drafter, reason in (
        (swapped, "id 1 is 'b'"),
        (longer, "exists on one side only"),
        (ending, "eos_token is id 7"),
    ):
        with pytest.raises(ValueError, match=f"tokenizers differ.*{reason}"):
            load_family(target=target, drafters=[drafter], device="cpu")


def test_equal_tokenizers_have_no_difference(embedded) -> None:
    assert tokenizers.difference(embedded.tokenizer, catalog.load_tokenizer("nano")) is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "nothing"}, "choose one of embedded"),
        ({"target": "no-such-model"}, "give a folder, a hub id"),
        ({"device": "cuda"}, "use --device cpu"),
    ],
)
def test_unknown_names_get_a_sentence(arguments, sentence) -> None:
    if arguments.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ValueError, match=sentence):
        load_family(**arguments)


def test_missing_catalogue_model_says_how_to_get_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("FLASHSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ValueError, match="flashspec pull smollm2-135m"):
        load_family("smollm2-135m")
    assert not catalog.is_local("smollm2-135m")
    assert catalog.is_local("embedded")


def test_empty_prompt_gets_a_sentence(embedded) -> None:
    for prompt in ("", "  \n"):
        with pytest.raises(ValueError, match="prompt is empty"):
            embedded.encode(prompt)


def test_packing_loses_at_most_half_a_step(tmp_path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    packing.pack(dict(model.state_dict()), tmp_path / packing.WEIGHTS)
    again = packing.load_packed(tmp_path)
    for name, weight in model.state_dict().items():
        step = weight.abs().amax(-1, keepdim=True) / 127 if weight.ndim == 2 else 0
        assert ((again.state_dict()[name] - weight).abs() <= step / 2 + 1e-6).all()


def test_a_packed_file_that_does_not_fit_is_refused(tmp_path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    state.pop("model.norm.weight")
    packing.pack(state, tmp_path / packing.WEIGHTS)
    with pytest.raises(ValueError, match="does not fit"):
        packing.load_packed(tmp_path)


def test_configurations_of_the_assets_are_plain() -> None:
    for name in catalog.EMBEDDED:
        config = json.loads((catalog.assets() / "models" / name / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert "auto_map" not in config


def test_a_target_spread_over_gpus_is_placed_by_accelerate(folder, monkeypatch) -> None:
    """Without a GPU accelerate has only the processor to spread over; layers, dtype and text are those of an ordinary load."""
    target = folder("target")
    with pytest.raises(ValueError, match="No CUDA device"):
        load_family(target=target, device="spread")
    alone = load_family(target=target, device="cpu", layout="transformers")
    monkeypatch.setattr(catalog, "choose_device", lambda wanted: "cpu")
    load, asked = AutoModelForCausalLM.from_pretrained, list[object]()
    keep = lambda *where, **how: asked.append(how.get("device_map")) or load(*where, **how)  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", keep)
    spread = load_family(target=target, device="spread", layout="transformers")
    assert asked == ["auto"]
    request = Request(12, SamplingParams(temperature=0), candidates=0)
    found = [list(some.decoder().rounds([1, 2, 3], request, Fixed(Arm("early-exit", 2)))) for some in (alone, spread)]
    assert ids(found[0]) == ids(found[1])


def test_a_model_on_several_devices_is_not_taken_for_a_plain_one() -> None:
    model = llama()
    assert lean.suits(model)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert not lean.suits(model)


@pytest.mark.skipif(reason_without_triton() is not None, reason=str(reason_without_triton()))
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels are compiled for it")
def test_graphs_are_taken_where_they_serve(embedded_float32, monkeypatch) -> None:
    """In Triton's interpreter, where a processor stands for the GPU."""
    from flashspec.graphs import GraphDecoder

    models = {"tiny": embedded_float32.target, **embedded_float32.models}
    pool = catalog._graphs(models, 2, "graphs")
    assert list(pool.fused) == ["tiny", "nano", "early-exit"]
    assert len(pool.fused["early-exit"].layers) == 2
    family = replace(embedded_float32, pool=pool)
    assert family.layout == "graphs"
    assert isinstance(family.decoder("triton"), GraphDecoder)
    assert catalog._graphs(models, 2, "auto") is None  # no GPU is there
    models["nano"] = llama(vocabulary=50)
    with pytest.raises(ValueError, match="one vocabulary"):
        catalog._graphs(models, 2, "graphs")
