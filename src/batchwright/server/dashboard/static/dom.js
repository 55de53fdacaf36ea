// The page's own few words for the DOM. Texts go in as text; nothing here can make HTML of them.

export const byId = (id) => document.getElementById(id);

/** The element in the <template> with this id, fresh. */
export const fromTemplate = (id) => byId(id).content.firstElementChild.cloneNode(true);

export const part = (root, name) => root.querySelector(`[data-part="${name}"]`);

export const action = (root, name) => root.querySelector(`[data-action="${name}"]`);

/** Written only when it changes, so that a selection stays and no reader is told the same again. */
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

/** Put texts where `data-field` names them. */
export function fill(root, texts) {
  let fields = fieldsOf.get(root);
  if (!fields) {
    fields = new Map();
    for (const node of root.querySelectorAll("[data-field]")) fields.set(node.dataset.field, node);
    fieldsOf.set(root, fields);
  }
  for (const [name, text] of Object.entries(texts)) setText(fields.get(name), text);
}

/** Bars named by `data-bar`, 0..1 of their track. */
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

/** Make the children of `list` those of `keys`, in this order, moving only what is out of place: focus survives. */
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
