"""Verification in PyTorch, on whatever device the logits are, without reading anything back to the host: the law."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flashspec import rng
from flashspec.sampling import warp
from flashspec.verifiers import rules
from flashspec.verifiers.base import BAD_ID, UNUSABLE_ROW, Draft, Grounds, Settings, Verdict


class ReferenceVerifier:
    """Runs the formulas of `rules` on tensors. See `base.Verifier` for shapes. formulas: others only where a fault is planted to be found."""

    name = "torch"

    def __init__(self, formulas: Mapping[str, rules.Rule | None] = rules.RULES) -> None:
        self._formulas = formulas

    def verify(
        self, logits: Tensor, draft: Draft, settings: Settings, rule: str, seed: Tensor, position: Tensor
    ) -> Verdict:
        """The verdict; without grounds where every request is greedy, since then nothing but the largest entries matters."""
        if settings.greedy and self._formulas is rules.RULES:
            return _greedy(logits, draft, rule)
        return self.explain(logits, draft, settings, rule, seed, position)

    def explain(
        self, logits: Tensor, draft: Draft, settings: Settings, rule: str, seed: Tensor, position: Tensor
    ) -> Verdict:
        """The same verdict, always by the formulas of the rule and with its grounds."""
        vocabulary = logits.shape[-1]
        p, ids = warped(logits, settings), draft.ids
        gamma = ids.shape[1]
        offsets = torch.arange(gamma + 1, device=ids.device)
        count = torch.full_like(position, gamma) if draft.num_draft is None else draft.num_draft.long()  # [B]
        there = offsets[:-1] < count[:, None]  # [B, γ]
        valid = there & (ids >= 0) & (ids < vocabulary)
        q = _dense(draft, torch.where(valid, ids, 0), settings, vocabulary, valid)
        judge = self._formulas[rule]

        def noise_at(place: Tensor) -> Tensor:
            """Of the race for the token at `place` [B]: [B, V]; [1, 1] where one entry alone has weight and wins any race."""
            return p.new_ones(1, 1) if settings.greedy else rng.exponentials(seed, place, vocabulary, rng.RACE)

        if judge is None:
            noise = [noise_at(position + i) for i in range(gamma + 1)]
            tau, next_token = coupled(p, torch.where(valid, ids, -1), torch.stack(noise, 1))
            thresholds = uniforms = p.new_empty(len(p), 0)
            weights = rules.row(p, tau)
        else:
            uniforms = rng.uniforms(seed, position, gamma)
            tau, weights, thresholds = torch.zeros_like(position), p[:, 0], uniforms
            if gamma:
                drawn_p, drawn_q, drawn = _with_foreign(p, q, ids, valid)
                if draft.num_draft is None:
                    thresholds = judge.thresholds(drawn_p, drawn_q, drawn)
                else:
                    thresholds = _ragged(judge, drawn_p, drawn_q, drawn, count)
                tau = judge.accepted((uniforms <= thresholds) & valid)
                weights = judge.replacement(drawn_p, drawn_q, drawn, tau)[:, :vocabulary]
                weights = torch.where((tau < count)[:, None], weights, rules.row(p, tau))  # the bonus of a short block
                # p equal to q up to rounding and still rejected: nothing positive is left, so p itself is drawn from.
                weights = torch.where(weights.amax(-1, keepdim=True) > 0, weights, rules.row(p, tau))
            next_token = rng.race(weights, noise_at(position + tau))
        unusable = ~torch.isfinite(logits.amax(-1))
        return Verdict(
            *_emitted(ids, count, valid, tau, next_token, unusable), Grounds(p, q, thresholds, uniforms, weights)
        )


def _greedy(logits: Tensor, draft: Draft, rule: str) -> Verdict:
    """All three rules at temperature 0: p is one-hot, so a drafted token passes as long as it is the target's choice and had a chance."""
    ids, vocabulary = draft.ids, logits.shape[-1]
    gamma = ids.shape[1]
    largest, choices = logits.max(-1)  # [B, γ+1], the first of equals
    offsets = torch.arange(gamma, device=ids.device)
    count = choices.new_full((len(ids),), gamma) if draft.num_draft is None else draft.num_draft.long()
    valid = (offsets < count[:, None]) & (ids >= 0) & (ids < vocabulary)
    passes = rules.matches(choices, ids) & valid
    if rule != "coupled" and draft.q is not None:
        passes &= draft.q.gather(-1, torch.where(valid, ids, 0)[..., None])[..., 0] > 0
    elif rule != "coupled" and draft.logits is not None:
        passes &= draft.logits.argmax(-1) == ids
    tau = rules.leading(passes)
    next_token = rules.pick(choices, tau[:, None])[:, 0]
    return Verdict(*_emitted(ids, count, valid, tau, next_token, ~torch.isfinite(largest)))


