// The page: predicts, lists classes, draws the history, teaches. It uses no library and stores nothing.
import { predict, predictAgain, markOutdated } from "/static/predict.js";
import { drawHistory, formatMeasure, formatShare, measureOf } from "/static/chart.js";
import { $, api, bdi, plural, acceptFiles, hasToken, create, state, showText, confirmed, authorizedApi } from "/static/common.js";
import { startTeaching } from "/static/teach.js";

// Classes

async function refresh() {
  const [health, classes, history] = await Promise.all([api("/healthz"), api("/classes"), api("/history")]);
  Object.assign(state, { health, classes: classes.classes, history });
  document.title = `${health.name} · onea`;
  $("name").textContent = health.name;
  $("facts").textContent = `${plural(classes.count, "class", "classes")} · version ${classes.version}`;
  $("teach-form").hidden = !health.teaching;
  $("classes-hint").hidden = !health.teaching || !classes.count;
  showFormats(health.formats);
  showText("teach-off", health.teaching ? "" :
    "Teaching is disabled; the operator of the service can enable it with a token.");
  showText("memory", health.memory.join(" "));
  $("refresh").hidden = !(health.teaching && health.stored_copies);
  $("stored").textContent = health.stored_copies
    ? "Photos for predictions are not stored. Of taught photos, the model stores small copies."
    : "Photos are not stored, neither for predictions nor for teaching.";
  $("class-names").replaceChildren(...state.classes.map((info) => create("option", { value: info.name })));
  showClasses();
  showHistory();
  markOutdated();
  showCheck(await api("/check"));
}

// The formats of the service, for the hint and for the file dialogs.
function showFormats(formats) {
  const endings = formats.flatMap((name) => (name === "HEIC" ? [".heic", ".heif"] : [])); // many browsers report no type for these
  const types = [...formats.map((name) => `image/${name.toLowerCase()}`), ...endings].join();
  $("predict-files").accept = types;
  $("teach-files").accept = `${types},.zip`;
  $("predict-formats").textContent = `${formats.slice(0, -1).join(", ")} or ${formats.at(-1)}.`;
}

const MAX_LISTED = 12;

function showCheck(check) {
  const isUrgent = (advice) => !["not measured", "no mistakes stand out"].includes(advice);
  const urgent = check.classes.filter((info) => isUrgent(info.advice));
  const count = Object.entries(check.advice).reduce((sum, [advice, classes]) => sum + (isUrgent(advice) ? classes : 0), 0);
  $("check").hidden = !count && !check.mistakes.absorbing.length;
  $("check-summary").textContent = `${plural(count, "class", "classes")} to improve`;
  $("check-list").replaceChildren(...urgent.slice(0, MAX_LISTED).map((info) => create("li", {},
    info.advice === "too similar to another class" ? `${info.name}: too similar to ${info.most_like}`
      : info.advice === "often misclassified" ? `${info.name}: often misclassified`
        : `${info.name}: few photos (${info.images.toLocaleString("en")})`)));
  if (count > MAX_LISTED) $("check-list").append(create("li", {}, `and ${count - MAX_LISTED} more`));
  const { absorbing, mistakes, images } = check.mistakes;
  $("check-list").append(...absorbing.map((entry) => create("li", {},
    `${entry.name}: predicted for ${entry.mistakes} of ${mistakes} misclassified photos (${images} held out)`)));
}

const MAX_SHOWN = 300; // elements of a list, so that a key pressed in the search is answered at once

function showClasses() {
  const query = $("search").value.trim().toLocaleLowerCase();
  const shown = state.classes.filter((info) => info.name.toLocaleLowerCase().includes(query));
  $("classes").replaceChildren(...shown.slice(0, MAX_SHOWN).map((info) => {
    const images = create("span", { title: plural(info.images, "photo", "photos") }, info.images.toLocaleString("en"));
    const className = state.fresh.has(info.name) ? "fresh" : "";
    if (!state.health.teaching) return create("li", { className }, bdi(info.name), images);
    const button = create("button", { type: "button", title: `Rename or remove ${info.name}` }, bdi(info.name), images);
    button.addEventListener("click", () => edit(info.name));
    return create("li", { className }, button);
  }));
  if (!shown.length) $("classes").append(create("li", { className: "none" }, "No matching class."));
  const hidden = shown.length - MAX_SHOWN;
  if (hidden > 0) $("classes").append(create("li", { className: "none" }, `And ${hidden.toLocaleString("en")} more; search by name.`));
  $("search-status").textContent = query ? `${plural(shown.length, "class", "classes")} found` : "";
  const all = state.classes.length.toLocaleString("en");
  $("classes-count").textContent = query ? `${shown.length.toLocaleString("en")} of ${all}` : all;
  updateHeight();
}

const MIN_CUT = 80; // pixels, two lines
let isExpanded = false; // whether a long list of classes is shown in full height

function updateHeight() {
  const list = $("classes");
  list.classList.remove("whole");
  const isCut = list.scrollHeight > list.clientHeight + MIN_CUT;
  list.classList.toggle("whole", isExpanded || !isCut);
  $("classes-all").hidden = !isCut;
  $("classes-all").ariaExpanded = String(isExpanded);
  const all = list.childElementCount > MAX_SHOWN ? "more" : `all ${list.childElementCount.toLocaleString("en")}`;
  $("classes-all").textContent = isExpanded ? "Show fewer" : `Show ${all}`;
  updateFade();
}

function updateFade() { // at the bottom, while there is more to scroll
  const list = $("classes");
  list.classList.toggle("more", list.scrollHeight - list.scrollTop - list.clientHeight > 4);
}

// Rename, merge and remove

let edited = "";

