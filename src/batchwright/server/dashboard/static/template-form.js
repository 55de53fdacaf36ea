// The form that says how the rows of a table become prompts.

import { byId, fill, fromTemplate, make, part, show } from "./dom.js";

/**
 * A form for a file that `inspect` found to be a table or prompts. `onSubmit` gets the options of the requests; for
 * prompts the template may stay empty.
 */
export function templateForm({ kind, columns }, onSubmit) {
  const form = fromTemplate("template-form");
  const template = form.elements.prompt_template;
  const prompts = kind === "prompts";
  fill(form, { "prompt-label": prompts ? "Prompt (leave it empty to send the prompts as they are)" : "Prompt, with columns as {column}" });
  template.required = !prompts;
  if (!prompts) template.value = columns?.length === 1 ? `{${columns[0]}}` : "";
  template.placeholder = prompts ? "" : `What is the sentiment of this review? {${columns?.at(-1) ?? "text"}}`;
  show(part(form, "columns"), Boolean(columns?.length));
  part(form, "chips").append(...(columns ?? []).map((column) => chip(column, template)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = new FormData(form);
    const options = { max_tokens: Number(given.get("max_tokens")) };
    for (const name of ["prompt_template", "system_template"]) if (given.get(name).trim()) options[name] = given.get(name);
    onSubmit(options);
  });
  return form;
}

/** A button that inserts a column where the cursor is. */
function chip(column, template) {
  const button = make("button", { type: "button", class: "chip mono" }, `{${column}}`);
  button.addEventListener("click", () => {
    const { selectionStart: start, selectionEnd: end } = template;
    template.setRangeText(`{${column}}`, start, end, "end");
    template.focus();
  });
  return button;
}

/** Give the focus to the form of an upload, or to the button for files when it is gone. */
export function focusOn(form) {
  (form?.querySelector("textarea") ?? byId("file-input")).focus();
}
