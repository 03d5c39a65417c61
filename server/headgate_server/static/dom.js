// Making and changing elements. Names and keys come from anybody, so text only ever goes in as text: nothing here, or
// anywhere else in this page, parses a string as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings among the children become text. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Write text, and touch the page only if it differs: what did not change must not be announced or repainted. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/** Give a custom property to the style sheet: through CSSOM, since the policy of this page forbids style attributes. */
export function setVariable(node, name, value) {
  if (node.style.getPropertyValue(name) !== String(value)) node.style.setProperty(name, value);
}

const lists = new WeakMap();

/**
 * Make the children of a container agree with a list of items, one child each, in order.
 *
 * A child lives as long as its item's key is in the list, so focus, hover and open details survive updates.
 * `create(item)` returns an object with a `node`; `update(row, item)` is called for new and old ones alike.
 */
export function keyed(container, items, keyOf, create, update = () => {}) {
  const old = lists.get(container) ?? new Map();
  const rows = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (rows.has(key)) continue;
    const row = old.get(key) ?? create(item);
    rows.set(key, row);
    update(row, item);
  }
  for (const [key, row] of old) if (!rows.has(key)) row.node.remove();
  let place = container.firstElementChild;
  for (const { node } of rows.values()) {
    if (node === place) place = place.nextElementSibling;
    else container.insertBefore(node, place);
  }
  lists.set(container, rows);
  return rows;
}

/** The entry of a parsed JSON object; what it inherits, such as "constructor", is none. */
export function entry(object, name) {
  return object && Object.hasOwn(object, name) ? object[name] : undefined;
}

/** Copy the text of a node, and say in `status` that it was. */
export async function copyText(node, status) {
  try {
    await navigator.clipboard.writeText(node.textContent);
    setText(status, "Copied");
  } catch {
    // No clipboard without https or permission: select the text, so that one key press copies it.
    getSelection().selectAllChildren(node);
    setText(status, "Selected; press Ctrl+C");
  }
}
