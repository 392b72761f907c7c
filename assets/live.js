// The live output: messages of flashspec/ui/live.py in, coloured tokens out. Runs once inside Gradio's HTML component,
// which provides `element`, `props` and `watch`. All text of the model is set as text, never as markup.

const find = (selector) => element.querySelector(selector);
const strip = find(".fs-strip");
const detail = find(".fs-detail");
const status = find(".fs-status");

const state = { run: null, seq: -1, tokens: [], drawn: 0, figures: null, selected: -1, scheduled: false, running: false, lost: 0 };
element.flashspec = Object.assign(state, { receive }); // what scripts on the page may use: the state, and a message to show

// ---------------------------------------------------------------------------------------------------- messages to tokens

function receive(message) {
  if (message.run !== state.run) reset(message.run);
  if (message.seq <= state.seq) return;
  state.lost += message.seq - state.seq - 1;
  state.seq = message.seq;
  state.figures = message.totals;
  for (const round of message.rounds) state.tokens.push(...tokensOf(round));
  state.running = !message.done;
  if (message.error) say(message.error, "error");
  else if (message.done) say(ending(message));
  if (!state.scheduled) {
    state.scheduled = true;
    requestAnimationFrame(draw);
  }
}

function tokensOf(round) {
  const tokens = round.drafted.map(([text, piece, verdict, id, p, q, threshold, uniform]) => ({
    text: verdict === "accepted" ? piece : text.replaceAll("\n", "↵"), label: text, verdict, id, p, q, threshold, uniform, round,
  }));
  if (round.next) {
    const [text, piece, verdict, id, p] = round.next;
    tokens.push({ text: piece, label: text, verdict, id, p, round });
  }
  return tokens;
}

function ending(message) {
  const last = state.tokens.at(-1)?.round;
  const why = {
    eos: "The model ended its answer.",
    length: "The chosen number of tokens is reached.",
    context: "The model's context is full.",
    "stop string": "A stop string was reached.",
  };
  return `${why[last?.stop] ?? "Done."} Verified by ${last?.backend ?? "nobody"}. ${message.totals.tokens} tokens in ${message.totals.seconds.toFixed(2)} s.`;
}

function reset(run) {
  Object.assign(state, { run, seq: -1, tokens: [], drawn: 0, selected: -1, lost: 0 });
  strip.textContent = "";
  detail.textContent = "Point at a token, or focus the output and use the arrow keys, to see its numbers.";
  say("Reading the prompt …");
}

function say(text, kind = "") {
  status.textContent = text;
  status.className = `fs-status ${kind}`;
}

// --------------------------------------------------------------------------------------------------------------- drawing

function draw() {
  state.scheduled = false;
  const atEnd = strip.scrollTop + strip.clientHeight > strip.scrollHeight - 40;
  const fresh = document.createDocumentFragment();
  for (; state.drawn < state.tokens.length; state.drawn++) fresh.append(cell(state.tokens[state.drawn], state.drawn));
  if (state.drawn && status.textContent.startsWith("Reading")) say("Writing …");
  strip.append(fresh);
  if (atEnd) strip.scrollTop = strip.scrollHeight;
  drawFigures(state.figures);
}

function cell(token, index) {
  const span = document.createElement("span");
  span.className = `fs-token ${token.verdict}`;
  span.textContent = token.text;
  span.dataset.index = index;
  span.id = `fs-token-${index}`;
  span.setAttribute("role", "option");
  span.setAttribute("aria-selected", "false");
  if (!token.text) span.classList.add("silent"); // part of a character that a later token completes, or the end mark
  return span;
}

function drawFigures({ tokens, rounds, drafted, accepted, seconds }) {
  const show = (name, text) => { find(`[data-figure=${name}]`).textContent = text; };
  show("rate", seconds > 0 ? (tokens / seconds).toFixed(1) : "–");
  show("pass", rounds ? (tokens / rounds).toFixed(2) : "–");
  show("accepted", drafted ? `${Math.round((100 * accepted) / drafted)} %` : "–");
  show("rounds", rounds || "–");
}

// ---------------------------------------------------------------------------------------------------------------- detail

function describe({ label, verdict, p, q, threshold, uniform, round }) {
  const number = (x) => x.toFixed(3);
  const name = `“${label}” ${verdict}, round ${round.i + 1} (${round.arm}).`;
  if (verdict === "bonus") return `${name} Every draft was accepted, so the target's pass gave one token more: p = ${number(p)}.`;
  if (verdict === "replacement" && round.rule === "coupled") return `${name} The target's own choice: p = ${number(p)}.`;
  if (verdict === "replacement") return `${name} Drawn from what p has beyond q, in place of the rejected draft: p = ${number(p)}.`;
  const sides = `p = ${number(p)}, q = ${number(q)}`;
  if (threshold === null) {
    return `${name} ${sides}; drafter and target ${verdict === "accepted" ? "chose" : "did not choose"} the same with shared noise.`;
  }
  if (verdict === "discarded") return `${name} ${sides}; it stood behind a rejected draft.`;
  const sign = uniform <= threshold ? "≤" : ">";
  const limit = Math.min(1, threshold);
  return `${name} ${sides}; accepted with probability ${number(limit)}, drew ${number(uniform)} ${sign} ${number(limit)}.`;
}

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
  detail.textContent = describe(state.tokens[index]);
  return span;
}

const indexOf = (event) => event.target.closest?.(".fs-strip .fs-token")?.dataset.index;

// pointermove and not pointerover: scrolling by keyboard moves tokens under a pointer at rest.
element.addEventListener("pointermove", (event) => { if (indexOf(event) && indexOf(event) !== String(state.selected)) select(Number(indexOf(event))); });
element.addEventListener("click", (event) => { if (indexOf(event)) select(Number(indexOf(event))); });
element.addEventListener("change", (event) => {
  if (event.target.dataset.show) element.classList.toggle("fs-hide-rejected", !event.target.checked);
});
strip.addEventListener("keydown", (event) => {
  const last = state.drawn - 1;
  const to = { ArrowRight: state.selected + 1, ArrowLeft: state.selected - 1, Home: 0, End: last }[event.key];
  if (to === undefined || last < 0) return;
  event.preventDefault();
  const step = event.key === "ArrowLeft" || event.key === "End" ? -1 : 1;
  let index = Math.min(last, Math.max(0, to));
  while (index > 0 && index < last && strip.children[index].offsetParent === null) index += step; // skips hidden drafts
  select(index)?.scrollIntoView({ block: "nearest" });
});
document.addEventListener("click", (event) => {
  if (event.target.closest?.("#stop") && state.running) say("Stopped. What was written stays.");
});

watch("value", () => { if (props.value) receive(JSON.parse(props.value)); });
