// A tour of one minute: six stops, each a panel lit up and two sentences about it.

const STOPS = [
  [".fs-output", "Every token shows its fate. Blue was guessed by the small model and kept; red was guessed and thrown away; ochre was put in its place by the large model; teal came for free."],
  [".fs-transport", "Everything can be played again, by round or by stage: the draft, the pass of the large model, the comparison, what is emitted. The space bar plays, R jumps to the next rejection."],
  [".fs-inspector", "Take any token apart: how likely the large model (p) and the small one (q) found it, the odds of acceptance, and the number that was drawn."],
  [".fs-arms", "A bandit chooses who drafts and how far, one dot a round. On the right is what it believes each arm delivers, in tokens per second."],
  [".fs-regret", "What choosing has cost: seconds more than the best single arm would have needed for this very text. Where switching could gain less than 3 %, the page says that there is nothing to learn."],
  [".fs-figures", "The large model alone writes one token a pass. Here you see how many a pass really gave, and whether that was faster. Press Generate to run it on this machine."],
];
const card = find(".fs-tour");
let stop = -1;

function visit(next) {
  find(STOPS[stop]?.[0] ?? ".none")?.classList.remove("fs-lit");
  stop = next;
  card.hidden = stop < 0 || stop >= STOPS.length;
  if (card.hidden) { stop = -1; return find("[data-tour=start]").focus(); }
  const [selector, text] = STOPS[stop];
  find(selector).classList.add("fs-lit");
  find(selector).scrollIntoView({ block: "center", behavior: calm.matches ? "auto" : "smooth" });
  card.querySelector("p").textContent = text;
  card.querySelector("span").textContent = `${stop + 1} of ${STOPS.length}`;
  card.querySelector("[data-tour=next]").textContent = stop + 1 < STOPS.length ? "Next" : "Done";
  card.querySelector("[data-tour=next]").focus({ preventScroll: true });
}

element.addEventListener("click", (event) => {
  const step = event.target.closest?.("[data-tour]")?.dataset.tour;
  if (step) visit({ start: 0, back: Math.max(0, stop - 1), next: stop + 1, end: -1 }[step]);
});
card.addEventListener("keydown", (event) => { if (event.key === "Escape") visit(-1); });
