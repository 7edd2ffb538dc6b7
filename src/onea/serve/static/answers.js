// One prediction: its photo, the verdict, the probabilities as bars, and a form to correct it.
import { bdi, create, state, photoElement, printable } from "/static/common.js";
import { enqueue } from "/static/teach.js";

// Probabilities that add up to 1, as percentages with one decimal that add up to 100 %.
export function percents(shares) {
  const tenths = shares.map((share) => Math.floor(1000 * share));
  const rest = (n) => 1000 * shares[n] - tenths[n];
  const missing = 1000 - tenths.reduce((sum, tenth) => sum + tenth, 0);
  for (const n of [...shares.keys()].sort((a, b) => rest(b) - rest(a)).slice(0, missing)) tenths[n] += 1;
  return tenths.map((tenth, n) => (tenth === 0 && shares[n] > 0 ? "< 0.1 %" : `${(tenth / 10).toFixed(tenth % 1000 ? 1 : 0)} %`));
}

// The whole distribution, the largest probability first: classes, none of them, and all other classes together.
function distribution(answer) {
  const chosen = new Set(answer.verdict === "unsure" ? answer.candidates.map((candidate) => candidate.class) : [answer.class]);
  const top = answer.top.map((item) => ({ name: item.class, share: item.probability, kind: chosen.has(item.class) ? "chosen" : "" }));
  const none = { words: "none of the classes", share: answer.none_of_these, kind: "none" };
  const parts = [...top, none].sort((a, b) => b.share - a.share);
  const others = 1 - parts.reduce((sum, part) => sum + part.share, 0);
  if (others > 1e-6) parts.push({ words: "all other classes", share: others, kind: "" });
  const texts = percents(parts.map((part) => part.share));
  return parts.map((part, n) => ({ ...part, percent: texts[n] }));
}

const verdictPercent = (answer) => distribution(answer).find((part) =>
  (answer.verdict === "unknown" ? part.kind === "none" : part.name === answer.class)).percent;

// The alternatives of an unsure prediction: its candidates, and none of the classes if that is more probable than one of them.
function alternatives(answer) {
  const parts = distribution(answer);
  return parts.slice(0, 1 + parts.findLastIndex((part) => part.kind === "chosen"));
}

export function predictionText(answer) {
  if (answer.verdict === "unknown") return `unknown, ${verdictPercent(answer)} none of the classes`;
  return answer.verdict === "unsure" ? `unsure, ${alternatives(answer).map((part) => part.words ?? printable(part.name)).join(" or ")}`
    : `${printable(answer.class)}, ${verdictPercent(answer)} sure`;
}

const listItem = (kind, photo, image, ...parts) => create("li", { className: kind },
  create("figure", {}, image, create("figcaption", { title: printable(photo.name) }, bdi(photo.name))), create("div", {}, ...parts));

export const renderUnreadable = (detail, photo) => listItem("bad", photo, create("span", { className: "no-picture" }, "no photo"),
  create("p", { className: "verdict" }, "Cannot be read"),
  create("p", { className: "why" }, `${detail[0].toUpperCase()}${detail.slice(1)}.`));

export function renderPrediction(answer, photo) {
  const item = listItem(answer.verdict, photo, photoElement(photo, ""), verdict(answer),
    create("ol", { className: "likely" }, ...distribution(answer).map(bar)),
    ...(state.health?.teaching ? [correction(answer, photo)] : []));
  item.dataset.version = answer.version;
  return item;
}

function verdict(answer) {
  const confidence = (words) => create("small", {}, `${verdictPercent(answer)} ${words}`);
  const doubt = (words) => create("span", { className: "doubt" }, words);
  const words = answer.verdict === "unknown" ? [doubt("Unknown"), " ", confidence("none of the classes")]
    : answer.verdict === "answer" ? [bdi(answer.class), " ", confidence("sure")]
      : [doubt("Unsure:"), " ", ...alternatives(answer).flatMap(({ words, name }, n) => [create("small", {}, n ? " or " : ""), words ?? bdi(name)])];
  return create("p", { className: "verdict" }, ...words);
}

function bar({ name, words, share, kind, percent }) {
  const fill = create("div", { className: "fill", hidden: !share });
  fill.style.width = `${100 * share}%`;
  return create("li", { className: kind }, name === undefined ? create("span", {}, words) : create("span", { title: name }, bdi(name)),
    create("b", {}, percent), create("div", { className: "track", ariaHidden: "true" }, fill));
}

// Adds the photo to those to teach, with a candidate of the prediction or another name as its class.
function correction(answer, photo) {
  const place = create("div", { className: "correct" });
  const correct = (name) => {
    enqueue(name, [photo]);
    const done = create("p", { className: "why", tabIndex: -1 }, "Added to “", bdi(name), "”; press Teach to train on all added photos.");
    place.replaceChildren(done);
    done.focus(); // so that the keyboard continues here
  };
  const choices = answer.candidates.map(({ class: name }) => {
    const choose = create("button", { type: "button", className: "quiet" }, "It is ", bdi(name));
    choose.addEventListener("click", () => correct(name));
    return choose;
  });
  const label = { answer: "No, this is …", unsure: "This is something else …", unknown: "This is …" }[answer.verdict];
  const open = create("button", { type: "button", className: "link" }, label);
  open.addEventListener("click", () => {
    const form = nameForm(photo, correct);
    place.replaceChildren(form);
    form.querySelector("input").focus();
  });
  place.append(...choices, open);
  return place;
}

function nameForm(photo, correct) {
  const name = create("input", {
    type: "text", maxLength: 200, autocomplete: "off", placeholder: "class name", ariaLabel: `Class of ${printable(photo.name)}`,
  });
  name.setAttribute("list", "class-names");
  const form = create("form", { className: "row" }, name, create("button", { type: "submit", className: "quiet" }, "Add"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (name.value.trim()) correct(name.value.trim());
    else name.focus();
  });
  return form;
}
