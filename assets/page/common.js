// Small helpers that every component of the page begins with. Runs inside Gradio's HTML component, which provides `element`, `props`, `watch`.

const find = (selector) => element.querySelector(selector);
const NS = "http://www.w3.org/2000/svg";
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** An HTML element with attributes and children. Text is always set as text: what a model writes is data, never markup. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An SVG element; `text` becomes its text. */
function draw(tag, attributes, text) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const number = (x, digits = 3) => (x === null || x === undefined ? "–" : x > 0 && x < 0.5 * 10 ** -digits ? x.toPrecision(2) : x.toFixed(digits));
const percent = (x, digits = 0) => `${(100 * x).toFixed(digits)} %`;
const duration = (seconds) => (seconds < 0.1 ? `${(1000 * seconds).toFixed(1)} ms` : seconds < 10 ? `${seconds.toFixed(2)} s` : `${seconds.toFixed(1)} s`);
const sum = (values) => values.reduce((a, b) => a + b, 0);
/** The class that colours a token. */
const kindOf = ({ own, verdict }) => (own ? "own" : verdict);
const armName = ([drafter, gamma]) => (gamma === 0 ? drafter : `${drafter} γ=${gamma}`);
