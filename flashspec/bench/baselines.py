"""Verification as it is usually written in PyTorch, to be compared with: no host read, nothing kept that is not needed."""

from __future__ import annotations

import torch
from torch import Tensor


def eager(
    logits: Tensor, draft_logits: Tensor, ids: Tensor, temperature: Tensor, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Token rule from raw logits: [B, γ+1, V], [B, γ, V], [B, γ], [B] -> tokens [B, γ+1], tau [B]. top_p by sorting."""
    gamma = ids.shape[1]
    p = torch.softmax(logits.float() / temperature[:, None, None], -1)
    q = torch.softmax(draft_logits.float() / temperature[:, None, None], -1)
    if top_p < 1:
        p, q = _nucleus(p, top_p), _nucleus(q, top_p)
    p_x = p[:, :gamma].gather(-1, ids[..., None])[..., 0]
    q_x = q.gather(-1, ids[..., None])[..., 0]
    tau = (torch.rand_like(p_x) * q_x <= p_x).long().cumprod(-1).sum(-1)
    batch = torch.arange(len(ids), device=ids.device)
    drafted = q[batch, tau.clamp(max=gamma - 1)] * (tau < gamma)[:, None]
    weights = (p[batch, tau] - drafted).clamp_min(0)
    return _emitted(ids, tau, (weights / torch.empty_like(weights).exponential_()).argmax(-1))


def eager_lean(logits: Tensor, draft_logits: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The same with log-sum-exps of all rows and the softmax of one: fewer bytes, more operations."""
    gamma = ids.shape[1]
    scale = (1.0 / temperature)[:, None, None]
    log_p = logits[:, :gamma].gather(-1, ids[..., None])[..., 0].float() * scale[..., 0]
    log_q = draft_logits.gather(-1, ids[..., None])[..., 0].float() * scale[..., 0]
    log_p = log_p - torch.logsumexp(logits[:, :gamma].float() * scale, -1)
    log_q = log_q - torch.logsumexp(draft_logits.float() * scale, -1)
    tau = (torch.rand_like(log_p).log() <= log_p - log_q).long().cumprod(-1).sum(-1)
    batch = torch.arange(len(ids), device=ids.device)
    p = torch.softmax(logits[batch, tau].float() * scale[..., 0], -1)
    q = (
        torch.softmax(draft_logits[batch, tau.clamp(max=gamma - 1)].float() * scale[..., 0], -1)
        * (tau < gamma)[:, None]
    )
    weights = (p - q).clamp_min(0)
    return _emitted(ids, tau, (weights / torch.empty_like(weights).exponential_()).argmax(-1))


def accept_only(target_log_p: Tensor, draft_log_p: Tensor, ids: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance alone from ready log-probabilities [B, γ, V]: mask [B, γ] and first rejection [B]."""
    log_p = target_log_p.gather(-1, ids[..., None])[..., 0]
    log_q = draft_log_p.gather(-1, ids[..., None])[..., 0]
    accepted = uniforms < (log_p - log_q).exp().clamp(max=1)
    return accepted, accepted.long().cumprod(-1).sum(-1)


def _nucleus(p: Tensor, top_p: float) -> Tensor:
    ordered = p.sort(-1, descending=True).values
    kept = (ordered.cumsum(-1) - ordered < top_p).sum(-1, keepdim=True)
    p = p * (p >= ordered.gather(-1, kept - 1))
    return p / p.sum(-1, keepdim=True)


def _emitted(ids: Tensor, tau: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    place = torch.arange(ids.shape[1] + 1, device=ids.device)
    tokens = torch.where(place < tau[:, None], torch.nn.functional.pad(ids, (0, 1)), -1)
    return torch.where(place == tau[:, None], token[:, None], tokens), tau
