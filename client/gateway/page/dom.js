// The only file that makes elements. Children are texts or elements, never markup: names of peers, errors and answers
// come from other machines.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** An element. `properties`: attributes; `class`; `on` with listeners by event. A child is a text, a node or nothing. */
export function make(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** An SVG element. */
export function draw(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(element, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set a text only where it differs: setting it would drop the selection and make screen readers repeat it. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make screen readers read a text. */
export const announce = (text) => setText(byId("status"), text);

/** Copy to the clipboard; where the browser forbids that, show the text in a dialog. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    byId("copy-text").value = text;
    byId("copy-dialog").showModal();
    byId("copy-text").select();
    return;
  }
  const name = (button.dataset.name ??= button.textContent); // kept, so that a second press does not save "Copied" as the name
  button.textContent = "Copied";
  announce("Copied");
  setTimeout(() => (button.textContent = name), 1500);
}
