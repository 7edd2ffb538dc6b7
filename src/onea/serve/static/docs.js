// The OpenAPI document as a page.
const origin = location.origin;
document.getElementById("examples").textContent = [
  "# predict the class of a photo",
  `curl -F images=@photo.jpg '${origin}/predict?top=3'`,
  "",
  "# teach a class from its photos, or many from a zip of class folders",
  `curl -H "Authorization: Bearer $ONEA_TOKEN" -F class='plum jam' -F images=@1.jpg -F images=@2.jpg ${origin}/learn`,
  `curl -H "Authorization: Bearer $ONEA_TOKEN" -F zip=@new.zip ${origin}/learn`,
  "",
  "# follow the training job; undo the update",
  `curl -N ${origin}/learn/ID/events`,
  `curl -X POST -H "Authorization: Bearer $ONEA_TOKEN" ${origin}/undo`,
].join("\n");

function create(tag, className, ...children) {
  const element = document.createElement(tag);
  element.className = className;
  element.append(...children);
  return element;
}

// Text with `words between backticks` as code elements.
const withCode = (text) => text.split("`").map((part, n) => (n % 2 ? create("code", "", part) : part));

function definitionList(list) {
  const element = create("dl", "");
  for (const [name, text] of list) element.append(create("dt", "", name), create("dd", "", text));
  return element;
}

function operation(path, method, spec) {
  const title = create("h3", "", create("span", `method ${method}`, method.toUpperCase()), create("code", "", path));
  if (spec.security) title.append(create("span", "needs", "needs the token"));
  const parts = [title, create("p", "", ...withCode(spec.description ?? spec.summary))];
  const bodyTypes = Object.keys(spec.requestBody?.content ?? {}).join(", ");
  const parameters = (spec.parameters ?? []).map(({ name, description, schema }) => [name, description ?? schema?.type ?? ""]);
  if (bodyTypes) parameters.push(["body", `${spec.requestBody.description} (${bodyTypes})`]);
  if (parameters.length) parts.push(definitionList(parameters));
  const responses = Object.entries(spec.responses).map(([status, response]) => [status, response.description]);
  const folded = create("details", "", create("summary", "", "Responses"), definitionList(responses));
  return create("div", "op", ...parts, folded);
}

const { paths } = await (await fetch("/openapi.json")).json();
document.getElementById("operations").append(...Object.entries(paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, spec]) => operation(path, method, spec))));
