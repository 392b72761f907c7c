"""The page: layout first, then events, then launch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware

from flashspec import bandits
from flashspec.machine import reason_without_numba
from flashspec.models.catalog import FAMILIES, assets, drafter_names, is_local
from flashspec.records import Trace
from flashspec.ui import figures, labs, live
from flashspec.verifiers import load_verifier, on_gpu, reason_without_triton
from flashspec.verifiers.rules import RULES

TITLE = "FlashSpec"
EXAMPLES = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "Give me five tips for a good night's sleep.",
    "What are the benefits of learning a language?",
    "Write a Python function that counts the words of a text, then print it again with a docstring.",
    "Write the multiplication table of 7.",
)
HEADER = """
<header class="fs-header">
  <h1>Speculative decoding, one token at a time</h1>
  <p>A small model guesses ahead. The large model checks every guess in one pass and keeps what it would have written itself:
  the text is distributed exactly as the large model's own.</p>
</header>
"""
WAITING = 64  # runs that may queue: a class of thirty and more


def build(family: str = "embedded") -> gr.Blocks:
    """The page as a Gradio app; models go on loading behind it. Raises ValueError where `family` is not on this machine."""
    live.load_behind(family)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True) as demo:
        gr.HTML(HEADER, apply_default_css=False)
        controls, start, stop = _controls(family)
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Live", id="live"):
                view = _component(
                    "live", ["common", "run", "inspector", "charts", "live", "tour"], _asset("recording.json")
                )
                last = _analysis()
            with gr.Tab("Race", id="race"):
                racing = _race(controls)
            with gr.Tab("Labs", id="labs"):
                _labs()
            with gr.Tab("How it works", id="guide"):
                gr.Markdown(_asset("guide.md"), elem_classes="fs-guide")
        # One decode at a time: on a small machine two would make each other ten times slower, not half as fast.
        engine: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "engine", "api_visibility": "private"}
        run = gr.on(
            [start.click, controls[0].submit],
            _on_gpu(_run),
            controls,
            [view, last],
            show_progress="minimal",
            show_progress_on=[start],
            **engine,
        )
        button, against, lanes = racing
        raced = button.click(
            _on_gpu(_run_race),
            [*controls, against],
            lanes,
            show_progress="minimal",
            show_progress_on=[button],
            **engine,
        )
        stop.click(None, cancels=[run, raced])
        demo.load(_from_link, None, controls, api_visibility="private", queue=False, show_progress="hidden")
        gr.api(_on_gpu(generate), api_name="generate", concurrency_limit=1, concurrency_id="engine")
    return demo


def launch(demo: gr.Blocks, host: str | None = None, port: int | None = None, share: bool = False, **more: Any) -> Any:
    """Serve the page; `more` goes to Gradio's launch."""
    return demo.queue(max_size=WAITING).launch(
        server_name=host,
        server_port=port,
        share=share,
        css=_asset("style.css"),
        theme=_theme(),
        ssr_mode=False,
        run_history=False,
        footer_links=["api"],
        show_error=True,
        # The page itself, scripts and recording included, is sent compressed; streams of events are left alone.
        app_kwargs={"middleware": [Middleware(GZipMiddleware, minimum_size=2000)]},
        mcp_server=importlib.util.find_spec("mcp") is not None,
        **more,
    )


# -------------------------------------------------------------------------------------------------------------- layout


