import torch
from hypothesis import given
from hypothesis import strategies as st

from flashspec import rng

keys = st.integers(-(2**63), 2**63 - 1)
positions = st.integers(0, 2**40)


@given(st.lists(st.tuples(keys, positions), min_size=1, max_size=4), st.integers(1, 3000), st.integers(0, 20))
def test_draws_do_not_depend_on_batch_or_vocabulary(slots, vocabulary, offset) -> None:
    seed, position = (torch.tensor(column, dtype=torch.int64) for column in zip(*slots, strict=True))
    together = rng.exponentials(seed, position, vocabulary, rng.DRAFT, offset)
    for b in range(len(slots)):
        alone = rng.exponentials(seed[b : b + 1], position[b : b + 1], vocabulary + 7, rng.DRAFT, offset)
        assert torch.equal(together[b], alone[0, :vocabulary])


@given(keys, positions, st.integers(0, 17))
def test_uniforms_have_the_asked_shape(key, position, count) -> None:
    drawn = rng.uniforms(torch.tensor([key]), torch.tensor([position]), count)
    assert drawn.shape == (1, count)
    assert ((drawn > 0) & (drawn <= 1)).all()
