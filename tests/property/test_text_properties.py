from hypothesis import given
from hypothesis import strategies as st
from worlds import ByteTokenizer

from flashspec.models.catalog import load_tokenizer
from flashspec.text import Labels, TextStream

BYTES = ByteTokenizer()
SMOL = load_tokenizer("tiny")
tricky = st.text(st.sampled_from("a é漢😀\u0301\ufffd\u200d\n🏳️‍🌈אب"), max_size=30)


def stream(tokenizer, tokens, stop=()) -> tuple[list[str], TextStream]:
    text = TextStream(tokenizer, stop)
    pieces = [text.push(token) for token in tokens]
    return [*pieces, text.finish()], text


@given(tricky)
def test_pieces_join_to_the_decoded_text(text) -> None:
    for tokenizer in (BYTES, SMOL):
        tokens = tokenizer.encode(text)
        pieces, _ = stream(tokenizer, tokens)
        assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True)
        if "\ufffd" not in text:
            assert all("\ufffd" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_broken_bytes_join_to_the_decoded_text(tokens) -> None:
    pieces, _ = stream(BYTES, tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


@given(st.lists(st.integers(0, len(SMOL) - 1), max_size=30))
def test_any_ids_join_to_the_decoded_text(tokens) -> None:
    pieces, _ = stream(SMOL, tokens)
    assert "".join(pieces) == SMOL.decode(tokens, skip_special_tokens=True)


@given(st.text("ab\ufffd", max_size=30))
def test_literal_replacement_characters_never_stop_the_stream(text) -> None:
    """What is held is never more than the last three characters."""
    out, tokens = TextStream(BYTES), BYTES.encode(text)
    released = "".join(out.push(token) for token in tokens)
    assert len(released) >= len(text) - 3


@given(st.text("abST", max_size=40), st.lists(st.text("abST", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_released(text, stops) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    pieces, out = stream(BYTES, BYTES.encode(text), stops)
    assert out.stopped == bool(ends)
    if ends:  # the stop string that is complete first ends the text where it, or one completed with it, begins
        first = min(end for end, _ in ends)
        assert "".join(pieces) == text[: min(start for end, start in ends if end == first)]
    else:
        assert "".join(pieces) == text


def test_labels_show_spaces_parts_and_specials() -> None:
    label = Labels(SMOL)
    assert label(SMOL.encode(" the")[0]) == " the"
    assert label(SMOL.eos_token_id) == "<|im_end|>"
    assert "\ufffd" not in label(SMOL.encode("😀")[0])
    assert label(10**6) == "<1000000>"
