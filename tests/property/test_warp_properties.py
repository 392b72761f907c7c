import torch
from hypothesis import given
from hypothesis import strategies as st

from flashspec.sampling import SamplingParams, warp

rows = st.lists(st.integers(-4, 4), min_size=1, max_size=40)  # integers, so that ties are common


@given(
    rows,
    st.sampled_from([1, 2, 5, 39, 40, 41, 10**6]),
    st.sampled_from([0.0, 1e-9, 0.3, 0.9, 1.0]),
    st.sampled_from([0.3, 1.0, 2.0]),
)
def test_truncation_keeps_ties_and_the_maximum(row, top_k, top_p, temperature) -> None:
    logits = torch.tensor([row], dtype=torch.float32)
    p = warp(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))[0]
    kept = logits[0][p > 0]
    assert p[logits[0].argmax()] > 0
    assert abs(float(p.sum()) - 1) < 1e-5
    assert set(kept.tolist()).isdisjoint(logits[0][p == 0].tolist())  # a value is kept or dropped, never split
    if top_p == 1:
        assert len(kept) >= min(top_k, len(row))
        assert len(kept[kept > kept.min()]) < max(top_k, 1)
    if top_p in (0.0, 1e-9):
        assert kept.unique().numel() == 1


@given(rows, st.integers(1, 3), st.floats(0.05, 0.99))
def test_rows_do_not_influence_each_other(row, copies, top_p) -> None:
    logits = torch.tensor([row], dtype=torch.float32)
    other = torch.linspace(0, 3, len(row))[None].expand(copies, -1)
    params = SamplingParams(temperature=0.6, top_p=top_p)
    assert torch.equal(warp(logits, params)[0], warp(torch.cat([other, logits]), params)[-1])