def _controls(family: str) -> tuple[list[Any], gr.Button, gr.Button]:
    """Prompt, settings and buttons; the settings in the order of live.Controls."""
    ready = [name for name in FAMILIES if is_local(name)]
    with gr.Row(elem_classes="fs-controls"):
        prompt = gr.Textbox(
            EXAMPLES[0], label="Prompt", lines=4, max_lines=8, scale=3, elem_id="prompt", max_length=live.MAX_PROMPT
        )
        with gr.Column(scale=2, min_width=260):
            with gr.Row():
                drafter = gr.Dropdown(
                    _drafting(family), value=live.BANDIT, label="Drafting", elem_id="drafter", min_width=180
                )
                verifier = gr.Dropdown(
                    _verifiers(),
                    value=load_verifier("auto", "cuda" if on_gpu() else "cpu").name,
                    label="Verifier",
                    elem_id="verifier",
                    min_width=100,
                )
            with gr.Row():
                rule = gr.Dropdown(list(RULES), value="block", label="Rule", elem_id="rule", min_width=100)
                temperature = gr.Slider(0, 2, 0.7, step=0.05, label="Temperature", elem_id="temperature", min_width=130)
    gr.Examples([[text] for text in EXAMPLES], prompt, label="Try", elem_id="examples")
    with gr.Row(elem_classes="fs-buttons"):
        generate = gr.Button("Generate", variant="primary", elem_id="generate")
        stop = gr.Button("Stop", elem_id="stop")
    with gr.Accordion("More settings", open=False, elem_id="more"):
        with gr.Row():
            family_box = gr.Dropdown(ready, value=family, label="Models", elem_id="family")
            policy = gr.Dropdown(
                list(bandits.POLICIES),
                value=bandits.DEFAULT,
                label="Bandit policy",
                info="Chooses where drafting is left to the bandit.",
                elem_id="policy",
            )
            gamma = gr.Slider(0, 8, 3, step=1, label="Draft length γ", info="For a fixed drafter.", elem_id="gamma")
        with gr.Row():
            tokens = gr.Slider(1, live.MAX_TOKENS, 128, step=1, label="Tokens", elem_id="tokens")
            top_p = gr.Slider(0.05, 1, 1, step=0.05, label="Top-p", elem_id="top-p")
            top_k = gr.Number(0, label="Top-k (0: off)", precision=0, minimum=0, elem_id="top-k")
            seed = gr.Number(0, label="Seed", precision=0, elem_id="seed")
        if about := _about_verifiers():
            gr.Markdown(about, elem_classes="fs-muted")
    family_box.change(_drafters, family_box, drafter, api_visibility="private", queue=False)
    settings = [
        prompt, family_box, drafter, gamma, rule, temperature, top_p, tokens, seed, verifier, policy, top_k,
    ]  # fmt: skip
    return settings, generate, stop


def _race(controls: list[Any]) -> tuple[gr.Button, Any, gr.HTML]:
    choices = [("plain against these settings", "plain")]
    if reason_without_triton() is None:
        choices.append(("PyTorch against Triton", "verifier"))
    with gr.Row(elem_classes="fs-buttons"):
        against = gr.Dropdown(choices, value="plain", label="Race", elem_id="against", min_width=260)
        button = gr.Button("Start the race", variant="primary", elem_id="start-race")
    return button, against, _component("race", ["common", "run", "race"])


def _analysis() -> gr.State:
    """Figures of the last finished run, drawn when they are asked for: Plotly is large, and the page should come at once."""
    last = gr.State()
    with gr.Accordion("Take the last run apart", open=False, elem_id="analysis"):
        draw = gr.Button("Draw its figures", elem_id="draw-analysis", elem_classes="fs-run")
        said = gr.Markdown("Generate a text first; its figures are drawn here.", elem_classes="fs-answer")
        shown = []
        for row in (
            ("Where the time went", "Accepted by depth"),
            ("Speed along the text", "Seconds lost, by exact replay"),
        ):
            with gr.Row():
                shown += [
                    gr.Plot(label=title, visible="hidden", min_width=320, elem_classes="fs-plot") for title in row
                ]
    draw.click(
        _figures, last, [said, *shown], api_visibility="private", show_progress="minimal", show_progress_on=[said]
    )
    return last


