// The page: asks, shows what is known, draws the history, teaches. No library, nothing stored.
import { ask, askAgain, markOld } from "/static/ask.js";
import { drawHistory, measuredInWords, measureOf, shareInWords } from "/static/chart.js";
import { $, api, bdi, count, droppable, hasToken, make, page, say, sure, teacherApi } from "/static/page.js";
import { startTeaching } from "/static/teach.js";

// What it knows

async function refresh() {
  const [health, classes, history] = await Promise.all([api("/healthz"), api("/classes"), api("/history")]);
  Object.assign(page, { health, classes: classes.classes, history });
  document.title = `${health.name} · onea`;
  $("name").textContent = health.name;
  $("facts").textContent = `Knows ${count(classes.count, "class", "classes")} · version ${classes.version}`;
  $("teach-form").hidden = !health.teaching;
  $("classes-hint").hidden = !health.teaching || !classes.count;
  showFormats(health.formats);
  say("teach-off", health.teaching ? "" :
    "Teaching is switched off here. Whoever runs the service can allow it with a token.");
  $("known-classes").replaceChildren(...page.classes.map((known) => make("option", { value: known.name })));
  showClasses();
  showHistory();
  markOld();
  showCheck(await api("/check"));
}

// One list of formats, that of the service, for the hint and for what a browser offers to choose.
function showFormats(formats) {
  const endings = formats.flatMap((name) => (name === "HEIC" ? [".heic", ".heif"] : [])); // which many systems give no type
  const types = [...formats.map((name) => `image/${name.toLowerCase()}`), ...endings].join();
  $("ask-files").accept = types;
  $("teach-files").accept = `${types},.zip`;
  $("ask-formats").textContent = `${formats.slice(0, -1).join(", ")} or ${formats.at(-1)}.`;
}

const MOST_NEEDY = 12;

function showCheck(found) {
  const needy = found.classes.filter((known) => !["not measured", "no mistakes stand out"].includes(known.advice));
  $("check").hidden = !needy.length && !found.mistakes.absorbing.length;
  $("check-summary").textContent = `${count(needy.length, "class needs", "classes need")} something`;
  $("check-list").replaceChildren(...needy.slice(0, MOST_NEEDY).map((known) => make("li", {},
    known.advice === "too like another class" ? `${known.name}: too like ${known.most_like}`
      : known.advice === "often misclassified" ? `${known.name}: often misclassified`
        : `${known.name}: few photos (${known.images.toLocaleString("en")})`)));
  if (needy.length > MOST_NEEDY) $("check-list").append(make("li", {}, `and ${needy.length - MOST_NEEDY} more`));
  const { absorbing, mistakes, images } = found.mistakes;
  $("check-list").append(...absorbing.map((one) => make("li", {},
    `${one.name}: ${one.mistakes} of ${mistakes} mistakes among ${images} held-out photos end here`)));
}

function showClasses() {
  const wanted = $("search").value.trim().toLocaleLowerCase();
  const shown = page.classes.filter((known) => known.name.toLocaleLowerCase().includes(wanted));
  $("classes").replaceChildren(...shown.map((known) => {
    const images = make("span", { title: count(known.images, "photo", "photos") }, known.images.toLocaleString("en"));
    const className = page.fresh.has(known.name) ? "fresh" : "";
    if (!page.health.teaching) return make("li", { className }, bdi(known.name), images);
    const button = make("button", { type: "button", title: `Rename or forget ${known.name}` }, bdi(known.name), images);
    button.addEventListener("click", () => edit(known.name));
    return make("li", { className }, button);
  }));
  if (!shown.length) $("classes").append(make("li", { className: "none" }, "No class has that in its name."));
  $("search-status").textContent = wanted ? `${count(shown.length, "class", "classes")} found` : "";
  const all = page.classes.length.toLocaleString("en");
  $("classes-count").textContent = wanted ? `${shown.length.toLocaleString("en")} of ${all}` : all;
  showCut();
}

const TWO_LINES = 80; // pixels
let whole = false; // whether a long list of classes is shown at its full height

function showCut() {
  const list = $("classes");
  list.classList.remove("whole");
  const cut = list.scrollHeight > list.clientHeight + TWO_LINES; // to cut less would be a nuisance
  list.classList.toggle("whole", whole || !cut);
  $("classes-all").hidden = !cut;
  $("classes-all").ariaExpanded = String(whole);
  $("classes-all").textContent = whole ? "Show fewer" : `Show all ${list.childElementCount.toLocaleString("en")}`;
  showMore();
}

function showMore() { // fades at the foot while there is more below
  const list = $("classes");
  list.classList.toggle("more", list.scrollHeight - list.scrollTop - list.clientHeight > 4);
}

// Rename and forget

let edited = "";

function edit(name) {
  edited = name;
  $("edit").hidden = !name;
  for (const place of ["edit-error", "edit-done"]) say(place, "");
  $("edit-label").textContent = `New name for “${name}”`;
  $("edit-name").value = name;
  for (const [id, words] of [["edit-forget", "Forget it"], ["edit-rename", "Rename"]]) {
    $(id).textContent = words;
    delete $(id).dataset.sure;
  }
  if (name) $("edit-name").select();
}

