// Two small distributions to drag: a slider each for p and q of every token. The value is {"p": [weights], "q": [weights]} as JSON.

const box = find(".fs-sliders");
const weights = JSON.parse(props.value);
const shares = (w) => { const total = sum(w) || 1; return w.map((x) => x / total); };

function build() {
  weights.p.forEach((_, k) => {
    const name = String.fromCharCode(97 + k);
    const slider = (which) => make("label", { class: which }, make("span", {}, `${which}(${name})`), make("input", { type: "range", min: "0", max: "10", step: "0.5", value: weights[which][k], "data-which": which, "data-token": k }), make("output", {}));
    box.append(make("div", { class: "fs-pair" }, slider("p"), slider("q")));
  });
  tell();
}

function tell() {
  const now = { p: shares(weights.p), q: shares(weights.q) };
  for (const input of box.querySelectorAll("input")) input.nextSibling.textContent = number(now[input.dataset.which][Number(input.dataset.token)], 2);
}

box.addEventListener("input", (event) => {
  weights[event.target.dataset.which][Number(event.target.dataset.token)] = Number(event.target.value);
  tell();
  props.value = JSON.stringify(weights);
});
build();