def _emitted(
    ids: Tensor, count: Tensor, valid: Tensor, tau: Tensor, next_token: Tensor, unusable: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, γ+1], tau and status [B]. count [B] drafted tokens, valid [B, γ] those in the vocabulary, unusable [B, γ+1] rows."""
    offsets = torch.arange(ids.shape[1] + 1, device=ids.device)
    tokens = torch.where(offsets < tau[:, None], torch.nn.functional.pad(ids, (0, 1)), -1)
    tokens = torch.where(offsets == tau[:, None], next_token[:, None], tokens)
    there = offsets[:-1] < count[:, None]
    # A row counts where a drafted token was judged by it or the next token drawn from it.
    counts = (offsets < count[:, None]) | (offsets == tau[:, None])
    status = (counts & unusable).any(-1) * UNUSABLE_ROW + (there & ~valid).any(-1) * BAD_ID
    return tokens, tau, status


def coupled(p: Tensor, ids: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The target's own choice at every position, accepted while the drafter made the same.

    p, noise [B, γ+1, V], ids [B, γ] -> tau [B], next token [B].
    """
    choices = rng.race(p, noise)  # [B, γ+1]
    tau = rules.leading(rules.matches(choices, ids))
    return tau, rules.pick(choices, tau[:, None])[:, 0]


def warped(logits: Tensor, settings: Settings) -> Tensor:
    """[B, n, V] logits -> [B, n, V] probabilities, each request with its own settings."""
    if len(settings.requests) == 1:
        return warp(logits, settings.requests[0])
    return torch.stack([warp(rows, settings.request(b)) for b, rows in enumerate(logits)])


def _dense(draft: Draft, ids: Tensor, settings: Settings, vocabulary: int, valid: Tensor) -> Tensor:
    """q as [B, γ, V] float32, whatever form the draft has."""
    if draft.q is not None:
        return draft.q
    if draft.logits is not None:
        return warped(draft.logits, settings)
    certain = torch.zeros(*ids.shape, vocabulary, device=ids.device)
    return certain.scatter_(-1, ids[..., None], valid[..., None].float())


def _with_foreign(p: Tensor, q: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids outside the vocabulary as one more token, which the drafter may write and the target never does."""
    if not ids.is_cuda and bool(valid.all()):  # to look is free on a CPU, and saves the copies
        return p, q, ids
    pad = torch.nn.functional.pad
    return pad(p, (0, 1)), pad(q, (0, 1), value=1.0), torch.where(valid, ids, p.shape[-1])


def _ragged(judge: rules.Rule, p: Tensor, q: Tensor, ids: Tensor, count: Tensor) -> Tensor:
    """Thresholds of blocks of different length: each request alone, as its last position depends on where its block ends."""
    thresholds = torch.zeros(ids.shape, device=p.device)
    for b, n in enumerate(count.tolist()):
        if n:
            one = slice(b, b + 1)
            thresholds[one, :n] = judge.thresholds(p[one, : n + 1], q[one, :n], ids[one, :n])
    return thresholds
