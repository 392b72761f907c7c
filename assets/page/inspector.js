// One token taken apart: what p and q said, what was drawn, and why it stayed or went.

/** Why the token has its fate, in one or two sentences. */
function reason({ verdict, p, q, threshold, uniform, round, candidates }) {
  if (verdict === "bonus" && !round.drafted.length) return `Nothing was drafted, so the target wrote this token itself: p = ${number(p)}.`;
  if (verdict === "bonus") return `Every draft was accepted, so the target's pass gave one token more, drawn from p: p = ${number(p)}.`;
  if (verdict === "replacement" && round.rule === "coupled") return `The target's own choice with the shared noise, in place of the rejected draft: p = ${number(p)}.`;
  if (verdict === "replacement") return `Drawn from the residual, what p has beyond q, in place of the rejected draft: p = ${number(p)}.`;
  const sides = `p = ${number(p)}, q = ${number(q)}`;
  if (verdict === "discarded") return `${sides}. It stood behind a rejected draft, so nobody looked at it.`;
  if (threshold === null || threshold === undefined) return `${sides}; with shared noise drafter and target ${verdict === "accepted" ? "chose" : "did not choose"} the same token.`;
  const limit = Math.min(1, threshold);
  const how = round.rule === "block" ? "in view of the whole block accepted with probability" : "accepted with probability min(1, p/q) =";
  const fate = `${sides}; ${how} ${number(limit)}, drew ${number(uniform)} ${uniform <= threshold ? "≤" : ">"} ${number(limit)}`;
  if (verdict === "accepted" && uniform > threshold) return `${fate}; a later place of the block passed, so the whole block up to there is accepted.`;
  return `${fate}: ${verdict === "accepted" ? "accepted" : "rejected"}.`;
}

/** What happened in the round, in words. */
function explainRound(round) {
  const [draft, target, verify] = round.s;
  const some = (n) => `${n} token${n === 1 ? "" : "s"}`;
  const n = round.drafted.length;
  const wrote = n ? `${round.arm[0]} drafted ${some(n)} in ${duration(draft)}` : round.arm[1] ? `${round.arm[0]} found nothing to draft` : "Nothing was drafted";
  const judged = !n ? "the target wrote one token" : round.tau === n ? "all were accepted" : round.tau === 0 ? "the first was rejected" : `${round.tau} of them ${round.tau === 1 ? "was" : "were"} accepted`;
  const ends = !round.next ? "and the text ended" : !n ? "" : round.tau === n ? "and the pass gave one bonus token" : "and the target replaced the next";
  return `Round ${round.i + 1}: ${wrote}; one pass of the target took ${duration(target)}, the verdict ${duration(verify)}: ${judged} ${ends}. ${some(round.emitted)} in ${duration(round.seconds)}.`.replace(" .", ".");
}

function inspect(box, token) {
  const head = make("p", { class: "fs-said" }, make("span", { class: `fs-token ${kindOf(token)}` }, token.label), " ", make("b", {}, token.own ? "the target's own" : token.verdict), ` · round ${token.round.i + 1}, ${armName(token.round.arm)}, ${token.round.rule} rule`);
  const parts = [head, make("p", {}, reason(token))];
  if (token.threshold !== null && token.threshold !== undefined && token.verdict !== "discarded") parts.push(gauge(token));
  if (token.candidates.length) parts.push(candidateTable(token));
  parts.push(make("p", { class: "fs-words" }, explainRound(token.round)));
  box.replaceChildren(...parts);
}

/** The interval [0, 1] with the part that accepts and the number drawn. */
function gauge({ threshold, uniform }) {
  const limit = Math.min(1, threshold);
  return make("div", { class: "fs-gauge", role: "img", "aria-label": `accepts below ${number(limit)}, drew ${number(uniform)}` },
    make("i", { style: `width:${100 * limit}%` }), make("u", { style: `left:${100 * uniform}%` }), make("span", {}, "0"), make("span", {}, "accepts"), make("span", {}, "1"));
}

function candidateTable(token) {
  const has = (k) => token.candidates.some((c) => c[k] !== null && c[k] !== undefined);
  const columns = [[2, "target p", "p"], ...(has(3) ? [[3, "drafter q", "q"]] : []), ...(has(4) ? [[4, "residual", "r"]] : [])];
  const head = make("tr", {}, make("th", { scope: "col" }, "token"), ...columns.map(([, name]) => make("th", { scope: "col" }, name)));
  const rows = token.candidates.map((c) => make("tr", { class: c[0] === token.id ? "chosen" : null },
    make("td", {}, make("code", {}, c[1].replaceAll("\n", "↵"))),
    ...columns.map(([k, , kind]) => make("td", {}, make("i", { class: `bar ${kind}`, style: `width:calc(${Math.max(0, Math.min(1, c[k] ?? 0))} * var(--fs-bar))` }), number(c[k])))));
  return make("table", { class: "fs-top" }, make("thead", {}, head), make("tbody", {}, ...rows));
}
