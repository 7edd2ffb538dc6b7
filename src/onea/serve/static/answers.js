// One answer: its photo and file, the verdict, the probabilities as bars, and what to do if it is wrong.
import { bdi, make, page, picture, printable } from "/static/page.js";
import { lineUp } from "/static/teach.js";

// Shares that add up to 1, as text in tenths of a percent that add up to 100.
export function percents(shares) {
  const tenths = shares.map((share) => Math.floor(1000 * share));
  const rest = (n) => 1000 * shares[n] - tenths[n];
  const missing = 1000 - tenths.reduce((sum, one) => sum + one, 0);
  for (const n of [...shares.keys()].sort((a, b) => rest(b) - rest(a)).slice(0, missing)) tenths[n] += 1;
  return tenths.map((one, n) => (one === 0 && shares[n] > 0 ? "< 0.1 %" : `${(one / 10).toFixed(one % 1000 ? 1 : 0)} %`));
}

// The whole distribution, the largest first: classes, none of them, and what is left for all other classes.
function distribution(answer) {
  const chosen = new Set(answer.verdict === "unsure" ? answer.candidates.map((one) => one.class) : [answer.class]);
  const known = answer.top.map((one) => ({ name: one.class, share: one.probability, kind: chosen.has(one.class) ? "chosen" : "" }));
  const none = { words: "none of the classes", share: answer.none_of_these, kind: "none" };
  const parts = [...known, none].sort((a, b) => b.share - a.share);
  const left = 1 - parts.reduce((sum, one) => sum + one.share, 0);
  if (left > 1e-6) parts.push({ words: "all other classes", share: left, kind: "" });
  const texts = percents(parts.map((one) => one.share));
  return parts.map((one, n) => ({ ...one, percent: texts[n] }));
}

const ofVerdict = (answer) => distribution(answer).find((one) =>
  (answer.verdict === "unknown" ? one.kind === "none" : one.name === answer.class)).percent;

// What an unsure answer may be: its candidates, and none of the classes if that is more probable than one of them.
function alternatives(answer) {
  const parts = distribution(answer);
  return parts.slice(0, 1 + parts.findLastIndex((one) => one.kind === "chosen"));
}

export function inWords(answer) {
  if (answer.verdict === "unknown") return `unknown, ${ofVerdict(answer)} none of the classes`;
  return answer.verdict === "unsure" ? `unsure, ${alternatives(answer).map((one) => one.words ?? printable(one.name)).join(" or ")}`
    : `${printable(answer.class)}, ${ofVerdict(answer)} sure`;
}

const line = (kind, photo, image, ...parts) => make("li", { className: kind },
  make("figure", {}, image, make("figcaption", { title: printable(photo.name) }, bdi(photo.name))), make("div", {}, ...parts));

export const shownBad = (detail, photo) => line("bad", photo, make("span", { className: "no-picture" }, "no photo"),
  make("p", { className: "verdict" }, "Cannot be read"),
  make("p", { className: "why" }, `${detail[0].toUpperCase()}${detail.slice(1)}.`));

export function shownAnswer(answer, photo) {
  const shown = line(answer.verdict, photo, picture(photo, ""), verdict(answer),
    make("ol", { className: "likely" }, ...distribution(answer).map(bar)),
    ...(page.health?.teaching ? [correction(answer, photo)] : []));
  shown.dataset.version = answer.version;
  return shown;
}

function verdict(answer) {
  const sure = (words) => make("small", {}, `${ofVerdict(answer)} ${words}`);
  const doubt = (words) => make("span", { className: "doubt" }, words);
  const words = answer.verdict === "unknown" ? [doubt("Unknown"), " ", sure("none of the classes")]
    : answer.verdict === "answer" ? [bdi(answer.class), " ", sure("sure")]
      : [doubt("Unsure:"), " ", ...alternatives(answer).flatMap(({ words, name }, n) => [make("small", {}, n ? " or " : ""), words ?? bdi(name)])];
  return make("p", { className: "verdict" }, ...words);
}

function bar({ name, words, share, kind, percent }) {
  const fill = make("div", { className: "fill", hidden: !share });
  fill.style.width = `${100 * share}%`;
  return make("li", { className: kind }, name === undefined ? make("span", {}, words) : make("span", { title: name }, bdi(name)),
    make("b", {}, percent), make("div", { className: "track", ariaHidden: "true" }, fill));
}

// The photo joins those to be taught, under its right name: by one click where the answer has candidates, or typed in.
function correction(answer, photo) {
  const place = make("div", { className: "correct" });
  const correct = (name) => {
    lineUp(name, [photo]);
    const done = make("p", { className: "why", tabIndex: -1 }, "Lined up as “", bdi(name), "”; press Teach when all is there.");
    place.replaceChildren(done);
    done.focus(); // the keyboard goes on from here
  };
  const choices = answer.candidates.map(({ class: name }) => {
    const choose = make("button", { type: "button", className: "quiet" }, "It is ", bdi(name));
    choose.addEventListener("click", () => correct(name));
    return choose;
  });
  const words = { answer: "No, this is …", unsure: "This is something else …", unknown: "This is …" }[answer.verdict];
  const open = make("button", { type: "button", className: "link" }, words);
  open.addEventListener("click", () => {
    const form = named(photo, correct);
    place.replaceChildren(form);
    form.querySelector("input").focus();
  });
  place.append(...choices, open);
  return place;
}

function named(photo, correct) {
  const name = make("input", {
    type: "text", maxLength: 200, autocomplete: "off", placeholder: "what it shows", ariaLabel: `What ${printable(photo.name)} shows`,
  });
  name.setAttribute("list", "known-classes");
  const form = make("form", { className: "row" }, name, make("button", { type: "submit", className: "quiet" }, "Teach this"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (name.value.trim()) correct(name.value.trim());
    else name.focus();
  });
  return form;
}
