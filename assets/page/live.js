// The live view: messages in; coloured tokens, rounds, charts, inspector and replay out.

const strip = find(".fs-strip"), roundsBox = find(".fs-rounds"), detail = find(".fs-detail"), status = find(".fs-status"), stageBox = find(".fs-stage"), scrub = find("[data-do=scrub]");
const hintText = "Point at a token, or focus the output and use the arrow keys, to see its numbers.";

// What is on show. cursor: rounds shown, null while everything is; stage of the round behind the cursor, see STAGES.
const state = Object.assign(newRun(), { drawn: 0, roundsDrawn: 0, selected: -1, scheduled: false, running: false, cursor: null, stage: 0, timer: null, charted: 0 });
element.flashspec = Object.assign(state, { receive, open: openText }); // what scripts on the page may use

// ------------------------------------------------------------------------------------------------------------ messages

function receive(message) {
  if (message.recording) return playRecording(message.recording);
  if (message.run !== state.id) {
    show(newRun(message.run));
  }
  if (!take(state, message)) return;
  state.running = !message.done;
  if (message.note) say(message.note, "waiting");
  if (message.error) say(message.error, "error");
  else if (message.done) say(ending());
  schedule();
}

/** Replace what is on show by `run`. */
function show(run) {
  pause();
  Object.assign(state, run, { drawn: 0, roundsDrawn: 0, selected: -1, cursor: null, stage: 0, running: false, charted: 0 });
  strip.textContent = roundsBox.textContent = stageBox.textContent = "";
  detail.replaceChildren(make("p", { class: "fs-muted" }, hintText));
  schedule();
}

function playRecording(messages) {
  const run = newRun("recording");
  for (const message of messages) take(run, message);
  show(run);
  if (!calm.matches) state.cursor = 0; // before the first frame, so that nothing flashes
  paint();
  say(`A recording from ${run.head.machine.device ?? "another machine"}. Press Generate to run it here.`);
  if (!calm.matches) play();
}

function ending() {
  const last = state.rounds.at(-1);
  const why = { eos: "The model ended its answer.", length: "The chosen number of tokens is reached.", context: "The model's context is full.", "stop string": "A stop string was reached." };
  return `${why[last?.stop] ?? "Done."} Verified by ${last?.backend ?? "nobody"}. ${state.figures.tokens} tokens in ${state.figures.seconds.toFixed(2)} s.`;
}

/** kind: "error", or "waiting" until the first token comes; then the empty output says it too. */
function say(text, kind = "") {
  strip.dataset.note = kind === "waiting" ? text : "";
  status.textContent = text;
  status.className = `fs-status ${kind}`;
}

// ------------------------------------------------------------------------------------------------------------- drawing

function schedule() {
  if (state.scheduled) return;
  state.scheduled = true;
  requestAnimationFrame(() => { state.scheduled = false; paint(); });
}

function paint() {
  const atEnd = strip.scrollTop + strip.clientHeight > strip.scrollHeight - 40;
  const fresh = document.createDocumentFragment();
  for (; state.drawn < state.tokens.length; state.drawn++) fresh.append(cell(state.tokens[state.drawn], state.drawn));
  if (state.drawn && status.classList.contains("waiting")) say("Writing …");
  strip.append(fresh);
  for (; !roundsBox.hidden && state.roundsDrawn < state.rounds.length; state.roundsDrawn++) roundsBox.append(roundRow(state.rounds[state.roundsDrawn]));
  scrub.max = state.rounds.length;
  scrub.value = shown();
  veil();
  if (atEnd && state.cursor === null) strip.scrollTop = strip.scrollHeight;
  drawFigures();
  drawCharts();
}

function cell(token, index) {
  const span = make("span", { class: `fs-token ${kindOf(token)}`, "data-index": index, id: `fs-token-${index}`, role: "option", "aria-selected": "false", "aria-label": token.text.trim() ? null : token.label.trim() || "white space" }, token.text);
  if (!token.text) span.classList.add("silent"); // part of a character that a later token completes, or the end mark
  return span;
}

