"""Saved benchmark results as a README table and a plot."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashspec.bandits import DEFAULT

README_SHAPES = [(b, g, v) for v in (32_000, 151_936) for g in (1, 4, 16) for b in (1, 8, 32, 128)]
COLUMNS = {
    "triton": "token rule",
    "triton_block": "block rule",
    "triton_coupled": "coupled",
    "triton_lse": "token, draft log-sum-exp given",
    "eager": "PyTorch eager",
    "compiled": "torch.compile",
}


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def table(result: dict[str, Any]) -> str:
    """Markdown: µs inside a CUDA graph for the shapes of the README, the share of copy bandwidth, and the launched figures at B = 1."""
    rows = {(r["B"], r["gamma"], r["V"]): r for r in result["rows"]}
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"{result['device']}, {versions}, {result['date']}; bf16 logits, T = {result['temperature']}, median µs in a CUDA graph. "
        f"Floor: each needed row read once at the measured copy bandwidth of {result['copy_bandwidth'] / 1e12:.2f} TB/s; "
        "“share” is the floor over the token rule.",
        "",
        "| B | γ | V | floor | " + " | ".join(COLUMNS.values()) + " | share |",
        "|" + " --- |" * (len(COLUMNS) + 5),
    ]
    for shape in README_SHAPES:
        row = rows[shape]
        figures = [f"{row['graph'][name]:.1f}" if row["graph"].get(name) else "–" for name in COLUMNS]
        share = f"{row['floor'] / row['graph']['triton']:.0%}"
        lines.append("| " + " | ".join([*map(str, shape), f"{row['floor']:.1f}", *figures, share]) + " |")
    single = [rows[s]["launched"] for s in rows if s[0] == 1]
    lines += [
        "",
        "Launched from Python and waited for, B = 1, median over "
        f"{len(single)} shapes: bound call {_median(single, 'triton_bound')} µs, ordinary call {_median(single, 'triton')} µs, "
        f"PyTorch eager {_median(single, 'eager')} µs; an empty kernel {result['empty']['launched']} µs.",
        "",
        _cut_line(rows),
        "",
        *(f"Note: {note}" for note in result["notes"]),
    ]
    return "\n".join(lines)


def bandit_table(result: dict[str, Any]) -> str:
    """Markdown: what the default policy reaches by replay on every workload, and by the clock on all of them mixed."""
    machine = result["runs"][0]["machine"]
    lines = [
        f"{machine['device']}, {machine['dtype']}, torch {machine['torch']}; block rule. Replay: tokens per second on the same texts at the "
        "measured cost table. Headroom: what the best switching every 32 tokens would gain, had it known the text. Clock: really decoded, "
        "all workloads mixed, contestants alternating prompt by prompt.",
        "",
        "| target, prompts, T | workload | plain | best fixed arm | hand rule | default policy | of best fixed | headroom |",
        "|" + " --- |" * 8,
    ]
    for run in result["runs"]:
        where = f"{run['family']}, {run['prompts']}, {run['temperature']:g}"
        for kind in dict.fromkeys(line["workload"] for line in run["replay"]):
            lines.append(_bandit_row(where, kind, run["replay"], f"{run['headroom'][kind]:.1%}"))
        if run["live"]:
            lines.append(
                _bandit_row(where, "mixed", run["live"], "–").replace("| mixed |", "| **mixed, by the clock** |")
            )
    return _with_notes(lines, result)


def _bandit_row(where: str, kind: str, lines: list[dict[str, Any]], headroom: str) -> str:
    of_kind = {line["contestant"]: line for line in lines if line["workload"] == kind}
    fixed = [name for name, line in of_kind.items() if name == "plain" or "γ=" in name]
    best = max(fixed, key=lambda name: of_kind[name]["rate"])
    default = of_kind[DEFAULT]
    rates = [
        f"{of_kind['plain']['rate']:.1f}",
        f"{of_kind[best]['rate']:.1f} ({best})",
        f"{of_kind['rule']['rate']:.1f}",
    ]
    return (
        f"| {where} | {kind} | "
        + " | ".join([*rates, f"{default['rate']:.1f}", f"{default['of_best']:.3f}", headroom])
        + " |"
    )


def alpha_table(result: dict[str, Any]) -> str:
    """Markdown: acceptance of a drafted token and expected tokens a pass, one row a workload, one column a drafter."""
    machine, runs = result["runs"][0]["machine"], result["runs"]
    names = list(dict.fromkeys(line["drafter"] for run in runs for line in run["lines"]))
    count, gamma, tokens = runs[0]["per_workload"], runs[0]["gamma"], runs[0]["tokens"]
    lines = [
        f"{machine['dtype']}, {count} prompts of each workload, {tokens} tokens each. Chance that the first drafted token is accepted "
        "(for lookup: where it drafts, with the share of positions where it does) / expected tokens a target pass with "
        f"γ = {gamma}, token rule. Bold: most tokens a pass.",
        "",
        f"| target, T | workload | {' | '.join(names)} | repeated 4-grams |",
        "|" + " --- |" * (len(names) + 3),
    ]
    for run in runs:
        for kind, repeated in run["repeated"].items():
            of_kind = {line["drafter"]: line for line in run["lines"] if line["workload"] == kind}
            most = max(line["per_pass"] for line in of_kind.values())
            cells = [_alpha_cell(of_kind.get(name), most) for name in names]
            lines.append(f"| {run['family']}, {run['temperature']:g} | {kind} | {' | '.join(cells)} | {repeated:.0%} |")
    return "\n".join(lines)


def decode_table(result: dict[str, Any]) -> str:
    """Markdown: tokens per second of every contestant, ratios of medians, losers included."""
    machine = result["runs"][0]["machine"]
    lines = [
        f"{machine['device']}, torch {machine['torch']}, transformers {machine['transformers']}; FlashSpec: {machine['dtype']}. "
        "Whole requests, prompt included, contestants alternating; median and quartiles in tokens per second, ratios of medians.",
        "",
        "| target, prompts, T | contestant | tokens/s | quartiles | × transformers | × FlashSpec plain | first token, s |",
        "|" + " --- |" * 7,
    ]
    for run in result["runs"]:
        where = f"{run['family']}, {run['prompts']}, {run['temperature']:g}"
        for line in run["lines"]:
            first = f"{line['first']:.3f}" if line["first"] is not None else "–"
            lines.append(
                f"| {where} | {line['method']} | {line['rate']:.1f} | {line['low']:.1f}–{line['high']:.1f} | {line['of_reference']:.2f} | "
                f"{line['of_plain']:.2f} | {first} |"
            )
    return _with_notes(lines, result)


def batch_table(result: dict[str, Any]) -> str:
    """Markdown: tokens per second of all rows together, one line a number of rows."""
    machine, names = result["runs"][0]["machine"], list(result["runs"][0]["lines"][0]["rates"])
    lines = [
        f"{machine['device']}, {machine['dtype']}, torch {machine['torch']}, transformers {machine['transformers']}; "
        f"{result['runs'][0]['tokens']} tokens a row. Tokens per second of all rows together.",
        "",
        f"| target, prompts, T | rows | {' | '.join(names)} |",
        "|" + " --- |" * (len(names) + 2),
    ]
    for run in result["runs"]:
        where = f"{run['family']}, {run['prompts']}, {run['temperature']:g}"
        for line in run["lines"]:
            rates = " | ".join(f"{line['rates'][name]:.0f}" for name in names)
            lines.append(f"| {where} | {line['rows']} | {rates} |")
    return _with_notes(lines, result)


def shapes_table(result: dict[str, Any]) -> str:
    """Markdown: milliseconds of a round at the shapes of large models, and the acceptance that pays for it."""
    run = result["runs"][0]
    lines = [
        f"A cost model, not a speed-up: random weights of these shapes, {run['machine']['dtype']}, {run['text']} tokens in the caches, "
        "one request; "
        f"{run['machine']['device']}, torch {run['machine']['torch']}, {run['date']}. Milliseconds of a round by the device's clock.",
        "",
        "| target | drafter | γ | plain | draft | target | verify | acceptance that pays |",
        "|" + " --- |" * 8,
    ]
    for line in run["lines"]:
        figures = " | ".join(f"{1000 * line[name]:.2f}" for name in ("plain", "draft", "read", "verify"))
        even = "never" if line["break_even"] is None else f"{line['break_even']:.2f}"
        lines.append(f"| {line['target']} | {line['drafter']} | {line['gamma']} | {figures} | {even} |")
    return "\n".join(lines)


def _with_notes(lines: Sequence[str], result: dict[str, Any]) -> str:
    """A table, and below it what is to be known of its runs."""
    notes = dict.fromkeys(note for run in result["runs"] for note in run.get("notes", []))
    return "\n".join([*lines, "", *(f"Note: {note}" for note in notes)]).rstrip()


def _alpha_cell(line: dict[str, Any] | None, most: float) -> str:
    if line is None:
        return "–"
    where = "" if line["drafts"] > 0.995 else f" ({line['drafts']:.0%})"
    passes = f"**{line['per_pass']:.2f}**" if line["per_pass"] == most else f"{line['per_pass']:.2f}"
    return f"{line['alpha']:.2f}{where} / {passes}"


def _cut_line(rows: dict[tuple[int, int, int], dict[str, Any]]) -> str:
    """The figures with top-p, and where ours is no faster than PyTorch."""
    cut = {shape: row["graph"] for shape, row in rows.items() if row["graph"].get("triton_top_p")}
    ratios = sorted(g["eager_top_p"] / g["triton_top_p"] for g in cut.values())
    slower = [
        s
        for s, row in rows.items()
        if row["graph"]["triton"] > min(row["graph"].get(n) or 1e9 for n in ("eager", "eager_lean", "compiled"))
    ]
    return (
        f"With top-p 0.9 the kernel that finds the thresholds dominates: {ratios[0]:.1f} to {ratios[-1]:.1f} times faster than PyTorch's sort, "
        f"γ = 4. Shapes where PyTorch is faster than the token rule: {', '.join(map(str, slower)) or 'none'}."
    )


def _median(rows: list[dict[str, float]], name: str) -> float:
    values = sorted(row[name] for row in rows)
    return values[len(values) // 2]


def write_into_readme(readme: Path, name: str, text: str) -> None:
    """Replace what stands between <!-- NAME --> and <!-- /NAME -->."""
    old = readme.read_text(encoding="utf-8")
    new = re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m: f"{m[1]}{text}\n{m[2]}", old, flags=re.DOTALL)
    readme.write_text(new, encoding="utf-8")


def _pyplot() -> Any:
    """matplotlib for SVG files that are the same bytes every time."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flashspec"
    from matplotlib import pyplot

    return pyplot


