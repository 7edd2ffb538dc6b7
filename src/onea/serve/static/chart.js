// The history as a picture: classes of each update above, held-out photos that are right below.
const SPACE = "http://www.w3.org/2000/svg";
const MOST = 60;
const LEFT = 50, RIGHT = 8, TOP = 26, BARS = 110, GAP = 40, POINTS = 80, FOOT = 24;

function draw(parent, tag, attributes, text) {
  const element = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// Two or three whole numbers from 0 to just above the largest value.
function ticks(largest) {
  const rough = Math.max(1, largest) / 2;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough));
  return [0, step, 2 * step].filter((tick) => tick < largest + step);
}

export function drawHistory(figure, all) {
  const width = Math.round(figure.clientWidth);
  if (!width) return;
  const updates = all.slice(-MOST);
  const height = TOP + BARS + GAP + POINTS + FOOT;
  const svg = document.createElementNS(SPACE, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", inWords(updates, all.length));
  const slot = (width - LEFT - RIGHT) / updates.length;
  const middle = (n) => LEFT + slot * (n + 0.5);

  const taught = (update) => (update.kind === "learn" ? update.classes.length : 0);
  const marks = ticks(Math.max(...updates.map(taught), 1));
  const y = (classes) => TOP + BARS - (BARS * classes) / marks.at(-1);
  draw(svg, "text", { class: "title", x: 0, y: 12 }, "Classes in each update");
  for (const mark of marks) line(svg, width, y(mark), mark);
  if (updates.some((update) => update.kind === "learn" && update.classes.length > update.new_classes)) legend(svg, width);
  const wide = Math.min(44, slot * 0.7);
  updates.forEach((update, n) => {
    const left = middle(n) - wide / 2;
    const group = draw(svg, "g", {});
    draw(group, "title", {}, about(update));
    if (update.kind !== "learn") {
      draw(group, "rect", { class: "other", x: middle(n) - 3, y: y(0) - 6, width: 6, height: 6, rx: 1 });
      return;
    }
    const again = taught(update) - update.new_classes;
    if (again) draw(group, "rect", { class: "again", x: left, y: y(again), width: wide, height: y(0) - y(again), rx: 2 });
    if (update.new_classes) {
      const top = y(again + update.new_classes);
      draw(group, "rect", { class: "new", x: left, y: top, width: wide, height: y(again) - top, rx: 2 });
    }
  });

  const base = TOP + BARS + GAP;
  const z = (share) => base + POINTS * (1 - share);
  draw(svg, "text", { class: "title", x: 0, y: base - 14 }, "Photos right");
  for (const share of [0, 0.5, 1]) line(svg, width, z(share), `${100 * share} %`);
  const own = updates.some(measureOf), ofAll = updates.some((update) => update.overall_accuracy != null), both = own && ofAll;
  if (!own && !ofAll) draw(svg, "text", { x: LEFT + 6, y: z(0.5) - 6 }, "Not measured: fewer than 20 photos.");
  // Dots with their intervals: of few photos, a line from one to the next says nothing.
  const apart = Math.min(7, slot * 0.2);
  updates.forEach((update, n) => {
    if (measureOf(update)) point(svg, middle(n) - (both ? apart : 0), z, update, measureOf(update), "dot");
    if (update.overall_accuracy != null) point(svg, middle(n) + (both ? apart : 0), z, update, "overall", "dot all");
  });
  if (ofAll) {
    [["dot", "update", 134], ["dot all", "all classes", 62]].forEach(([kind, words, left]) => {
      draw(svg, "circle", { class: kind, cx: width - RIGHT - left - 8, cy: base - 18, r: 5 });
      draw(svg, "text", { x: width - RIGHT - left, y: base - 14 }, words);
    });
  }
  const every = Math.ceil(30 / slot);
  updates.forEach((update, n) => {
    if (n % every === 0) draw(svg, "text", { x: middle(n), y: height - 6, "text-anchor": "middle" }, `v${update.version}`);
  });
  figure.replaceChildren(svg);
}

// By which photos an update was measured: its own held-out ones or, of too few, all of its own by cross-validation.
export const measureOf = (update) => ["held_out", "cross_validated"].find((name) => update[`${name}_accuracy`] != null);

// The share of right answers, of how many, and the 95 % confidence interval.
export function shareInWords(update, name) {
  const share = update[`${name}_accuracy`];
  if (share == null) return "";
  const images = update[name === "held_out" ? name : `${name}_images`];
  const [low, high] = update[`${name}_interval`].map((end) => (100 * end).toFixed(0));
  return `${(100 * share).toFixed(0)} % of ${images.toLocaleString("en")} (${low} to ${high} %)`;
}

export function measuredInWords(update) {
  const name = measureOf(update);
  return name ? `${shareInWords(update, name)}${name === "held_out" ? "" : ", cross-validated"}` : "";
}

function point(svg, x, z, update, name, kind) {
  const [low, high] = update[`${name}_interval`];
  draw(svg, "line", { class: `range ${kind.split(" ")[1] ?? ""}`, x1: x, x2: x, y1: z(low), y2: z(high) });
  const dot = draw(svg, "circle", { class: kind, cx: x, cy: z(update[`${name}_accuracy`]), r: 5 });
  draw(dot, "title", {}, about(update));
}

function legend(svg, width) {
  [["new", "new", 132], ["again", "taught again", 82]].forEach(([kind, words, left]) => {
    draw(svg, "rect", { class: kind, x: width - RIGHT - left - 14, y: 3, width: 10, height: 10, rx: 2 });
    draw(svg, "text", { x: width - RIGHT - left, y: 12 }, words);
  });
}

function line(svg, width, height, label) {
  draw(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: height, y2: height });
  draw(svg, "text", { x: LEFT - 8, y: height + 4, "text-anchor": "end" }, label);
}

function about(update) {
  if (update.kind !== "learn") return `Version ${update.version}: ${update.kind}`;
  const right = measureOf(update) ? `, right: ${measuredInWords(update)}` : "";
  return `Version ${update.version}, ${update.name}: ${update.classes.length} classes, ${update.images} photos${right}`;
}

function inWords(updates, all) {
  const last = updates.findLast(measureOf);
  const accuracy = last ? ` Of the photos of the last measured update, ${measuredInWords(last)}, were right.` : "";
  return `${all} updates; the last one made version ${updates.at(-1)?.version}.${accuracy} The table below has every number.`;
}
