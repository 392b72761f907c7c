"""The distillation recipe at toy size: texts, loss, growth, and that slices of time join."""

import json

import numpy as np
import pytest
import torch
from worlds import llama

from flashspec.models import distill, packing
from flashspec.models.distill import Recipe, Student, build, distil, grow, head_loss, toy
from flashspec.models.scribe import ASSISTANT, USER, Scribe, openings
from flashspec.target import CachedModel


def toy_teacher(vocabulary: int, **more):
    return llama(vocabulary, sharp=1.0, context=2048, **more)


def test_head_loss_equals_autograd() -> None:
    torch.manual_seed(0)
    wanted, wanted_head = torch.randn(21, 6), torch.randn(13, 6)
    for kl_weight, tv_weight in ((1.0, 0.0), (0.3, 1.0)):
        hidden, head = torch.randn(21, 5, requires_grad=True), torch.nn.Parameter(torch.randn(13, 5))
        p, log_q = (wanted @ wanted_head.T).softmax(-1), (hidden @ head.T).log_softmax(-1)
        kl = (p * (p.log() - log_q)).sum(-1).mean()
        tv = (p - log_q.exp()).abs().sum(-1).mean() / 2
        (kl_weight * kl + tv_weight * tv).backward()
        expected, head.grad = head.grad, None
        found_kl, alpha, gradient = head_loss(hidden, head, wanted, wanted_head, kl_weight, tv_weight, chunk=8)
        assert torch.allclose(found_kl, kl, atol=1e-5)
        assert torch.allclose(alpha, 1 - tv, atol=1e-5)
        assert torch.allclose(gradient, hidden.grad, atol=1e-5)
        assert torch.allclose(head.grad, expected, atol=1e-5)


def test_scribe_writes_what_the_model_would(embedded_float32) -> None:
    """Teacher-forced on its own text, the model gives the logits from which the scribe drew; turns are dictated."""
    tokenizer, module = embedded_float32.tokenizer, embedded_float32.models["nano"]
    scribe = Scribe(module, tokenizer, batch=6, length=200)
    begins = openings(tokenizer, 6, seed=3)
    text = scribe.write(begins, seed=1)
    assert text.shape == (6, 200)
    for row, ids in zip(text.tolist(), begins, strict=True):
        assert row[: len(ids)] == ids
        words = tokenizer.decode(row)
        turns = [turn for turn in words.split("<|im_start|>")[1:] if turn.strip()]
        roles = [turn.split("\n")[0] for turn in turns]
        assert roles == ["system", *["user", "assistant"] * len(roles)][: len(roles)]
    row = text[0].tolist()
    expected = CachedModel(module, "nano").read(row[:150], keep=1)[0, -1]
    scribe._at.fill_(149)
    logits = scribe._forward(text[:, 149], 256)[0]
    assert torch.allclose(logits, expected, atol=1e-3)
    assert len({tuple(r) for r in text.tolist()}) == 6


def test_growing_keeps_the_function() -> None:
    teacher = toy_teacher(97).config
    small = build(Student(32, 2, 2, 48), teacher, 64)
    large = build(Student(32, 5, 2, 48), teacher, 64)
    grow(large, small)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.allclose(large(ids).logits, small(ids).logits, atol=1e-5)
    large.model.layers[1].mlp.down_proj.weight.data.add_(0.1)
    assert not torch.allclose(large(ids).logits, small(ids).logits, atol=1e-3)


@pytest.fixture
def run(tmp_path, embedded_float32):
    tokenizer = embedded_float32.tokenizer
    teacher = toy_teacher(len(tokenizer))
    return tmp_path / "run", lambda seconds, recipe: distil(
        teacher, tokenizer, tmp_path / "run", recipe, seconds, write=lambda line: None
    )


def test_the_recipe_runs_in_slices_and_packs(run) -> None:
    folder, go = run
    recipe = distill.replace(toy(Recipe()), train_seconds=0.6)
    slices = 0
    while not go(0.6, recipe):
        if (folder / "state.pt").exists():
            assert packing.load_packed(folder / "nano").config.hidden_size == 32  # every slice leaves students to use
        slices += 1
        assert slices < 60
    assert slices >= 2
    figures = json.loads((folder / "figures.json").read_text())
    assert figures.keys() == {"tiny", "nano"}
    assert 0 < figures["nano"]["alpha_teacher_T1.0"] < 1
    assert abs(figures["nano"]["alpha_lost_by_packing"]) < 0.01
    assert 0 < figures["nano"]["alpha_tiny_T1.0"] <= 1
    packed = packing.load_packed(folder / "nano")
    assert packed.config.max_position_embeddings == 256
    assert np.load(folder / "teacher-0.npy").shape == (4, 24)
    assert go(1, recipe)  # done stays done


def test_training_lowers_the_loss(run) -> None:
    folder, go = run
    recipe = distill.replace(
        toy(Recipe()), students={"nano": Student(32, 2, 2, 48)}, train_seconds=6.0, batch=4, rate=5e-3
    )
    while not go(30, recipe):
        pass
    figures = json.loads((folder / "figures.json").read_text())
    untrained = build(Student(32, 2, 2, 48), toy_teacher(49152).config, 256)
    ids = torch.from_numpy(np.load(folder / "teacher-0.npy").astype(np.int64))[:2]
    teacher = toy_teacher(49152)
    with torch.no_grad():
        before = torch.minimum(teacher(ids).logits.softmax(-1), untrained(ids).logits.softmax(-1)).sum(-1).mean()
    assert figures["nano"]["alpha_teacher_T1.0"] > float(before) + 0.005


def test_roles_are_those_of_the_chat_template(embedded) -> None:
    text = embedded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith(USER + "Hi<|im_end|>\n" + ASSISTANT)