def _labs() -> None:
    """One fold a lesson: a question, a prediction, an experiment."""
    with gr.Accordion("Is it exact?", open=True, elem_id="lab-exactness"):
        _say("Give target and drafter any two distributions. The verifier of the engine makes 10,000 rounds of them. Do the tokens have the target's law? "
             "Then plant a fault: which ones does the test catch, and with which bars?")  # fmt: skip
        bars = _component("bars", ["common", "bars"], json.dumps({"p": [5, 3, 1, 0.5], "q": [2, 4, 3, 1]}))
        with gr.Row():
            fault = gr.Dropdown(list(labs.PLANTED), value=labs.SOUND, label="Planted fault", elem_id="fault")
            rule = gr.Dropdown(list(RULES), value="token", label="Rule", elem_id="lab-rule")
            gamma = gr.Slider(1, 6, 2, step=1, label="γ", elem_id="lab-gamma")
            warmth = gr.Slider(0.2, 2, 1, step=0.1, label="Temperature", elem_id="lab-temperature")
        _experiment("exactness", _exactness, [bars, gamma, rule, warmth, fault], ["It passes", "It is rejected"])
    with gr.Accordion("How many samples?", open=False, elem_id="lab-samples"):
        _say(
            "A verifier is wrong by very little: its temperature is a few percent too high. Are 1,000 samples enough to notice?"
        )
        error = gr.Slider(0, 30, 8, step=1, label="Error of the temperature, %", elem_id="error")
        _experiment("samples", labs.samples_lab, [error], ["1,000 are enough", "It takes 10,000", "Neither sees it"])
    with gr.Accordion("The temperature that did nothing", open=False, elem_id="lab-temperature"):
        _say(
            "Someone forgot to apply the temperature to the target. Every test ran at T = 1.0 and passed. At which temperature does it show?"
        )
        other = gr.Slider(0.2, 2, 0.5, step=0.1, label="Temperature of the second test", elem_id="other-temperature")
        _experiment(
            "temperature", labs.temperature_lab, [other], ["The second test passes too", "The second test fails"]
        )
    with gr.Accordion("What runs here", open=False, elem_id="lab-here"):
        _say(
            "What this machine can do, and the command that adds what it cannot. Everything works without a GPU and without Triton; it is slower."
        )
        gr.HTML(labs.capabilities(), elem_id="capabilities", apply_default_css=False)
    with gr.Accordion("Is the kernel faster?", open=False, elem_id="lab-kernel"):
        _say("Verification as one fused Triton kernel, or as PyTorch operations. At which shape does the kernel lose?")
        _experiment(
            "kernel",
            labs.kernel_lab,
            [],
            ["It wins everywhere", "It loses at small batches", "It loses at large batches"],
        )
    with gr.Accordion("The shape nobody tried", open=False, elem_id="lab-shape"):
        _say("A fault of one position is planted: the last drafted token is never accepted. A search tries random shapes (batch B, draft length γ, vocabulary V) until one "
             "shows it, then shrinks it. What is the smallest shape that fails?")  # fmt: skip
        _experiment("shape", labs.shape_lab, [], ["B = 1, γ = 1", "B = 1, γ = 2", "B = 2, γ = 1"], figure=False)
    with gr.Accordion("Nothing to adapt to", open=False, elem_id="lab-arena"):
        _say(
            "Three arms: plain decoding and two drafters with γ = 3. Set how often each is right and what a round costs, then let policies play. Make the arms alike: what is left to learn?"
        )
        with gr.Row():
            alphas = [
                gr.Slider(0, 0.99, a, step=0.01, label=f"Acceptance of {n}", elem_id=f"alpha-{n}")
                for n, a in (("nano", 0.55), ("tiny", 0.8))
            ]
        with gr.Row():
            costs = [
                gr.Slider(1, 60, c, step=1, label=f"ms of a round, {n}", elem_id=f"cost-{n}")
                for n, c in (("plain", 20), ("nano", 28), ("tiny", 34))
            ]
        names = gr.Dropdown(
            list(labs.POLICIES),
            value=["contextual", "ucb1", "exp3", "random"],
            multiselect=True,
            label="Policies",
            elem_id="policies",
        )
        _experiment(
            "arena",
            _arena,
            [*alphas, *costs, names],
            ["The bandit wins clearly", "There is nothing to learn", "Trying costs more than it gives"],
        )


