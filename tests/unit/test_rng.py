import pytest
import torch

from flashspec import rng


def test_philox_known_answers() -> None:
    """Vectors of Random123's kat_vectors for philox4x32-10."""
    known = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, wanted in known:
        words = rng.philox([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
        assert tuple(int(word[0]) for word in words) == wanted


def test_seeds_of_any_size_are_keys() -> None:
    assert [int(rng.seeds(s)[0]) for s in (0, -1, 2**64 - 1, 2**63)] == [0, -1, -1, -(2**63)]


def test_uniforms_are_never_zero() -> None:
    assert float(rng._unit(torch.zeros(1))) > 0
    assert float(rng._unit(torch.full((1,), 2.0**32 - 1))) <= 1


def test_purposes_offsets_and_positions_do_not_collide() -> None:
    seed, seen = rng.seeds(5), []
    for position in (3, 4):
        for purpose in (rng.ACCEPT, rng.RACE, rng.DRAFT):
            for offset in (0, 1):
                seen.append(rng.exponentials(seed, torch.tensor([position]), 64, purpose, offset)[0])
    stacked = torch.stack(seen)
    assert (torch.cdist(stacked, stacked) + torch.eye(len(seen)) * 9 > 1).all()


def test_inverse_draws_in_proportion_and_never_the_impossible() -> None:
    weights = torch.tensor([[0.0, 0.1, 0.0, 0.6, 0.3, 0.0]])
    drawn = torch.cat(
        [rng.inverse(weights, rng.uniforms(rng.seeds(s), torch.tensor([0]), 1, rng.DRAFT)) for s in range(4000)]
    )
    share = torch.bincount(drawn, minlength=6) / 4000
    assert torch.allclose(share, weights[0], atol=0.03)
    assert (share[[0, 2, 5]] == 0).all()
    for extreme in (1e-12, 0.1, 0.7, 1.0):  # edges: an entry without weight is never the first to reach them
        assert weights[0, int(rng.inverse(weights, torch.tensor([[extreme]])))] > 0


def test_race_draws_in_proportion() -> None:
    weights = torch.tensor([[0.1, 0.0, 0.6, 0.3]])
    noise = torch.cat([rng.exponentials(rng.seeds(s), torch.tensor([0]), 4, rng.RACE) for s in range(4000)])
    share = torch.bincount(rng.race(weights, noise), minlength=4) / 4000
    assert share[1] == 0
    assert torch.allclose(share, weights[0], atol=0.03)


@pytest.mark.parametrize("compiled", [True, False])
def test_batches_and_vocabularies_of_any_size_draw_the_same_bits(compiled, monkeypatch) -> None:
    """A short vocabulary needs fewer counters; nothing of it shows, in compiled loops or in torch."""
    if not compiled:
        monkeypatch.setattr(rng, "compiled_loops", lambda _: None)
    many, position = torch.arange(33) * 7919, torch.arange(33) + 2**33
    for vocabulary in (1, 5, 256, 257, 1500):
        together = rng.exponentials(many, position, vocabulary, rng.RACE, offset=3)
        alone = [
            rng.exponentials(many[k : k + 1], position[k : k + 1], vocabulary, rng.RACE, offset=3)
            for k in range(len(many))
        ]
        assert torch.equal(together, torch.cat(alone))
    long = rng.exponentials(many[:2], position[:2], 2000, rng.RACE)
    assert torch.equal(long[:, :257], rng.exponentials(many[:2], position[:2], 257, rng.RACE))
