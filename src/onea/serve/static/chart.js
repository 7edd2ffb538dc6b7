// The chart of the history: classes of each update above, accuracies below.
const NAMESPACE = "http://www.w3.org/2000/svg";
const MAX_UPDATES = 60;
const LEFT = 50, RIGHT = 8, TOP = 26, BARS = 110, GAP = 40, POINTS = 80, FOOT = 24;

function draw(parent, tag, attributes, text) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// Two or three whole numbers from 0 to just above the largest value.
function ticks(largest) {
  const half = Math.max(1, largest) / 2;
  const power = 10 ** Math.floor(Math.log10(half));
  const step = Math.max(1, [1, 2, 5, 10].map((m) => m * power).find((s) => s >= half));
  return [0, step, 2 * step].filter((tick) => tick < largest + step);
}

export function drawHistory(figure, all) {
  const width = Math.round(figure.clientWidth);
  if (!width) return;
  const updates = all.slice(-MAX_UPDATES);
  const height = TOP + BARS + GAP + POINTS + FOOT;
  const svg = document.createElementNS(NAMESPACE, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", description(updates, all.length));
  const slot = (width - LEFT - RIGHT) / updates.length;
  const middle = (n) => LEFT + slot * (n + 0.5);

  const taught = (update) => (update.kind === "learn" ? update.classes.length : 0);
  const marks = ticks(Math.max(...updates.map(taught), 1));
  const y = (classes) => TOP + BARS - (BARS * classes) / marks.at(-1);
  draw(svg, "text", { class: "title", x: 0, y: 12 }, "Classes in each update");
  for (const mark of marks) gridLine(svg, width, y(mark), mark);
  if (updates.some((update) => update.kind === "learn" && update.classes.length > update.new_classes)) legend(svg, width);
  const wide = Math.min(44, slot * 0.7);
  updates.forEach((update, n) => {
    const left = middle(n) - wide / 2;
    const group = draw(svg, "g", {});
    draw(group, "title", {}, tooltip(update));
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
  draw(svg, "text", { class: "title", x: 0, y: base - 14 }, "Accuracy");
  for (const share of [0, 0.5, 1]) gridLine(svg, width, z(share), `${100 * share} %`);
  const hasOwn = updates.some(measureOf), hasOverall = updates.some((update) => update.overall_accuracy != null), both = hasOwn && hasOverall;
  if (!hasOwn && !hasOverall) draw(svg, "text", { x: LEFT + 6, y: z(0.5) - 6 }, "Not measured: fewer than 20 photos.");
  // Dots with confidence intervals, without lines between them: the intervals are wide.
  const offset = Math.min(7, slot * 0.2);
  updates.forEach((update, n) => {
    if (measureOf(update)) point(svg, middle(n) - (both ? offset : 0), z, update, measureOf(update), "dot");
    if (update.overall_accuracy != null) point(svg, middle(n) + (both ? offset : 0), z, update, "overall", "dot all");
  });
  if (hasOverall) {
    [["dot", "update", 134], ["dot all", "all classes", 62]].forEach(([kind, label, left]) => {
      draw(svg, "circle", { class: kind, cx: width - RIGHT - left - 8, cy: base - 18, r: 5 });
      draw(svg, "text", { x: width - RIGHT - left, y: base - 14 }, label);
    });
  }
  const step = Math.ceil(30 / slot);
  updates.forEach((update, n) => {
    if (n % step === 0) draw(svg, "text", { x: middle(n), y: height - 6, "text-anchor": "middle" }, `v${update.version}`);
  });
  figure.replaceChildren(svg);
}

// The measure of an update: accuracy on its held-out photos or, if these are too few, cross-validated on all of its photos.
export const measureOf = (update) => ["held_out", "cross_validated"].find((name) => update[`${name}_accuracy`] != null);

// An accuracy with its number of photos and its 95 % confidence interval.
export function formatShare(update, name) {
  const share = update[`${name}_accuracy`];
  if (share == null) return "";
  const images = update[name === "held_out" ? name : `${name}_images`];
  const [low, high] = update[`${name}_interval`].map((end) => (100 * end).toFixed(0));
  return `${(100 * share).toFixed(0)} % of ${images.toLocaleString("en")} (${low} to ${high} %)`;
}

export function formatMeasure(update) {
  const name = measureOf(update);
  return name ? `${formatShare(update, name)}${name === "held_out" ? "" : ", cross-validated"}` : "";
}

function point(svg, x, z, update, name, kind) {
  const [low, high] = update[`${name}_interval`];
  draw(svg, "line", { class: `range ${kind.split(" ")[1] ?? ""}`, x1: x, x2: x, y1: z(low), y2: z(high) });
  const dot = draw(svg, "circle", { class: kind, cx: x, cy: z(update[`${name}_accuracy`]), r: 5 });
  draw(dot, "title", {}, tooltip(update));
}

function legend(svg, width) {
  [["new", "new", 132], ["again", "taught again", 82]].forEach(([kind, label, left]) => {
    draw(svg, "rect", { class: kind, x: width - RIGHT - left - 14, y: 3, width: 10, height: 10, rx: 2 });
    draw(svg, "text", { x: width - RIGHT - left, y: 12 }, label);
  });
}

function gridLine(svg, width, height, label) {
  draw(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: height, y2: height });
  draw(svg, "text", { x: LEFT - 8, y: height + 4, "text-anchor": "end" }, label);
}

function tooltip(update) {
  if (update.kind !== "learn") return `Version ${update.version}: ${update.kind}`;
  const accuracy = measureOf(update) ? `, accuracy: ${formatMeasure(update)}` : "";
  return `Version ${update.version}, ${update.name}: ${update.classes.length} classes, ${update.images} photos${accuracy}`;
}

function description(updates, total) {
  const last = updates.findLast(measureOf);
  const accuracy = last ? ` The accuracy on the last measured update is ${formatMeasure(last)}.` : "";
  return `${total} updates; the current version is ${updates.at(-1)?.version}.${accuracy} The table below has all numbers.`;
}