def _experiment(name: str, ask: Any, inputs: list[Any], predictions: list[str], figure: bool = True) -> None:
    """A prediction to make, a button, and the answer as text and a figure, or a table in HTML."""
    guess = gr.Radio(predictions, label="Your prediction", elem_id=f"guess-{name}")
    button = gr.Button("Run the experiment", variant="primary", elem_id=f"run-{name}", elem_classes="fs-run")
    answer = gr.Markdown("", elem_id=f"answer-{name}", elem_classes="fs-answer", min_height=72)
    look: dict[str, Any] = {"elem_id": f"plot-{name}", "visible": "hidden"}
    shown = (
        gr.Plot(show_label=False, elem_classes="fs-plot", **look)
        if figure
        else gr.HTML(apply_default_css=False, **look)
    )

    def run(prediction: str | None, *values: Any) -> tuple[str, Any]:
        try:
            text, found = ask(*values)
        except (ValueError, TypeError) as error:
            return f"{error}", gr.skip()
        said = f"You predicted: *{prediction}*. " if prediction else ""
        return said + text, gr.update(value=found, visible=True)

    button.click(run, [guess, *inputs], [answer, shown], api_visibility="private", concurrency_limit=1, concurrency_id="engine",
                 show_progress="minimal", show_progress_on=[answer])  # fmt: skip


def _component(name: str, scripts: list[str], value: str = "") -> gr.HTML:
    """A component of our own: its template, and its scripts joined in one scope."""
    return gr.HTML(
        value,
        html_template=_asset(f"{name}.html"),
        js_on_load="\n".join(_asset(f"{script}.js") for script in scripts),
        apply_default_css=False,
        elem_id=name,
        elem_classes=f"fs-live fs-{name}",
    )


def _say(text: str) -> None:
    gr.Markdown(text, elem_classes="fs-question")


# -------------------------------------------------------------------------------------------------------------- events


def _on_gpu(function: Any) -> Any:
    """On a ZeroGPU Space the function borrows a GPU for as long as a run may take; elsewhere it is left as it is.

    A run brings its own bandit and takes it away again, so nothing is lost when the borrowed process ends.
    """
    if importlib.util.find_spec("spaces") is None:
        return function
    import spaces

    return spaces.GPU(duration=lambda *values, **named: int(live.MAX_SECONDS))(function)


def _run(*values: Any) -> Iterator[tuple[Any, Any]]:
    """Messages for the component, and at the end what is kept of the run for its figures."""
    kept: list[Any] = []
    for message in live.messages(live.Controls(*values), keep=lambda *found: kept.extend(found)):
        yield message, kept or gr.skip()


def _figures(last: list[Any] | None) -> list[Any]:
    if not last:
        return ["There is no finished run yet; press Generate first.", *[gr.skip()] * 4]
    trace, regret = last
    said = f"{len(trace.rounds)} rounds. {regret['verdict'] if regret else ''}"
    return [said, *(gr.update(value=figure, visible=True) for figure in figures.of_run(trace, regret))]


def _run_race(*values: Any) -> Iterator[str]:
    *settings, against = values
    yield from live.race(live.Controls(*settings), against)


def _exactness(weights: str, gamma: int, rule: str, temperature: float, fault: str) -> tuple[str, Any]:
    bars = json.loads(weights)
    return labs.exactness(bars["p"], bars["q"], gamma, rule, temperature, fault)


def _arena(
    nano: float, tiny: float, plain_ms: float, nano_ms: float, tiny_ms: float, names: list[str]
) -> tuple[str, Any]:
    return labs.arena((nano, tiny), (plain_ms, nano_ms, tiny_ms), names)


