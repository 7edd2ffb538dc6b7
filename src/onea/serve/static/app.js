// The page: asks, shows what is known, draws the history, teaches. No library, nothing stored.
import { drawHistory } from "/static/chart.js";

const $ = (id) => document.getElementById(id);
const MOST_THUMBS = 12;
const page = { health: null, classes: [], history: null, photos: [], fresh: new Set() };

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
const percent = (share) => (share > 0.9995 ? "100 %" : share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);

function say(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

async function api(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The service does not answer; check that it is running, then try again.");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.detail || `The service refused (${response.status}).`);
  return body;
}

// What it knows

async function refresh() {
  const [health, classes, history] = await Promise.all([api("/healthz"), api("/classes"), api("/history")]);
  Object.assign(page, { health, classes: classes.classes, history });
  document.title = `${health.name} · onea`;
  $("name").textContent = health.name;
  $("facts").textContent = `Knows ${count(classes.count, "class", "classes")} · version ${classes.version}`;
  $("classes-count").textContent = classes.count.toLocaleString("en");
  $("teach-form").hidden = !health.teaching;
  say("teach-off", health.teaching ? "" :
    "Teaching is switched off here. Whoever runs the service can allow it with a token.");
  showClasses();
  showHistory();
  showCheck(await api("/check"));
}

const MOST_NEEDY = 12;

function showCheck(found) {
  const needy = found.classes.filter((known) => known.advice !== "not measured");
  $("check").hidden = !needy.length;
  $("check-summary").textContent = `${count(needy.length, "class needs", "classes need")} something`;
  $("check-list").replaceChildren(...needy.slice(0, MOST_NEEDY).map((known) => make("li", {},
    known.advice === "too like another class" ? `${known.name}: too like ${known.most_like}`
      : `${known.name}: few photos (${known.images.toLocaleString("en")})`)));
  if (needy.length > MOST_NEEDY) $("check-list").append(make("li", {}, `and ${needy.length - MOST_NEEDY} more`));
}

function showClasses() {
  const wanted = $("search").value.trim().toLocaleLowerCase();
  const shown = page.classes.filter((known) => known.name.toLocaleLowerCase().includes(wanted));
  $("classes").replaceChildren(...shown.map((known) =>
    make("li", { className: page.fresh.has(known.name) ? "fresh" : "" }, known.name,
      make("span", { title: count(known.images, "photo", "photos") }, known.images.toLocaleString("en")))));
  if (!shown.length) $("classes").append(make("li", { className: "none" }, "No class has that in its name."));
  $("search-status").textContent = wanted ? `${count(shown.length, "class", "classes")} found` : "";
}

// Asking

async function ask(files) {
  const photos = [...files].filter((file) => file.type.startsWith("image/") || !file.type);
  say("ask-error", "");
  if (!photos.length) return say("ask-error", "Those are no images; choose photos.");
  const most = page.health?.predict_images ?? 64;
  if (photos.length > most) return say("ask-error", `Ask about ${most} photos at a time.`);
  const form = new FormData();
  photos.forEach((photo) => form.append("images", photo));
  $("ask-status").textContent = "Looking…";
  $("ask-drop").classList.add("waiting");
  try {
    const { answers } = await api("/predict?top=3", { method: "POST", body: form });
    forgetPictures($("answers"));
    $("answers").replaceChildren(...answers.map((answer, n) => shownAnswer(answer, photos[n])));
    $("ask-status").textContent = answers.map(inWords).join(". ");
  } catch (error) {
    forgetPictures($("answers"));
    $("answers").replaceChildren();
    $("ask-status").textContent = "";
    say("ask-error", error.message);
  } finally {
    $("ask-drop").classList.remove("waiting");
  }
}

const inWords = (answer) => `${answer.image}: ${answer.unknown ? "unknown, unlike everything it was taught"
  : `${answer.class}, ${percent(answer.confidence)} sure`}`;

const chanceOfNone = (answer) => answer.none_of_these === null ? "Unlike everything it was taught."
  : `None of the classes, with a chance of ${percent(answer.none_of_these)}.`;

function shownAnswer(answer, photo) {
  const verdict = answer.unknown
    ? [make("p", { className: "verdict" }, "Unknown"),
       make("p", { className: "why" }, `${chanceOfNone(answer)} If it is one of the classes after all:`)]
    : [make("p", { className: "verdict" }, answer.class, make("small", {}, `${percent(answer.confidence)} sure`)),
       ...(answer.none_of_these >= 0.5 ? [make("p", { className: "why" }, chanceOfNone(answer))] : [])];
  const likely = answer.top.map((guess) => {
    const fill = make("div", { className: "fill" });
    fill.style.width = `${Math.max(0.5, 100 * guess.confidence)}%`;
    return make("li", {}, make("span", { title: guess.class }, guess.class), make("b", {}, percent(guess.confidence)),
      make("div", { className: "track", ariaHidden: "true" }, fill));
  });
  return make("li", { className: answer.unknown ? "unknown" : "" },
    make("img", { src: URL.createObjectURL(photo), alt: answer.image }),
    make("div", {}, ...verdict, make("ol", { className: "likely" }, ...likely)));
}

function forgetPictures(place) {
  place.querySelectorAll("img").forEach((image) => URL.revokeObjectURL(image.src));
}

// Teaching

function addPhotos(files) {
  page.photos.push(...[...files].filter((file) => file.type.startsWith("image/")));
  showPhotos();
}

function showPhotos() {
  const thumbs = $("teach-thumbs");
  forgetPictures(thumbs);
  thumbs.replaceChildren(...page.photos.slice(0, MOST_THUMBS).map((photo) =>
    make("li", {}, make("img", { src: URL.createObjectURL(photo), alt: "" }))));
  const more = page.photos.length - MOST_THUMBS;
  if (more > 0) thumbs.append(make("li", { className: "more" }, `+${more}`));
  $("teach-clear").hidden = !page.photos.length;
  $("teach-count").textContent = page.photos.length
    ? count(page.photos.length, "photo", "photos") : "Two or more; ten or more are better.";
}

function showKnown() {
  const name = $("teach-class").value.trim();
  const known = page.classes.find((other) => other.name === name);
  $("teach-known").textContent = known
    ? `Known already from ${count(known.images, "photo", "photos")}; these will be added.` : "";
}

const bearer = () => ({ Authorization: `Bearer ${$("token").value.trim()}` });

async function teach(event) {
  event.preventDefault();
  say("teach-error", "");
  say("teach-done", "");
  const name = $("teach-class").value.trim();
  const most = page.health.learn_files;
  const known = page.classes.some((other) => other.name === name);
  if (page.photos.length < (known ? 1 : 2)) return say("teach-error", "Choose at least two photos of it.");
  if (page.photos.length > most) return say("teach-error", `Send at most ${most} photos at a time; the rest can follow.`);
  const form = new FormData();
  form.append("class", name);
  form.append("name", name);
  page.photos.forEach((photo) => form.append("images", photo));
  $("teach-go").disabled = true;
  showTraining(`Sending ${count(page.photos.length, "photo", "photos")}…`);
  try {
    const training = await api("/learn", { method: "POST", body: form, headers: bearer() });
    const last = await followed(training.id);
    if (last.status !== "done") throw new Error(last.detail);
    page.fresh = new Set(last.classes);
    page.photos = [];
    $("teach-class").value = "";
    showPhotos();
    showKnown();
    await refresh();
    say("teach-done", `Learned “${name}” from ${count(last.images, "photo", "photos")} in ${last.seconds} s. ` +
      `Version ${last.version} answers now.`);
  } catch (error) {
    say("teach-error", error.message);
  } finally {
    $("training").hidden = true;
    $("teach-go").disabled = false;
  }
}

function showTraining(note, done = 0, total = 0) {
  $("training").hidden = false;
  if ($("training-note").textContent !== note) $("training-note").textContent = note;
  if (total) Object.assign($("training-bar"), { max: total, value: done });
  else $("training-bar").removeAttribute("value");
}

const STAGES = { "reading the model": "Starting", prototypes: "Looking at every photo" };

function followed(id) {
  const words = (note) => STAGES[note] ?? note[0].toUpperCase() + note.slice(1);
  const show = (report) => showTraining(`${words(report.note)}…`, report.done, report.total);
  return new Promise((resolve, reject) => {
    const events = new EventSource(`/learn/${id}/events`);
    events.addEventListener("progress", (event) => show(JSON.parse(event.data)));
    events.addEventListener("end", (event) => {
      events.close();
      resolve(JSON.parse(event.data));
    });
    events.onerror = () => {
      if (events.readyState !== EventSource.CLOSED) return; // it connects again by itself
      api(`/learn/${id}`).then((report) => (["done", "failed"].includes(report.status) ? resolve(report)
        : reject(new Error("Lost sight of the training job; reload the page to see whether it is done."))), reject);
    };
  });
}

// History

function showHistory() {
  const { updates, kept } = page.history;
  drawHistory($("chart"), updates);
  $("history-rows").replaceChildren(...updates.toReversed().map((update) => {
    const cells = [update.version, new Date(update.date).toLocaleDateString("en-GB", { dateStyle: "medium" }), what(update),
      update.kind === "learn" ? update.classes.length : "", update.images ?? "",
      update.held_out_accuracy == null ? "" : `${(100 * update.held_out_accuracy).toFixed(0)} % of ${update.held_out}`];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, String(cell))));
  }));
  $("undo").hidden = !(page.health.teaching && kept.length > 1);
  calm($("undo"));
}

