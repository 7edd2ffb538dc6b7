// Asking: photos in, answers out, and what to do with a wrong one.
import { $, api, isPhoto, make, page, percent, picture, say } from "/static/page.js";
import { lineUp } from "/static/teach.js";

export async function ask(found) {
  const photos = found.filter(isPhoto).map(({ file }) => file);
  say("ask-error", "");
  if (!photos.length) return say("ask-error", "Those are no images; choose photos.");
  const most = page.health?.predict_images ?? 64;
  if (photos.length > most) return say("ask-error", `Ask about ${most} photos at a time.`);
  const form = new FormData();
  photos.forEach((photo) => form.append("images", photo));
  $("ask-status").textContent = "Looking…";
  $("ask-drop").classList.add("waiting");
  try {
    const { answers, skipped } = await api("/predict?top=3&on_bad=skip", { method: "POST", body: form });
    page.asked = photos;
    show(answers, skipped, photos);
  } catch (error) {
    page.asked = [];
    show([], [], []);
    say("ask-error", error.message);
  } finally {
    $("ask-drop").classList.remove("waiting");
  }
}

export const askAgain = () => ask(page.asked.map((file) => ({ file, path: file.name })));

function show(answers, skipped, photos) {
  const bad = new Map(skipped.map((one) => [one.index, one]));
  const good = answers.values();
  $("answers").replaceChildren(...photos.map((photo, n) =>
    bad.has(n) ? unreadable(bad.get(n)) : shownAnswer(good.next().value, photo)));
  $("ask-status").textContent = [...answers.map(inWords),
    ...skipped.map((one) => `${one.image} cannot be read`)].join(". ");
  markOld();
}

// Answers of a version that no longer answers.
export function markOld() {
  const now = page.history?.version;
  const old = [...$("answers").children].filter((line) => line.dataset.version && Number(line.dataset.version) !== now);
  for (const line of $("answers").children) line.classList.toggle("old", old.includes(line));
  $("ask-old").hidden = !old.length;
  if (old.length) $("ask-old-text").textContent = `These answers are of version ${old[0].dataset.version}; version ${now} answers now.`;
}

const unreadable = (one) => make("li", { className: "bad" }, make("span", { className: "no-picture" }, "no photo"),
  make("div", {}, make("p", { className: "verdict" }, "Cannot be read"), make("p", { className: "why" }, `${one.image}: ${one.detail}.`)));

const inWords = (answer) => `${answer.image}: ${isUnknown(answer) ? "unknown, unlike everything it was taught"
  : answer.verdict === "unsure" ? `unsure: ${namesOf(answer)}` : `${answer.class}, ${percent(answer.probability)} sure`}`;

const isUnknown = (answer) => answer.verdict === "unknown";
const namesOf = (answer) => answer.candidates.map((one) => one.class).join(" or ");
const noneOfThese = (answer) => `None of the classes: ${percent(answer.none_of_these)}.`;

function shownAnswer(answer, photo) {
  const verdict = isUnknown(answer)
    ? [make("p", { className: "verdict" }, "Unknown"), make("p", { className: "why" }, noneOfThese(answer))]
    : answer.verdict === "unsure"
      ? [make("p", { className: "verdict" }, "Unsure"),
         make("p", { className: "why" }, `It may be ${namesOf(answer)}. ${noneOfThese(answer)}`)]
      : [make("p", { className: "verdict" }, answer.class, make("small", {}, `${percent(answer.probability)} sure`))];
  const likely = answer.top.map((guess) => {
    const fill = make("div", { className: "fill" });
    fill.style.width = `${Math.max(0.5, 100 * guess.probability)}%`;
    return make("li", {}, make("span", { title: guess.class }, guess.class), make("b", {}, percent(guess.probability)),
      make("div", { className: "track", ariaHidden: "true" }, fill));
  });
  const line = make("li", { className: isUnknown(answer) ? "unknown" : "" }, picture(photo, answer.image),
    make("div", {}, ...verdict, make("ol", { className: "likely" }, ...likely),
      ...(page.health?.teaching ? [correction(answer, photo)] : [])));
  line.dataset.version = answer.version;
  return line;
}

// "No, this is ...": the photo joins those to be taught, under its right name.
function correction(answer, photo) {
  const words = answer.verdict !== "answer" ? "This is …" : "No, this is …";
  const open = make("button", { type: "button", className: "link" }, words);
  const name = make("input", { type: "text", maxLength: 200, autocomplete: "off", placeholder: "what it shows", ariaLabel: `What ${answer.image} shows` });
  name.setAttribute("list", "known-classes");
  const form = make("form", { className: "correct", hidden: true }, name,
    make("button", { type: "submit", className: "quiet" }, "Teach this"));
  open.addEventListener("click", () => {
    open.hidden = true;
    form.hidden = false;
    name.focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!name.value.trim()) return name.focus();
    lineUp(name.value.trim(), [photo]);
    form.replaceWith(make("p", { className: "why" }, `Lined up as “${name.value.trim()}”; press Teach when all is there.`));
    $("lined").scrollIntoView({ block: "nearest" });
  });
  return make("div", {}, open, form);
}