def generate(
    prompt: str,
    family: str = "embedded",
    drafter: str = live.BANDIT,
    gamma: int = 3,
    rule: str = "block",
    temperature: float = 0.7,
    max_new_tokens: int = 128,
    seed: int = 0,
) -> dict[str, Any]:
    """Decode speculatively and return the whole trace: text, every drafted token with its fate, p, q and seconds of every round.

    Args:
        prompt: What to answer, up to 4000 characters.
        family: "embedded", or another family that is on this machine.
        drafter: "bandit", or a drafter: plain, lookup, nano, early-exit, lookup-else-nano.
        gamma: Tokens drafted in a round by a fixed drafter.
        rule: token, block or coupled.
        temperature: 0 is greedy.
        max_new_tokens: 1 to 512.
        seed: Equal seeds give equal texts with the coupled rule and at temperature 0.
    """
    settings = live.Controls(prompt, family, drafter, gamma, rule, temperature, 1.0, max_new_tokens, seed, "auto")
    try:
        trace: Trace = live.generate(settings)
    except ValueError as error:
        raise gr.Error(str(error)) from None
    return {"text": trace.text, "trace": json.loads(trace.to_json())}


def _from_link(request: gr.Request) -> list[Any]:
    """The controls as the link's query says (`?prompt=…&drafter=nano&gamma=4`); what it does not name, or names wrongly, stays."""
    query = dict(request.query_params)
    kinds: list[tuple[str, Any]] = [
        ("prompt", str), ("family", _one_of([name for name in FAMILIES if is_local(name)])), ("drafter", str),
        ("gamma", _between(0, 8)), ("rule", _one_of(list(RULES))), ("temperature", _between(0, 2)), ("top_p", _between(0.05, 1)),
        ("tokens", _between(1, live.MAX_TOKENS)), ("seed", _between(0, 2**31)), ("verifier", _one_of([v for _, v in _verifiers()])),
        ("policy", _one_of(list(bandits.POLICIES))), ("top_k", _between(0, 10**6)),
    ]  # fmt: skip
    values: list[Any] = []
    for name, read in kinds:
        try:
            values.append(gr.update(value=read(query[name])))
        except (KeyError, ValueError):
            values.append(gr.skip())
    family = query.get("family", "embedded")
    if query.get("drafter") not in [name for _, name in _drafting(family if family in FAMILIES else "embedded")]:
        values[2] = gr.skip()
    return values


def _one_of(choices: list[str]) -> Any:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return read


def _between(low: float, high: float) -> Any:
    def read(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(text)
        return int(value) if value == int(value) else value

    return read


# ------------------------------------------------------------------------------------------------------------ contents


def _asset(name: str) -> str:
    return (assets() / "page" / name).read_text(encoding="utf-8")


def _verifiers() -> list[tuple[str, str]]:
    """What can verify here, by label."""
    choices = [("PyTorch", "torch")]
    if not on_gpu() and reason_without_numba() is None:
        choices.insert(0, ("Numba", "numba"))
    if reason_without_triton() is None:
        choices.append(("Triton" if on_gpu() else "Triton (interpreted)", "triton"))
    return choices


def _about_verifiers() -> str:
    return reason_without_triton() or (
        "" if on_gpu() else "No GPU here: the Triton kernel runs in an interpreter, much slower, with the same tokens."
    )


def _drafting(family: str) -> list[tuple[str, str]]:
    return [
        ("bandit chooses", live.BANDIT),
        *((f"always {name}", name) for name in drafter_names(FAMILIES[family].drafters)),
    ]


def _drafters(family: str) -> Any:
    return gr.update(choices=_drafting(family), value=live.BANDIT)


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
        block_info_text_color="#59616B",
        block_info_text_color_dark="#A3ACB7",
        button_primary_background_fill="#3B4CC0",
        button_primary_background_fill_dark="#4A5FD6",
    )