def plot(result: dict[str, Any], path: Path) -> None:
    """µs against batch size at γ = 4, one panel a vocabulary. Needs matplotlib."""
    pyplot = _pyplot()
    vocabularies = sorted({row["V"] for row in result["rows"]})
    figure, panels = pyplot.subplots(1, len(vocabularies), figsize=(3.2 * len(vocabularies), 3.4), sharey=True)
    styles = {
        "floor": ("#59616B", ":"),
        "triton": ("#14458F", "-"),
        "triton_block": ("#0E8078", "-"),
        "eager": ("#8F2A0A", "--"),
    }
    for panel, vocabulary in zip(panels, vocabularies, strict=True):
        rows = sorted((r for r in result["rows"] if r["V"] == vocabulary and r["gamma"] == 4), key=lambda r: r["B"])
        for name, (colour, line) in styles.items():
            values = [r["floor"] if name == "floor" else r["graph"][name] for r in rows]
            panel.loglog(
                [r["B"] for r in rows],
                values,
                line,
                color=colour,
                marker="o",
                markersize=3,
                label=name.replace("_", ", "),
            )
        panel.set_title(f"V = {vocabulary:,}", fontsize=10)
        panel.set_xlabel("requests B")
        panel.set_xticks([1, 8, 32, 128], ["1", "8", "32", "128"])
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("µs a verification, γ = 4")
    panels[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def plot_decode(result: dict[str, Any], path: Path) -> None:
    """Tokens per second of every contestant with its quartiles, one panel a temperature, the slowest at the bottom. Needs matplotlib."""
    pyplot = _pyplot()
    runs = result["runs"]
    figure, panels = pyplot.subplots(1, len(runs), figsize=(5.2 * len(runs), 3.6), squeeze=False)
    for panel, run in zip(panels[0], runs, strict=True):
        lines = sorted(run["lines"], key=lambda line: line["rate"])
        colours = ["#8F2A0A" if "transformers" in line["method"] else "#14458F" for line in lines]
        spread = [[line["rate"] - line["low"] for line in lines], [line["high"] - line["rate"] for line in lines]]
        panel.barh(
            [line["method"] for line in lines],
            [line["rate"] for line in lines],
            color=colours,
            xerr=spread,
            ecolor="#59616B",
        )
        panel.set_title(f"{run['family']}, T = {run['temperature']:g}", fontsize=10)
        panel.set_xlabel("tokens a second")
        panel.grid(alpha=0.25, axis="x")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


TABLES = {
    "verify": table, "bandit": bandit_table, "alpha": alpha_table, "decode": decode_table, "batch": batch_table, "shapes": shapes_table,
}  # fmt: skip
PLOTS = {"verify": plot, "decode": plot_decode}
