// A run as the browser holds it, put together from the messages of flashspec/ui/live.py or read from a saved trace.

const SCHEMA = 1;
const MAX_TRACE_BYTES = 16e6;

const newRun = (id = null) => ({ id, seq: -1, lost: 0, head: null, rounds: [], tokens: [], figures: null, regret: null, done: false, sums: [{ tokens: 0, seconds: 0, drafted: 0, accepted: 0 }] });

/** Take a message in; returns whether it brought anything new. A repeated one is ignored, a gap is counted. */
function take(run, message) {
  if (message.seq <= run.seq) return false;
  run.lost += message.seq - run.seq - 1;
  run.seq = message.seq;
  run.figures = message.totals;
  run.head = message.head ?? run.head;
  run.regret = message.regret ?? run.regret;
  run.done = run.done || Boolean(message.done);
  for (const round of message.rounds) addRound(run, round);
  return true;
}

function addRound(run, round) {
  round.first = run.tokens.length;
  round.number = run.rounds.length;
  for (const [text, piece, verdict, id, p, q, threshold, uniform, candidates] of round.drafted) {
    run.tokens.push({ text: verdict === "accepted" ? piece : text.replaceAll("\n", "↵"), label: text, piece, verdict, id, p, q, threshold, uniform, candidates: candidates ?? [], round, place: run.tokens.length - round.first });
  }
  if (round.next) {
    const [text, piece, verdict, id, p, candidates] = round.next;
    const own = !round.drafted.length; // nothing was drafted: the target's own token, no bonus to show
    run.tokens.push({ text: piece, label: text, piece, verdict, own, id, p, candidates: candidates ?? [], round, place: run.tokens.length - round.first });
  }
  round.count = run.tokens.length - round.first;
  round.emitted = round.tau + (round.next ? 1 : 0);
  round.seconds = sum(round.s ?? [0]);
  const before = run.sums.at(-1);
  run.sums.push({ tokens: before.tokens + round.emitted, seconds: before.seconds + round.seconds, drafted: before.drafted + round.drafted.length, accepted: before.accepted + round.tau });
  run.rounds.push(round);
}

/** The run as a FlashSpec trace, the form that `flashspec generate --save` writes; numbers have the digits that the page was sent. */
function traceOf(run) {
  const candidate = ([id, text, p, q, residual]) => [id, text, p, q, residual];
  return {
    family: run.head.family, prompt: run.head.prompt, prompt_tokens: run.head.prompt_tokens, settings: run.head.settings, machine: run.head.machine,
    rounds: run.rounds.map((r) => ({
      index: r.i, position: r.at, arm: r.arm, gamma: r.gamma, rule: r.rule, backend: r.backend,
      drafted: r.drafted.map(([text, piece, verdict, id, p, q, threshold, uniform, top]) => ({ id, text, piece, verdict, p, q, threshold, uniform, candidates: (top ?? []).map(candidate) })),
      next: r.next && { id: r.next[3], text: r.next[0], piece: r.next[1], kind: r.next[2], p: r.next[4], candidates: (r.next[5] ?? []).map(candidate) },
      tau: r.tau, caught_up: r.late,
      seconds: { draft: r.s[0], target: r.s[1], verify: r.s[2], catch_up: r.s[3], other: r.s[4], policy: r.s[5] },
      stop: r.stop, estimates: r.e && Object.fromEntries(r.e.map(([index, mean, width], k) => [run.head.arms[k], { index, mean, width }])),
    })),
    schema: SCHEMA,
  };
}

/** A run from the text of a trace file. Throws Error with a sentence for the reader. */
function runOf(text) {
  const bad = (why) => new Error(`This file is not a FlashSpec trace (${why}). Choose a trace.json saved by FlashSpec.`);
  if (text.length > MAX_TRACE_BYTES) throw new Error(`This trace is larger than ${MAX_TRACE_BYTES / 1e6} MB; save a shorter run.`);
  let trace;
  try { trace = JSON.parse(text); } catch { throw bad("it is not JSON"); }
  if (trace === null || typeof trace !== "object" || !Array.isArray(trace.rounds)) throw bad("it has no rounds");
  if (trace.schema !== SCHEMA) throw new Error(`This trace has schema version ${trace.schema}; this page reads version ${SCHEMA}. Record it again or update FlashSpec.`);
  const run = newRun("file");
  const arms = [...new Set(trace.rounds.flatMap((r) => Object.keys(r?.estimates ?? {})))];
  run.head = { family: String(trace.family), prompt: String(trace.prompt), prompt_tokens: trace.prompt_tokens, settings: trace.settings ?? {}, machine: trace.machine ?? {}, arms };
  const top = (candidates) => (candidates ?? []).map((c) => [c[0], String(c[1]), c[2] ?? 0, c[3] ?? null, c[4] ?? null]);
  const numeric = (value) => value === null || value === undefined || Number.isFinite(value);
  try {
    for (const r of trace.rounds) {
      const s = ["draft", "target", "verify", "catch_up", "other", "policy"].map((part) => r.seconds[part] ?? 0);
      if (!Array.isArray(r.arm) || ![r.index, r.tau, ...s].every(Number.isFinite)) throw bad("a round lacks its numbers");
      for (const d of r.drafted) if (!["accepted", "rejected", "discarded"].includes(d.verdict) || ![d.p, d.q, d.threshold, d.uniform].every(numeric)) throw bad("a drafted token has no verdict");
      if (r.next && !["replacement", "bonus"].includes(r.next.kind)) throw bad("a round ends in an unknown way");
      addRound(run, {
        i: r.index, at: r.position, arm: [String(r.arm[0]), Number(r.arm[1])], gamma: r.gamma, rule: String(r.rule), backend: String(r.backend), stop: r.stop ?? null, tau: r.tau, late: r.caught_up, s,
        e: r.estimates ? arms.map((arm) => { const e = r.estimates[arm] ?? {}; return [e.index ?? null, e.mean ?? null, e.width ?? null]; }) : null,
        drafted: r.drafted.map((d) => [String(d.text), String(d.piece), d.verdict, d.id, d.p ?? null, d.q ?? null, d.threshold ?? null, d.uniform ?? null, top(d.candidates)]),
        next: r.next ? [String(r.next.text), String(r.next.piece), r.next.kind, r.next.id, r.next.p ?? null, top(r.next.candidates)] : null,
      });
    }
  } catch (error) { throw error.message.startsWith("This") ? error : bad("a round is not complete"); }
  if (!run.rounds.length) throw bad("it holds no round");
  run.figures = { ...run.sums.at(-1), rounds: run.rounds.length };
  run.done = true;
  return run;
}
