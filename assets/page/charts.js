// Live charts, drawn as SVG at the measured width: who drafted in which round, and what choosing has cost.

const LABEL = 158;

function clean(box, height, label) {
  const width = Math.max(240, box.clientWidth);
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  box.replaceChildren(svg);
  return { svg, width };
}

/** One row an arm, a dot a round, and on the right what the policy believes: tokens per second, ± one standard deviation. */
function drawArms(box, run, until, chosen) {
  const names = [...new Set([...(run.head?.arms ?? []), ...run.rounds.map((r) => armName(r.arm))])];
  const row = 20, height = Math.max(names.length, 1) * row + 22;
  const { svg, width } = clean(box, height, "Arms: one row an arm, one dot a round, and the estimate of its rate");
  const last = run.rounds.slice(0, until).findLast((r) => r.e);
  const believed = new Map((last?.e ?? []).map((e, k) => [run.head.arms[k], e]));
  const right = believed.size && width > 420 ? 120 : 0;
  const x0 = LABEL, x1 = width - right - 8, count = Math.max(40, run.rounds.length);
  const x = (i) => x0 + 4 + (i / (count - 1)) * (x1 - x0 - 8);
  const most = Math.max(1e-9, ...[...believed.values()].map(([, mean, w]) => (mean ?? 0) + (w ?? 0)));
  names.forEach((name, k) => {
    const y = k * row + 12;
    svg.append(draw("line", { x1: x0, x2: x1, y1: y, y2: y, class: "grid" }), draw("text", { x: 0, y: y + 4 }, name));
    const e = believed.get(name);
    if (!right || !e || e[1] === null) return;
    const scale = (v) => x1 + 10 + (Math.max(0, v) / most) * (right - 56);
    svg.append(draw("line", { x1: scale(e[1] - (e[2] ?? 0)), x2: scale(e[1] + (e[2] ?? 0)), y1: y, y2: y, class: "spread" }), draw("circle", { cx: scale(e[1]), cy: y, r: 3.5, class: "mean" }), draw("text", { x: width, y: y + 4, "text-anchor": "end" }, e[1].toFixed(0)));
  });
  const radius = run.rounds.length > 120 ? 2 : 3;
  run.rounds.slice(0, until).forEach((r, i) => svg.append(draw("circle", { cx: x(i).toFixed(1), cy: names.indexOf(armName(r.arm)) * row + 12, r: i === chosen ? 5 : radius, class: i === chosen ? "dot chosen" : "dot" })));
  svg.append(draw("text", { x: x0, y: height - 2, class: "axis" }, "rounds →"));
  if (right) svg.append(draw("text", { x: width, y: height - 2, "text-anchor": "end", class: "axis" }, "tokens/s believed"));
}

/** The same as a table, for those who cannot see the chart. */
function armTable(run, until) {
  const last = run.rounds.slice(0, until).findLast((r) => r.e);
  const rows = [...new Set([...(run.head?.arms ?? []), ...run.rounds.map((r) => armName(r.arm))])].map((name) => {
    const own = run.rounds.slice(0, until).filter((r) => armName(r.arm) === name);
    const e = last?.e?.[run.head.arms.indexOf(name)];
    const mean = (f) => (own.length ? sum(own.map(f)) / own.length : null);
    return make("tr", {}, make("th", { scope: "row" }, name), ...[String(own.length), number(mean((r) => r.emitted), 2), number(own.length ? 1000 * mean((r) => r.seconds) : null, 1), e && e[1] !== null ? `${e[1].toFixed(0)} ± ${(e[2] ?? 0).toFixed(0)}` : "–"].map((text) => make("td", {}, text)));
  });
  const head = ["arm", "rounds", "tokens a round", "ms a round", "believed tokens/s"].map((text) => make("th", { scope: "col" }, text));
  return make("table", { class: "fs-table" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

/** Lines over tokens: [{name, points: [[x, y]…], kind}], with a line at zero that is called `zero`. */
function drawLines(box, lines, zero, label) {
  const height = 230;
  const { svg, width } = clean(box, height, label);
  const all = lines.flatMap((line) => line.points);
  if (!all.length) return;
  const x0 = 8, x1 = width - 8, y0 = 14, y1 = height - 22;
  const right = Math.max(...all.map((p) => p[0]), 1), low = Math.min(0, ...all.map((p) => p[1])), high = Math.max(1e-6, ...all.map((p) => p[1]));
  const x = (v) => x0 + (v / right) * (x1 - x0), y = (v) => y1 - ((v - low) / (high - low)) * (y1 - y0);
  svg.append(draw("line", { x1: x0, x2: x1, y1: y(0), y2: y(0), class: "zero" }));
  for (const { points, kind } of lines) svg.append(draw("path", { d: points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join(""), class: `line ${kind}` }));
  svg.append(draw("text", { x: x0, y: height - 4, class: "axis" }, "tokens of the text →"));
  const ends = lines.map(({ name, points, kind }) => make("span", { class: kind }, `${name} ${points.at(-1)[1] < 0 ? "−" : "+"}${duration(Math.abs(points.at(-1)[1]))}`));
  box.prepend(make("p", { class: "fs-names" }, ...ends, make("span", { class: "zero" }, zero)));
}

/** Exact curves when the replay is there, else what the policy itself would estimate. */
function drawRegret(box, note, run, until) {
  if (run.regret) {
    const g = run.regret;
    const curve = (name) => g.tokens.map((t, i) => [t, g[name][i]]);
    drawLines(box, [{ name: "this run", points: curve("run"), kind: "run" }, { name: "hand rule", points: curve("rule"), kind: "rule" }, { name: "oracle", points: curve("oracle"), kind: "oracle" }], `always ${g.best}`, "Seconds lost against the best fixed arm, by exact replay");
    note.replaceChildren(make("span", {}, `${g.verdict} `), make("span", { class: "fs-muted" }, "Seconds more than the best fixed arm on this very text, by exact replay at the measured costs. The oracle knows the text in advance; nothing reaches it."));
    return;
  }
  const rounds = run.rounds.slice(0, until);
  const points = rounds.flatMap((r, i) => {
    const best = Math.max(0, ...(r.e ?? []).map((e) => e[1] ?? 0));
    const { tokens, seconds } = run.sums[i + 1];
    return best > 0 ? [[tokens, seconds - tokens / best]] : [];
  });
  drawLines(box, points.length ? [{ name: "this run", points, kind: "run" }] : [], "the arm believed best", "Seconds lost, estimated while the text grows");
  note.textContent = points.length ? "An estimate while the text grows: it trusts the policy's own beliefs. The exact replay comes when the text is done." : "A fixed arm chooses nothing; when the text is done, exact replay tells what other arms would have needed.";
}

/** Headroom from 0 to 20 %, with the 3 % below which there is nothing to learn. */
function drawHeadroom(box, regret) {
  if (!regret) return box.replaceChildren(make("span", { class: "fs-muted" }, "Headroom: known when the text is done."));
  const at = Math.max(0, Math.min(1, regret.headroom / 0.2));
  box.replaceChildren(make("div", { class: "fs-meter", role: "img", "aria-label": `headroom ${percent(regret.headroom, 1)}` }, make("i", { style: `width:${100 * at}%` }), make("u", { style: "left:15%" })), make("span", {}, `Headroom ${percent(regret.headroom, 1)}: what the best switching every 32 tokens would gain. Below the mark (3 %) there is nothing to learn.`));
}
