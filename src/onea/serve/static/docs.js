// The OpenAPI document as a page.
const place = location.origin;
document.getElementById("examples").textContent = [
  "# what is in a photo",
  `curl -F images=@photo.jpg '${place}/predict?top=3'`,
  "",
  "# teach a class from its photos, or many from a zip of class folders",
  `curl -H "Authorization: Bearer $ONEA_TOKEN" -F class='plum jam' -F images=@1.jpg -F images=@2.jpg ${place}/learn`,
  `curl -H "Authorization: Bearer $ONEA_TOKEN" -F zip=@new.zip ${place}/learn`,
  "",
  "# follow the training job, and go back",
  `curl -N ${place}/learn/ID/events`,
  `curl -X POST -H "Authorization: Bearer $ONEA_TOKEN" ${place}/undo`,
].join("\n");

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children);
  return element;
}

// Text in which `words between backticks` are code.
const worded = (text) => text.split("`").map((part, n) => (n % 2 ? make("code", "", part) : part));

function entries(list) {
  const found = make("dl", "");
  for (const [name, text] of list) found.append(make("dt", "", name), make("dd", "", text));
  return found;
}

function operation(path, method, about) {
  const title = make("h3", "", make("span", `method ${method}`, method.toUpperCase()), make("code", "", path));
  if (about.security) title.append(make("span", "needs", "needs the token"));
  const parts = [title, make("p", "", ...worded(about.description ?? about.summary))];
  const sent = Object.keys(about.requestBody?.content ?? {}).join(", ");
  const taken = (about.parameters ?? []).map((one) => [one.name, one.description ?? one.schema?.type ?? ""]);
  if (sent) taken.push(["body", `${about.requestBody.description} (${sent})`]);
  if (taken.length) parts.push(entries(taken));
  const answers = Object.entries(about.responses).map(([status, one]) => [status, one.description]);
  const folded = make("details", "", make("summary", "", "Answers"), entries(answers));
  return make("div", "op", ...parts, folded);
}

const { paths } = await (await fetch("/openapi.json")).json();
document.getElementById("operations").append(...Object.entries(paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, about]) => operation(path, method, about))));
