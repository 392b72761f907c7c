"""Random blocks to judge, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from flashspec.sampling import SamplingParams, warp
from flashspec.verifiers.base import Draft, Settings, Verdict

FORMS = ("probabilities", "one-hot", "logits", "logits and log-sum-exp")
RULES = ("token", "block", "coupled")

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.4, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 7, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
)


def block(
    batch: int,
    gamma: int,
    vocabulary: int,
    seed: int,
    params,
    dtype=torch.float32,
    ragged: bool = False,
    noise: float = 0.7,
    device="cpu",
):
    """logits, drafts by form, settings, seeds, positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(batch, gamma + 1, vocabulary, generator=generator) * 3).to(dtype)
    draft_logits = (logits[:, :gamma].float() + noise * torch.randn(batch, gamma, vocabulary, generator=generator)).to(
        dtype
    )
    settings = Settings.of(params, batch, device)
    q = torch.stack([warp(rows, settings.request(b)) for b, rows in enumerate(draft_logits)])
    ids = torch.zeros(batch, 0, dtype=torch.int64)
    if gamma:
        ids = torch.multinomial(q.reshape(-1, vocabulary), 1, generator=generator).view(batch, gamma)
    temperature = torch.tensor([settings.request(b).temperature or 1.0 for b in range(batch)])
    lse = torch.logsumexp(draft_logits.float() / temperature[:, None, None], -1)
    lengths = torch.randint(0, gamma + 1, (batch,), generator=generator, dtype=torch.int32) if ragged else None
    keys = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    places = torch.randint(0, 2**34, (batch,), generator=generator)

    def moved(tensor):
        return None if tensor is None else tensor.to(device)

    common = {"ids": moved(ids), "num_draft": moved(lengths)}
    drafts = {
        "probabilities": Draft(q=moved(q), **common),
        "one-hot": Draft(**common),
        "logits": Draft(logits=moved(draft_logits), **common),
        "logits and log-sum-exp": Draft(logits=moved(draft_logits), lse=moved(lse), **common),
    }
    return moved(logits), drafts, settings, moved(keys), moved(places)


def differing(found: Verdict, wanted: Verdict) -> list[int]:
    """Requests on which two backends disagree."""
    off = (found.tokens != wanted.tokens).any(-1) | (found.tau != wanted.tau) | (found.status != wanted.status)
    return off.nonzero().flatten().tolist()


PLAIN = SamplingParams(temperature=0.8)
