"""Plotly figures: how all of them look, and the four that take a finished run apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashspec.records import Arm, Round, Trace

BLUE, RED, OCHRE, TEAL, GREY = "#4A6FD0", "#C4552B", "#A88100", "#12958B", "#7A838D"
COLOURS = (BLUE, RED, OCHRE, TEAL, GREY, "#8E5BB5", "#3B8F4D", "#B05080", "#6A727C")
PARTS = (
    ("draft", BLUE),
    ("target", GREY),
    ("verify", TEAL),
    ("catch_up", OCHRE),
    ("policy", "#8E5BB5"),
    ("other", "#C8C4BA"),
)
WINDOW = 8  # rounds over which the speed along a text is taken


def of_run(trace: Trace, regret: dict[str, Any] | None) -> list[Any]:
    """What a run was made of: time by arm, acceptance by depth, speed along the text, seconds lost."""
    found = [where_time_went(trace.rounds), accepted_by_depth(trace.rounds), speed(trace.rounds), seconds_lost(regret)]
    for figure in found:  # the component's label stands at the top, so the legend goes below the axis
        figure.update_layout(height=380, margin_t=44, legend={"y": -0.2, "yanchor": "top", "traceorder": "normal"})
        figure.update_xaxes(title_standoff=6, automargin=True)
    found[0].update_layout(height=max(380, 140 + 44 * len(found[0].data[0].y)))
    return found


def where_time_went(rounds: Sequence[Round]) -> Any:
    """Mean milliseconds of a round by arm, in its parts."""
    import plotly.graph_objects as go

    played = _by_arm(rounds)
    names = [f"{arm} ({len(some)})" for arm, some in played.items()]
    bars = [
        go.Bar(
            name=part.replace("_", " "), y=names, orientation="h", width=0.42, marker_color=colour,
            x=[1000 * float(np.mean([getattr(round.seconds, part) for round in some])) for some in played.values()],
        )
        for part, colour in PARTS
    ]  # fmt: skip
    figure = dressed(go.Figure(bars), "", x="ms a round (rounds)")
    figure.update_layout(barmode="stack", hovermode="y unified")
    figure.update_yaxes(autorange="reversed", showticklabels=False)
    for name in names:  # above its bar, where a phone has room for it
        figure.add_annotation(x=0, y=name, text=name, showarrow=False, xanchor="left", yanchor="bottom", yshift=9)
    return figure


def accepted_by_depth(rounds: Sequence[Round]) -> Any:
    """Of the rounds that drafted a k-th token: the share in which it was accepted, by arm."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for (arm, some), colour in zip(_by_arm(rounds).items(), COLOURS, strict=False):
        reached = [sum(len(round.drafted) > k for round in some) for k in range(arm.gamma)]
        passed = [sum(round.tau > k for round in some) for k in range(arm.gamma)]
        there = [k for k in range(arm.gamma) if reached[k]]
        if there:
            figure.add_scatter(
                x=[k + 1 for k in there], y=[passed[k] / reached[k] for k in there], name=str(arm), mode="lines+markers", line_color=colour,
                customdata=[[passed[k], reached[k]] for k in there], hovertemplate="%{y:.0%} (%{customdata[0]} of %{customdata[1]})",
            )  # fmt: skip
    figure = dressed(figure, "accepted", x="drafted token of the block", percent=True)
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 1.02])
    return figure


def speed(rounds: Sequence[Round]) -> Any:
    """Tokens per second along the text, over a few rounds at a time and over all so far."""
    import plotly.graph_objects as go

    tokens = np.cumsum([0, *(len(round.emitted) for round in rounds)])
    seconds = np.cumsum([0.0, *(round.seconds.total for round in rounds)])
    behind = np.maximum(np.arange(1, len(tokens)) - WINDOW, 0)
    local = (tokens[1:] - tokens[behind]) / np.maximum(seconds[1:] - seconds[behind], 1e-9)
    whole = tokens[1:] / np.maximum(seconds[1:], 1e-9)
    lines = [
        go.Scatter(name=f"last {WINDOW} rounds", x=tokens[1:], y=local, mode="lines", line_color=OCHRE),
        go.Scatter(name="so far", x=tokens[1:], y=whole, mode="lines", line_color=BLUE),
    ]
    return dressed(go.Figure(lines), "tokens a second", x="tokens written")


def seconds_lost(regret: dict[str, Any] | None) -> Any:
    """Exact replay: seconds more than the best fixed arm on the same text; below zero is a gain. An empty figure without a replay."""
    import plotly.graph_objects as go

    lines = []
    if regret:
        ends = [regret["tokens"][0], regret["tokens"][-1]]
        lines.append(go.Scatter(name=f"always {regret['best']}", x=ends, y=[0, 0], mode="lines", line_color=GREY))
        for name, label, colour in (
            ("run", "this run", BLUE),
            ("rule", "hand rule", OCHRE),
            ("oracle", "oracle", TEAL),
        ):
            lines.append(go.Scatter(name=label, x=regret["tokens"], y=regret[name], mode="lines", line_color=colour))
    return dressed(go.Figure(lines), "seconds lost", x="tokens written")


def dressed(figure: Any, y: str, x: str = "", percent: bool = False) -> Any:
    """Sizes and colours for both themes: transparent paper; the style sheet gives text and lines the page's ink."""
    figure.update_layout(
        height=320, margin={"l": 48, "r": 8, "t": 8, "b": 40}, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": 1.18, "x": 0}, hovermode="x unified",
        font={"size": 13, "family": "ui-sans-serif, system-ui, sans-serif"},
    )  # fmt: skip
    figure.update_xaxes(title=x, gridcolor="rgba(128,128,128,.2)", zeroline=False)
    figure.update_yaxes(
        title=y, gridcolor="rgba(128,128,128,.25)", zeroline=False, tickformat=".0%" if percent else None
    )
    return figure


def _by_arm(rounds: Sequence[Round]) -> dict[Arm, list[Round]]:
    """Rounds by arm, the arm played most first."""
    played: dict[Arm, list[Round]] = {}
    for round in rounds:
        played.setdefault(round.arm, []).append(round)
    return dict(sorted(played.items(), key=lambda item: -len(item[1])))