function edit(name) {
  edited = name;
  $("edit").hidden = !name;
  for (const id of ["edit-error", "edit-done"]) showText(id, "");
  $("edit-label").textContent = `New name for “${name}”`;
  $("edit-name").value = name;
  for (const [id, label] of [["edit-remove", "Remove"], ["edit-rename", "Rename"]]) {
    $(id).textContent = label;
    delete $(id).dataset.confirming;
  }
  if (name) $("edit-name").select();
}

async function applyEdit(path, done) {
  if (!hasToken("edit-error")) return;
  showText("edit-error", "");
  try {
    const now = await authorizedApi(path);
    await refresh();
    edit("");
    showText("edit-done", [`${done} The model is now at version ${now.version}; undo restores the version before.`, ...now.remarks].join(" "));
  } catch (error) {
    showText("edit-error", error.message);
  }
}

function rename(event) {
  event.preventDefault();
  const name = $("edit-name").value.trim();
  if (!name || name === edited) return $("edit-name").focus();
  const merge = state.classes.some((info) => info.name === name);
  if (merge && !confirmed($("edit-rename"), `Really merge “${edited}” into “${name}”?`, "Rename")) return;
  applyEdit(`/rename?${new URLSearchParams({ old: edited, new: name, merge })}`,
    merge ? `Merged “${edited}” into “${name}”.` : `Renamed “${edited}” to “${name}”.`);
}

function remove() {
  if (!confirmed($("edit-remove"), `Really remove “${edited}”?`, "Remove")) return;
  applyEdit(`/forget?${new URLSearchParams({ class: edited })}`, `Removed “${edited}”.`);
}

// History

function showHistory() {
  const { updates, kept } = state.history;
  drawHistory($("chart"), updates);
  $("history-rows").replaceChildren(...updates.toReversed().map((update) => {
    const cells = [update.version, new Date(update.date).toLocaleDateString("en-GB", { dateStyle: "medium" }), updateTitle(update),
      update.kind === "learn" ? update.classes.length : "", update.images ?? "",
      formatMeasure(update), formatShare(update, "overall")];
    return create("tr", {}, ...cells.map((cell) => create("td", {}, String(cell))));
  }));
  showText("accuracy", accuracyText(updates));
  $("undo").hidden = !(state.health.teaching && kept.length > 1);
  $("undo").textContent = "Undo the last update";
  delete $("undo").dataset.confirming;
}

// The latest accuracy over all classes or, if there are too few held-out photos, that on the photos of an update.
function accuracyText(updates) {
  const last = updates.findLast((update) => update.overall_accuracy != null) ?? updates.findLast(measureOf);
  if (!last) return "";
  const classes = plural(last.known, "class", "classes");
  const version = last === updates.at(-1) ? "" : ` of version ${last.version}`; // classes may have been removed
  if (last.overall_accuracy == null) return `Accuracy on the photos of “${updateTitle(last)}”, among all ${classes}${version}: ${formatMeasure(last)}.`;
  const measured = last.overall_classes === last.known ? "all" : `${last.overall_classes} of`;
  return `Accuracy on held-out photos of ${measured} ${classes}${version}: ${formatShare(last, "overall")}.`;
}

function updateTitle(update) {
  if (update.kind === "forget") return `Removed ${update.classes.join(", ") || `${plural(update.everywhere, "class", "classes")} everywhere`}`;
  if (update.kind === "rename") return `${update.merged ? "Merged" : "Renamed"} ${update.classes[0]} ${update.merged ? "into" : "to"} ${update.classes[1]}`;
  if (update.kind === "background") return `Background: ${update.name}`;
  return update.name;
}

async function undo() {
  for (const id of ["undo-error", "undo-done"]) showText(id, "");
  if (!hasToken("undo-error")) return;
  if (!confirmed($("undo"), `Really undo “${updateTitle(state.history.updates.at(-1))}”?`, "Undo the last update")) return;
  try {
    const now = await authorizedApi("/undo");
    await refresh();
    showText("undo-done", `Undid version ${now.undone}; the model is at version ${now.version} again.`);
  } catch (error) {
    showText("undo-error", error.message);
  }
}

// Events

const pasted = (data) => [...data.files].map((file) => ({ file, path: file.name }));

acceptFiles($("predict-drop"), [$("predict-files")], predict);
startTeaching(refresh);
document.addEventListener("dragover", (event) => event.preventDefault()); // otherwise a photo dropped elsewhere would replace the page
document.addEventListener("drop", (event) => event.preventDefault());
document.addEventListener("paste", (event) => event.clipboardData.files.length && predict(pasted(event.clipboardData)));
$("predict-again").addEventListener("click", predictAgain);
$("search").addEventListener("input", showClasses);
$("classes").addEventListener("scroll", updateFade);
$("classes-all").addEventListener("click", () => {
  isExpanded = !isExpanded;
  updateHeight();
});
$("edit").addEventListener("submit", rename);
$("edit-name").addEventListener("input", () => { // a confirmation is for one name
  $("edit-rename").textContent = "Rename";
  delete $("edit-rename").dataset.confirming;
});
$("edit-remove").addEventListener("click", remove);
$("edit-close").addEventListener("click", () => edit(""));
$("undo").addEventListener("click", undo);
new ResizeObserver(updateHeight).observe($("classes-section"));
new ResizeObserver(() => state.history && drawHistory($("chart"), state.history.updates)).observe($("chart"));

// Highlight the link to the section in the middle of the window.
const sectionObserver = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    document.querySelector(`.jump [href="#${target.id}"]`).ariaCurrent = isIntersecting ? "true" : null;
  }
}, { rootMargin: "-40% 0px -60% 0px" });
for (const section of document.querySelectorAll("main section")) sectionObserver.observe(section);

refresh().catch((error) => { $("facts").textContent = error.message; });
