"""A class on one small machine: thirty clients at once, each with its own run, through the public interface."""

from concurrent.futures import ThreadPoolExecutor

from gradio_client import Client

CLIENTS = 30


def test_thirty_clients_lose_nothing(address) -> None:
    def ask(k: int) -> dict:
        client = Client(address, verbose=False)
        return client.predict(
            prompt=f"Name {k + 2} birds.",
            drafter="nano",
            temperature=0.0,
            max_new_tokens=8,
            seed=k,
            api_name="/generate",
        )

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, range(CLIENTS)))
    for k, answer in enumerate(answers):
        assert answer["trace"]["prompt"] == f"Name {k + 2} birds."
        assert answer["trace"]["settings"]["seed"] == k
        emitted = sum(r["tau"] + (r["next"] is not None) for r in answer["trace"]["rounds"])
        assert emitted == 8 or answer["trace"]["rounds"][-1]["stop"] == "eos"


def test_the_interface_answers_bad_input_with_a_sentence(address) -> None:
    import pytest

    client = Client(address, verbose=False)
    with pytest.raises(Exception, match="prompt is empty"):
        client.predict(prompt=" ", api_name="/generate")
