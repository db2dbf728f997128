// The only place where elements are made. Children are texts or elements, never markup: names of peers, errors and
// answers come from others' machines.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** An element. `properties`: attributes; `class`; `on` with listeners by event. A child is a text, a node or nothing. */
export function make(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same in a drawing. */
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

/** Change a text only where it differs: nothing is selected away or read out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Have a screen reader say it. */
export const say = (text) => setText(byId("status"), text);

/** To the clipboard, or to a field to copy from where the browser forbids that. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    byId("copy-text").value = text;
    byId("copy-dialog").showModal();
    byId("copy-text").select();
    return;
  }
  const name = (button.dataset.name ??= button.textContent); // pressed twice, it must not stay at "Copied"
  button.textContent = "Copied";
  say("Copied");
  setTimeout(() => (button.textContent = name), 1500);
}
