"""The page: layout first, then events, then launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from flashspec.models.catalog import FAMILIES, assets, drafter_names, is_local
from flashspec.ui import live
from flashspec.verifiers import on_gpu, reason_without_triton
from flashspec.verifiers.rules import RULES

TITLE = "FlashSpec"
EXAMPLES = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "Give me five tips for a good night's sleep.",
    "What are the benefits of learning a language?",
)
HEADER = """
<header class="fs-header">
  <h1>Speculative decoding, one token at a time</h1>
  <p>A small model guesses ahead. The large model checks every guess in one pass and keeps what it would have written itself:
  the text is distributed exactly as the large model's own.</p>
</header>
"""


def build(family: str = "embedded") -> gr.Blocks:
    """The page as a Gradio app. Raises ValueError where `family` cannot be loaded."""
    live.family(family)  # the first visitor finds the models loaded
    ready = [name for name in FAMILIES if is_local(name)]
    default = drafter_names(FAMILIES[family].drafters)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True) as demo:
        gr.HTML(HEADER, apply_default_css=False)
        with gr.Row(elem_classes="fs-controls"):
            prompt = gr.Textbox(
                EXAMPLES[0], label="Prompt", lines=4, max_lines=8, scale=3, elem_id="prompt", max_length=live.MAX_PROMPT
            )
            with gr.Column(scale=2, min_width=260):
                with gr.Row():
                    drafter = gr.Dropdown(default, value=default[-1], label="Drafter", elem_id="drafter", min_width=180)
                    rule = gr.Dropdown(list(RULES), value="block", label="Rule", elem_id="rule", min_width=100)
                with gr.Row():
                    gamma = gr.Slider(0, 8, 3, step=1, label="Draft length γ", elem_id="gamma", min_width=130)
                    temperature = gr.Slider(
                        0, 2, 0.7, step=0.05, label="Temperature", elem_id="temperature", min_width=130
                    )
        gr.Examples([[text] for text in EXAMPLES], prompt, label="Try", elem_id="examples")
        with gr.Row(elem_classes="fs-buttons"):
            generate = gr.Button("Generate", variant="primary", elem_id="generate")
            stop = gr.Button("Stop", elem_id="stop")
        with gr.Accordion("More settings", open=False, elem_id="more"), gr.Row():
            family_box = gr.Dropdown(ready, value=family, label="Models", elem_id="family")
            verifier = gr.Dropdown(
                _verifiers(),
                value="triton" if on_gpu() and reason_without_triton() is None else "torch",
                label="Verifier",
                info=_about_verifiers(),
                elem_id="verifier",
            )
            top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", elem_id="top-p")
            tokens = gr.Slider(1, live.MAX_TOKENS, 128, step=1, label="Tokens", elem_id="tokens")
            seed = gr.Number(0, label="Seed", precision=0, elem_id="seed")
        view = gr.HTML(
            "",
            html_template=(assets() / "live.html").read_text(encoding="utf-8"),
            js_on_load=(assets() / "live.js").read_text(encoding="utf-8"),
            apply_default_css=False,
            elem_id="live",
            elem_classes="fs-live",
        )
        controls = [prompt, family_box, drafter, gamma, rule, temperature, top_p, tokens, seed, verifier]

        family_box.change(_drafters, family_box, drafter, api_visibility="private", queue=False)
        # One decode at a time: on a small machine two would make each other ten times slower, not half as fast.
        run = gr.on(
            [generate.click, prompt.submit],
            _run,
            controls,
            view,
            concurrency_limit=1,
            concurrency_id="engine",
            show_progress="minimal",
            show_progress_on=[generate],
            api_visibility="private",
        )
        stop.click(None, cancels=run)
    return demo


def launch(demo: gr.Blocks, host: str | None = None, port: int | None = None, share: bool = False, **more: Any) -> Any:
    """Serve the page; `more` goes to Gradio's launch."""
    return demo.queue(max_size=24).launch(
        server_name=host,
        server_port=port,
        share=share,
        css=(assets() / "style.css").read_text(encoding="utf-8"),
        theme=_theme(),
        ssr_mode=False,
        run_history=False,
        footer_links=["api"],
        show_error=True,
        **more,
    )


def _run(*values: Any) -> Iterator[str]:
    yield from live.messages(live.Controls(*values))


def _verifiers() -> list[tuple[str, str]]:
    """What can verify here, by label."""
    choices = [("PyTorch", "torch")]
    if reason_without_triton() is None:
        choices.append(("Triton" if on_gpu() else "Triton (interpreted)", "triton"))
    return choices


def _about_verifiers() -> str:
    return reason_without_triton() or (
        "" if on_gpu() else "No GPU here: the Triton kernel runs in an interpreter, much slower, with the same tokens."
    )


def _drafters(family: str) -> Any:
    names = drafter_names(FAMILIES[family].drafters)
    return gr.update(choices=names, value=names[-1])


def _theme() -> gr.themes.Base:
    accent = gr.themes.Color(
        "#EEF1FF", "#DDE3FF", "#BCC7FF", "#9DB2FF", "#6C84EA", "#3B4CC0", "#3343AB", "#2A378C", "#212B6D", "#19204F", "#111635"
    )  # fmt: skip
    sans = ["ui-sans-serif", "system-ui", "sans-serif"]
    mono = ["ui-monospace", "SFMono-Regular", "Menlo", "monospace"]
    return gr.themes.Base(primary_hue=accent, neutral_hue="stone", font=sans, font_mono=mono, radius_size="sm").set(
        body_background_fill="#FBFAF7",
        body_background_fill_dark="#0F1317",
        block_background_fill="#FFFFFF",
        block_background_fill_dark="#171C22",
        block_border_color="#DAD7D0",
        block_border_color_dark="#2C343D",
        input_background_fill="#FBFAF7",
        input_background_fill_dark="#0F1317",
        block_label_text_color="#59616B",
        block_label_text_color_dark="#A3ACB7",
        button_primary_background_fill="#3B4CC0",
        button_primary_background_fill_dark="#4A5FD6",
    )
