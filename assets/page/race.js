// The race: two runs measured one after the other, replayed on one clock.

const result = find(".fs-result"), again = find("[data-do=again]");
const race = { lanes: {}, timer: null };
element.flashspec = Object.assign(race, { receive });

const lane = (name) => find(`[data-lane=${name}]`);

function receive(message) {
  const name = message.lane;
  if (message.seq === 0) {
    if (name === "a") reset();
    race.lanes[name] = newRun(message.run);
    result.textContent = name === "a" ? "Measuring the first run …" : "Measuring the second run …";
    result.className = "fs-result";
  }
  const run = race.lanes[name];
  if (!run || message.run !== run.id || !take(run, message)) return;
  if (message.head) lane(name).querySelector("h2").textContent = title(run);
  lane(name).querySelector(".fs-clock span").textContent = `${run.figures.tokens} tokens measured`;
  if (message.error) {
    result.textContent = message.error;
    result.className = "fs-result error";
  } else if (message.done && name === "b") start();
}

function title(run) {
  return `${run.head.settings.arm}, verified by ${run.rounds[0]?.backend ?? "…"}`;
}

function reset() {
  cancelAnimationFrame(race.timer);
  race.lanes = {};
  again.disabled = true;
  for (const name of ["a", "b"]) {
    lane(name).querySelector(".fs-strip").textContent = "";
    lane(name).querySelector("b").textContent = "–";
    lane(name).querySelector("span").textContent = "";
    lane(name).querySelector("h2").textContent = name === "a" ? "First run" : "Second run";
  }
}

/** Put both runs at the start line and let one clock run. */
function start() {
  cancelAnimationFrame(race.timer);
  again.disabled = false;
  const names = ["a", "b"];
  const drawn = { a: 0, b: 0 };
  for (const name of names) {
    lane(name).querySelector("h2").textContent = title(race.lanes[name]);
    lane(name).querySelector(".fs-strip").textContent = "";
  }
  result.textContent = "Both on one clock …";
  const speed = Number(find("select").value), began = performance.now();
  const end = Math.max(...names.map((name) => race.lanes[name].sums.at(-1).seconds));
  const turn = () => {
    const clock = calm.matches ? end : ((performance.now() - began) / 1000) * speed;
    for (const name of names) drawn[name] = advance(name, drawn[name], clock);
    if (clock < end) race.timer = requestAnimationFrame(turn);
    else result.textContent = verdict();
  };
  turn();
}

function advance(name, from, clock) {
  const run = race.lanes[name], box = lane(name).querySelector(".fs-strip");
  let at = from;
  for (; at < run.rounds.length && run.sums[at + 1].seconds <= clock; at++) {
    const { first, count } = run.rounds[at];
    for (const token of run.tokens.slice(first, first + count)) if (token.piece) box.append(make("span", { class: `fs-token ${kindOf(token)}` }, token.piece));
  }
  if (at !== from) box.scrollTop = box.scrollHeight;
  const { tokens } = run.sums[at], total = run.sums.at(-1);
  lane(name).querySelector("b").textContent = `${Math.min(clock, total.seconds).toFixed(2)} s`;
  lane(name).querySelector(".fs-clock span").textContent = `${tokens} of ${total.tokens} tokens`;
  return at;
}

function verdict() {
  const [a, b] = ["a", "b"].map((name) => race.lanes[name]);
  const [rateA, rateB] = [a, b].map((run) => run.sums.at(-1).tokens / run.sums.at(-1).seconds);
  const ratio = rateB / rateA;
  const who = ratio >= 1 ? `The second run is ${ratio.toFixed(2)} times as fast` : `The second run is slower: ${ratio.toFixed(2)} times the speed of the first`;
  const text = (run) => run.tokens.map((token) => token.piece).join("");
  const same = text(a) === text(b);
  const { rule, sampling } = b.head.settings;
  const why = same ? "Both texts are identical, token by token." : rule === "coupled" || sampling.temperature === 0 ? "The texts differ, which this setting should not allow." : "The texts differ: both are draws from the same distribution. With the coupled rule they would be identical.";
  return `${who} (${rateB.toFixed(1)} against ${rateA.toFixed(1)} tokens/s). ${why}`;
}

again.addEventListener("click", start);
watch("value", () => { if (props.value) receive(JSON.parse(props.value)); });
