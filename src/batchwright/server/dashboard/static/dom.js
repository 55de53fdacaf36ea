// Helpers for the DOM. Texts are inserted as text; nothing here can turn them into HTML.

export const byId = (id) => document.getElementById(id);

/** A new copy of the element in the <template> with this id. */
export const fromTemplate = (id) => byId(id).content.firstElementChild.cloneNode(true);

export const part = (root, name) => root.querySelector(`[data-part="${name}"]`);

export const action = (root, name) => root.querySelector(`[data-action="${name}"]`);

/** Set a text only when it changes, so that a selection stays and screen readers do not repeat it. */
export function setText(node, text) {
  const wanted = text ?? "";
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setAttribute(node, name, value) {
  if (value === null || value === undefined) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function show(node, shown) {
  if (node.hidden === shown) node.hidden = !shown;
}

const fieldsOf = new WeakMap();

/** Set the texts of the elements that `data-field` names. */
export function fill(root, texts) {
  let fields = fieldsOf.get(root);
  if (!fields) {
    fields = new Map();
    for (const node of root.querySelectorAll("[data-field]")) fields.set(node.dataset.field, node);
    fieldsOf.set(root, fields);
  }
  for (const [name, text] of Object.entries(texts)) setText(fields.get(name), text);
}

/** Set the lengths of the bars that `data-bar` names, 0..1 of their track. */
export function fillBars(root, shares) {
  for (const [name, share] of Object.entries(shares)) {
    const width = `${(Math.min(1, Math.max(0, share ?? 0)) * 100).toFixed(2)}%`;
    const bar = root.querySelector(`[data-bar="${name}"]`);
    if (bar.style.inlineSize !== width) bar.style.inlineSize = width;
  }
}

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Make the children of `list` those of `keys`, in this order, moving only what is out of place, so that focus survives. */
export function reconcile(list, keys, nodes, create) {
  const wanted = new Set(keys);
  for (const [key, node] of nodes) {
    if (wanted.has(key)) continue;
    node.remove();
    nodes.delete(key);
  }
  let next = list.firstElementChild;
  for (const key of keys) {
    if (!nodes.has(key)) nodes.set(key, create(key));
    const node = nodes.get(key);
    if (node === next) next = next.nextElementSibling;
    else list.insertBefore(node, next);
  }
}