function what(update) {
  if (update.kind === "forget") return `Forgot ${update.classes.join(", ")}`;
  if (update.kind === "rename") return `Renamed ${update.classes[0]} to ${update.classes[1]}`;
  if (update.kind === "background") return `Background: ${update.name}`;
  return update.name;
}

function calm(button) {
  button.textContent = "Undo the last update";
  delete button.dataset.sure;
}

async function undo() {
  const button = $("undo");
  say("undo-error", "");
  say("undo-done", "");
  if (!$("token").value.trim()) {
    say("undo-error", "Undo needs the token; type it into the teaching form.");
    return $("token").focus();
  }
  if (!button.dataset.sure) {
    button.dataset.sure = "asked";
    button.textContent = `Really undo “${what(page.history.updates.at(-1))}”?`;
    return setTimeout(() => calm(button), 6000);
  }
  try {
    const now = await api("/undo", { method: "POST", headers: bearer() });
    await refresh();
    say("undo-done", `Version ${now.undone} is undone; version ${now.version} answers now.`);
  } catch (error) {
    say("undo-error", error.message);
  }
}

// Wiring

function droppable(zone, input, take) {
  for (const name of ["dragover", "dragleave", "drop"]) {
    zone.addEventListener(name, (event) => {
      event.preventDefault();
      zone.classList.toggle("over", name === "dragover");
      if (name === "drop") take(event.dataTransfer.files);
    });
  }
  input.addEventListener("change", () => {
    if (input.files.length) take([...input.files]);
    input.value = "";
  });
}

droppable($("ask-drop"), $("ask-files"), ask);
droppable($("teach-drop"), $("teach-files"), addPhotos);
document.addEventListener("dragover", (event) => event.preventDefault()); // a photo beside the zone must not replace the page
document.addEventListener("drop", (event) => event.preventDefault());
document.addEventListener("paste", (event) => event.clipboardData.files.length && ask(event.clipboardData.files));
$("search").addEventListener("input", showClasses);
$("teach-class").addEventListener("input", showKnown);
$("teach-clear").addEventListener("click", () => {
  page.photos = [];
  showPhotos();
  $("teach-files").focus();
});
$("teach-form").addEventListener("submit", teach);
$("undo").addEventListener("click", undo);
new ResizeObserver(() => page.history && drawHistory($("chart"), page.history.updates)).observe($("chart"));
refresh().catch((error) => { $("facts").textContent = error.message; });
