import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    Lfm2Config,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
)
from worlds import cached, decoder, ids, llama, run

from flashspec.engine import Request
from flashspec.sampling import SamplingParams
from flashspec.target import CachedModel, cache_argument, probe

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(config, attention: str = "sdpa"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().requires_grad_(False)
    model.get_output_embeddings().weight.mul_(20)
    return model


def plain_greedy(model, prompt, length):
    """Argmax of forwards without any cache."""
    context = list(prompt)
    for _ in range(length):
        context.append(int(model(torch.tensor([context]), use_cache=False).logits[0, -1].argmax()))
    return context[len(prompt) :]


def test_read_equals_a_forward_without_cache() -> None:
    model, prompt = cached(0), [3, 1, 4, 1, 5, 9, 2, 6]
    for tokens, keep in ((prompt, 3), (prompt[:5], 1), ([*prompt[:5], 7, 7], 2), (prompt, 8), ([7], 1), (prompt, 1)):
        wanted = model.model(torch.tensor([tokens]), use_cache=False).logits[:, -keep:]
        assert torch.allclose(model.read(tokens, keep), wanted, atol=1e-4)
        assert model.tokens == tokens


def test_long_prompts_are_read_in_chunks(monkeypatch) -> None:
    tokens = [int(x) for x in torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(1))]
    wanted = cached(0).read(tokens, keep=20)
    monkeypatch.setattr("flashspec.target.PREFILL_CHUNK", 16)
    assert torch.allclose(cached(0).read(tokens, keep=20), wanted, atol=1e-4)


def test_a_longer_text_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="context ends at 16"):
        cached(0, context=16).read([1] * 17)


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (MistralConfig(**SMALL, sliding_window=8), "sdpa"),
        (MistralConfig(**SMALL, sliding_window=8), "eager"),
        (Gemma2Config(**SMALL, sliding_window=8, head_dim=8), "eager"),  # every other layer has a window
    ],
)
def test_sliding_window_equals_plain(config, attention) -> None:
    model, prompt = build(config, attention), [5, 6, 5, 6, 5]
    wanted = plain_greedy(model, prompt, 40)
    draft = cached(1)
    probe(model, "window")
    engine = decoder(CachedModel(model, "window"), {"draft": draft, "same": CachedModel(model, "same")})
    for drafter in ("plain", "draft", "same", "lookup"):
        request = Request(max_new_tokens=40, sampling=SamplingParams(temperature=0))
        assert ids(run(engine, prompt, request, drafter, 4)) == wanted


@pytest.mark.parametrize(
    "config",
    [GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0), Qwen2Config(**SMALL)],
)
def test_other_attention_models_pass_the_probe(config) -> None:
    model = build(config)
    probe(model, "model")
    request = Request(max_new_tokens=20, sampling=SamplingParams(temperature=0))
    assert ids(
        run(decoder(CachedModel(model, "m"), {"draft": cached(1)}), [5, 6, 5], request, "draft")
    ) == plain_greedy(model, [5, 6, 5], 20)


def test_stateful_model_is_refused() -> None:
    mamba = build(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4), "eager")
    hybrid = build(Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]))
    for model in (mamba, hybrid):
        with pytest.raises(ValueError, match="cannot be cut back"):
            probe(model, "stateful")


def test_a_model_that_ignores_its_cache_is_refused(monkeypatch) -> None:
    model = llama()
    forward = type(model).forward

    def forgetful(self, input_ids=None, past_key_values=None, use_cache=None, logits_to_keep=0):
        return forward(self, input_ids=input_ids, logits_to_keep=logits_to_keep)

    monkeypatch.setattr(type(model), "forward", forgetful)
    with pytest.raises(ValueError, match="standard deviations"):
        probe(model, "forgetful")


def test_cache_argument_is_found_by_name() -> None:
    assert cache_argument({"input_ids": 0, "cache": 0}) == "cache"
    assert cache_argument({"input_ids": 0, "past_key_values": 0}) == "past_key_values"
    with pytest.raises(ValueError, match="takes no key/value cache"):
        cache_argument({"input_ids": 0})


def test_probe_leaves_the_model_alone() -> None:
    model = llama()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    probe(model, "llama")
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