/** draft → verdict → correction or bonus, and where the time went. */
function roundRow(round) {
  const cells = state.tokens.slice(round.first, round.first + round.count).map((token, k) => make("span", { class: `fs-token ${kindOf(token)}`, "data-index": round.first + k }, token.label.replaceAll("\n", "↵")));
  const parts = [["draft", round.s[0] + round.s[3]], ["target", round.s[1]], ["verify", round.s[2]], ["other", round.s[4] + round.s[5]]];
  const bars = parts.map(([name, seconds]) => make("i", { class: name, style: `width:${(100 * seconds) / Math.max(round.seconds, 1e-9)}%`, title: `${name} ${duration(seconds)}` }));
  return make("div", { class: "fs-round", "data-round": round.number }, make("span", { class: "fs-muted" }, `${round.i + 1} · ${armName(round.arm)}`), make("span", { class: "fs-cells" }, ...cells), make("span", { class: "fs-times", title: parts.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ") }, ...bars), make("span", { class: "fs-muted" }, duration(round.seconds)));
}

const shown = () => (state.cursor === null ? state.rounds.length : state.cursor);

function drawFigures() {
  const now = state.sums[Math.min(shown(), state.rounds.length)];
  const put = (name, text) => { find(`[data-figure=${name}]`).textContent = text; };
  const passes = shown();
  put("rate", now.seconds > 0 ? (now.tokens / now.seconds).toFixed(1) : "–");
  put("pass", passes ? (now.tokens / passes).toFixed(2) : "–");
  put("accepted", now.drafted ? `${Math.round((100 * now.accepted) / now.drafted)} %` : "–");
  put("rounds", passes || "–");
  const g = state.regret;
  put("plain", g?.fixed?.plain ? (g.fixed.plain / (g.best_seconds + g.run.at(-1))).toFixed(2) : "–");
}

/** Charts are redrawn at most four times a second while text streams. */
function drawCharts(now = false) {
  const time = performance.now();
  if (!now && (state.running || state.timer) && time - state.charted < 250) return;
  state.charted = time;
  const chosen = state.selected >= 0 ? state.tokens[state.selected].round.number : -1;
  drawArms(find("[data-chart=arms]"), state, shown(), chosen);
  drawRegret(find("[data-chart=regret]"), find(".fs-note"), state, shown());
  drawHeadroom(find(".fs-headroom"), state.regret);
  if (find(".fs-arms details").open) find("[data-table=arms]").replaceChildren(armTable(state, shown()));
}

// -------------------------------------------------------------------------------------------------------------- replay

const STAGES = ["", "draft: the drafter has proposed", "verify: the target has read the whole block in one pass", "compare: each draft is accepted or rejected"];

/** Hide what lies behind the cursor; of the round at the cursor show what its stage has reached. */
function veil() {
  const { cursor, stage } = state;
  const hidden = cursor === null ? Infinity : cursor;
  for (let r = 0; r < state.rounds.length; r++) {
    const { first, count, drafted } = state.rounds[r];
    for (let k = 0; k < count && first + k < state.drawn; k++) {
      const early = r === hidden && stage > 0 && k < drafted.length;
      const list = strip.children[first + k].classList;
      list.toggle("later", r >= hidden && !early);
      list.toggle("pending", early && stage < 3);
    }
    const row = roundsBox.children[r];
    if (row) row.classList.toggle("later", r >= hidden);
  }
  const round = state.rounds[hidden];
  stageBox.textContent = cursor === null || !round ? "" : stage ? `Round ${round.i + 1}, ${STAGES[stage]}` : `${cursor} of ${state.rounds.length} rounds`;
}

function seek(cursor, stage = 0) {
  const end = state.rounds.length;
  state.cursor = Math.max(0, Math.min(end, cursor));
  state.stage = state.cursor === end ? 0 : stage;
  if (state.cursor === end && !state.timer) state.cursor = null;
  paint();
  const at = state.rounds[Math.min(shown(), end - 1)];
  if (at) (strip.children[at.first] ?? strip).scrollIntoView?.({ block: "nearest" });
}

function step() {
  const at = shown() >= state.rounds.length ? 0 : shown();
  if (state.stage < 3 && state.rounds[at]?.drafted.length) seek(at, state.stage + 1);
  else seek(at + 1, 0);
}

function play() {
  if (state.running || !state.rounds.length) return;
  if (shown() >= state.rounds.length) seek(0);
  const turn = () => {
    const at = shown();
    if (at >= state.rounds.length) { pause(); state.cursor = null; return paint(); }
    const wait = Math.max(16, (1000 * state.rounds[at].seconds) / Number(find("[data-do=speed]").value));
    state.timer = setTimeout(() => { seek(at + 1); turn(); }, wait);
  };
  turn();
  markPlaying(true);
}

function pause() {
  clearTimeout(state.timer);
  state.timer = null;
  markPlaying(false);
}

function markPlaying(on) {
  const button = find("[data-do=play]");
  button.textContent = on ? "⏸" : "▶";
  button.setAttribute("aria-label", on ? "Pause" : "Play");
}

function toRejection() {
  pause();
  const from = state.selected >= 0 ? state.selected + 1 : 0;
  const index = state.tokens.findIndex((token, i) => i >= from && token.verdict === "rejected");
  if (index < 0) return say("There is no later rejection.");
  if (shown() <= state.tokens[index].round.number) seek(state.tokens[index].round.number + 1);
  select(index)?.scrollIntoView({ block: "nearest" });
}

const controls = {
  first: () => { pause(); seek(0); },
  back: () => { pause(); seek(shown() - 1); },
  play: () => (state.timer ? pause() : play()),
  step: () => { pause(); step(); },
  forward: () => { pause(); seek(shown() + 1); },
  last: () => { pause(); seek(state.rounds.length); },
  rejection: toRejection,
};

// ----------------------------------------------------------------------------------------------------------- inspector

function select(index) {
  if (index < 0 || index >= state.drawn) return;
  const mark = (at, on) => {
    const span = strip.children[at];
    span?.classList.toggle("selected", on);
    span?.setAttribute("aria-selected", String(on));
    return span;
  };
  if (state.selected >= 0) mark(state.selected, false);
  state.selected = index;
  const span = mark(index, true);
  strip.setAttribute("aria-activedescendant", span.id);
  inspect(detail, state.tokens[index]);
  if (!state.running && !state.timer) drawCharts(true);
  return span;
}

const indexOf = (event) => event.target.closest?.("[data-index]")?.dataset.index;

// pointermove and not pointerover: scrolling by keyboard moves tokens under a pointer at rest.
element.addEventListener("pointermove", (event) => { if (indexOf(event) && indexOf(event) !== String(state.selected)) select(Number(indexOf(event))); });
element.addEventListener("click", (event) => {
  if (indexOf(event)) select(Number(indexOf(event)));
  const button = event.target.closest?.("button");
  if (button?.dataset.do) controls[button.dataset.do]();
  if (button?.dataset.file) files[button.dataset.file]();
});
element.addEventListener("change", (event) => {
  const { show: what } = event.target.dataset;
  if (what === "rejected") element.classList.toggle("fs-hide-rejected", !event.target.checked);
  if (what === "rounds") {
    roundsBox.hidden = !event.target.checked;
    strip.hidden = event.target.checked;
    paint();
  }
});
scrub.addEventListener("input", () => { pause(); seek(Number(scrub.value)); });
find(".fs-arms details").addEventListener("toggle", () => drawCharts(true));
strip.addEventListener("keydown", (event) => {
  if (event.key === " ") { event.preventDefault(); return controls.play(); }
  if (event.key.toLowerCase() === "r" && !event.ctrlKey && !event.metaKey) return toRejection();
  const last = state.drawn - 1;
  const to = { ArrowRight: state.selected + 1, ArrowLeft: state.selected - 1, Home: 0, End: last }[event.key];
  if (to === undefined || last < 0) return;
  event.preventDefault();
  const by = event.key === "ArrowLeft" || event.key === "End" ? -1 : 1;
  let index = Math.min(last, Math.max(0, to));
  while (index > 0 && index < last && strip.children[index].offsetParent === null) index += by; // skips hidden drafts
  select(index)?.scrollIntoView({ block: "nearest" });
});
document.addEventListener("click", (event) => {
  if (event.target.closest?.("#stop") && state.running) { state.running = false; say("Stopped. What was written stays."); drawCharts(true); }
});
new ResizeObserver(() => drawCharts(true)).observe(find(".fs-grid"));

// --------------------------------------------------------------------------------------------------------------- files

function offer(name, content, type) {
  const link = make("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Show a saved trace; a bad file gets a sentence and what is on the page stays. */
function openText(text) {
  try { show(runOf(text)); } catch (error) { return say(error.message, "error"); }
  paint();
  say(`A saved trace: ${state.head.family} on ${state.head.machine.device ?? "an unnamed machine"}.`);
}

const quoted = (value) => (value === null || value === undefined ? "" : /[",\n\r]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));

/** The charts with their colours written into them, one below the other. */
function chartsAsSvg() {
  const parts = [...element.querySelectorAll("[data-chart] svg")];
  const width = Math.max(...parts.map((svg) => svg.clientWidth)), heights = parts.map((svg) => svg.clientHeight + 16);
  const page = draw("svg", { xmlns: NS, width, height: sum(heights), viewBox: `0 0 ${width} ${sum(heights)}` });
  page.append(draw("rect", { width: "100%", height: "100%", fill: getComputedStyle(find(".fs-card")).backgroundColor }));
  let top = 8;
  parts.forEach((svg, i) => {
    const group = draw("g", { transform: `translate(0 ${top})` });
    const copy = svg.cloneNode(true);
    [...svg.querySelectorAll("*")].forEach((node, k) => {
      const style = getComputedStyle(node);
      const twin = copy.querySelectorAll("*")[k];
      for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family", "font-weight"]) twin.setAttribute(name, style.getPropertyValue(name));
    });
    group.append(...copy.childNodes);
    page.append(group);
    top += heights[i];
  });
  return { text: new XMLSerializer().serializeToString(page), width, height: sum(heights) };
}

const files = {
  save: () => (state.rounds.length ? offer("trace.json", JSON.stringify(traceOf(state)), "application/json") : say("There is nothing to save yet; press Generate.", "error")),
  open: () => find(".fs-files input").click(),
  csv: () => {
    const rows = state.tokens.map((t) => [t.round.i, armName(t.round.arm), t.id, t.label, t.verdict, t.p, t.q, t.threshold, t.uniform, t.round.seconds]);
    offer("tokens.csv", [["round", "arm", "id", "token", "verdict", "p", "q", "threshold", "uniform", "seconds of the round"], ...rows].map((row) => row.map(quoted).join(",")).join("\n"), "text/csv");
  },
  svg: () => offer("charts.svg", chartsAsSvg().text, "image/svg+xml"),
  png: () => {
    const { text, width, height } = chartsAsSvg();
    const image = new Image();
    image.onload = () => {
      const canvas = make("canvas", { width: 2 * width, height: 2 * height });
      canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
      canvas.toBlob((blob) => offer("charts.png", blob, "image/png"));
    };
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  },
  link: async () => {
    if (!state.head) return say("There are no settings to link to yet; press Generate.", "error");
    const { sampling = {}, arm = "", ...settings } = state.head.settings;
    const [drafter, gamma] = String(arm).split(" γ=");
    const chosen = state.head.arms.includes(arm) || gamma || drafter === "plain" ? { drafter, gamma: gamma ?? 0 } : { drafter: "bandit", policy: arm };
    const link = new URL(location.href);
    link.search = new URLSearchParams({ prompt: state.head.prompt, family: state.head.family, ...chosen, rule: settings.rule, temperature: sampling.temperature, top_p: sampling.top_p, top_k: sampling.top_k, tokens: settings.max_new_tokens, seed: settings.seed });
    try { await navigator.clipboard.writeText(link.href); say("The link is in the clipboard."); } catch { say(link.href); }
  },
};

async function openFile(file) {
  if (file.size > MAX_TRACE_BYTES) return say(`This trace is larger than ${MAX_TRACE_BYTES / 1e6} MB; save a shorter run.`, "error");
  openText(await file.text());
}
find(".fs-files input").addEventListener("change", (event) => { if (event.target.files[0]) openFile(event.target.files[0]); event.target.value = ""; });
element.addEventListener("dragover", (event) => event.preventDefault());
element.addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) openFile(event.dataTransfer.files[0]); });

watch("value", () => { if (props.value) receive(JSON.parse(props.value)); });
if (props.value) receive(JSON.parse(props.value));