async function changed(path, words) {
  if (!hasToken("edit-error")) return;
  say("edit-error", "");
  try {
    const now = await teacherApi(path);
    await refresh();
    edit("");
    say("edit-done", [`${words} Version ${now.version} answers now; undo takes it back.`, ...now.remarks].join(" "));
  } catch (error) {
    say("edit-error", error.message);
  }
}

function rename(event) {
  event.preventDefault();
  const name = $("edit-name").value.trim();
  if (!name || name === edited) return $("edit-name").focus();
  const merge = page.classes.some((known) => known.name === name);
  if (merge && !sure($("edit-rename"), `Really make “${edited}” and “${name}” one class?`, "Rename")) return;
  changed(`/rename?${new URLSearchParams({ old: edited, new: name, merge })}`,
    merge ? `“${edited}” is part of “${name}” now.` : `“${edited}” is called “${name}” now.`);
}

function forget() {
  if (!sure($("edit-forget"), `Really forget “${edited}”?`, "Forget it")) return;
  changed(`/forget?${new URLSearchParams({ class: edited })}`, `“${edited}” is no longer answered.`);
}

// History

function showHistory() {
  const { updates, kept } = page.history;
  drawHistory($("chart"), updates);
  $("history-rows").replaceChildren(...updates.toReversed().map((update) => {
    const cells = [update.version, new Date(update.date).toLocaleDateString("en-GB", { dateStyle: "medium" }), what(update),
      update.kind === "learn" ? update.classes.length : "", update.images ?? "",
      measuredInWords(update), shareInWords(update, "overall")];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, String(cell))));
  }));
  say("overall", accuracyInWords(updates));
  $("undo").hidden = !(page.health.teaching && kept.length > 1);
  $("undo").textContent = "Undo the last update";
  delete $("undo").dataset.sure;
}

// The last accuracy over all classes or, where held-out photos are too few for one, that on the photos of an update.
function accuracyInWords(updates) {
  const last = updates.findLast((update) => update.overall_accuracy != null) ?? updates.findLast(measureOf);
  if (!last) return "";
  const known = count(last.known, "class", "classes");
  const then = last === updates.at(-1) ? "" : ` of version ${last.version}`; // the classes may be others now
  if (last.overall_accuracy == null) return `Of the photos of “${what(last)}”: ${measuredInWords(last)}, answered right among all ${known}${then}.`;
  const measured = last.overall_classes === last.known ? "all" : `${last.overall_classes} of`;
  return `Of held-out photos of ${measured} ${known}${then}: ${shareInWords(last, "overall")} answered right.`;
}

function what(update) {
  if (update.kind === "forget") return `Forgot ${update.classes.join(", ") || `${count(update.everywhere, "class", "classes")} everywhere`}`;
  if (update.kind === "rename") return `${update.merged ? "Merged" : "Renamed"} ${update.classes[0]} ${update.merged ? "into" : "to"} ${update.classes[1]}`;
  if (update.kind === "background") return `Background: ${update.name}`;
  return update.name;
}

async function undo() {
  for (const place of ["undo-error", "undo-done"]) say(place, "");
  if (!hasToken("undo-error")) return;
  if (!sure($("undo"), `Really undo “${what(page.history.updates.at(-1))}”?`, "Undo the last update")) return;
  try {
    const now = await teacherApi("/undo");
    await refresh();
    say("undo-done", `Version ${now.undone} is undone; version ${now.version} answers now.`);
  } catch (error) {
    say("undo-error", error.message);
  }
}

// Wiring

const pasted = (data) => [...data.files].map((file) => ({ file, path: file.name }));

droppable($("ask-drop"), [$("ask-files")], ask);
startTeaching(refresh);
document.addEventListener("dragover", (event) => event.preventDefault()); // a photo beside the zone must not replace the page
document.addEventListener("drop", (event) => event.preventDefault());
document.addEventListener("paste", (event) => event.clipboardData.files.length && ask(pasted(event.clipboardData)));
$("ask-again").addEventListener("click", askAgain);
$("search").addEventListener("input", showClasses);
$("classes").addEventListener("scroll", showMore);
$("classes-all").addEventListener("click", () => {
  whole = !whole;
  showCut();
});
$("edit").addEventListener("submit", rename);
$("edit-name").addEventListener("input", () => { // what was asked was about another name
  $("edit-rename").textContent = "Rename";
  delete $("edit-rename").dataset.sure;
});
$("edit-forget").addEventListener("click", forget);
$("edit-close").addEventListener("click", () => edit(""));
$("undo").addEventListener("click", undo);
new ResizeObserver(showCut).observe($("known"));
new ResizeObserver(() => page.history && drawHistory($("chart"), page.history.updates)).observe($("chart"));

// The link to the part in the middle of the window is marked.
const inMiddle = new IntersectionObserver((parts) => {
  for (const { target, isIntersecting } of parts) {
    document.querySelector(`.jump [href="#${target.id}"]`).ariaCurrent = isIntersecting ? "true" : null;
  }
}, { rootMargin: "-40% 0px -60% 0px" });
for (const part of document.querySelectorAll("main section")) inMiddle.observe(part);

refresh().catch((error) => { $("facts").textContent = error.message; });
